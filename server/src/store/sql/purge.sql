SELECT last_resource, purged FROM fencepost.purge_v1($1, $2, $3, $4)
