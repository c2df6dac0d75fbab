//! Creating the image that a name is reserved for, while another controller may do the same.
//!
//! The controller that has lost its lease may still be at work, and go on where it
//! stalled at any time. So nobody goes on with what this driver has begun and not
//! completed: it is given up for good, taken away, and made anew under another uuid.
//! All that an attempt makes is named by its uuid; so neither takes away what the
//! other has made, and the one that is late finds that it was given up, and takes
//! away what it has made since.

use super::{
    super::{ContentSource, Error},
    RbdStore,
    copies::{drop_snapshot, temporary},
    error::RbdError,
    found::source_named,
};
use crate::{
    ceph::{
        client::{rados::IoCtx, rbd},
        csi_format::journal::{CreateState, Journal, JournalEntry, JournalKind, Reserved},
    },
    error_chain,
    secret::Secrets,
};

/// One reservation, and what it is for.
#[derive(Clone, Copy)]
pub struct Attempt<'a> {
    pub store: &'a RbdStore,
    pub journal: &'a Journal,
    /// The pool of the names.
    pub directory: &'a IoCtx,
    /// The pool of the entry and the image.
    pub pool: &'a IoCtx,
    pub name: &'a str,
    pub reserved: Reserved,
    pub secrets: &'a Secrets,
}

impl Attempt<'_> {
    /// Enters what is about to be made, which nobody has reserved before.
    pub fn enter(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let (directory, pool) = (self.directory, self.pool);
        if self.journal.enter(directory, pool, self.reserved, entry)? {
            return Ok(());
        }
        Err(self.given_up(&entry.image))
    }

    /// Enters that the image is whole.
    pub fn complete(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let gone = || self.given_up(&entry.image);
        let id = rbd::image_id(self.pool, &entry.image)?.ok_or_else(gone)?;
        let (uuid, making) = (self.reserved.uuid, entry.making);
        if self.journal.complete(self.pool, uuid, making, &id)? {
            return Ok(());
        }
        Err(gone())
    }

    fn given_up(&self, image: &str) -> RbdError {
        RbdError::Contended(format!("{}/{image}", self.pool))
    }

    /// What was entered earlier, where it counts: it is complete, or ceph-csi has
    /// begun it. None: it was neither, and is gone now.
    pub fn there(&self, wanted: &JournalEntry) -> Result<Option<JournalEntry>, RbdError> {
        let uuid = self.reserved.uuid;
        loop {
            let there = self.journal.read(self.pool, uuid)?;
            if there.is_some_and(|there| there.is_complete() || there.making == CreateState::No) {
                return Ok(Some(self.journal.go_on(self.pool, uuid, wanted)?));
            }
            if self.give_up(None)? {
                return Ok(None);
            }
        }
    }

    /// Takes back what has failed; a repeat does it where this fails. Another
    /// controller may have given it up and forgotten the entry: so what was made is
    /// told here.
    pub fn undo(&self, own: &JournalEntry) {
        if let Err(error) = self.give_up(Some(own)) {
            let (name, error) = (self.name, error_chain(&error));
            tracing::warn!(
                name,
                error,
                "what is unfinished stays until its next create"
            );
        }
    }

    /// Gives it up, unless it is complete or not this driver's, and takes away what
    /// it has made, the name and the entry last. What that is, the entry says, unless
    /// it is known.
    fn give_up(&self, known: Option<&JournalEntry>) -> Result<bool, RbdError> {
        let uuid = self.reserved.uuid;
        if !self.journal.give_up(self.pool, uuid, self.name)? {
            return Ok(false);
        }
        let entry = match known {
            Some(known) => known.clone(),
            None => self.journal.read(self.pool, uuid)?.unwrap_or_default(),
        };
        let mut images = vec![entry.image.clone()];
        let mut snapshot = entry.image.clone();
        if self.journal.kind() == JournalKind::Volume {
            snapshot = temporary(&entry.image);
            images.push(snapshot.clone());
        }
        self.store.take_back(self.pool, &images)?;
        if let Some((pool, source)) = self.source(&entry)? {
            drop_snapshot(&pool, &source, &snapshot)?;
        }
        let (directory, pool) = (self.directory, self.pool);
        self.journal
            .forget(directory, pool, self.name, self.reserved)?;
        Ok(true)
    }

    /// The image on which an interrupted copy may have left a snapshot.
    fn source(&self, entry: &JournalEntry) -> Result<Option<(IoCtx, String)>, RbdError> {
        if self.journal.kind() == JournalKind::Snapshot {
            let source = Some(entry.source.clone()).filter(|source| !source.is_empty());
            return Ok(source.map(|source| (self.pool.clone(), source)));
        }
        let Some(ContentSource::Volume(handle)) = source_named(&entry.origin) else {
            return Ok(None);
        };
        match self.store.volume(&handle, self.secrets) {
            Ok(found) => Ok(Some((found.pool, found.image))),
            Err(Error::Rbd(error)) => Err(error),
            // Gone, and its snapshots with it.
            Err(_) => Ok(None),
        }
    }
}
