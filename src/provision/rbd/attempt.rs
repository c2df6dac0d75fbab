//! Creating the image of a reserved name, while another controller may do the same.
//!
//! A controller that has lost its lease may still be at work, or stall and resume at any
//! time. So no controller continues an incomplete attempt of this driver: it marks the
//! attempt as abandoned, removes it, and starts another under a new uuid. An attempt names
//! all its objects by its uuid, so two attempts do not remove each other's objects; one
//! that resumes late finds that it was abandoned, and removes the objects that it has
//! created since.

use super::{
    super::{ContentSource, ProvisionError},
    RbdStore, age_of,
    copies::{drop_left, temporary},
    error::RbdError,
    found::{ClusterConnection, handle_of, source_named},
};
use crate::{
    ceph::{
        client::{
            or_missing,
            rados::IoCtx,
            rbd::{self, Remains},
        },
        csi_format::journal::{CreateState, Journal, JournalEntry, JournalKind, NameEntry},
    },
    secret::Secrets,
};

/// One attempt, under its reservation.
#[derive(Clone, Copy)]
pub struct Attempt<'a> {
    pub store: &'a RbdStore,
    pub link: &'a ClusterConnection,
    pub journal: &'a Journal,
    /// The pool of the names.
    pub directory: &'a IoCtx,
    /// The pool of the entry and the image.
    pub pool: &'a IoCtx,
    pub name: &'a str,
    pub reserved: NameEntry,
    pub secrets: &'a Secrets,
}

impl Attempt<'_> {
    /// Enters a new attempt.
    pub fn enter(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let (directory, pool) = (self.directory, self.pool);
        if self.journal.enter(directory, pool, self.reserved, entry)? {
            return Ok(());
        }
        Err(self.contended(&entry.image))
    }

    /// Enters that the image is complete.
    pub fn complete(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let contended = || self.contended(&entry.image);
        let id = rbd::image_id(self.pool, &entry.image)?.ok_or_else(contended)?;
        let (uuid, state) = (self.reserved.uuid, entry.state);
        if self.journal.complete(self.pool, uuid, state, &id)? {
            let path = format!("{}/{}", self.pool, entry.image);
            tracing::info!(name = self.name, image = path, "created an image");
            return Ok(());
        }
        Err(contended())
    }

    fn contended(&self, image: &str) -> RbdError {
        RbdError::Contended(format!("{}/{image}", self.pool))
    }

    /// The earlier entry, if it is complete or ceph-csi's. None: it was neither, and is
    /// removed now.
    pub fn there(&self, wanted: &JournalEntry) -> Result<Option<JournalEntry>, RbdError> {
        let uuid = self.reserved.uuid;
        loop {
            let there = self.journal.read(self.pool, uuid)?;
            if let Some(there) = &there
                && (there.is_complete() || there.state == CreateState::None)
            {
                if !there.is_complete() {
                    self.leave_young(there)?;
                }
                return Ok(Some(self.journal.resume(self.pool, uuid, wanted)?));
            }
            let removed = self.abandon(None).map_err(|error| RbdError::NotRemoved {
                what: self.what(),
                source: error.into(),
            });
            if removed? {
                return Ok(None);
            }
        }
    }

    /// Whether the image is complete by its entry.
    pub fn is_complete(&self) -> Result<bool, RbdError> {
        let there = self.journal.read(self.pool, self.reserved.uuid)?;
        Ok(there.is_some_and(|there| there.is_complete()))
    }

    /// What was requested, for errors.
    fn what(&self) -> String {
        format!("{} {:?}", self.journal.kind().noun(), self.name)
    }

    /// Removes an attempt that failed with that error, and returns what to answer: no final
    /// error while something is left, which a repeat removes. `own` is its entry, which
    /// another controller may have removed.
    pub fn undo(&self, own: &JournalEntry, error: RbdError) -> ProvisionError {
        // It may still take effect.
        if error.is_uncertain() {
            return error.into();
        }
        let undone = self.abandon(Some(own)).map(drop);
        ProvisionError::from(error).after_undo(&self.what(), undone)
    }

    /// Refuses to continue an attempt that ceph-csi has begun or changed a moment ago.
    fn leave_young(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let Some(modified) = self.journal.modified(self.pool, self.reserved.uuid)? else {
            return Ok(());
        };
        let age = age_of(modified);
        if age >= self.store.quiet_for {
            return Ok(());
        }
        Err(RbdError::Foreign {
            image: format!("{}/{}", self.pool, entry.image),
            seconds: age.as_secs(),
            quiet: self.store.quiet_for.as_secs(),
        })
    }

    /// Gives up an attempt of ceph-csi, so that another begins under a new uuid. Of its images
    /// only those are removed that have no header, and so no data; and the snapshot on the
    /// source of a snapshot, which would count as a user's without its entry.
    pub fn give_up(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let (directory, pool) = (self.directory, self.pool);
        if !entry.is_complete() {
            for image in [temporary(&entry.image), entry.image.clone()] {
                if rbd::remains(pool, &image)? == Remains::WithoutHeader {
                    or_missing(rbd::remove(pool, &image))?;
                }
            }
            if self.journal.kind() == JournalKind::Snapshot
                && let Some((pool, source)) = self.source(entry)?
            {
                drop_left(&pool, &source, &entry.image)?;
            }
        }
        let (name, uuid) = (self.name, self.reserved.uuid);
        tracing::warn!(name, %uuid, image = entry.image, "gave up an image that cannot be completed; another is created");
        Ok(self
            .journal
            .forget(directory, pool, self.name, self.reserved)?)
    }

    /// Abandons it, unless it is complete or not this driver's, and removes its objects,
    /// the name and the entry last.
    pub fn abandon(&self, known: Option<&JournalEntry>) -> Result<bool, RbdError> {
        let uuid = self.reserved.uuid;
        let (directory, pool) = (self.directory, self.pool);
        let (name, reserved) = (self.name, self.reserved);
        if !self.journal.abandon(directory, pool, name, reserved)? {
            return Ok(false);
        }
        let entry = match known {
            Some(known) => Some(known.clone()),
            None => self.journal.read(pool, uuid)?,
        };
        // Without an entry, nothing was made.
        if let Some(entry) = entry {
            self.remove_objects(&entry)?;
        }
        self.journal.forget(directory, pool, name, reserved)?;
        Ok(true)
    }

    /// Removes what an attempt with that entry may have made, and the passphrase.
    fn remove_objects(&self, entry: &JournalEntry) -> Result<(), RbdError> {
        let pool = self.pool;
        let mut images = vec![entry.image.clone()];
        let mut snapshot = entry.image.clone();
        if self.journal.kind() == JournalKind::Volume {
            snapshot = temporary(&entry.image);
            images.push(snapshot.clone());
        }
        self.store.take_back(pool, &images)?;
        if let Some((pool, source)) = self.source(entry)? {
            drop_left(&pool, &source, &snapshot)?;
        }
        let handle = handle_of(self.link, pool, self.reserved.uuid);
        let key = (entry, &*handle);
        self.store.remove_key(self.link, key, self.secrets)
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
            Err(ProvisionError::Rbd(error)) => Err(error),
            // Deleted, with its snapshots.
            Err(_) => Ok(None),
        }
    }
}
