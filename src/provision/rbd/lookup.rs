//! Finds the volume or snapshot of a handle.
//!
//! A handle names a cluster and a pool, which have its entry. After a
//! fail-over to a mirror, the same image is in another cluster, under an entry of
//! the same uuid: ceph-csi's `cluster-mapping.json` names that cluster ([`Mappings`]), and
//! the lookup continues there. The volume keeps the handle of the request: its callers use
//! that, and its passphrase is sealed with it.
//!
//! [`Mappings`]: crate::ceph::csi_format::config::Mappings

use super::{
    super::ProvisionError,
    RbdStore,
    error::RbdError,
    found::{FoundImage, found},
};
use crate::{
    ceph::{
        client::{
            CephError,
            rados::IoCtx,
            rbd::{self, Image, Mirroring, OpenMode},
        },
        csi_format::{
            config::ConfigError,
            handle::{CephVolumeHandle, Handle},
            journal::{Journal, JournalEntry, read_from_other_pools},
        },
    },
    error_chain,
    secret::Secrets,
};

impl RbdStore {
    /// The clusters that may have the image of a volume's or snapshot's handle: its own, and
    /// those to which it may have failed over. Empty: the handle is not this driver's.
    pub(super) fn clusters_of(&self, handle: &str) -> Result<Vec<String>, RbdError> {
        Ok(match handle.parse() {
            Ok(CephVolumeHandle::Journaled(handle)) => {
                let places = self.mappings.of(handle.cluster_id(), handle.pool_id())?;
                let others = places.into_iter().map(|(cluster_id, _)| cluster_id);
                [handle.cluster_id().to_owned()]
                    .into_iter()
                    .chain(others)
                    .collect()
            }
            Ok(CephVolumeHandle::Migrated(handle)) => vec![handle.cluster_id().to_owned()],
            Err(_) => Vec::new(),
        })
    }

    /// All images of a volume's handle, that of its own cluster first, for a delete. Empty:
    /// no image exists, or the handle is not this driver's.
    pub(super) fn all_of_volume(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Vec<FoundImage>, RbdError> {
        match handle.parse() {
            Ok(CephVolumeHandle::Journaled(parsed)) => self.all(&self.volumes, &parsed, secrets),
            Ok(CephVolumeHandle::Migrated(parsed)) => {
                let link = self.link(parsed.cluster_id(), secrets)?;
                let pool = match link.pool(parsed.pool()) {
                    Err(error) if error.is_not_found() => return Ok(Vec::new()),
                    pool => pool?,
                };
                Ok(vec![FoundImage {
                    handle: handle.to_owned(),
                    link,
                    pool,
                    image: parsed.image().to_owned(),
                    image_id: String::new(),
                    recorded: None,
                    stands_in: false,
                }])
            }
            Err(_) => Ok(Vec::new()),
        }
    }

    /// The same for a snapshot's handle.
    pub(super) fn all_of_snapshot(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Vec<FoundImage>, RbdError> {
        match handle.parse() {
            Ok(parsed) => self.all(&self.snapshots, &parsed, secrets),
            Err(_) => Ok(Vec::new()),
        }
    }

    /// The volume of a handle; fails where there is none.
    pub(super) fn volume(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<FoundImage, ProvisionError> {
        let found = self.all_of_volume(handle, secrets)?.pop();
        found.ok_or_else(|| ProvisionError::NoVolume(handle.to_owned()))
    }

    /// The snapshot of a handle; fails where there is none.
    pub(super) fn snapshot(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<FoundImage, ProvisionError> {
        let found = self.all_of_snapshot(handle, secrets)?.pop();
        found.ok_or_else(|| ProvisionError::NoSnapshot(handle.to_owned()))
    }

    /// The image of a handle in its own cluster, or else the image that it fails over to.
    fn all(
        &self,
        of: &Journal,
        handle: &Handle,
        secrets: &Secrets,
    ) -> Result<Vec<FoundImage>, RbdError> {
        let own = self.at(of, handle, secrets);
        let mappings = &self.mappings;
        let places = mappings.of(handle.cluster_id(), handle.pool_id())?;
        if places.is_empty() {
            return Ok(own?.into_iter().collect());
        }
        if let Ok(Some(found)) = &own
            && found.has_image()?
        {
            return Ok(own?.into_iter().collect());
        }
        // A delete has removed its entry, and left the image to its mirror: elsewhere is the
        // primary.
        if matches!(own, Ok(None)) && self.image_by_uuid(handle, secrets)?.is_some() {
            return Ok(Vec::new());
        }
        let elsewhere = self.elsewhere(of, handle, &places, secrets);
        match (own, elsewhere?) {
            (Ok(own), other) => Ok(own.into_iter().chain(other).collect()),
            // Its own cluster does not admit this user, or is not configured here. One
            // that does not answer may still have the image: promoting another image
            // decided which of them counts.
            (Err(error), Some(other))
                if is_not_ours(&error)
                    || other.is_deleting()
                    || other.open(OpenMode::ReadOnly)?.mirroring()? == Mirroring::Primary =>
            {
                Ok(vec![other])
            }
            (Err(error), _) => Err(error),
        }
    }

    /// The image of a handle's uuid in its cluster and pool, with or without an entry.
    fn image_by_uuid(
        &self,
        handle: &Handle,
        secrets: &Secrets,
    ) -> Result<Option<(IoCtx, String)>, RbdError> {
        let Some((_, pool)) = self.linked_pool(handle, secrets)? else {
            return Ok(None);
        };
        Ok(image_of(&pool, handle)?.map(|name| (pool, name)))
    }

    /// The first image that a handle's own fails over to, also if a delete has removed it and
    /// has not ended.
    fn elsewhere(
        &self,
        of: &Journal,
        handle: &Handle,
        places: &[(String, i64)],
        secrets: &Secrets,
    ) -> Result<Option<FoundImage>, RbdError> {
        let mut failed = None;
        for (cluster_id, pool_id) in places {
            let Some(there) = Handle::new(cluster_id, *pool_id, handle.uuid()) else {
                continue;
            };
            match self.at(of, &there, secrets) {
                Ok(Some(found)) if found.is_deleting() || found.has_image()? => {
                    return Ok(Some(FoundImage {
                        handle: handle.to_string(),
                        stands_in: true,
                        ..found
                    }));
                }
                Ok(_) => {}
                Err(error) if is_not_ours(&error) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(None), Err)
    }

    /// Whether a cluster that may have the image of a handle has one besides those found, or
    /// does not answer. A copy that a daemon replays goes with its primary, and does not
    /// count.
    pub(super) fn may_have_another(
        &self,
        handle: &str,
        known: &[FoundImage],
        secrets: &Secrets,
    ) -> Result<bool, RbdError> {
        let Ok(CephVolumeHandle::Journaled(handle)) = handle.parse() else {
            return Ok(false);
        };
        let mapped = self.mappings.of(handle.cluster_id(), handle.pool_id())?;
        let own = (handle.cluster_id().to_owned(), handle.pool_id());
        for (cluster_id, pool_id) in mapped.into_iter().chain([own]) {
            if known.iter().any(|one| one.is_in(&cluster_id, pool_id)) {
                continue;
            }
            let Some(there) = Handle::new(&cluster_id, pool_id, handle.uuid()) else {
                continue;
            };
            match self.has_independent(&there, secrets) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                // As for a lookup: the other cluster replaced it.
                Err(error) if cluster_id == handle.cluster_id() && is_not_ours(&error) => {}
                Err(error) => {
                    let (handle, error) = (handle.to_string(), error_chain(&error));
                    tracing::info!(handle, cluster_id, error, "cannot look for another image");
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether the cluster and pool of a handle have an image of its uuid that is not the
    /// copy of another.
    fn has_independent(&self, handle: &Handle, secrets: &Secrets) -> Result<bool, RbdError> {
        let Some((pool, name)) = self.image_by_uuid(handle, secrets)? else {
            return Ok(false);
        };
        let image = Image::open(&pool, &name, OpenMode::ReadOnly)?;
        Ok(image.mirroring()? != Mirroring::Secondary || !image.mirror_sites()?.own.is_replaying())
    }

    /// A volume's entry in a cluster that replaces its own, if its image is missing there, as
    /// while a mirror copies it anew.
    pub(super) fn replacement_without_image(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<Option<FoundImage>, RbdError> {
        let Ok(CephVolumeHandle::Journaled(handle)) = handle.parse() else {
            return Ok(None);
        };
        for (cluster_id, pool_id) in self.mappings.of(handle.cluster_id(), handle.pool_id())? {
            if let Some(there) = Handle::new(&cluster_id, pool_id, handle.uuid())
                && let Ok(Some(found)) = self.at(&self.volumes, &there, secrets)
                && !found.has_image()?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The image in the cluster and pool that a handle names.
    fn at(
        &self,
        of: &Journal,
        handle: &Handle,
        secrets: &Secrets,
    ) -> Result<Option<FoundImage>, RbdError> {
        let Some((link, pool)) = self.linked_pool(handle, secrets)? else {
            return Ok(None);
        };
        self.use_pool(&link, &pool);
        let Some(mut entry) = of.read(&pool, handle.uuid())? else {
            return Ok(None);
        };
        if entry.name.is_empty() {
            if let Some(keys) = read_from_other_pools(of.kind(), &pool, handle.uuid())? {
                entry = JournalEntry {
                    is_deleting: entry.is_deleting,
                    ..keys
                };
            }
            find_image(&pool, handle, &mut entry)?;
        }
        found(link, pool, handle.uuid(), entry).map(Some)
    }
}

/// Finds the image of an entry that had no name, in case its keys are in a pool that this
/// user cannot read. Each image's name ends in the uuid, after any prefix.
fn find_image(pool: &IoCtx, handle: &Handle, entry: &mut JournalEntry) -> Result<(), RbdError> {
    if rbd::image_id(pool, &entry.image)?.is_some() {
        return Ok(());
    }
    if let Some(image) = image_of(pool, handle)? {
        entry.image = image;
    }
    Ok(())
}

/// The name of the image with a handle's uuid.
pub(super) fn image_of(pool: &IoCtx, handle: &Handle) -> Result<Option<String>, CephError> {
    let uuid = handle.uuid().to_string();
    let mut names = rbd::list(pool)?.into_iter().map(|image| image.name);
    Ok(names.find(|name| name.ends_with(&uuid)))
}

/// Whether an error shows that the cluster is not configured or does not admit this user:
/// it counts as a cluster without the volume.
pub(super) fn is_not_ours(error: &RbdError) -> bool {
    match error {
        RbdError::Config(error) => matches!(
            error,
            ConfigError::Unknown { .. } | ConfigError::NoMonitors { .. }
        ),
        RbdError::NoSecrets(_) => true,
        error => error.is_access_denied(),
    }
}
