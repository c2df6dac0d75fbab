//! What a store has though no volume and no snapshot refers to it, or what one refers to
//! though it is gone.

use std::{fmt, time::Duration};

/// What an orphan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OrphanKind {
    /// A create that its caller gave up: a name and an entry, perhaps with parts of an image.
    Incomplete,
    /// The same, and no name leads to its entry.
    Nameless,
    /// A name without an entry.
    Name,
    /// A name and an entry without an image.
    Lost,
    /// An image without an entry.
    Image,
    /// The image between a volume and its copy, without the copy.
    Temporary,
    /// A deleted image that cannot be removed from the trash.
    Trashed,
    /// The secondary image of a mirror, without an entry.
    Secondary,
}

impl fmt::Display for OrphanKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Incomplete => "incomplete",
            Self::Nameless => "nameless",
            Self::Name => "name",
            Self::Lost => "lost",
            Self::Image => "image",
            Self::Temporary => "temporary",
            Self::Trashed => "trashed",
            Self::Secondary => "secondary",
        })
    }
}

/// An orphan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub kind: OrphanKind,
    /// The cluster's id in the configuration, and its own.
    pub cluster_id: String,
    pub fsid: String,
    pub pool: String,
    /// Empty: the pool's own.
    pub namespace: String,
    /// The image's name; of a name: its key in the journal.
    pub name: String,
    /// How old it is, if known.
    pub age: Option<Duration>,
    /// Why it counts as an orphan.
    pub why: String,
    /// Why it is not removed, and what to do instead; empty: it can be removed.
    pub kept: String,
}

impl Orphan {
    /// `pool[/namespace]/name`.
    pub fn path(&self) -> String {
        match self.namespace.as_str() {
            "" => format!("{}/{}", self.pool, self.name),
            namespace => format!("{}/{namespace}/{}", self.pool, self.name),
        }
    }

    /// Whether both are the same: a configuration may know a cluster by several ids.
    pub fn is_same(&self, other: &Self) -> bool {
        self.fsid == other.fsid && self.kind == other.kind && self.path() == other.path()
    }
}

/// The orphans of a store, or of a part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrphanReport {
    pub orphans: Vec<Orphan>,
    /// What the report leaves out, in sentences.
    pub omitted: Vec<String>,
}
