//! `fencepost release`.

use fencepost_client::Calls;

use crate::{
    args::Lease,
    exit::{Exit, Failure},
    output::Output,
};

/// What `release` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    lease: Lease,
}

pub(crate) async fn run(args: Args, client: &Calls, output: &Output) -> Result<Exit, Failure> {
    let Lease {
        resource,
        owner,
        token,
    } = args.lease;
    client.release(&resource, &owner, token).await?;
    output.released()?;
    Ok(Exit::Done)
}
