SELECT resource, outcome, acquired_at, expires_at, remaining_us, slack_us, ttl_ms, labels
  FROM fencepost.renew_all_v1($1, $2, $3, $4)
