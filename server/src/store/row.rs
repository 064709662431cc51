//! What the columns of an answer mean.

use std::{collections::BTreeMap, time::Duration};

use serde_json::Value;
use tokio_postgres::{Row, types::FromSql};

use super::failure::Failure;
use crate::{
    clock::Moment,
    lock::{FencingToken, Labels, Lease, Owner, Resource},
};

/// A column by name; a type that does not fit is a bug, not a panic.
pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> Result<T, Failure> {
    row.try_get(name).map_err(Failure::Refused)
}

/// The one row of an answer that always has one.
pub(super) fn only(rows: &[Row]) -> Result<&Row, Failure> {
    rows.first()
        .ok_or_else(|| Failure::unknown("the database answered without a row"))
}

/// What is left of a lease by the database's word. Zero when it is over.
pub(super) fn remaining(row: &Row) -> Result<Duration, Failure> {
    micros(row, "remaining_us")
}

pub(super) fn micros(row: &Row, name: &str) -> Result<Duration, Failure> {
    let micros: i64 = column(row, name)?;
    Ok(Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
}

fn ttl(row: &Row) -> Result<Duration, Failure> {
    let millis: i64 = column(row, "ttl_ms")?;
    Ok(Duration::from_millis(u64::try_from(millis).unwrap_or(0)))
}

pub(super) fn labels(row: &Row) -> Result<Labels, Failure> {
    let value: Value = column(row, "labels")?;
    let entries = match value {
        Value::Object(entries) => entries
            .into_iter()
            .filter_map(|(key, value)| match value {
                Value::String(value) => Some((key, value)),
                _ => None,
            })
            .collect(),
        _ => BTreeMap::new(),
    };
    Ok(Labels::stored(entries))
}

/// Labels as the database stores them.
pub(super) fn labels_json(labels: &Labels) -> Value {
    labels
        .entries()
        .iter()
        .map(|(key, value)| (key.clone(), Value::from(value.as_str())))
        .collect()
}

/// The lease that an answer sent at `sent` tells of.
pub(super) fn lease(
    row: &Row,
    sent: Moment,
    resource: &Resource,
    owner: Owner,
    token: FencingToken,
) -> Result<Lease, Failure> {
    Ok(Lease {
        resource: resource.clone(),
        owner,
        token,
        acquired_at: column(row, "acquired_at")?,
        expires_at: column(row, "expires_at")?,
        deadline: sent.after(remaining(row)?),
        ttl: ttl(row)?,
        labels: labels(row)?,
    })
}
