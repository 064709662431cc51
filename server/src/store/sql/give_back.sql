SELECT place, given_back FROM fencepost.give_back_v1($1, $2)
