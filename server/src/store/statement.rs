//! Every statement the server sends, one file each. The file's name is the
//! statement's in the metrics, and in the `name` of a span, which lists all of a
//! transaction's.

use std::{collections::HashMap, time::Duration};

use tokio_postgres::types::Type;

use super::failure::Failure;
use crate::metrics::{StatementMetrics, StoreMetrics};

/// A statement, with the types of its parameters so that it can be sent
/// without a round trip to ask for them.
#[derive(Debug)]
pub(super) struct Statement {
    pub(super) name: &'static str,
    pub(super) sql: &'static str,
    pub(super) types: &'static [Type],
}

macro_rules! statements {
    ($($konst:ident = $name:literal [$($type:ident),*];)*) => {
        $(pub(super) const $konst: Statement = Statement {
            name: $name,
            sql: include_str!(concat!("sql/", $name, ".sql")),
            types: &[$(Type::$type),*],
        };)*

        /// The names of all of them.
        const NAMES: &[&str] = &[$($name),*];
    };
}

statements! {
    ACQUIRE = "acquire" [TEXT, TEXT, TEXT, UUID, INT8, JSONB];
    ACQUIRE_ALL = "acquire_all" [TEXT_ARRAY, TEXT_ARRAY, TEXT_ARRAY, UUID_ARRAY, INT8_ARRAY, JSONB_ARRAY];
    RENEW = "renew" [TEXT, TEXT, INT8, INT8];
    RENEW_ALL = "renew_all" [TEXT_ARRAY, TEXT_ARRAY, INT8_ARRAY, INT8_ARRAY];
    RELEASE = "release" [TEXT, TEXT, INT8];
    RELEASE_ALL = "release_all" [TEXT_ARRAY, TEXT_ARRAY, INT8_ARRAY];
    GET = "get" [TEXT];
    GET_ALL = "get_all" [TEXT_ARRAY];
    GIVE_BACK = "give_back" [TEXT_ARRAY, UUID_ARRAY];
    PURGE = "purge" [TEXT, INT4, INT8, TIMESTAMPTZ];
    CENSUS = "census" [TEXT, INT8];
    LEAP = "leap" [INT8, BOOL];
    POSITION = "position" [];
    PROBE = "probe" [];
    CHECK = "check" [];
    STRANGERS = "strangers" [];
}

/// What is counted of each statement, by its name; the same for all pools.
pub(super) struct Statements(HashMap<&'static str, StatementMetrics>);

impl Statements {
    pub(super) fn new(metrics: &StoreMetrics) -> Self {
        let named = |name: &&'static str| (*name, metrics.statement(name));
        Self(NAMES.iter().map(named).collect())
    }

    /// They went together, and their outcome took this long to be known.
    pub(super) fn ended(
        &self,
        names: impl Iterator<Item = &'static str>,
        took: Duration,
        why: Option<&Failure>,
    ) {
        for statement in names.filter_map(|name| self.0.get(name)) {
            statement.ended(took);
            if let Some(failure) = why {
                statement.failed(failure.kind());
            }
        }
    }
}
