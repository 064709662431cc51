//! What holds of every request: its fields are judged as the contract says, all
//! of them at once, and what is accepted is kept as it was. And of every answer:
//! its times are those of the lease.
//!
//! The contract's limits are written down here a second time, on purpose.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fencepost_proto::v1;
use proptest::{collection, option, prelude::*};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::{acquire, duration, keep_alive, positive, renew, timestamp};
use crate::{caller::Caller, lock::TtlLimits};

const LIMITS: TtlLimits = TtlLimits {
    min: Duration::from_millis(500),
    max: Duration::from_secs(86_400),
};

/// Names of any characters, mostly short, some about as long as they may be.
fn name(limit: usize) -> impl Strategy<Value = String> {
    let any = collection::vec(
        prop_oneof![any::<char>(), prop::char::range('\0', '\u{a1}')],
        0..6,
    );
    let plain = collection::vec(prop_oneof![Just('a'), Just('ä'), Just('\u{1f512}')], 1..8);
    let long = (
        prop_oneof![Just('a'), Just('ä'), Just('\u{1f512}')],
        limit - 3..limit + 3,
    )
        .prop_map(|(c, bytes)| vec![c; bytes / c.len_utf8()]);
    prop_oneof![1 => any, 3 => plain, 1 => long].prop_map(|chars| chars.into_iter().collect())
}

fn labels() -> impl Strategy<Value = HashMap<String, String>> {
    let value = prop_oneof![9 => name(40), 1 => name(4096)];
    prop_oneof![
        3 => collection::hash_map(name(20), value.clone(), 0..4),
        1 => collection::hash_map("[a-z]{4}", value, 14..19),
    ]
}

/// Durations of any kind, many of them near a limit.
fn time() -> impl Strategy<Value = prost_types::Duration> {
    let limits = [LIMITS.min, LIMITS.max].map(|limit| i64::try_from(limit.as_nanos()).unwrap());
    let near = (prop_oneof![Just(limits[0]), Just(limits[1])], -2_i64..=2)
        .prop_map(|(limit, off)| ((limit + off) / 1_000_000_000, (limit + off) % 1_000_000_000))
        .prop_map(|(seconds, nanos)| (seconds, i32::try_from(nanos).unwrap()));
    let valid = (1_i64..86_400, 0..1_000_000_000);
    let off = (-3_i64..3, any::<i32>());
    prop_oneof![2 => near, 3 => valid, 1 => off, 1 => any::<(i64, i32)>()]
        .prop_map(|(seconds, nanos)| prost_types::Duration { seconds, nanos })
}

fn is_name(value: &str, lengths: std::ops::RangeInclusive<usize>) -> bool {
    let is_control = |c: char| matches!(u32::from(c), 0..=0x1f | 0x7f..=0x9f);
    lengths.contains(&value.len()) && !value.chars().any(is_control)
}

fn are_labels(labels: &HashMap<String, String>) -> bool {
    let bytes: usize = labels
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    labels.len() <= 16
        && bytes <= 4096
        && labels.keys().all(|key| is_name(key, 0..=4096))
        && labels.values().all(|value| !value.contains('\0'))
}

/// In nanoseconds; none when it is not a duration that goes forward.
fn nanos(time: prost_types::Duration) -> Option<i128> {
    let whole = (0..1_000_000_000).contains(&time.nanos) && time.seconds >= 0;
    whole.then(|| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos))
}

fn is_ttl(time: prost_types::Duration) -> bool {
    nanos(time).is_some_and(|nanos| (500_000_000..=86_400_000_000_000).contains(&nanos))
}

/// The fields that are not as they should be, in order.
fn wrong(fields: &[(&str, bool)]) -> Vec<String> {
    let wrong = fields.iter().filter(|(_, good)| !good);
    wrong.map(|(name, _)| (*name).to_owned()).collect()
}

/// The fields that an answer complains about, in order.
fn refused(status: &Status) -> Vec<String> {
    assert_eq!(status.code(), Code::InvalidArgument);
    let request = status.get_details_bad_request().unwrap();
    let fields = request.field_violations.into_iter();
    fields.map(|violation| violation.field).collect()
}

proptest! {
    #[test]
    fn an_acquire_is_judged_by_each_of_its_fields(
        resource in name(512), owner in name(256), request_id in name(128),
        ttl in option::weighted(0.9, time()), labels in labels(),
    ) {
        let expected = wrong(&[
            ("resource", is_name(&resource, 1..=512)),
            ("owner", is_name(&owner, 1..=256)),
            ("ttl", ttl.is_some_and(is_ttl)),
            ("labels", are_labels(&labels)),
            ("request_id", is_name(&request_id, 0..=128)),
        ]);
        let request = v1::AcquireRequest { resource, owner, ttl, labels, request_id };
        match acquire(request.clone(), LIMITS, Caller::default()) {
            Err(status) => prop_assert_eq!(refused(&status), expected),
            Ok(taken) => {
                prop_assert!(expected.is_empty(), "{:?} was accepted", expected);
                prop_assert_eq!(taken.resource.as_str(), request.resource);
                prop_assert_eq!(taken.owner.as_str(), request.owner);
                prop_assert_eq!(taken.request_id.as_str(), request.request_id);
                let labels: HashMap<_, _> = taken.labels.into_entries().into_iter().collect();
                prop_assert_eq!(labels, request.labels);
                let asked = request.ttl.and_then(nanos).unwrap();
                prop_assert_eq!(i128::from(taken.ttl.millis()), asked / 1_000_000);
            }
        }
    }

    #[test]
    fn a_renewal_and_a_stream_are_judged_by_each_of_their_fields(
        resource in name(512), owner in name(256), ttl in option::of(time()),
        fencing_token in prop_oneof![3 => 1..i64::MAX, 1 => any::<i64>(), 1 => Just(0)],
        max_duration in option::of(time()),
    ) {
        let mut fields = vec![
            ("resource", is_name(&resource, 1..=512)),
            ("owner", is_name(&owner, 1..=256)),
            ("fencing_token", fencing_token > 0),
            ("ttl", ttl.is_none_or(is_ttl)),
        ];
        let request = v1::RenewRequest {
            resource: resource.clone(), owner: owner.clone(), fencing_token, ttl,
        };
        let refusal = renew(request, LIMITS).err().map(|status| refused(&status));
        prop_assert_eq!(refusal.unwrap_or_default(), wrong(&fields));

        let least = |asked| nanos(asked).is_some_and(|nanos| nanos >= 500_000_000);
        fields.push(("max_duration", max_duration.is_none_or(least)));
        let request = v1::KeepAliveRequest { resource, owner, fencing_token, ttl, max_duration };
        match keep_alive(request, LIMITS, None) {
            Err(status) => prop_assert_eq!(refused(&status), wrong(&fields)),
            Ok(keep) => {
                prop_assert_eq!(wrong(&fields), Vec::<String>::new());
                prop_assert_eq!(keep.renew.token.get(), fencing_token);
                let kept = keep.max_duration.map(|kept| i128::try_from(kept.as_nanos()).unwrap());
                prop_assert_eq!(kept, max_duration.and_then(nanos));
            }
        }
    }

    #[test]
    fn a_duration_comes_back_as_it_was(seconds in 0..u64::MAX / 2, nanos in 0..1_000_000_000_u32) {
        let there = Duration::new(seconds, nanos);
        prop_assert_eq!(positive(duration(there)), Some(there));
    }

    /// Years 1 to 9999, as the wire can say them, also before 1970.
    #[test]
    fn a_time_comes_back_as_it_was(
        seconds in -62_135_596_800_i64..=253_402_300_799, nanos in 0..1_000_000_000_u32,
    ) {
        let off = Duration::from_secs(seconds.unsigned_abs());
        let whole = if seconds < 0 { UNIX_EPOCH - off } else { UNIX_EPOCH + off };
        let there = whole + Duration::from_nanos(nanos.into());
        let wire = timestamp(there);
        prop_assert_eq!((wire.seconds, wire.nanos), (seconds, i32::try_from(nanos).unwrap()));
        prop_assert_eq!(SystemTime::try_from(wire).unwrap(), there);
    }
}
