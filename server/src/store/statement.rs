//! Every statement the server sends, one file each. The file's name is the
//! statement's in the `name` of a span, which lists all of a transaction's.

use tokio_postgres::types::Type;

/// A statement, with the types of its parameters so that it can be sent
/// without a round trip to ask for them.
#[derive(Debug)]
pub(super) struct Statement {
    pub(super) name: &'static str,
    pub(super) sql: &'static str,
    pub(super) types: &'static [Type],
}

macro_rules! statement {
    ($konst:ident, $name:literal, [$($type:ident),*]) => {
        pub(super) const $konst: Statement = Statement {
            name: $name,
            sql: include_str!(concat!("sql/", $name, ".sql")),
            types: &[$(Type::$type),*],
        };
    };
}

statement!(ACQUIRE, "acquire", [TEXT, TEXT, TEXT, UUID, INT8, JSONB]);
statement!(
    ACQUIRE_ALL,
    "acquire_all",
    [
        TEXT_ARRAY,
        TEXT_ARRAY,
        TEXT_ARRAY,
        UUID_ARRAY,
        INT8_ARRAY,
        JSONB_ARRAY
    ]
);
statement!(RENEW, "renew", [TEXT, TEXT, INT8, INT8]);
statement!(
    RENEW_ALL,
    "renew_all",
    [TEXT_ARRAY, TEXT_ARRAY, INT8_ARRAY, INT8_ARRAY]
);
statement!(RELEASE, "release", [TEXT, TEXT, INT8]);
statement!(
    RELEASE_ALL,
    "release_all",
    [TEXT_ARRAY, TEXT_ARRAY, INT8_ARRAY]
);
statement!(GET, "get", [TEXT]);
statement!(GET_ALL, "get_all", [TEXT_ARRAY]);
statement!(GIVE_BACK, "give_back", [TEXT_ARRAY, UUID_ARRAY]);
statement!(PURGE, "purge", [TEXT, INT4, INT8, TIMESTAMPTZ]);
statement!(LEAP, "leap", [INT8, BOOL]);
statement!(POSITION, "position", []);
statement!(PROBE, "probe", []);
statement!(CHECK, "check", []);
