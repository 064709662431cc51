//! Every statement the server sends, one file each. The file's name is the
//! name of the method that runs it, and of its span's `name`.

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
    RENEW,
    "renew",
    [TEXT_ARRAY, TEXT_ARRAY, INT8_ARRAY, INT8_ARRAY, BOOL]
);
statement!(RELEASE, "release", [TEXT, TEXT, INT8]);
statement!(GET, "get", [TEXT]);
statement!(GIVE_BACK, "give_back", [TEXT_ARRAY, UUID_ARRAY]);
statement!(PURGE, "purge", [TEXT, INT4, INT8, TIMESTAMPTZ]);
statement!(LEAP, "leap", [INT8, BOOL]);
statement!(POSITION, "position", []);
statement!(PROBE, "probe", []);
statement!(CHECK, "check", []);
