//! Names compare byte by byte, and nothing but equality ties two of them.

use fencepost_support::calls::{get, granted, refused};
use rand::{Rng as _, distr::Alphanumeric};

use crate::world::{LONG, assert_same_lease, client, fresh};

#[tokio::test]
async fn names_that_look_alike_do_not_block_each_other() {
    let mut client = client().await;
    let base = fresh("a");
    let lock = granted(&mut client, &base, "holder", LONG).await;
    let alike = [
        format!("{base}/"),
        format!("{base}/b"),
        base.to_uppercase(),
        format!("{base} "),
        format!(" {base}"),
        format!("{base}\u{a0}"),
        format!("{base}\u{200b}"),
        format!("{base}%"),
        format!("{base}_"),
        format!("{base}\\"),
        format!("{base}'"),
        format!("{base}\""),
        format!("{base};--"),
        format!("\u{202e}{base}"),
        // One character in its two Unicode forms.
        format!("{base}\u{e4}"),
        format!("{base}a\u{308}"),
        // Outside the plane that two bytes reach.
        format!("{base}\u{1f512}"),
        format!("{base}\u{fffd}"),
        format!("{base}\u{feff}"),
    ];
    for name in &alike {
        let other = granted(&mut client, name, "other", LONG).await;
        assert_eq!(&other.resource, name);
    }
    for name in &alike {
        assert_eq!(&get(&mut client, name).await.unwrap().resource, name);
        assert_eq!(
            refused(&mut client, name, "third", LONG).await.owner,
            "other"
        );
    }
    assert_same_lease(&get(&mut client, &base).await.unwrap(), &lock);
}

#[tokio::test]
async fn patterns_are_names() {
    let mut client = client().await;
    let held = fresh("pattern");
    granted(&mut client, &held, "a", LONG).await;
    for name in ["%", "_", "*", ".*", "\\", "'", "$1", "null", "0x0"] {
        granted(&mut client, name, "b", LONG).await;
    }
}

#[tokio::test]
async fn long_names_that_differ_in_the_last_byte_are_two() {
    let mut client = client().await;
    for length in [255, 512] {
        let stem: String = random(length - 1);
        let (one, other) = (format!("{stem}-"), format!("{stem}+"));
        granted(&mut client, &one, "a", LONG).await;
        granted(&mut client, &other, "b", LONG).await;
        assert_eq!(get(&mut client, &one).await.unwrap().owner, "a");
    }
}

#[tokio::test]
async fn owners_compare_byte_by_byte_too() {
    let (mut client, name) = (client().await, fresh("owners"));
    granted(&mut client, &name, "\u{e4}", LONG).await;
    for owner in ["a\u{308}", "\u{c4}", "\u{e4} ", " \u{e4}", "a"] {
        let holder = refused(&mut client, &name, owner, LONG).await;
        assert_eq!(holder.owner, "\u{e4}");
    }
}

#[tokio::test]
async fn many_random_names_are_independent() {
    let client = client().await;
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    granted(&mut client, &random(40), "a", LONG).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

fn random(length: usize) -> String {
    let characters = rand::rng().sample_iter(Alphanumeric);
    characters.take(length).map(char::from).collect()
}
