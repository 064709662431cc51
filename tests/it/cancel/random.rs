//! Thousands of calls that end at random moments.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fencepost_proto::v1::{GetRequest, ReleaseRequest, RenewRequest};
use fencepost_support::{
    Server,
    calls::{acquire, get, grant_in, granted, reason, renew, request_with_id, send},
    postgres::fresh_database,
    proxy::Proxy,
    server::{Client, channel_at},
};
use rand::{Rng as _, rngs::StdRng};
use tokio::{task::JoinSet, time::timeout};
use tonic::{Code, Request, Status};

use super::{LONG, assert_sessions_rest, generator, seed};

const WORKERS: u64 = 20;
const CALLS_EACH: usize = 250;
/// A channel was seen that had no connection any longer, and answered no call.
const PATIENCE: Duration = Duration::from_secs(15);

/// How a call ends before its time.
#[derive(Clone, Copy)]
enum Cut {
    /// Its future is dropped: `RST_STREAM`.
    Drop(Duration),
    /// `grpc-timeout`.
    Time(Duration),
}

impl Cut {
    fn random(rng: &mut StdRng) -> Self {
        if rng.random_bool(0.6) {
            Self::Drop(Duration::from_micros(rng.random_range(0..20_000)))
        } else {
            Self::Time(Duration::from_millis(rng.random_range(1..=30)))
        }
    }

    /// Runs a call until it is over or cut off; none when it was.
    async fn apply<T, R>(
        self,
        message: T,
        call: impl AsyncFnOnce(Request<T>) -> Result<R, Status>,
    ) -> Option<Result<R, Status>> {
        let mut request = Request::new(message);
        match self {
            Self::Drop(after) => timeout(after, call(request)).await.ok(),
            Self::Time(time) => {
                request.set_timeout(time);
                let patience = time + Duration::from_secs(1);
                timeout(patience, call(request)).await.ok()
            }
        }
    }
}

/// What is left of an Acquire, by its caller's knowledge.
struct Left {
    name: String,
    owner: String,
    id: String,
    /// The token, when the answer came.
    told: Option<i64>,
}

/// One caller: mostly Acquires, each on a name of its own.
async fn caller(mut client: Client, worker: u64, mut rng: StdRng) -> Vec<Left> {
    let mut left = Vec::new();
    let held = format!("held-{worker}");
    let owner = format!("owner-{worker}");
    let mut token = 1;
    for n in 0..CALLS_EACH {
        let cut = Cut::random(&mut rng);
        let resource = held.clone();
        match rng.random_range(0..10) {
            0..7 => {
                let (name, id) = (format!("c-{worker}-{n}"), format!("id-{worker}-{n}"));
                let request = request_with_id(&name, &owner, LONG, &id);
                let answer = cut
                    .apply(request, async |request| client.acquire(request).await)
                    .await;
                let told = match answer {
                    Some(Ok(answer)) => Some(answer.into_inner().lock.unwrap().fencing_token),
                    _ => None,
                };
                left.push(Left {
                    name,
                    owner: owner.clone(),
                    id,
                    told,
                });
            }
            7 => {
                let request = GetRequest { resource };
                cut.apply(request, async |request| client.get(request).await)
                    .await;
            }
            8 => {
                let acquired = acquire(&mut client, &held, &owner, LONG);
                match timeout(PATIENCE, acquired).await {
                    Ok(Ok(answer)) => token = answer.lock.unwrap().fencing_token,
                    Ok(Err(_cut)) => {}
                    // The channel does not recover; what the server did can be
                    // seen all the same.
                    Err(_elapsed) => return left,
                }
                let request = RenewRequest {
                    resource,
                    owner: owner.clone(),
                    fencing_token: token,
                    ttl: None,
                };
                cut.apply(request, async |request| client.renew(request).await)
                    .await;
            }
            _ => {
                let request = ReleaseRequest {
                    resource,
                    owner: owner.clone(),
                    fencing_token: token,
                };
                cut.apply(request, async |request| client.release(request).await)
                    .await;
            }
        }
    }
    left
}

#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_cancelled_calls_leave_nothing_behind() {
    let seed = seed("cancel");
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .flag("--database-pool-size", "3")
        .start()
        .await;
    server.wait_ready().await;
    let other = Server::start(&database.url()).await;
    let proxy = Proxy::start(server.grpc()).await;

    let mut callers = JoinSet::new();
    let shared = server.client().await;
    for worker in 0..WORKERS {
        let client = match worker % 5 {
            // Some sit on a connection that is reset now and then.
            0 => {
                let endpoint = fencepost_support::server::endpoint_at(proxy.address());
                Client::new(endpoint.connect_lazy())
            }
            _ => shared.clone(),
        };
        callers.spawn(caller(client, worker, generator(seed, worker)));
    }
    let mut rng = generator(seed, WORKERS);
    let resets = async {
        loop {
            tokio::time::sleep(Duration::from_millis(rng.random_range(5..60))).await;
            proxy.reset().await;
        }
    };
    let left: Vec<Left> = tokio::select! {
        left = callers.join_all() => left.into_iter().flatten().collect(),
        () = resets => unreachable!(),
    };

    // About a second, on a machine that has nothing else to do.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_sessions_rest(&database.url(), 3 + 16).await;
    let admin = database.client().await;
    let given_back = "SELECT count(*) FROM fencepost.locks
        WHERE resource LIKE 'c-%' AND released AND request_id = ''";
    let given_back: i64 = admin.value(given_back).await;
    let mut looks = JoinSet::new();
    let total = left.len();
    let mut left = left.into_iter();
    while left.len() > 0 {
        let share: Vec<Left> = left.by_ref().take(150).collect();
        let second = other.client().await;
        looks.spawn(async move { look_after(share, second).await });
    }
    let (mut told, mut late) = (0, 0);
    for found in looks.join_all().await {
        told += found.0;
        late += found.1;
    }
    println!(
        "{total} acquires: {told} told, {given_back} given back, {late} answered too late, \
         the rest never begun"
    );
    assert!(given_back > 50, "only {given_back} were given back");
    // How many are late is a matter of who gets the processor first: the answers of
    // a round are handed over together, and then written one by one.
    assert!(
        late < i64::try_from(total).unwrap() / 2,
        "{late} were not given back"
    );
}

/// Looks at what is left. How many callers were told of their leases, and how
/// many had gone while the answer was on its way.
async fn look_after(left: Vec<Left>, mut client: Client) -> (i64, i64) {
    let (mut told, mut late) = (0, 0);
    for lease in left {
        let Left {
            name, owner, id, ..
        } = lease;
        let seen = get(&mut client, &name).await.ok();
        match (lease.told, seen) {
            (Some(token), seen) => {
                told += 1;
                let seen = seen.expect("a lease that its caller was told of");
                assert_eq!(seen.fencing_token, token, "{name}");
                renew(&mut client, &name, &owner, token, None)
                    .await
                    .unwrap();
            }
            (None, None) => {
                let taken = acquire(&mut client, &name, "another", LONG).await;
                assert!(taken.unwrap().acquired, "{name}");
            }
            (None, Some(seen)) => {
                // The answer was on its way already: a replay finds it.
                late += 1;
                let request = request_with_id(&name, &owner, LONG, &id);
                let lock = grant_in(send(&mut client, request).await);
                assert_eq!(lock.fencing_token, seen.fencing_token, "{name}");
            }
        }
    }
    (told, late)
}

/// Rounds of a cancelled Acquire and its retry on another replica.
const ROUNDS: u64 = 2_000;
const AT_ONCE: u64 = 80;

#[derive(Default)]
struct Tally {
    answered: AtomicUsize,
    retried: AtomicUsize,
    spent: AtomicUsize,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_answered_to_a_retry_is_never_taken_back() {
    let seed = seed("retry");
    let database = fresh_database().await;
    let pool =
        |server: fencepost_support::server::Builder| server.flag("--database-pool-size", "6");
    let first = pool(Server::builder(&database.url())).start().await;
    let second = pool(Server::builder(&database.url())).start().await;
    first.wait_ready().await;
    second.wait_ready().await;

    let tally = Arc::new(Tally::default());
    let mut workers = JoinSet::new();
    for worker in 0..AT_ONCE {
        // Not on one connection all: a stream is opened in its order.
        let mut sides = [
            Client::new(channel_at(first.grpc()).await),
            Client::new(channel_at(second.grpc()).await),
        ];
        if worker % 2 == 1 {
            sides.swap(0, 1);
        }
        let tally = Arc::clone(&tally);
        let mut rng = generator(seed, worker);
        workers.spawn(async move {
            let [mut here, mut there] = sides;
            let (mut n, mut retries) = (0, 0);
            while retries < ROUNDS / AT_ONCE {
                let name = format!("r-{worker}-{n}");
                let cut = Duration::from_micros(rng.random_range(0..12_000));
                retries += round(&name, cut, &mut here, &mut there, &tally).await;
                n += 1;
            }
        });
    }
    workers.join_all().await;
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    println!(
        "{} answered, {} retried, {} of these spent",
        count(&tally.answered),
        count(&tally.retried),
        count(&tally.spent)
    );
    assert_sessions_rest(&database.url(), 12).await;
}

/// How many retries it took: none when the answer came before the cut.
async fn round(
    name: &str,
    cut: Duration,
    here: &mut Client,
    there: &mut Client,
    tally: &Tally,
) -> u64 {
    let request = request_with_id(name, "owner", LONG, name);
    if let Ok(answer) = timeout(cut, send(here, request.clone())).await {
        grant_in(answer);
        tally.answered.fetch_add(1, Ordering::Relaxed);
        return 0;
    }
    tally.retried.fetch_add(1, Ordering::Relaxed);
    match send(there, request).await {
        Ok(answer) => {
            let lock = answer.lock.expect("nobody else wants it");
            let token = lock.fencing_token;
            // Whoever would take it back has had the time.
            tokio::time::sleep(Duration::from_millis(300)).await;
            let seen = get(here, name)
                .await
                .unwrap_or_else(|status| panic!("{name} was taken back: {status:?}"));
            assert_eq!(seen.fencing_token, token, "{name}");
            renew(there, name, "owner", token, None).await.unwrap();
        }
        Err(status) => {
            assert_eq!(status.code(), Code::Aborted, "{status:?}");
            assert_eq!(reason(&status).as_deref(), Some("REQUEST_SPENT"));
            tally.spent.fetch_add(1, Ordering::Relaxed);
            granted(there, name, "another", LONG).await;
        }
    }
    1
}
