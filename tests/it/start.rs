//! How a server starts, or does not: exit codes, one clear line each, and
//! where its settings come from.

use std::{net::TcpListener, time::Duration};

use fencepost_support::{
    Postgres, Server, calls, postgres::fresh_database, server, system, system::free_address,
};
use serde_json::Value;

use crate::programs::{bare, expect_no_start, run};

const USAGE: i32 = 64;
const UNAVAILABLE: i32 = 69;
const CONFIGURATION: i32 = 78;

#[tokio::test]
async fn bad_usage_is_64_and_names_the_flag() {
    for (arguments, named) in [
        (&["--nonsense"][..], "--nonsense"),
        (&["--listen", "nowhere"], "--listen"),
        (&["--listen", "localhost:50051"], "an IP address"),
        (&["--min-ttl", "soon"], "--min-ttl"),
        (&["--database-pool-size", "0"], "--database-pool-size"),
        (&["--log-format", "xml"], "--log-format"),
        (&["--log", "info,fencepostd=loud=er"], "--log"),
        // Modules, for the library: they would silence the log.
        (&["--log", "inof"], "--log"),
        (&["--log", "fencepostd="], "--log"),
        (&["--log", ""], "--log"),
        (&["advance-tokens", "--at-least", "0"], "--at-least"),
        (&["advance-tokens", "--force"], "--at-least"),
        (&["serve"], "serve"),
        (
            &["--database-url", "x", "--database-url-file", "y"],
            "--database-url",
        ),
    ] {
        let mut command = bare(server::binary());
        command.args(arguments);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(USAGE), "{arguments:?}: {}", ended.said());
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
}

#[tokio::test]
async fn a_bad_configuration_is_78() {
    for url in [
        "nonsense",
        "mysql://u@127.0.0.1/locks",
        "postgres://u@127.0.0.1:port/locks",
        "postgres:///locks",
    ] {
        let line = expect_no_start(Server::builder(url), CONFIGURATION).await;
        assert!(line.contains("database URL"), "{line}");
    }
    for (parameters, named) in [
        ("sslmode=verify-full", "sslrootcert"),
        ("sslmode=verify-full&sslrootcert=/not/there", "sslrootcert"),
        ("sslmode=sometimes", "sslmode"),
        ("sslcert=/not/there", "sslkey"),
        (
            "connect_timeout=3&sslrotcert=/not/there",
            "parameter number 2",
        ),
    ] {
        let url = format!("postgres://u@127.0.0.1/locks?{parameters}");
        let line = expect_no_start(Server::builder(&url), CONFIGURATION).await;
        assert!(line.contains(named) && !line.contains("/not"), "{line}");
    }

    let good = "postgres://u@127.0.0.1/locks";
    for (flag, value) in [
        ("--min-ttl", "25h"),
        ("--max-ttl", "3years"),
        ("--request-timeout", "1ms"),
        ("--purge-retention", "1s"),
        ("--drain-timeout", "1s"),
    ] {
        let builder = Server::builder(good).flag(flag, value);
        let line = expect_no_start(builder, CONFIGURATION).await;
        assert!(line.contains(flag), "{line}");
    }
    let missing = Server::without_database().flag("--database-url-file", "/does/not/exist");
    let line = expect_no_start(missing, CONFIGURATION).await;
    assert!(line.contains("--database-url-file"), "{line}");
}

#[tokio::test]
async fn a_database_that_is_away_is_69() {
    let nobody = Postgres::url_via(free_address(), "locks");
    let line = expect_no_start(Server::builder(&nobody), UNAVAILABLE).await;
    assert!(line.contains("database"), "{line}");
    assert!(line.contains("refused"), "{line}");

    let database = fresh_database().await;
    let no_such = database.postgres().url_of("no_such_database");
    let line = expect_no_start(Server::builder(&no_such), UNAVAILABLE).await;
    assert!(line.contains("no_such_database"), "{line}");
}

#[tokio::test]
async fn a_database_of_another_encoding_is_78() {
    let database = fresh_database().await;
    let admin = database.postgres().admin().await;
    for (name, encoding) in [("ascii", "SQL_ASCII"), ("latin", "LATIN1")] {
        admin
            .run(&format!(
                "CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
            ))
            .await;
        let url = database.postgres().url_of(name);
        let line = expect_no_start(Server::builder(&url), CONFIGURATION).await;
        assert!(line.contains("UTF8") && line.contains(encoding), "{line}");
    }
}

#[tokio::test]
async fn a_standby_is_69() {
    use fencepost_support::postgres::Replication;
    let primary = Postgres::start().await;
    let standby = primary.standby("copy", Replication::Asynchronous).await;
    let line = expect_no_start(Server::builder(&standby.url()), UNAVAILABLE).await;
    assert!(
        line.contains("standby") || line.contains("writes"),
        "{line}"
    );
}

#[tokio::test]
async fn a_database_without_fsync_is_78_unless_it_is_a_toy() {
    let postgres = Postgres::builder().setting("fsync", "off").start().await;
    let line = expect_no_start(Server::builder(&postgres.url()), CONFIGURATION).await;
    assert!(line.contains("fsync=off"), "{line}");
    assert!(line.contains("--allow-fsync-off"), "{line}");

    let toy = Server::builder(&postgres.url()).switch("--allow-fsync-off");
    let toy = toy.start().await;
    toy.wait_ready().await;
    let ttl = Duration::from_secs(5);
    calls::granted(&mut toy.client().await, "a", "b", ttl).await;
}

/// The owner of the schema, or of a function in it, says what it does.
#[tokio::test]
async fn a_schema_of_another_role_is_78() {
    let database = fresh_database().await;
    let (admin, name) = (database.client().await, database.name());
    let of = |role: &str| {
        let url = database
            .url()
            .replace("postgres@", &format!("{role}_{name}@"));
        assert!(url.contains(role), "{url}");
        Server::builder(&url)
    };
    let refused = async |builder: server::Builder, what: &str| {
        for builder in [builder.clone(), builder.switch("migrate")] {
            let line = expect_no_start(builder, CONFIGURATION).await;
            assert!(line.contains(what), "{line}");
            assert!(line.contains(&format!("stranger_{name}")), "{line}");
        }
    };
    admin
        .run(&format!(
            "CREATE ROLE server_{name} LOGIN; CREATE ROLE stranger_{name}; CREATE ROLE member_{name} LOGIN IN ROLE server_{name};
             GRANT CREATE ON DATABASE {name} TO server_{name};
             CREATE SCHEMA fencepost AUTHORIZATION stranger_{name}; GRANT ALL ON SCHEMA fencepost TO server_{name}"
        ))
        .await;
    refused(of("server"), "schema fencepost").await;
    // Superusers may do all, and so would the stranger's code.
    refused(Server::builder(&database.url()), "schema fencepost").await;
    let tables = "SELECT count(*) FROM pg_class WHERE relnamespace = 'fencepost'::regnamespace";
    assert_eq!(admin.value::<i64>(tables).await, 0, "nothing was made");

    admin.run("DROP SCHEMA fencepost").await;
    of("server").start().await.wait_ready().await;
    of("member").start().await.wait_ready().await;
    admin
        .run(&format!(
            "ALTER FUNCTION fencepost.release_v1(text, text, bigint) OWNER TO stranger_{name}"
        ))
        .await;
    refused(of("server"), "function release_v1").await;
    // Who owns the database is trusted with all that is in it.
    admin
        .run(&format!("ALTER DATABASE {name} OWNER TO stranger_{name}"))
        .await;
    of("server").start().await.wait_ready().await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_named_and_may_be_tried_again() {
    let database = fresh_database().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for builder in [
        Server::builder(&database.url()).listen(address),
        Server::builder(&database.url()).flag("--health-listen", &address.to_string()),
    ] {
        let line = expect_no_start(builder, UNAVAILABLE).await;
        assert!(line.contains(&address.to_string()), "{line}");
    }
}

#[tokio::test]
async fn an_empty_database_url_is_78_and_no_private_postgres() {
    for (builder, named) in [
        (Server::builder(""), "--database-url"),
        (
            Server::without_database().env("FENCEPOST_DATABASE_URL", ""),
            "--database-url",
        ),
        (
            Server::without_database().env("DATABASE_URL", ""),
            "DATABASE_URL",
        ),
    ] {
        let line = expect_no_start(builder, CONFIGURATION).await;
        assert!(line.contains(&format!("{named} is empty")), "{line}");
    }
}

#[tokio::test]
async fn the_database_url_comes_from_flag_file_or_environment() {
    let database = fresh_database().await;
    let url = database.url();
    let directory = system::private_directory();
    let file = directory.join("url");
    std::fs::write(&file, format!("{url}\n")).unwrap();
    let file = file.to_str().unwrap();
    let nobody = Postgres::url_via(free_address(), "nobody");
    let servers = [
        Server::without_database().flag("--database-url-file", file),
        Server::without_database().env("FENCEPOST_DATABASE_URL_FILE", file),
        Server::without_database().env("FENCEPOST_DATABASE_URL", &url),
        Server::without_database().env("DATABASE_URL", &url),
        // The more specific one wins.
        Server::builder(&url).env("DATABASE_URL", &nobody),
        Server::builder(&url).env("FENCEPOST_DATABASE_URL", &nobody),
        Server::without_database()
            .env("FENCEPOST_DATABASE_URL", &url)
            .env("DATABASE_URL", &nobody),
    ];
    let ttl = Duration::from_secs(60);
    for (n, builder) in servers.into_iter().enumerate() {
        let server = builder.start().await;
        server.wait_ready().await;
        calls::granted(&mut server.client().await, &format!("lock {n}"), "a", ttl).await;
    }
    let rows = "SELECT count(*) FROM fencepost.locks WHERE resource LIKE 'lock _'";
    let locks: i64 = database.client().await.value(rows).await;
    assert_eq!(locks, 7, "all of them used the one database");
}

#[tokio::test]
async fn a_flag_wins_over_its_twin_in_the_environment() {
    let database = fresh_database().await;
    let ttl = Duration::from_secs(1);
    let twin = Server::builder(&database.url()).env("FENCEPOST_MIN_TTL", "2s");
    let server = twin.clone().start().await;
    server.wait_ready().await;
    let refused = calls::acquire(&mut server.client().await, "a", "b", ttl).await;
    calls::expect_violation(refused, "ttl");

    let server = twin.flag("--min-ttl", "1s").start().await;
    server.wait_ready().await;
    calls::granted(&mut server.client().await, "a", "b", ttl).await;
}

#[tokio::test]
async fn a_variable_that_is_no_setting_is_told() {
    let database = fresh_database().await;
    let server = Server::builder(&database.url())
        .env("FENCEPOST_MIN_TTLS", "5s")
        .env("FENCEPOST_DRAIN_DELAY", "1s")
        .env("FENCEPOST_PORT_50051_TCP_ADDR", "127.0.0.1")
        .start()
        .await;
    let is_told = |line: &Value| {
        line["message"] == "an environment variable that is no setting of this program"
    };
    let line = server.wait_for_log("the variable", is_told).await;
    assert_eq!(line["level"], "WARN");
    assert_eq!(line["name"], "FENCEPOST_MIN_TTLS");
    server.wait_ready().await;
    let told = server
        .logs()
        .iter()
        .filter(|line| line.contains("no setting of"))
        .count();
    assert_eq!(told, 1);
}

#[tokio::test]
async fn help_lists_every_flag_with_its_twin() {
    for (arguments, least) in [
        (&["--help"][..], 15),
        (&["migrate", "--help"], 5),
        (&["advance-tokens", "--help"], 5),
    ] {
        let mut command = bare(server::binary());
        command.args(arguments);
        let ended = run(command).await;
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let flags = ended.stdout.split("\n  ").filter_map(|line| {
            let flag = line.trim_start().trim_start_matches("-h, ");
            let flag = flag.trim_start_matches("-V, ").strip_prefix("--")?;
            Some(flag.split([' ', '\n']).next().unwrap().to_owned())
        });
        // Questions to the program, and what is only ever meant once.
        let apart = ["help", "version", "at-least", "force"];
        let flags: Vec<_> = flags
            .filter(|flag| !apart.contains(&flag.as_str()))
            .collect();
        assert!(flags.len() >= least, "{flags:?}");
        let help = ended
            .stdout
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        for flag in flags {
            let twin = format!("FENCEPOST_{}", flag.to_uppercase().replace('-', "_"));
            let shown = [']', '=']
                .iter()
                .any(|end| help.contains(&format!("[env: {twin}{end}")));
            assert!(shown, "--{flag} has no twin {twin}:\n{}", ended.stdout);
        }
    }
}
