//! What the README lists is exported, no more and no less, and nothing of what
//! callers have sent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use fencepost_proto::v1::GetResponse;
use fencepost_support::{
    Postgres, Server,
    calls::{self, acquire, get, refused, release, renew, request_with_id, send},
    raw,
};
use rand::Rng as _;
use tonic::Code;

use super::{scrape::Scrape, wait_for};
use crate::{
    keep_alive::stage::{Stream, request},
    world::LONG,
};

/// A row of the README's table: the kind of a metric, and its labels.
pub(crate) type Listed = (String, Vec<String>);

pub(crate) fn listed(heading: &str) -> BTreeMap<String, Listed> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = fs::read_to_string(readme).unwrap();
    let (_, section) = readme.split_once(&format!("\n### {heading}\n")).unwrap();
    let (section, _) = section.split_once("\n### ").unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let row = |line: &str| {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let labels = cells[3]
            .split(',')
            .map(|label| label.trim().trim_matches('`'));
        let mut labels: Vec<_> = labels
            .filter(|label| !label.is_empty())
            .map(str::to_owned)
            .collect();
        labels.sort();
        (
            cells[1].trim_matches('`').to_owned(),
            (cells[2].to_owned(), labels),
        )
    };
    rows.map(row).collect()
}

/// What is exported, as it should be listed.
pub(crate) fn exported(scrape: &Scrape) -> BTreeMap<String, Listed> {
    let of = |(name, kind): (&String, &String)| {
        let labels = scrape.labels(name).into_iter().collect();
        (name.clone(), (kind.clone(), labels))
    };
    scrape.types.iter().map(of).collect()
}

/// Uses what there is, in every way that a metric tells apart.
async fn use_everything(postgres: &mut Postgres, server: &Server, mark: &str) {
    let mut client = server.client().await;
    let (name, owner) = (format!("resource-{mark}"), format!("owner-{mark}"));
    let mut ask = request_with_id(&name, &owner, LONG, &format!("id-{mark}"));
    ask.labels
        .insert(format!("key-{mark}"), format!("label-{mark}"));
    let lock = calls::grant_in(send(&mut client, ask.clone()).await);
    send(&mut client, ask.clone()).await.unwrap();
    refused(&mut client, &name, "another", LONG).await;
    get(&mut client, &name).await.unwrap();
    renew(&mut client, &name, &owner, lock.fencing_token, None)
        .await
        .unwrap();
    renew(&mut client, &name, &owner, lock.fencing_token + 1, None)
        .await
        .unwrap_err();
    send(&mut client, ask).await.unwrap_err();
    Stream::open(&mut client, request(&lock)).await.next().await;
    release(&mut client, &name, &owner, lock.fencing_token)
        .await
        .unwrap();
    // A method that its caller made up.
    let channel = server.channel().await;
    let unknown = raw::unary::<GetResponse>(&channel, mark, Vec::new()).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
    server.health(mark).await;

    // A statement that is refused, and an outage.
    let admin = postgres.admin().await;
    admin
        .run("ALTER TABLE fencepost.locks RENAME TO hidden")
        .await;
    acquire(&mut client, &name, &owner, LONG).await.unwrap_err();
    admin
        .run("ALTER TABLE fencepost.hidden RENAME TO locks")
        .await;
    postgres.kill9().await;
    wait_for(server, "fencepost_ready", &[], 0.0).await;
    get(&mut client, &name).await.unwrap_err();
    postgres.start_again().await;
    wait_for(server, "fencepost_ready", &[], 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_readme_lists_what_is_exported_and_no_label_is_a_callers() {
    let mut postgres = Postgres::start().await;
    let mark = format!("swordfish{:08x}", rand::rng().random::<u32>());
    let url = postgres
        .url()
        .replacen("postgres@", &format!("postgres:{mark}@"), 1);
    assert!(url.contains(&mark), "{url}");
    let server = Server::builder(&url)
        .flag("--metrics-prefixes", "2")
        .ready()
        .await;
    use_everything(&mut postgres, &server, &mark).await;
    let scrape = Scrape::of(&server).await;

    assert_eq!(exported(&scrape), listed("Metrics"));

    let sql = Path::new(env!("CARGO_MANIFEST_DIR")).join("server/src/store/sql");
    let files = fs::read_dir(sql).unwrap().map(|file| {
        let path = file.unwrap().path();
        path.file_stem().unwrap().to_str().unwrap().to_owned()
    });
    let statements = scrape.values("fencepost_statement_duration_seconds", "statement");
    assert_eq!(files.collect::<BTreeSet<_>>(), statements);

    assert!(!scrape.text.contains(&mark), "{}", scrape.text);
    for line in scrape.text.lines().filter(|line| !line.starts_with('#')) {
        let labels = line.split_once('{').map_or("", |(_, rest)| rest);
        assert!(labels.len() < 80 && !labels.contains("://"), "{line}");
    }
}
