SELECT outcome, owner, fencing_token, acquired_at, expires_at, remaining_us, ttl_ms, labels
  FROM fencepost.acquire_v2($1, $2, $3, $4, $5, $6)
