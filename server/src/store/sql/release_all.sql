SELECT resource, outcome, held_us FROM fencepost.release_all_v2($1, $2, $3)
