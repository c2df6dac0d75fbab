//! Making, deleting, growing and changing volumes.

use std::collections::HashMap;

use super::{
    super::{
        NewVolume, ProvisionError, PublishedVolume, Range, VolumeCondition, VolumeInfo, VolumeUse,
        range::least, serialized::volume_named,
    },
    RbdStore,
    class::Class,
    create::Creation,
    error::RbdError,
    image_size,
    metadata::set_metadata,
    qos::{self, QosLimits},
};
use crate::{
    ceph::client::rbd::{Image, OpenMode},
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
        let all = self.all_of_volume(handle, secrets)?;
        // A create of that name must not continue with it meanwhile.
        let _names = self.lock_names(&all, volume_named);
        self.delete_all(&self.volumes, &all, secrets)
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
                    grow(&found.open_primary()?, before)?;
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
        let image = found.open_primary()?;
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
        let image = found.open_primary()?;
        Ok(image.sparsify().map_err(RbdError::from)?)
    }

    pub(super) fn modify_volume(
        &self,
        handle: &str,
        mutable: &HashMap<String, String>,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let metadata = qos::modified(mutable)?;
        let image = self.volume(handle, secrets)?.open_primary()?;
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
