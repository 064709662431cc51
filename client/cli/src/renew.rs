//! `fencepost renew`.

use std::time::Duration;

use fencepost_client::Calls;
use humantime::parse_duration;

use crate::{
    args::Lease,
    exit::{Exit, Failure},
    output::Output,
};

/// What `renew` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    lease: Lease,

    /// How long the lease lasts from now on. [default: its own time to live]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<Duration>,
}

pub(crate) async fn run(args: Args, client: &Calls, output: &Output) -> Result<Exit, Failure> {
    let Lease {
        resource,
        owner,
        token,
    } = args.lease;
    let lock = client.renew(&resource, &owner, token, args.ttl).await?;
    output.lock(&lock)?;
    Ok(Exit::Done)
}
