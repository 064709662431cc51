//! A disk that can be full: a library that is loaded before the C library. It needs
//! no mount, and so no root.

use std::{
    fs, io,
    path::PathBuf,
    process::{Command, Stdio},
};

use fencepost_support::system::{self, PrivateDirectory, give_away};

const SOURCE: &str = include_str!("../full_disk.c");

/// The disk of a Postgres.
#[derive(Debug)]
pub(crate) struct Disk {
    directory: PrivateDirectory,
}

impl Disk {
    /// One with room; none when there is no C compiler.
    pub(crate) fn roomy() -> Option<Self> {
        let disk = Self {
            directory: system::private_directory(),
        };
        let source = disk.directory.join("full_disk.c");
        fs::write(&source, SOURCE).expect("room on the disk");
        let compiled = Command::new("cc")
            .args(["-O2", "-shared", "-fPIC", "-o"])
            .arg(disk.library())
            .arg(source)
            .stderr(Stdio::null())
            .status();
        compiled.is_ok_and(|status| status.success()).then(|| {
            give_away(&disk.library());
            disk
        })
    }

    /// The environment of a program that writes to it.
    pub(crate) fn environment(&self) -> [(&'static str, String); 2] {
        [
            ("LD_PRELOAD", self.library().display().to_string()),
            ("FULL_DISK", self.flag().display().to_string()),
        ]
    }

    pub(crate) fn fill(&self) {
        fs::write(self.flag(), "").expect("room on the disk");
        give_away(&self.flag());
    }

    pub(crate) fn empty(&self) {
        match fs::remove_file(self.flag()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{error}"),
            _ => {}
        }
    }

    fn library(&self) -> PathBuf {
        self.directory.join("full_disk.so")
    }

    fn flag(&self) -> PathBuf {
        self.directory.join("full")
    }
}
