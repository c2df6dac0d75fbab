//! Entering a volume of another site in this site's journal.
//!
//! rbd-mirror copies a volume's image to another cluster, under the same name, but not its entry
//! in the journal, without which no call finds the image there. All that the entry has is in
//! the volume's PersistentVolume, so an entry is written anew from that, as ceph-csi's
//! controller does (`RegenerateJournal`).

use uuid::Uuid;

use super::{
    super::{ProvisionError, VolumeToEnter, serialized::volume_named},
    RbdStore,
    encryption::Encryption,
    error::RbdError,
    found::ClusterConnection,
    lookup::{image_of, is_not_ours},
};
use crate::{
    Done,
    ceph::{
        client::{
            rados::IoCtx,
            rbd::{Header, Image, Mirroring, OpenMode},
        },
        csi_format::{
            handle::{CephVolumeHandle, Handle},
            journal::{CreateState, JournalEntry, NameEntry},
        },
    },
    error_chain,
    secret::Secrets,
};

impl RbdStore {
    /// Enters the volume in each configured cluster that has its image, and lacks the entry.
    ///
    /// One cluster is enough: the others may be those of a site that is lost. Of what else
    /// there is to answer, a cluster that failed comes first, since it may have the image.
    pub(super) fn enter_volume(
        &self,
        volume: &VolumeToEnter,
        secrets: &Secrets,
    ) -> Result<Done, ProvisionError> {
        let no_volume = || ProvisionError::NoVolume(volume.handle.clone());
        let handle = match volume.handle.parse() {
            Ok(CephVolumeHandle::Journaled(handle)) => handle,
            Ok(CephVolumeHandle::Migrated(_)) => {
                return Err(RbdError::Migrated(volume.handle.clone()).into());
            }
            Err(_) => return Err(no_volume()),
        };
        let _name = self.names.lock_on_lane(&volume_named(&volume.name));
        let own = (handle.cluster_id().to_owned(), handle.pool_id());
        let mapped = self.mappings.of(handle.cluster_id(), handle.pool_id());
        let mapped = mapped.map_err(RbdError::from)?;
        let (mut entered, mut failed, mut refused) = (None, None, None);
        for (cluster_id, pool_id) in [own].into_iter().chain(mapped) {
            let Some(there) = Handle::new(&cluster_id, pool_id, handle.uuid()) else {
                continue;
            };
            match self.enter_at(volume, &there, secrets) {
                Ok(Some(Done::Now)) => entered = Some(Done::Now),
                Ok(Some(Done::Already)) => entered = entered.or(Some(Done::Already)),
                Ok(None) => {}
                // The other site's cluster need not be known here.
                Err(ProvisionError::Rbd(error)) if is_not_ours(&error) => {
                    refused.get_or_insert(error);
                }
                Err(error) => {
                    let (name, why) = (&volume.name, error_chain(&error));
                    tracing::warn!(name, cluster_id, error = why, "cannot enter a volume there");
                    failed.get_or_insert(error);
                }
            }
        }
        let refused = || refused.map_or_else(no_volume, ProvisionError::from);
        entered.ok_or_else(|| failed.unwrap_or_else(refused))
    }

    /// Enters it in one cluster; none if that has no image of it.
    fn enter_at(
        &self,
        volume: &VolumeToEnter,
        there: &Handle,
        secrets: &Secrets,
    ) -> Result<Option<Done>, ProvisionError> {
        let Some((link, pool)) = self.linked_pool(there, secrets)? else {
            return Ok(None);
        };
        match image_of(&pool, there).map_err(RbdError::from)? {
            Some(image) => self.enter_image(volume, &link, (&pool, &image, there.uuid())),
            None => Ok(None),
        }
    }

    fn enter_image(
        &self,
        volume: &VolumeToEnter,
        link: &ClusterConnection,
        (pool, image, uuid): (&IoCtx, &str, Uuid),
    ) -> Result<Option<Done>, ProvisionError> {
        let image_id = id_of_copy(pool, image)?;
        let named = |key: &str| volume.context.get(key).map_or("", String::as_str);
        let directory = match named("journalPool") {
            name if name.is_empty() || name == named("pool") => pool.clone(),
            name => link.named_pool(name)?,
        };
        let is_apart = directory.pool_id() != pool.pool_id();
        let encryption = Encryption::of_class(&volume.context, &volume.owner)?;
        let wanted = NameEntry {
            uuid,
            pool_id: is_apart.then(|| pool.pool_id()),
        };
        let entry = JournalEntry {
            name: volume.name.clone(),
            image: image.to_owned(),
            image_id: image_id.clone(),
            journal_pool: is_apart.then(|| directory.pool_id()),
            kms: encryption
                .as_ref()
                .map(|e| e.kms.clone())
                .unwrap_or_default(),
            encryption: encryption.map_or("", |e| e.what.as_str()).to_owned(),
            owner: volume.owner.clone(),
            ..JournalEntry::default()
        };
        let journal = &self.volumes;
        let differs = |how| {
            let name = volume.name.clone();
            ProvisionError::Differs { name, how }
        };
        // First, and only if it is free or the volume's: a name leads to one volume.
        let known = journal.read(pool, uuid).map_err(RbdError::from)?;
        if let Some(known) = &known
            && !known.name.is_empty()
            && known.name != volume.name
        {
            let how = format!("image {pool}/{image} is entered as {:?}", known.name);
            return Err(differs(how));
        }
        if known
            .as_ref()
            .is_some_and(|it| it.state != CreateState::None)
        {
            // Its create goes on, or was given up.
            return Err(RbdError::Contended(format!("{pool}/{image}")).into());
        }
        let reserved = journal.reserve(&directory, &volume.name, wanted);
        let reserved = reserved.map_err(RbdError::from)?;
        if let Some(other) = reserved.filter(|other| *other != wanted) {
            let how = format!("it is the name of volume {}", other.uuid);
            return Err(differs(how));
        }
        let done = match known {
            Some(known) if known.image_id == image_id && reserved.is_some() => Done::Already,
            Some(known) if known.image_id == image_id => Done::Now,
            Some(known) => {
                // rbd-mirror has copied the image anew since, or ceph-csi was interrupted at the
                // same.
                let state = if known.is_complete() {
                    known.state
                } else {
                    let resumed = journal.resume(pool, uuid, &entry);
                    resumed.map_err(RbdError::from)?.state
                };
                let completed = journal.complete(pool, uuid, state, &image_id);
                if !completed.map_err(RbdError::from)? {
                    return Err(RbdError::Contended(format!("{pool}/{image}")).into());
                }
                Done::Now
            }
            None => {
                let entered = journal.enter(&directory, pool, wanted, &entry);
                if !entered.map_err(RbdError::from)? {
                    return Err(RbdError::Contended(format!("{pool}/{image}")).into());
                }
                Done::Now
            }
        };
        if done == Done::Now {
            let (name, image) = (&volume.name, format!("{pool}/{image}"));
            tracing::info!(
                name,
                image,
                "entered a volume of another site in the journal"
            );
        }
        Ok(Some(done))
    }
}

/// The id of a mirrored image; not of one that rbd-mirror is about to make.
fn id_of_copy(pool: &IoCtx, image: &str) -> Result<String, RbdError> {
    let opened = Image::open(pool, image, OpenMode::ReadOnly)?;
    if opened.mirroring()? == Mirroring::None && Header::of(pool, image)?.is_mirrored()? {
        return Err(RbdError::Resyncing {
            image: format!("{pool}/{image}"),
            why: "it is being copied",
        });
    }
    Ok(opened.id()?)
}
