SELECT leapt, clock_behind, from_token, to_token FROM fencepost.leap_v1($1, $2)
