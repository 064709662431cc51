-- What must hold of a database before its first use.
SELECT current_setting('server_version_num')::integer AS version,
       current_setting('server_encoding') AS encoding,
       pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS read_only,
       current_setting('fsync') = 'on' AS fsync,
       -- Off by default nowhere: on a direct connection we have set it.
       current_setting('enable_seqscan') = 'off' AS configured
