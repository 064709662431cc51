//! `fencepost acquire`.

use std::time::Duration;

use fencepost_client::{AcquireOptions, Acquisition, Calls};
use humantime::parse_duration;

use crate::{
    exit::{Exit, Failure},
    output::{self, Output},
};

/// What `acquire` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The name to lock.
    resource: String,

    /// Who asks. Names ONE holder, never a host or a service: whoever has the
    /// lock and acquires it again loses the first lease. [default: a new name
    /// of host, process id and a random part]
    // No FENCEPOST_OWNER: two of these within one `run` would be one holder.
    #[arg(long)]
    owner: Option<String>,

    /// How long the lease lasts without a renewal.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    ttl: Duration,

    /// Shown to whoever is refused, such as a build or a trace id. Repeatable.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Names this acquisition, so that repeating the command after exit code
    /// 69, with the same owner, gets the same lease. [default: a new UUID]
    #[arg(long)]
    request_id: Option<String>,
}

pub(crate) async fn run(args: Args, client: &Calls, output: &Output) -> Result<Exit, Failure> {
    let mut options = options(args.ttl, args.owner, args.labels);
    if let Some(id) = args.request_id {
        options = options.request_id(id);
    }
    let acquisition = client.acquire(&args.resource, options).await?;
    output.acquisition(&acquisition)?;
    match acquisition {
        Acquisition::Acquired(_) => Ok(Exit::Done),
        Acquisition::Refused(holder) => {
            let left = output::seconds(holder.remaining);
            output::error(&format!(
                "not acquired: {} has it for another {left} unless it renews or releases",
                holder.owner
            ));
            Ok(Exit::NotAcquired)
        }
    }
}

/// What each subcommand that acquires says of it.
pub(crate) fn options(
    ttl: Duration,
    owner: Option<String>,
    labels: Vec<(String, String)>,
) -> AcquireOptions {
    let mut options = AcquireOptions::default().ttl(ttl);
    if let Some(owner) = owner {
        options = options.owner(owner);
    }
    for (key, value) in labels {
        options = options.label(key, value);
    }
    options
}

/// `KEY=VALUE`.
pub(crate) fn label(text: &str) -> Result<(String, String), &'static str> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("expected KEY=VALUE"),
    }
}
