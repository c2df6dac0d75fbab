//! Making, deleting, growing and changing volumes.

use std::collections::HashMap;

use super::{
    super::{
        NewVolume, ProvisionError, PublishedVolume, Range, VolumeCondition, VolumeInfo, VolumeUse,
        range::least, serialized::volume_named,
    },
    RbdStore,
    class::Class,
    copies::present,
    create::Creation,
    error::RbdError,
    found::{FoundImage, Recorded},
    image_size,
    metadata::set_metadata,
    qos::{self, QosLimits},
    temporary_group::is_temporary,
};
use crate::{
    ceph::{
        client::rbd::{Header, Image, Mirroring, OpenMode},
        csi_format::journal::Journal,
    },
    secret::Secrets,
    size::exact,
};

impl RbdStore {
    pub(super) fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, ProvisionError> {
        let _name = self.names.lock_on_lane(&volume_named(&new.name));
        let class = Class::parse(&new.parameters)?;
        let file_systems = Class::file_systems(&new.uses)?;
        class.check_mkfs(&file_systems)?;
        if let Some(encryption) = &class.encryption {
            encryption.check_uses(&new.uses, &file_systems)?;
        }
        let least = least(&file_systems);
        let link = self.link(&class.cluster_id, &new.secrets)?;
        let creation = Creation::new(self, new, &class, &link, least)?;
        creation.run()
    }

    pub(super) fn delete_volume(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let _delete = self.purger.deletes.begin();
        for found in self.all_of_volume(handle, secrets)? {
            // A create of that name must not continue with it meanwhile.
            let name = found.name().map(volume_named);
            let _name = name.map(|name| self.names.lock_on_lane(&name));
            self.delete_found(&found, secrets)?;
        }
        Ok(())
    }

    fn delete_found(&self, found: &FoundImage, secrets: &Secrets) -> Result<(), ProvisionError> {
        let temp = super::copies::temporary(&found.image);
        match self.removal(found) {
            Ok(Removal::All) => {}
            Ok(removal) => return leave(&self.volumes, found, removal),
            // The delete was interrupted: the image is being removed.
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        self.discard(found, &[temp, found.image.clone()])?;
        self.remove_key(found, secrets)
            .map_err(ProvisionError::from)?;
        forget(&self.volumes, found)
    }

    /// Removes the passphrase of a deleted image from its KMS.
    pub(super) fn remove_key(&self, found: &FoundImage, secrets: &Secrets) -> Result<(), RbdError> {
        match &found.recorded {
            Some(Recorded { entry, .. }) => self.keeper(secrets).remove(entry, &found.handle),
            None => Ok(()),
        }
    }

    /// What a delete removes; of an image, no client may have it open. Mostly the header
    /// suffices; opening the image takes longer.
    fn removal(&self, found: &FoundImage) -> Result<Removal, RbdError> {
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
        let removal = removal(&self.volumes, found, &image)?;
        if removal == Removal::All {
            refuse_if_used(found, &image)?;
        }
        Ok(removal)
    }

    /// Moves those of these images that exist to the trash, and the one whose id the journal
    /// has, if an earlier attempt moved it.
    pub(super) fn discard(
        &self,
        found: &FoundImage,
        names: &[String],
    ) -> Result<(), ProvisionError> {
        let mut images = present(&found.pool, names).map_err(RbdError::from)?;
        let known = images.iter().any(|image| image.id == found.image_id);
        if !known && !found.image_id.is_empty() {
            let (id, name) = (found.image_id.clone(), found.image.clone());
            images.push(super::trash::Discarded { id, name });
        }
        let discarded = self.purger.discard(&found.pool, &images);
        discarded.map_err(RbdError::from)?;
        for image in images {
            let (handle, path) = (&found.handle, format!("{}/{}", found.pool, image.name));
            tracing::info!(handle, image = path, "moved an image to the trash");
        }
        Ok(())
    }

    pub(super) fn expand_volume(
        &self,
        handle: &str,
        range: Range,
        secrets: &Secrets,
    ) -> Result<u64, ProvisionError> {
        let found = self.volume(handle, secrets)?;
        let image = found.open(OpenMode::ReadOnly)?;
        let before = image.size().map_err(RbdError::from)?;
        if range.required <= before {
            if range.holds(before) {
                // An attempt may have ended after it had grown the image.
                let metadata = image.metadata_list().map_err(RbdError::from)?;
                if !QosLimits::are_set(&metadata, before) {
                    drop(image);
                    grow(&found.open(OpenMode::ReadWrite)?, before)?;
                }
                return Ok(before);
            }
            let why = format!(
                "the volume has {} already, and volumes cannot shrink",
                exact(before)
            );
            let field = "limit_bytes";
            return Err(ProvisionError::Size { field, why });
        }
        let bytes = image_size::choose(range, before, before)?;
        drop(image);
        let image = found.open(OpenMode::ReadWrite)?;
        grow(&image, bytes)?;
        Ok(bytes)
    }

    /// Removes the image's objects that hold nothing but zeros, unless a client has it open.
    pub(super) fn reclaim_space(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let found = self.volume(handle, secrets)?;
        let image = found.open(OpenMode::ReadOnly)?;
        let mut users = image.watchers().map_err(RbdError::from)?;
        users.retain(|user| !user.own);
        if !image
            .without_mirror_daemons(users)
            .map_err(RbdError::from)?
            .is_empty()
        {
            tracing::info!(handle, "not sparsified: a client has its image open");
            return Ok(());
        }
        drop(image);
        let image = found.open(OpenMode::ReadWrite)?;
        Ok(image.sparsify().map_err(RbdError::from)?)
    }

    pub(super) fn modify_volume(
        &self,
        handle: &str,
        mutable: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let metadata = qos::modified(mutable)?;
        let image = self.volume(handle, secrets)?.open(OpenMode::ReadWrite)?;
        Ok(set_metadata(&image, metadata).map_err(RbdError::from)?)
    }

    pub(super) fn get_volume(&self, handle: &str) -> Result<PublishedVolume, ProvisionError> {
        let found = self.volume(handle, &Secrets::default())?;
        let image = found.open(OpenMode::ReadOnly)?;
        let bytes = image.size().map_err(RbdError::from)?;
        Ok(PublishedVolume {
            volume: found.listed(bytes),
            // A watcher has an address, no node id.
            nodes: Vec::new(),
        })
    }

    pub(super) fn check_uses(
        &self,
        handle: &str,
        uses: &[VolumeUse],
        parameters: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<Option<String>, ProvisionError> {
        let found = self.volume(handle, secrets)?;
        found.open(OpenMode::ReadOnly)?;
        if let Err(error) = Class::file_systems(uses) {
            return Ok(Some(error.to_string()));
        }
        if parameters.is_empty() {
            return Ok(None);
        }
        Ok(match Class::parse(parameters) {
            Ok(class) if class.cluster_id == found.link.config.cluster_id => None,
            Ok(class) => Some(format!(
                "the volume is not in cluster {:?}",
                class.cluster_id
            )),
            Err(error) => Some(error.to_string()),
        })
    }

    pub(super) fn volume_condition(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Option<VolumeCondition>, ProvisionError> {
        match self.volume(handle, secrets)?.open(OpenMode::ReadOnly) {
            Ok(_) => Ok(None),
            Err(error @ RbdError::Lost { .. }) => Ok(Some(VolumeCondition {
                reason: "ImageMissing",
                message: error.to_string(),
            })),
            Err(error) => Err(error.into()),
        }
    }
}

/// Removes a deleted volume from the journal.
pub fn forget(journal: &Journal, found: &FoundImage) -> Result<(), ProvisionError> {
    if let Some(recorded) = &found.recorded {
        let (name, reserved) = (&recorded.entry.name, recorded.reserved);
        journal
            .forget(&recorded.journal, &found.pool, name, reserved)
            .map_err(RbdError::from)?;
    }
    Ok(())
}

/// What a delete removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The image and its entry in the journal.
    All,
    /// The entry alone: `rbd-mirror` replays the primary image, and removes this one with it.
    Entry,
    /// Nothing: it is not proven that the image is the volume's.
    Nothing,
}

/// What a delete removes of a volume with that image. An image that was found by
/// `cluster-mapping.json` must be primary, or proven to be the volume's. Whether a secondary
/// image has a primary shows only while it is replayed: else its data may be the last.
pub fn removal(of: &Journal, found: &FoundImage, image: &Image) -> Result<Removal, RbdError> {
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

/// Leaves the image of a deleted volume, and removes its entry if that is all to remove.
/// [`all_of_volume`](RbdStore::all_of_volume) keeps a repeat from the primary image.
pub fn leave(of: &Journal, found: &FoundImage, removal: Removal) -> Result<(), ProvisionError> {
    tracing::info!(
        handle = found.handle,
        image = found.path(),
        "deleted a volume without its image, which is secondary or not proven to be the volume's"
    );
    match removal {
        Removal::Entry => forget(of, found),
        _ => Ok(()),
    }
}

/// Grows an image, and its limits with it.
pub fn grow(image: &Image, bytes: u64) -> Result<(), RbdError> {
    image.grow(bytes)?;
    let limits = QosLimits::of_metadata(&image.metadata_list()?);
    let metadata = limits.metadata(bytes).into_iter();
    Ok(set_metadata(
        image,
        metadata.map(|(key, value)| (key, Some(value))),
    )?)
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
