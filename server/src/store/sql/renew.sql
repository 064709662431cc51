SELECT outcome, acquired_at, expires_at, remaining_us, slack_us, ttl_ms, labels
  FROM fencepost.renew_v1(ARRAY[$1::text], ARRAY[$2::text], ARRAY[$3::bigint], ARRAY[$4::bigint], false)
