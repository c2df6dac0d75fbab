//! The journal's entry of a volume whose image a mirror has copied.
//!
//! Nothing mirrors the journal. So the metadata of an image tell its entry before it is
//! mirrored, and mirrors have them, too. The other site enters the volume by them, as
//! ceph-csi's `--type=controller` does by the PersistentVolumes: under the uuid of the
//! handle, with the image's id of that site, in the image's pool.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    super::ProvisionError,
    RbdStore,
    error::RbdError,
    found::FoundImage,
    lookup::{MirroredCopies, is_not_ours},
    metadata::ENTRY,
};
use crate::{
    ceph::{
        client::rbd::{Image, Mirroring, OpenMode},
        csi_format::{
            handle::{CephVolumeHandle, Handle},
            journal::{JournalEntry, NameEntry},
        },
    },
    secret::Secrets,
};

/// The value of [`ENTRY`]. The entry's other keys are an image's own at each site.
#[derive(Debug, Serialize, Deserialize)]
struct MirroredEntry {
    /// A clone that ceph-csi makes has its parent's metadata.
    uuid: Uuid,
    name: String,
    #[serde(default)]
    kms: String,
    #[serde(default)]
    encryption: String,
    #[serde(default)]
    owner: String,
    #[serde(default)]
    origin: String,
}

/// Has an image's metadata tell its entry.
pub fn tell_entry(found: &FoundImage) -> Result<(), RbdError> {
    let Some(recorded) = found.recorded.as_ref().filter(|_| found.name().is_some()) else {
        return Ok(());
    };
    let JournalEntry {
        name,
        kms,
        encryption,
        owner,
        origin,
        ..
    } = recorded.entry.clone();
    let entry = MirroredEntry {
        uuid: recorded.reserved.uuid,
        name,
        kms,
        encryption,
        owner,
        origin,
    };
    let told = serde_json::to_string(&entry).expect("texts are JSON");
    let known = found.open(OpenMode::ReadOnly)?.metadata_list()?;
    if known.get(ENTRY) != Some(&told) {
        found
            .open(OpenMode::ReadWrite)?
            .metadata_set(ENTRY, &told)?;
    }
    Ok(())
}

impl RbdStore {
    /// The volume of a call on its mirroring: also if only the image of a mirror tells of it.
    /// `force`: also if its own cluster does not answer.
    pub(super) fn mirrored_volume(
        &self,
        handle: &str,
        force: bool,
        secrets: &Secrets,
    ) -> Result<FoundImage, ProvisionError> {
        let found = self.volume(handle, secrets);
        let may_be_a_copy = match &found {
            Err(ProvisionError::NoVolume(_)) => true,
            Err(ProvisionError::Rbd(error)) => force || is_not_ours(error),
            _ => false,
        };
        let mut copy = None;
        if may_be_a_copy && let Ok(CephVolumeHandle::Journaled(handle)) = handle.parse() {
            let mut places = self
                .mappings
                .of(handle.cluster_id(), handle.pool_id())
                .map_err(RbdError::from)?;
            // Both sites may have the same ids.
            places.push((handle.cluster_id().to_owned(), handle.pool_id()));
            copy = self.elsewhere(
                &self.volumes,
                &handle,
                &places,
                MirroredCopies::All,
                secrets,
            )?;
        }
        let found = copy.map_or(found, Ok)?;
        if found.stands_in {
            // A controller may have been killed before.
            self.enter_name(&found)?;
        }
        Ok(found)
    }

    /// Enters the volume of an image that a mirror has copied to the cluster and pool of this
    /// handle, by the image's metadata; false if these do not tell of it.
    pub(super) fn enter_copy(
        &self,
        there: &Handle,
        which: MirroredCopies,
        secrets: &Secrets,
    ) -> Result<bool, RbdError> {
        let Some((pool, name)) = self.image_by_uuid(there, secrets)? else {
            return Ok(false);
        };
        let image = Image::open(&pool, &name, OpenMode::ReadOnly)?;
        let role = image.mirroring()?;
        if role != Mirroring::Primary
            && (role != Mirroring::Secondary || which != MirroredCopies::All)
        {
            return Ok(false);
        }
        let told = image.metadata_list()?.remove(ENTRY);
        let told = told.and_then(|told| serde_json::from_str::<MirroredEntry>(&told).ok());
        let Some(told) = told.filter(|told| told.uuid == there.uuid()) else {
            return Ok(false);
        };
        let entry = JournalEntry {
            name: told.name,
            image: name,
            image_id: image.id()?,
            kms: told.kms,
            encryption: told.encryption,
            owner: told.owner,
            origin: told.origin,
            ..JournalEntry::default()
        };
        self.volumes.enter_complete(&pool, told.uuid, &entry)?;
        tracing::info!(
            name = entry.name,
            image = format!("{pool}/{}", entry.image),
            "entered a mirrored volume in the journal"
        );
        Ok(true)
    }

    /// Enters the name of a volume that was entered by its image: after the entry, because a
    /// create removes the image that a name without an entry leads to.
    pub(super) fn enter_name(&self, found: &FoundImage) -> Result<(), RbdError> {
        let (Some(recorded), Some(name)) = (&found.recorded, found.name()) else {
            return Ok(());
        };
        let own = recorded.reserved;
        let there = self.volumes.reserve(&recorded.journal, name, own)?;
        if let Some(NameEntry { uuid, .. }) = there.filter(|there| *there != own) {
            let handle = &found.handle;
            tracing::warn!(handle, name, %uuid, "another volume of this site has the name of a mirrored one");
        }
        Ok(())
    }
}
