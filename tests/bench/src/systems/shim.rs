//! A disk that is slower: 1 ms more for each flush, by a library that is
//! loaded before the C library.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use fencepost_support::system::{self, PrivateDirectory, give_away};

use crate::load::Result;

const SOURCE: &str = include_str!("../../slow_fsync.c");

pub(crate) struct Shim {
    directory: PrivateDirectory,
}

impl Shim {
    /// Compiles it.
    pub(crate) async fn new() -> Result<Self> {
        let directory = system::private_directory();
        let source = directory.join("slow_fsync.c");
        fs::write(&source, SOURCE)?;
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-shared", "-fPIC", "-o"])
            .arg(library(&directory))
            .arg(source);
        system::run(cc).await;
        Ok(Self { directory })
    }

    /// Makes the flushes of `command` slow. Each system gets a copy of the
    /// library in its own directory, which the account that it runs as can read.
    pub(super) fn slow_down(&self, command: &mut Command, directory: &Path) -> Result<()> {
        let copy = library(directory);
        fs::copy(library(&self.directory), &copy)?;
        give_away(&copy);
        command.env("LD_PRELOAD", copy);
        Ok(())
    }
}

fn library(directory: &Path) -> PathBuf {
    directory.join("slow_fsync.so")
}
