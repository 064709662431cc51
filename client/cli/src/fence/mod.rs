//! `fencepost fence`: the fencing kit in the database that holds the data. Talks
//! to that database, and to no lock server.

use std::{ops::Range, path::PathBuf, time::Duration};

use clap::Subcommand;
use fencepost_client::fence::POSTGRES_KIT;

use crate::{
    exit::{Exit, Failure},
    output::{self, Output, Seen},
};

mod database;

use database::Database;
pub(crate) use database::FenceFailure;

/// What can be a token, as the kit judges.
const TOKENS: Range<i64> = 1..1 << 53;

/// What `fence` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    at: At,
    #[command(subcommand)]
    command: Command,
}

/// Which database.
#[derive(Debug, clap::Args)]
struct At {
    /// The database that holds the data to be fenced, the lock server's or any
    /// other: postgresql://user:password@host:port/name. Other users of the machine can
    /// read flags: prefer the environment or a file.
    #[arg(
        long,
        global = true,
        env = "FENCEPOST_FENCE_DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        conflicts_with = "database_url_file"
    )]
    database_url: Option<String>,

    /// A file that holds that URL.
    #[arg(
        long,
        global = true,
        env = "FENCEPOST_FENCE_DATABASE_URL_FILE",
        value_name = "FILE"
    )]
    database_url_file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the kit, or bring it up to date. Keeps all tokens, and may run
    /// beside writers.
    Install {
        /// Print the SQL instead, for a migration tool. Needs no database.
        #[arg(long)]
        print: bool,
    },
    /// See the highest token that a resource has seen, and how many writes were
    /// refused in the whole database.
    Check {
        /// The name that is locked.
        #[arg(value_parser = resource)]
        resource: String,

        /// Would this token, from 1 to 2^53 - 1, be admitted? Exit code 76: no, a
        /// newer one was seen. The next moment it may be otherwise: only the write
        /// itself can tell.
        #[arg(long, value_parser = clap::value_parser!(i64).range(TOKENS))]
        token: Option<i64>,
    },
    /// Mend a resource that has seen a token which was never given.
    ///
    /// THIS OPENS THE FENCE. Whoever holds a token from N on, or any token after
    /// --forget, may write again, also a holder that has been frozen for hours.
    /// Take the token of the present lease (`fencepost get RESOURCE`) for N. Rows
    /// of guarded tables that carry the wrong token must be mended too: how is in
    /// the comment on fence.reset in `fencepost fence install --print`.
    #[command(verbatim_doc_comment)]
    Reset(Reset),
}

#[derive(Debug, clap::Args)]
struct Reset {
    /// The name that is locked.
    #[arg(value_parser = resource)]
    resource: String,

    #[command(flatten)]
    target: Target,
}

/// One of the two: resetting has no harmless default.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Target {
    /// The highest token from now on, from 1 to 2^53 - 1, higher or lower than it was.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(TOKENS))]
    to: Option<i64>,

    /// As if no token had ever been seen. For names that are gone for good.
    #[arg(long)]
    forget: bool,
}

/// A name that the kit could have seen.
fn resource(name: &str) -> Result<String, &'static str> {
    match name.len() {
        1..=512 => Ok(name.to_owned()),
        _ => Err("a resource has 1 to 512 bytes"),
    }
}

pub(crate) async fn run(args: Args, patience: Duration, output: &Output) -> Result<Exit, Failure> {
    let Args { at, command } = args;
    if let Command::Install { print: true } = command {
        output.raw(POSTGRES_KIT)?;
        return Ok(Exit::Done);
    }
    let work = async {
        let database = Database::connect(at.database_url, at.database_url_file).await?;
        match command {
            Command::Install { .. } => {
                database.install().await?;
                output.installed()?;
                Ok(Exit::Done)
            }
            Command::Check { resource, token } => {
                let seen = database.check(&resource).await?;
                check(&resource, &seen, token, output)
            }
            Command::Reset(Reset { resource, target }) => {
                let before = database.reset(&resource, target.to).await?;
                output.reset(&resource, target.to, before)?;
                Ok(Exit::Done)
            }
        }
    };
    match tokio::time::timeout(patience, work).await {
        Ok(done) => done,
        Err(_elapsed) => Err(FenceFailure::TimedOut.into()),
    }
}

fn check(
    resource: &str,
    seen: &Seen,
    token: Option<i64>,
    output: &Output,
) -> Result<Exit, Failure> {
    let admitted = token.map(|token| token >= seen.highest_token);
    output.seen(resource, seen, admitted)?;
    if admitted == Some(false) {
        output::error("not admitted: a newer token was seen");
        return Ok(Exit::Lost);
    }
    Ok(Exit::Done)
}
