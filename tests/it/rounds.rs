//! Calls that share a statement and a commit: what they save, and that none of
//! them is the worse for the company it is in.

mod news;
mod queued;
mod stage;

use std::time::{Duration, Instant};

use fencepost_proto::v1::{AcquireRequest, AcquireResponse, Lock};
use fencepost_support::{
    calls::{
        acquire, expect_error, expect_retryable, get, grant_in, granted, refusal_in, release,
        renew, request, send,
    },
    eventually,
    row_lock::RowLock,
};
use tonic::{Code, Status};

use self::stage::{LONG, Sent, Stage};

/// Sends an Acquire of each name.
async fn queue(
    stage: &Stage,
    names: &[String],
    owner: &'static str,
) -> Sent<impl Future<Output = Result<AcquireResponse, Status>> + use<>> {
    let calls = names.iter().map(|name| {
        let (mut client, name) = (stage.client.clone(), name.clone());
        async move { acquire(&mut client, &name, owner, LONG).await }
    });
    stage.send(calls).await
}

fn names(stem: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{stem} {n}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_wait_share_a_commit_and_no_more_than_five_hundred_do() {
    let stage = Stage::start().await;
    let held = stage.hold_round("!").await;
    let names = names("lock", 700);
    let sent = queue(&stage, &names, "owner").await;
    stage.open("!").await;
    held.await.unwrap();
    let locks: Vec<Lock> = sent.answers().await.into_iter().map(grant_in).collect();
    let (transactions, largest) = stage.transactions("lock %").await;
    assert!(transactions <= 10, "{transactions} for {}", names.len());
    assert!(largest <= 500, "{largest}");
    for (lock, name) in locks.iter().zip(&names) {
        assert_eq!((&lock.resource, &*lock.owner), (name, "owner"));
    }
    let mut tokens: Vec<i64> = locks.iter().map(|lock| lock.fencing_token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), locks.len());

    let held = stage.hold_round("!").await;
    let releases = locks.into_iter().map(|lock| {
        let mut client = stage.client.clone();
        async move { release(&mut client, &lock.resource, "owner", lock.fencing_token).await }
    });
    let sent = stage.send(releases).await;
    stage.open("!").await;
    held.await.unwrap();
    sent.answers()
        .await
        .into_iter()
        .for_each(|answer| answer.unwrap());
    let (transactions, largest) = stage.transactions("lock %").await;
    assert!(transactions <= 10, "{transactions} for {}", names.len());
    assert!(largest <= 500, "{largest}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_of_a_round_is_answered_for_its_own_row() {
    let odd = [
        "NULL",
        "{a,b}",
        "\"quoted\"",
        "'; --",
        "back\\slash",
        "%_",
        " ",
        "{}",
        "ünï",
        "🔒",
        "\\N",
    ];
    let mut names: Vec<String> = odd.iter().map(|&name| name.to_owned()).collect();
    names.push("x".repeat(512));
    names.push("é".repeat(256));
    let labels = |name: &String| {
        [
            ("name".to_owned(), name.clone()),
            (
                name.chars().take(64).collect(),
                "\"}],\\u0041\n\t".to_owned(),
            ),
        ]
    };
    let stage = Stage::start().await;
    let held = stage.hold_round("!").await;
    let acquires = names.iter().map(|name| {
        let mut client = stage.client.clone();
        let request = AcquireRequest {
            labels: labels(name).into(),
            request_id: name.chars().take(32).collect(),
            ..request(name, name.get(..64).unwrap_or(name), LONG)
        };
        async move { send(&mut client, request).await }
    });
    let sent = stage.send(acquires).await;
    stage.open("!").await;
    held.await.unwrap();
    let locks: Vec<Lock> = sent.answers().await.into_iter().map(grant_in).collect();

    let held = stage.hold_round("!").await;
    let gets = names.iter().map(|name| {
        let mut client = stage.client.clone();
        async move { get(&mut client, name).await }
    });
    let sent = stage.send(gets).await;
    stage.open("!").await;
    held.await.unwrap();
    for ((lock, read), name) in locks.iter().zip(sent.answers().await).zip(&names) {
        assert_eq!(&lock.resource, name);
        let read = read.unwrap();
        assert_eq!(read.labels, labels(name).into());
        let told = |lock: &Lock| {
            (
                lock.resource.clone(),
                lock.owner.clone(),
                lock.fencing_token,
            )
        };
        assert_eq!(told(&read), told(lock));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_delays_nobody_else() {
    let stage = Stage::start().await;
    let mut client = stage.client.clone();
    let lock = granted(&mut client, "locked", "before", LONG).await;
    release(&mut client, "locked", "before", lock.fencing_token)
        .await
        .unwrap();
    let row = RowLock::hold(&stage.database.url(), "locked").await;
    let others = names("other", 50);

    let held = stage.hold_round("!").await;
    let locked = queue(&stage, &["locked".to_owned()], "owner").await;
    let sent = queue(&stage, &others, "owner").await;
    stage.open("!").await;
    held.await.unwrap();
    let locks: Vec<Lock> = sent.answers().await.into_iter().map(grant_in).collect();
    row.wait_for_waiters(1).await;
    // Together, and not each alone after one was in the way.
    let (transactions, _) = stage.transactions("other %").await;
    assert!(transactions <= 5, "{transactions}");
    row.rollback().await;
    let lock = grant_in(locked.answers().await.remove(0));

    let row = RowLock::hold(&stage.database.url(), "locked").await;
    let held = stage.hold_round("!").await;
    let releases = |locks: Vec<Lock>| {
        locks.into_iter().map(|lock| {
            let mut client = stage.client.clone();
            async move { release(&mut client, &lock.resource, "owner", lock.fencing_token).await }
        })
    };
    let locked = stage.send(releases(vec![lock])).await;
    let sent = stage.send(releases(locks)).await;
    stage.open("!").await;
    held.await.unwrap();
    sent.answers()
        .await
        .into_iter()
        .for_each(|answer| answer.unwrap());
    row.wait_for_waiters(1).await;
    let (transactions, _) = stage.transactions("other %").await;
    assert!(transactions <= 5, "{transactions}");
    row.rollback().await;
    locked.answers().await.remove(0).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_coming_into_being_delays_nobody_for_long() {
    let stage = Stage::start().await;
    let other = stage.database.client().await;
    other
        .run(
            "BEGIN; INSERT INTO fencepost.locks VALUES ('new', 'psql', false,
             nextval('fencepost.fencing_tokens'), 0, 60000, clock_timestamp(),
             clock_timestamp() + interval '60 s', false, '', gen_random_uuid(), 1, '{}')",
        )
        .await;
    let held = stage.hold_round("!").await;
    let new = queue(&stage, &["new".to_owned()], "owner").await;
    let sent = queue(&stage, &names("other", 50), "owner").await;
    stage.open("!").await;
    let asked = Instant::now();
    held.await.unwrap();
    sent.answers()
        .await
        .into_iter()
        .for_each(|answer| _ = grant_in(answer));
    // A call alone waits for the row for eight seconds.
    assert!(
        asked.elapsed() < Duration::from_secs(4),
        "{:?}",
        asked.elapsed()
    );
    other.run("COMMIT").await;
    assert_eq!(refusal_in(new.answers().await.remove(0)).owner, "psql");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_refused_fails_no_other_call() {
    let stage = Stage::start().await;
    stage
        .psql
        .run(
            "CREATE FUNCTION public.raise() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN RAISE 'poisoned'; END $$;
             CREATE TRIGGER at_once BEFORE INSERT ON fencepost.locks FOR EACH ROW
                 WHEN (NEW.resource = 'at once') EXECUTE FUNCTION public.raise();
             CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT OR UPDATE ON fencepost.locks
                 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
                 WHEN (NEW.resource = 'at commit') EXECUTE FUNCTION public.raise()",
        )
        .await;
    for poisoned in ["at once", "at commit"] {
        let held = stage.hold_round("!").await;
        let refused = queue(&stage, &[poisoned.to_owned()], "owner").await;
        let others = names(&format!("beside {poisoned}"), 50);
        let sent = queue(&stage, &others, "owner").await;
        stage.open("!").await;
        held.await.unwrap();
        let answer = refused.answers().await.remove(0);
        expect_retryable(&expect_error(
            answer,
            Code::Unavailable,
            "STORE_UNAVAILABLE",
        ));
        sent.answers()
            .await
            .into_iter()
            .for_each(|answer| _ = grant_in(answer));
        assert!(!stage.is_there(poisoned).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_are_answered_while_a_flood_waits() {
    let stage = Stage::start().await;
    let mut client = stage.client.clone();
    let lock = granted(&mut client, "renewed", "owner", LONG).await;
    let held = stage.hold_round("!").await;
    let sent = queue(&stage, &names("flood", 500), "owner").await;
    for _ in 0..20 {
        renew(&mut client, "renewed", "owner", lock.fencing_token, None)
            .await
            .unwrap();
    }
    assert!(!held.is_finished(), "nothing was in the way");
    stage.open("!").await;
    held.await.unwrap();
    sent.answers()
        .await
        .into_iter()
        .for_each(|answer| _ = grant_in(answer));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_is_cut_off_is_an_unknown_outcome_for_all_of_it() {
    let stage = Stage::start().await;
    let mut client = stage.client.clone();
    for is_committed in [false, true] {
        let mut names = names(&format!("cut {is_committed}"), 20);
        names.push("!!".to_owned());
        let held = stage.hold_round("!").await;
        // Before it is asked for: on a busy machine, the round of "!" may be given up
        // for stuck, and the next one begin before the gate is opened.
        stage.close("!!").await;
        let sent = queue(&stage, &names, "owner").await;
        stage.open("!").await;
        held.await.unwrap();
        stage.wait_at_gate().await;
        if is_committed {
            // The answer is lost.
            stage.proxy.swallow_down();
            stage.open("!!").await;
            eventually("it is committed", async || {
                let query = "SELECT owner FROM fencepost.locks WHERE resource = '!!'";
                (stage.psql.value::<String>(query).await == "owner").then_some(())
            })
            .await;
            stage.proxy.cut().await;
        } else {
            let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event = 'PgSleep'";
            eventually("its session is ended", async || {
                (stage.psql.value::<i64>(kill).await == 1).then_some(())
            })
            .await;
            stage.open("!!").await;
        }
        // On a busy machine, some may have gone in a round of their own.
        let mut cut_off = Vec::new();
        for (answer, name) in sent.answers().await.into_iter().zip(&names) {
            if answer.is_err() {
                expect_error(answer, Code::Unavailable, "STORE_UNAVAILABLE");
                cut_off.push(name);
            }
        }
        assert!(cut_off.contains(&&"!!".to_owned()));
        stage.proxy.forward().await;
        for name in cut_off {
            eventually("the name is free", async || {
                let answer = acquire(&mut client, name, "another", LONG).await.ok()?;
                answer.acquired.then_some(())
            })
            .await;
        }
        let lock = get(&mut client, "!!").await.unwrap();
        release(&mut client, "!!", "another", lock.fencing_token)
            .await
            .unwrap();
    }
}
