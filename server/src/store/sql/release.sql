SELECT outcome FROM fencepost.release_v1($1, $2, $3)
