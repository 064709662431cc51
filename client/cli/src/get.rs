//! `fencepost get`.

use fencepost_client::Calls;

use crate::{
    exit::{Exit, Failure},
    output::{self, Output},
};

/// What `get` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The name to look at.
    resource: String,
}

pub(crate) async fn run(args: Args, client: &Calls, output: &Output) -> Result<Exit, Failure> {
    match client.get(&args.resource).await? {
        Some(lock) => {
            output.lock(&lock)?;
            Ok(Exit::Done)
        }
        None => {
            output.free()?;
            output::error(&format!("{} is free", args.resource));
            Ok(Exit::Free)
        }
    }
}
