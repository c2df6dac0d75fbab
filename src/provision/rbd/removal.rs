//! Deleting the images of a volume's or snapshot's handle.
//!
//! After a fail-over several sites may have an image and an entry of one handle, and its
//! passphrase is in the KMS once, under that handle. So no site loses anything before each
//! has admitted the delete, and the passphrase is removed last, if no site has an image left.

use std::collections::BTreeSet;

use tokio::sync::OwnedMutexGuard;

use super::{
    super::ProvisionError,
    RbdStore,
    copies::{drop_left, present, temporary},
    error::RbdError,
    found::{FoundImage, Recorded},
    left_snapshots::sort_snapshots,
    temporary_group::is_temporary,
    trash::{self as purged, Discarded},
};
use crate::{
    ceph::{
        client::{
            or_missing,
            rbd::{
                self, Header, Image, Mirroring, OpenMode,
                trash::{self, Trashed},
            },
        },
        csi_format::journal::{Journal, JournalEntry, JournalKind},
    },
    secret::Secrets,
};

/// What a delete removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    /// The image and its entry in the journal.
    All,
    /// The entry alone: `rbd-mirror` replays the primary image, and removes this one with it.
    Entry,
    /// Nothing: it is not proven that the image is the volume's.
    Nothing,
}

impl RbdStore {
    /// Locks the names of the requests that created these, each once, and in one order.
    pub(super) fn lock_names(
        &self,
        all: &[FoundImage],
        key: impl Fn(&str) -> String,
    ) -> Vec<OwnedMutexGuard<()>> {
        let names: BTreeSet<_> = all.iter().filter_map(FoundImage::name).collect();
        let lock = |name| self.names.lock_on_lane(&key(name));
        names.into_iter().map(lock).collect()
    }

    /// Deletes all images of a handle, with their entries and its passphrase.
    pub(super) fn delete_all(
        &self,
        of: &Journal,
        all: &[FoundImage],
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let removals = all.iter().map(|found| Self::removal(of, found));
        let removals: Vec<_> = removals.collect::<Result<_, _>>()?;
        let is_key_kept = self.is_key_kept(all, &removals, secrets)?;
        for (found, removal) in all.iter().zip(&removals) {
            match removal {
                Removal::All => self.discard_at_site(of, found)?,
                Removal::Entry | Removal::Nothing => tracing::info!(
                    handle = found.handle,
                    image = found.path(),
                    "deleted a volume without its image, which is secondary or not proven to be the volume's"
                ),
            }
        }
        if !is_key_kept && let Some((found, entry)) = all.iter().find_map(encrypted) {
            self.remove_key(&found.link, (entry, &found.handle), secrets)?;
        }
        for (found, removal) in all.iter().zip(removals) {
            // A repeat finds the image without an entry, and leaves it
            // ([`RbdStore::all_of_volume`]).
            if removal != Removal::Nothing {
                forget(of, found)?;
            }
        }
        Ok(())
    }

    /// Whether a site has or may have an image, after the delete, that the passphrase opens; or
    /// the trash, for a user's snapshot or because a user moved it there.
    fn is_key_kept(
        &self,
        all: &[FoundImage],
        removals: &[Removal],
        secrets: &Secrets,
    ) -> Result<bool, RbdError> {
        let Some((found, entry)) = all.iter().find_map(encrypted) else {
            return Ok(false);
        };
        let (handle, kms) = (&found.handle, &entry.kms);
        for found in all {
            if let Some(why) = stays_in_trash(found)? {
                let image = found.path();
                tracing::warn!(
                    handle,
                    kms,
                    image,
                    why,
                    "the passphrase of a deleted volume is kept in its KMS, under the handle: an image of its name stays in the trash"
                );
                return Ok(true);
            }
        }
        let is_kept = removals.iter().any(|removal| *removal != Removal::All)
            || self.may_have_another(&found.handle, all, secrets)?;
        if is_kept {
            tracing::warn!(
                handle,
                kms,
                "the passphrase of a deleted volume is kept in its KMS, under the handle: another site has, or may have, its image"
            );
        }
        Ok(is_kept)
    }

    /// What a delete removes; of an image, no client may have it open. Mostly the header
    /// suffices; opening the image takes longer.
    fn removal(of: &Journal, found: &FoundImage) -> Result<Removal, RbdError> {
        match Self::removal_of_image(of, found) {
            // An interrupted delete is removing the image, or has.
            Err(error) if error.is_not_found() => Ok(Removal::All),
            removal => removal,
        }
    }

    fn removal_of_image(of: &Journal, found: &FoundImage) -> Result<Removal, RbdError> {
        let header = Header::of(&found.pool, &found.image)?;
        if header.is_grouped()? {
            let (image, open) = (found.path(), found.open(OpenMode::ReadOnly)?);
            let group = open.group()?;
            // The name is empty if the group has ended meanwhile.
            return Err(if group.is_empty() || is_temporary(&group) {
                RbdError::GroupSnapshotUnderWay { image, group }
            } else {
                RbdError::Grouped { image, group }
            });
        }
        if !found.stands_in && !header.is_mirrored()? && header.watching()?.is_empty() {
            return Ok(Removal::All);
        }
        let image = Image::open(&found.pool, &found.image, OpenMode::ReadOnly)?;
        let removal = removal_of(of, found, &image)?;
        if removal == Removal::All {
            refuse_if_used(found, &image)?;
        }
        Ok(removal)
    }

    /// The same for an image that may be at another site than its handle names. There an entry
    /// without its image may be that of a volume whose image is copied anew, so a repeat goes
    /// on with a delete only where the entry says so.
    fn discard_at_site(&self, of: &Journal, found: &FoundImage) -> Result<(), ProvisionError> {
        let Some(recorded) = found.recorded.as_ref().filter(|_| found.stands_in) else {
            return self.discard_found(of, found);
        };
        let mark = |is_deleting| {
            of.mark_deleting(&found.pool, recorded.reserved.uuid, is_deleting)
                .map_err(RbdError::from)
        };
        mark(true)?;
        let discarded = self.discard_found(of, found);
        if let Err(error) = &discarded
            // Else the image may go later.
            && !matches!(error, ProvisionError::Rbd(error) if error.is_uncertain())
            && matches!(found.has_image(), Ok(true))
            && let Err(error) = mark(false)
        {
            let handle = &found.handle;
            tracing::warn!(handle, %error, "the entry of an image that stays says that it is deleted");
        }
        discarded
    }

    /// Moves the image to the trash, with what copies have left.
    fn discard_found(&self, of: &Journal, found: &FoundImage) -> Result<(), ProvisionError> {
        let image = found.image.clone();
        if of.kind() == JournalKind::Volume {
            return self.discard(found, &[temporary(&image), image]);
        }
        if let Some(Recorded { entry, .. }) = &found.recorded
            && !entry.is_complete()
            && !entry.source.is_empty()
        {
            drop_left(&found.pool, &entry.source, &image)?;
        }
        match found.open(OpenMode::ReadWrite) {
            // While it has clones, it stays without its name.
            Ok(opened) => or_missing(opened.snapshot_remove(&image)).map_err(RbdError::from)?,
            Err(RbdError::Lost { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.discard(found, &[image])
    }

    /// Moves those of these images that exist to the trash, and the one whose id the journal
    /// has, if an earlier attempt moved it.
    fn discard(&self, found: &FoundImage, names: &[String]) -> Result<(), ProvisionError> {
        let mut images = present(&found.pool, names).map_err(RbdError::from)?;
        let known = images.iter().any(|image| image.id == found.image_id);
        if !known && !found.image_id.is_empty() {
            let (id, name) = (found.image_id.clone(), found.image.clone());
            images.push(Discarded { id, name });
        }
        let discarded = self.purger.discard(&found.pool, &images);
        discarded.map_err(RbdError::from)?;
        for image in images {
            let (handle, path) = (&found.handle, format!("{}/{}", found.pool, image.name));
            tracing::info!(handle, image = path, "moved an image to the trash");
        }
        Ok(())
    }
}

/// The entry of an encrypted volume.
fn encrypted(found: &FoundImage) -> Option<(&FoundImage, &JournalEntry)> {
    let Recorded { entry, .. } = found.recorded.as_ref()?;
    (!entry.kms.is_empty()).then_some((found, entry))
}

/// Why an image of that name stays in the trash after the delete, to be restored, if one does:
/// for a user's snapshot, or as a user has moved it there. rbd-mirror may have copied the image
/// anew, so each of that name counts, and not only the one whose id the journal has; and an
/// earlier attempt may have moved any of them.
fn stays_in_trash(found: &FoundImage) -> Result<Option<String>, RbdError> {
    let (pool, own) = (&found.pool, &found.image_id);
    let mut ids: BTreeSet<_> = rbd::image_id(pool, &found.image)?.into_iter().collect();
    if !own.is_empty() {
        ids.insert(own.clone());
    }
    let of_deletes = purged::listed(pool)?;
    for trashed in trash::list(pool)? {
        let Trashed { id, name, .. } = &trashed;
        let is_own = id == own;
        if !is_own && *name != found.image {
            continue;
        }
        // The delete removes the one whose id the journal has, and those that deletes listed.
        if trashed.has_expiry() || !is_own && !of_deletes.contains_key(id) {
            let why = format!("with the id {id}; a user may have moved it there");
            return Ok(Some(why));
        }
        ids.insert(id.clone());
    }
    for id in ids {
        let image = match Image::open_by_id(pool, &id, OpenMode::ReadOnly) {
            Err(error) if error.is_not_found() => continue,
            image => image?,
        };
        let (_, others) = sort_snapshots(pool, &found.image, &image)?;
        if !others.is_empty() {
            let others = others.join(", ");
            let why = format!("with the id {id}, for snapshots that no copy has left: {others}");
            return Ok(Some(why));
        }
    }
    Ok(None)
}

/// What a delete removes of a volume with that image. An image that was found by
/// `cluster-mapping.json` must be primary, or proven to be the volume's. Whether a secondary
/// image has a primary shows only while it is replayed: else its data may be the last.
fn removal_of(of: &Journal, found: &FoundImage, image: &Image) -> Result<Removal, RbdError> {
    Ok(match image.mirroring()? {
        Mirroring::Secondary => {
            let own = image.mirror_sites()?.own;
            if !own.is_replaying() {
                return Err(RbdError::NotReplayed {
                    image: found.path(),
                    status: own.description,
                });
            }
            Removal::Entry
        }
        Mirroring::Primary => Removal::All,
        Mirroring::None | Mirroring::Ending if !found.stands_in => Removal::All,
        // The journal's directory and its entry agree.
        Mirroring::None | Mirroring::Ending => {
            let Recorded {
                journal,
                reserved,
                entry,
            } = found.recorded()?;
            let is_proven =
                entry.image_id == image.id()? && of.find(journal, &entry.name)? == Some(*reserved);
            if is_proven {
                Removal::All
            } else {
                Removal::Nothing
            }
        }
    })
}

/// Removes a deleted volume from the journal.
fn forget(journal: &Journal, found: &FoundImage) -> Result<(), ProvisionError> {
    if let Some(recorded) = &found.recorded {
        let (name, reserved) = (&recorded.entry.name, recorded.reserved);
        journal
            .forget(&recorded.journal, &found.pool, name, reserved)
            .map_err(RbdError::from)?;
    }
    Ok(())
}

/// Refuses to delete an image that a client has open.
pub fn refuse_if_used(found: &FoundImage, image: &Image) -> Result<(), RbdError> {
    let mut others = image.watchers()?;
    others.retain(|watcher| !watcher.own);
    let others = image.without_mirror_daemons(others)?;
    if others.is_empty() {
        return Ok(());
    }
    let addresses: Vec<_> = others.into_iter().map(|other| other.address).collect();
    Err(RbdError::InUse {
        image: found.path(),
        watchers: addresses.join(", "),
    })
}
