//! Messages of any bytes: each is answered as the contract says, and the
//! connection works on.

use fencepost_support::{calls, raw};
use prost::Message as _;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};
use tonic::Code;

use crate::world::{LONG, fresh, shared};

const MESSAGES: usize = 2_000;

/// A good request that was damaged, or bytes that never were one.
fn body(rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = calls::request(&fresh("body"), "a", LONG).encode_to_vec();
    let at = rng.random_range(0..bytes.len());
    match rng.random_range(0..4) {
        0 => {
            bytes = (0..rng.random_range(0..200))
                .map(|_| rng.random())
                .collect()
        }
        1 => bytes.truncate(at),
        2 => bytes[at] = rng.random(),
        _ => bytes.insert(at, rng.random()),
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn any_bytes_are_answered_as_the_contract_says() {
    let seed: u64 = rand::rng().random();
    println!("seed: {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let channel = shared().await.server.channel().await;
    let (mut good, mut invalid) = (0, 0);
    for _ in 0..MESSAGES {
        let method = ["Acquire", "Acquire", "Release", "Renew", "Get"]
            .choose(&mut rng)
            .unwrap();
        let body = body(&mut rng);
        // `()` takes any answer.
        match raw::unary::<()>(&channel, method, body.clone()).await {
            Ok(()) => good += 1,
            Err(status) => {
                let known = calls::reason(&status).is_some()
                    && matches!(
                        status.code(),
                        Code::InvalidArgument
                            | Code::NotFound
                            | Code::PermissionDenied
                            | Code::Aborted
                    );
                assert!(known, "{method} {body:02x?}: {status:?}");
                invalid += usize::from(status.code() == Code::InvalidArgument);
            }
        }
    }
    println!("{MESSAGES} messages: {good} good, {invalid} invalid");
    assert!(good > 5 && invalid > MESSAGES / 4);
}
