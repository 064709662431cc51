//! A program's wall clock that can be set while it runs; its monotonic ones stay.

use std::{fs, path::PathBuf};

use crate::system::{self, PrivateDirectory};

/// A wall clock, of one program or of several. Dropping it removes its file.
#[derive(Debug)]
pub struct Clock {
    library: String,
    directory: PrivateDirectory,
}

impl Clock {
    /// A clock that is right. Panics when faketime is not installed.
    pub fn right() -> Self {
        Self::try_right().expect("faketime is installed")
    }

    /// A clock that is right, where faketime is installed.
    pub fn try_right() -> Option<Self> {
        let clock = Self {
            library: library()?,
            directory: system::private_directory(),
        };
        clock.set("+0");
        Some(clock)
    }

    /// The environment of a program that goes by it.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        let set = |value: &str| value.to_owned();
        [
            ("LD_PRELOAD", self.library.clone()),
            ("FAKETIME_TIMESTAMP_FILE", self.file().display().to_string()),
            ("FAKETIME_NO_CACHE", set("1")),
            ("FAKETIME_DONT_FAKE_MONOTONIC", set("1")),
        ]
    }

    /// Sets it this far from the right time: seconds with a sign, as faketime
    /// writes them.
    pub fn set(&self, offset: &str) {
        // Written aside and renamed, so that nobody reads half of it.
        let aside = self.directory.join("new");
        fs::write(&aside, offset).expect("room on the disk");
        system::give_away(&aside);
        fs::rename(&aside, self.file()).expect("the directory is ours");
    }

    fn file(&self) -> PathBuf {
        self.directory.join("offset")
    }
}

/// The library that fakes a program's wall clock.
pub fn library() -> Option<String> {
    let architectures = fs::read_dir("/usr/lib").ok()?;
    let library = architectures
        .filter_map(|entry| Some(entry.ok()?.path().join("faketime/libfaketimeMT.so.1")))
        .find(|library| library.exists())?;
    Some(library.to_str()?.to_owned())
}
