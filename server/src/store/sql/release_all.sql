SELECT resource, outcome FROM fencepost.release_all_v1($1, $2, $3)
