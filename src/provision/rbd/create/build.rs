//! The image itself: blank or a copy, with its metadata.

use std::collections::BTreeMap;

use super::{
    super::{
        super::{ContentSource, ProvisionError, range::DEFAULT},
        copies,
        encryption::{Encryption, PassphraseStore, SourceKey},
        error::RbdError,
        found::FoundImage,
        image_size,
        metadata::{foreign, set_metadata},
    },
    Creation, NewImage,
};
use crate::ceph::client::rbd::{self, Image, OpenMode};

/// The source of a copy.
pub struct CopySource {
    found: FoundImage,
    bytes: u64,
    /// And what opens it before the copy.
    encryption: Option<(Encryption, SourceKey)>,
    /// The metadata that the copy must not have.
    foreign: Vec<(String, Option<String>)>,
}

impl CopySource {
    /// The same for a copy that was made at an unknown time: the source may have been formatted
    /// since, so its state says nothing about the copy.
    pub(super) fn of_earlier_copy(mut self) -> Self {
        if let Some((_, key)) = &mut self.encryption {
            key.forget_state();
        }
        self
    }
}

impl Creation<'_> {
    /// Finds the source, and flattens it where its chain is too long for a copy.
    pub(super) fn origin(&self) -> Result<Option<CopySource>, ProvisionError> {
        let (store, secrets) = (self.store, &self.new.secrets);
        let Some(source) = &self.new.source else {
            return Ok(None);
        };
        let (ContentSource::Snapshot(handle) | ContentSource::Volume(handle)) = source;
        // Before any connection: the class's user may be none of the source's cluster.
        self.check_cluster(&store.clusters_of(handle)?)?;
        let found = match source {
            ContentSource::Snapshot(_) => store.snapshot(handle, secrets)?,
            ContentSource::Volume(_) => store.volume(handle, secrets)?,
        };
        self.check_cluster(std::slice::from_ref(&found.link.config.cluster_id))?;
        let image = match found.open(OpenMode::ReadOnly) {
            Err(RbdError::Lost { handle, .. }) => {
                return Err(match &self.new.source {
                    Some(ContentSource::Snapshot(_)) => ProvisionError::NoSnapshot(handle),
                    _ => ProvisionError::NoVolume(handle),
                });
            }
            image => image?,
        };
        let bytes = image.size().map_err(RbdError::from)?;
        let metadata = image.metadata_list().map_err(RbdError::from)?;
        let encryption = self.encryption_of(&found, &image)?;
        let flattener = &store.flattener;
        match &self.new.source {
            Some(ContentSource::Volume(_)) => {
                found.refuse_secondary(&image, "copy")?;
                flattener.keep_parent_short(&image)?;
                flattener.keep_few(&image)?;
            }
            _ => flattener.keep_short(&found.pool, &image, &found.image, 1)?,
        }
        Ok(Some(CopySource {
            found,
            bytes,
            encryption,
            foreign: foreign(&metadata),
        }))
    }

    /// Refuses a source whose cluster is not that of the class.
    fn check_cluster(&self, may_have: &[String]) -> Result<(), RbdError> {
        let here = &self.class.cluster_id;
        match may_have {
            [there, ..] if !may_have.contains(here) => Err(RbdError::OtherCluster {
                there: there.clone(),
                here: here.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// The encryption of the source, and what opens it. Fails unless source and copy are
    /// both encrypted in the same way, or neither is.
    fn encryption_of(
        &self,
        source: &FoundImage,
        image: &Image,
    ) -> Result<Option<(Encryption, SourceKey)>, RbdError> {
        let there = Encryption::of_journal(&source.recorded()?.entry)?;
        match (there, &self.class.encryption) {
            (None, None) => Ok(None),
            (Some(from), Some(to)) if from.what == to.what => {
                let keeper = self.store.keeper(&self.new.secrets);
                let key = keeper.of_source((&from, to), (&source.handle, image))?;
                Ok(Some((from, key)))
            }
            (there, here) => {
                let name = |encryption: Option<&Encryption>| match encryption {
                    None => "not encrypted".to_owned(),
                    Some(encryption) => format!(
                        "encrypted (encryptionType {}) by KMS {:?}",
                        encryption.what.as_str(),
                        encryption.kms
                    ),
                };
                let (there, here) = (name(there.as_ref()), name(here.as_ref()));
                Err(RbdError::OtherEncryption { there, here })
            }
        }
    }

    pub(super) fn bytes(&self, origin: Option<&CopySource>) -> Result<u64, ProvisionError> {
        let (default, least) = match origin {
            Some(origin) => (origin.bytes, self.least.max(origin.bytes)),
            None => (DEFAULT, self.least),
        };
        image_size::choose(self.new.range, default, least)
    }

    pub(super) fn make(
        &self,
        new_image: &NewImage,
        origin: Option<&CopySource>,
        bytes: u64,
    ) -> Result<(), RbdError> {
        let mut options = self.class.options.clone();
        options.data_pool.clone_from(&self.pools.data);
        let to = (&new_image.pool, new_image.image());
        match origin {
            None => rbd::create(to.0, to.1, bytes, &options)?,
            Some(CopySource { found, .. }) => {
                let from = (&found.pool, found.image.as_str());
                match &self.new.source {
                    Some(ContentSource::Volume(_)) => copies::of_volume(from, to, &options)?,
                    _ => copies::of_snapshot(from, to, &options)?,
                }
            }
        }
        Ok(())
    }

    /// Removes the temporary image and snapshots of an interrupted copy.
    pub(super) fn tidy(
        &self,
        new_image: &NewImage,
        origin: Option<&CopySource>,
    ) -> Result<(), RbdError> {
        let from = origin.map(|o| (&o.found.pool, o.found.image.as_str()));
        if let Some(ContentSource::Volume(_)) = &self.new.source {
            copies::tidy_of_volume(from, (&new_image.pool, new_image.image()))?;
        }
        Ok(())
    }

    pub(super) fn complete(
        &self,
        new_image: &NewImage,
        origin: Option<&CopySource>,
        bytes: u64,
    ) -> Result<(), RbdError> {
        self.finish_image(new_image, origin, bytes)?;
        self.attempt(&new_image.pool, new_image.reserved)
            .complete(&new_image.entry)
    }

    /// The metadata of a new image; mostly none.
    fn finish_image(
        &self,
        new_image: &NewImage,
        origin: Option<&CopySource>,
        bytes: u64,
    ) -> Result<(), RbdError> {
        let names = self.store.names_of_objects.of(&self.new.parameters);
        let plain = origin.is_none_or(|origin| origin.bytes == bytes && origin.foreign.is_empty())
            && self.class.encryption.is_none()
            && self.class.limits.is_empty()
            && names.is_empty()
            && self.changeable.is_empty();
        if plain {
            return Ok(());
        }
        let image = Image::open(&new_image.pool, new_image.image(), OpenMode::ReadWrite)?;
        if image.size()? < bytes {
            image.grow(bytes)?;
        }
        // Of two values of one key, the later counts.
        let foreign = origin.map_or(&[][..], |origin| &origin.foreign);
        let mut metadata: BTreeMap<_, _> = foreign.iter().cloned().collect();
        let limits = self.class.limits.metadata(bytes).into_iter();
        metadata.extend(limits.map(|(key, value)| (key, Some(value))));
        metadata.extend(names);
        metadata.extend(self.changeable.iter().cloned());
        set_metadata(&image, metadata)?;
        let Some(encryption) = &self.class.encryption else {
            return Ok(());
        };
        let keeper: PassphraseStore<'_> = self.store.keeper(&self.new.secrets);
        let own = (new_image.handle.as_str(), &image);
        match origin {
            None => keeper.prepare(encryption, own),
            Some(origin) => {
                let encryption_there = origin.encryption.as_ref();
                let (from, key) = encryption_there.expect("a copy is encrypted if its source is");
                let source = origin.found.open(OpenMode::ReadOnly)?;
                let of = (origin.found.handle.as_str(), &source);
                keeper.copy((from, encryption), of, own, key)
            }
        }
    }
}
