//! What the manager set out to do for a volume.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::desired::{Desired, DesiredAccess};
use crate::size::Size;

/// What the manager set out to do for a volume, as it records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The name of the file that asked for it.
    pub name: String,
    pub desired: Desired,
    /// The size that it was grown to.
    #[serde(default)]
    pub grown_to: Option<Size>,
    /// Whether the mount at its path has the options, and a raw volume its lock and its map; else
    /// it may have others, or none.
    #[serde(default)]
    pub has_options: bool,
    /// Where a change of the mounted file system has begun and did not end: the options that
    /// it may have set.
    #[serde(default)]
    pub in_doubt: Option<Vec<String>>,
    /// The last change of the mounted file system that was refused.
    #[serde(default)]
    pub refused: Option<Refused>,
}

/// A change that a mounted file system refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    pub options: Vec<String>,
    pub read_only: bool,
    pub why: String,
}

impl Refused {
    /// Whether it is the change to this desired state.
    pub fn is_of(&self, desired: &Desired) -> bool {
        let DesiredAccess::Mount { options, .. } = &desired.access else {
            return false;
        };
        (&self.options, self.read_only) == (options, desired.read_only)
    }
}

impl Applied {
    /// Its file system was given these options; its mount may have others.
    pub fn reconfigured(&mut self, options: &[String], read_only: bool) {
        self.desired.access.set_options(options);
        self.desired.read_only = read_only;
        self.has_options = false;
        self.in_doubt = None;
        self.refused = None;
    }

    pub fn is_raw(&self) -> bool {
        self.desired.access == DesiredAccess::Raw
    }

    /// The lock of a raw volume may have gone, and its map.
    pub fn lose_lock(&mut self) {
        self.has_options &= !self.is_raw();
    }

    /// Its file's name, handle and path.
    pub fn as_file<'a>(&'a self, handle: &'a str) -> (&'a str, &'a str, &'a Path) {
        (&self.name, handle, &self.desired.path)
    }
}
