//! The contract's limits: each at its edge and one beyond, before the
//! database sees anything.

use std::collections::HashMap;

use fencepost_proto::v1::{AcquireRequest, GetRequest, ReleaseRequest};
use fencepost_support::{
    calls::{
        expect_error, expect_violation, get, grant_in, granted, renew, request, send, violations,
    },
    server::Client,
};
use rand::{Rng as _, distr::Alphanumeric};
use tonic::{Code, Status};

use crate::world::{LONG, assert_same_lease, client, fresh};

fn ask() -> AcquireRequest {
    request(&fresh("limits"), "a", LONG)
}

/// Random, so that it cannot be compressed below an index's limit.
fn random(length: usize) -> String {
    let characters = rand::rng().sample_iter(Alphanumeric);
    characters.take(length).map(char::from).collect()
}

/// Expects that a request is refused for `field`, and that its connection
/// still works.
async fn expect_refused(client: &mut Client, ask: AcquireRequest, field: &str) {
    let answer = send(client, ask).await;
    expect_violation(answer, field);
    granted(client, &fresh("still-works"), "a", LONG).await;
}

#[tokio::test]
async fn a_resource_is_1_to_512_bytes() {
    let mut client = client().await;
    for length in [1, 2, 255, 256, 511, 512] {
        for name in [random(length), "x".repeat(length)] {
            granted(&mut client, &name, "a", LONG).await;
        }
    }
    for length in [0, 513, 1024, 2704, 8191, 60_000] {
        for resource in [random(length), "x".repeat(length)] {
            expect_refused(
                &mut client,
                AcquireRequest { resource, ..ask() },
                "resource",
            )
            .await;
        }
    }
}

#[tokio::test]
async fn an_owner_is_1_to_256_bytes() {
    let mut client = client().await;
    for length in [1, 2, 255, 256] {
        for owner in [random(length), "x".repeat(length)] {
            grant_in(send(&mut client, AcquireRequest { owner, ..ask() }).await);
        }
    }
    for length in [0, 257, 1024, 2704, 8191, 60_000] {
        let owner = random(length);
        expect_refused(&mut client, AcquireRequest { owner, ..ask() }, "owner").await;
    }
}

#[tokio::test]
async fn a_request_id_is_at_most_128_bytes() {
    let mut client = client().await;
    for length in [0, 1, 127, 128] {
        let request_id = random(length);
        grant_in(
            send(
                &mut client,
                AcquireRequest {
                    request_id,
                    ..ask()
                },
            )
            .await,
        );
    }
    for length in [129, 2704, 60_000] {
        let request_id = random(length);
        let ask = AcquireRequest {
            request_id,
            ..ask()
        };
        expect_refused(&mut client, ask, "request_id").await;
    }
}

#[tokio::test]
async fn lengths_are_counted_in_bytes_not_characters() {
    let mut client = client().await;
    granted(&mut client, &"ä".repeat(256), "a", LONG).await;
    let resource = "ä".repeat(256) + "x";
    expect_refused(
        &mut client,
        AcquireRequest { resource, ..ask() },
        "resource",
    )
    .await;
    let owner = "\u{1f512}".repeat(64);
    grant_in(send(&mut client, AcquireRequest { owner, ..ask() }).await);
    let owner = "\u{1f512}".repeat(64) + "x";
    expect_refused(&mut client, AcquireRequest { owner, ..ask() }, "owner").await;
}

#[tokio::test]
async fn labels_are_at_most_16_entries() {
    let mut client = client().await;
    let labels = |n: usize| -> HashMap<_, _> {
        (0..n).map(|i| (format!("k{i}"), format!("v{i}"))).collect()
    };
    for n in [0, 1, 16] {
        let labels = labels(n);
        let ask = AcquireRequest {
            labels: labels.clone(),
            ..ask()
        };
        assert_eq!(grant_in(send(&mut client, ask).await).labels, labels);
    }
    for n in [17, 100] {
        let labels = labels(n);
        expect_refused(&mut client, AcquireRequest { labels, ..ask() }, "labels").await;
    }
}

#[tokio::test]
async fn labels_are_at_most_4_kib_of_keys_and_values_together() {
    let mut client = client().await;
    let labels = |key: usize, value: usize| HashMap::from([(random(key), random(value))]);
    for (key, value) in [(1, 4095), (4096, 0), (2048, 2048)] {
        let labels = labels(key, value);
        let ask = AcquireRequest {
            labels: labels.clone(),
            ..ask()
        };
        assert_eq!(grant_in(send(&mut client, ask).await).labels, labels);
    }
    for (key, value) in [(1, 4096), (4097, 0), (2048, 2049)] {
        let labels = labels(key, value);
        expect_refused(&mut client, AcquireRequest { labels, ..ask() }, "labels").await;
    }
    // Counted over all entries.
    let labels: HashMap<_, _> = (0..16).map(|i| (format!("k{i:02}"), random(254))).collect();
    expect_refused(&mut client, AcquireRequest { labels, ..ask() }, "labels").await;
}

#[tokio::test]
async fn names_ids_and_label_keys_have_no_control_characters() {
    let mut client = client().await;
    let controls = ('\0'..='\u{1f}').chain('\u{7f}'..='\u{9f}');
    for control in controls {
        for text in [
            format!("a{control}b"),
            format!("{control}"),
            format!("a{control}"),
        ] {
            let cases = [
                (
                    AcquireRequest {
                        resource: text.clone(),
                        ..ask()
                    },
                    "resource",
                ),
                (
                    AcquireRequest {
                        owner: text.clone(),
                        ..ask()
                    },
                    "owner",
                ),
                (
                    AcquireRequest {
                        request_id: text.clone(),
                        ..ask()
                    },
                    "request_id",
                ),
                (
                    AcquireRequest {
                        labels: HashMap::from([(text.clone(), "v".to_owned())]),
                        ..ask()
                    },
                    "labels",
                ),
            ];
            for (ask, field) in cases {
                expect_violation(send(&mut client, ask).await, field);
            }
        }
    }
    granted(&mut client, &fresh("still-works"), "a", LONG).await;
}

#[tokio::test]
async fn what_is_no_control_character_is_kept_as_it_is() {
    let mut client = client().await;
    // Marks that turn the writing direction, separators, joiners, a noncharacter.
    let odd = "a\u{200f}\u{202e}\u{2028}\u{2029}\u{200d}\u{ad}\u{a0}\u{ffff}\u{10ffff}";
    let ask = AcquireRequest {
        resource: format!("{}{odd}", fresh("odd")),
        owner: odd.to_owned(),
        request_id: odd.to_owned(),
        labels: HashMap::from([(odd.to_owned(), odd.to_owned())]),
        ..ask()
    };
    let lock = grant_in(send(&mut client, ask.clone()).await);
    assert_eq!(lock.resource, ask.resource);
    assert_eq!(lock.owner, odd);
    assert_eq!(lock.labels, ask.labels);
    assert_same_lease(&grant_in(send(&mut client, ask).await), &lock);
}

#[tokio::test]
async fn label_values_have_no_nul_and_may_have_all_else() {
    let mut client = client().await;
    let with = |value: &str| AcquireRequest {
        labels: HashMap::from([("k".to_owned(), value.to_owned())]),
        ..ask()
    };
    for value in ["", "two\nlines", "\u{1}\t\u{7f}\u{80}", "\"\\'{}"] {
        let lock = grant_in(send(&mut client, with(value)).await);
        assert_eq!(lock.labels["k"], value);
    }
    for value in ["\0", "a\0b", "a\0"] {
        expect_refused(&mut client, with(value), "labels").await;
    }
}

#[tokio::test]
async fn a_fencing_token_is_required_and_above_0() {
    let (mut client, name) = (client().await, fresh("token"));
    let lock = granted(&mut client, &name, "a", LONG).await;
    for token in [0, -1, i64::MIN] {
        let answer = renew(&mut client, &name, "a", token, None).await;
        expect_violation(answer, "fencing_token");
        let ask = ReleaseRequest {
            resource: name.clone(),
            owner: "a".to_owned(),
            fencing_token: token,
        };
        expect_violation(client.release(ask).await, "fencing_token");
    }
    assert_same_lease(&get(&mut client, &name).await.unwrap(), &lock);
}

#[tokio::test]
async fn every_call_checks_its_names() {
    let mut client = client().await;
    let long = ("x".repeat(513), "x".repeat(257));
    for (resource, owner) in [("", ""), ("a\n", "b\0"), (&*long.0, &*long.1)] {
        let (resource, owner) = (resource.to_owned(), owner.to_owned());
        let both = |status: Status| {
            let mut fields = violations(&status);
            fields.sort();
            assert_eq!(fields, ["owner", "resource"], "{status:?}");
        };
        let ask = GetRequest {
            resource: resource.clone(),
        };
        expect_violation(client.get(ask).await, "resource");
        let ask = AcquireRequest {
            resource: resource.clone(),
            owner: owner.clone(),
            ..ask_for_nothing()
        };
        both(send(&mut client, ask).await.unwrap_err());
        both(
            renew(&mut client, &resource, &owner, 1, None)
                .await
                .unwrap_err(),
        );
        let ask = ReleaseRequest {
            resource,
            owner,
            fencing_token: 1,
        };
        both(client.release(ask).await.unwrap_err());
    }
}

fn ask_for_nothing() -> AcquireRequest {
    request("", "", LONG)
}

#[tokio::test]
async fn all_bad_fields_are_named_at_once() {
    let mut client = client().await;
    let answer = client.release(ReleaseRequest::default()).await;
    let status = expect_error(answer, Code::InvalidArgument, "INVALID_REQUEST");
    let mut fields = violations(&status);
    fields.sort();
    assert_eq!(fields, ["fencing_token", "owner", "resource"]);
}
