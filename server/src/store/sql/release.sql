SELECT outcome, held_us FROM fencepost.release_v2($1, $2, $3)
