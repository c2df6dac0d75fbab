//! Snapshots: images of their own, cloned from a volume.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::{
    super::{NewSnapshot, ProvisionError, SnapshotInfo, params::bad, serialized::snapshot_named},
    RbdStore,
    attempt::Attempt,
    class::{check_name_prefix, pass_over},
    copies,
    encryption::{Encryption, SourceKey},
    error::RbdError,
    found::{FoundImage, Recorded, handle_of},
    metadata::{foreign, set_metadata},
};
use crate::{
    ceph::{
        client::rbd::{Features, Image, OpenMode},
        csi_format::journal::{CreateState, JournalEntry, NameEntry},
    },
    secret::Secrets,
};

impl RbdStore {
    pub(super) fn create_snapshot(
        &self,
        new: &NewSnapshot,
    ) -> Result<SnapshotInfo, ProvisionError> {
        let _name = self.names.lock_on_lane(&snapshot_named(&new.name));
        let prefix = name_prefix(new)?;
        let volume = self.volume(&new.volume, &new.secrets)?;
        let of = volume.recorded()?;
        self.check_key(&volume, &new.secrets)?;
        let known = self.snapshots.find(&of.journal, &new.name);
        let mut known = known.map_err(RbdError::from)?;
        loop {
            if let Some(reserved) = known
                && let Some(taken) = self.resume(new, &volume, reserved, prefix)?
            {
                return Ok(taken);
            }
            let source = match volume.open(OpenMode::ReadOnly) {
                Err(RbdError::Lost { handle, .. }) => return Err(ProvisionError::NoVolume(handle)),
                source => source?,
            };
            let features = source.features().map_err(RbdError::from)?;
            if !features.contains(Features::LAYERING) {
                return Err(RbdError::NoLayering(source.to_string()).into());
            }
            volume.refuse_secondary(&source, "copy")?;
            self.flattener.keep_few(&source)?;
            drop(source);
            let wanted = NameEntry {
                uuid: Uuid::new_v4(),
                pool_id: of.reserved.pool_id,
            };
            let reserved = self.snapshots.reserve(&of.journal, &new.name, wanted);
            known = reserved.map_err(RbdError::from)?;
            if known.is_none() {
                let attempt = self.attempt(new, &volume, wanted)?;
                let entry = self.entry(new, &volume, wanted, prefix)?;
                return attempt
                    .enter(&entry)
                    .and_then(|()| self.take(new, &volume, attempt, &entry))
                    .map_err(|error| attempt.undo(&entry, error));
            }
        }
    }

    fn attempt<'a>(
        &'a self,
        new: &'a NewSnapshot,
        volume: &'a FoundImage,
        reserved: NameEntry,
    ) -> Result<Attempt<'a>, RbdError> {
        Ok(Attempt {
            store: self,
            link: &volume.link,
            journal: &self.snapshots,
            directory: &volume.recorded()?.journal,
            pool: &volume.pool,
            name: &new.name,
            reserved,
            secrets: &new.secrets,
        })
    }

    /// Continues the reserved snapshot, if it is complete or ceph-csi's. `None`: it was
    /// neither, and has been removed.
    fn resume(
        &self,
        new: &NewSnapshot,
        volume: &FoundImage,
        reserved: NameEntry,
        prefix: Option<&str>,
    ) -> Result<Option<SnapshotInfo>, ProvisionError> {
        let attempt = self.attempt(new, volume, reserved)?;
        if !attempt.is_complete()? {
            volume.refuse_secondary_source()?;
        }
        let wanted = JournalEntry {
            state: CreateState::None,
            ..self.entry(new, volume, reserved, prefix)?
        };
        let Some(entry) = attempt.there(&wanted)? else {
            return Ok(None);
        };
        if !(entry.source.is_empty() || entry.source == volume.image) {
            let name = new.name.clone();
            let how = "it is a snapshot of another volume".to_owned();
            return Err(ProvisionError::Differs { name, how });
        }
        if !entry.is_complete()
            && copies::is_half_made(&volume.pool, &entry.image).map_err(RbdError::from)?
        {
            attempt.give_up(&entry)?;
            return Ok(None);
        }
        Ok(Some(self.take(new, volume, attempt, &entry)?))
    }

    pub(super) fn entry(
        &self,
        new: &NewSnapshot,
        volume: &FoundImage,
        reserved: NameEntry,
        prefix: Option<&str>,
    ) -> Result<JournalEntry, RbdError> {
        let of = &volume.recorded()?.entry;
        Ok(JournalEntry {
            name: new.name.clone(),
            image: self.snapshots.kind().image(prefix, reserved.uuid),
            journal_pool: of.journal_pool,
            kms: of.kms.clone(),
            encryption: of.encryption.clone(),
            owner: of.owner.clone(),
            source: volume.image.clone(),
            origin: new.volume.clone(),
            state: CreateState::UnderWay,
            ..JournalEntry::default()
        })
    }

    fn take(
        &self,
        new: &NewSnapshot,
        volume: &FoundImage,
        attempt: Attempt<'_>,
        entry: &JournalEntry,
    ) -> Result<SnapshotInfo, RbdError> {
        let pool = &volume.pool;
        let handle = handle_of(&volume.link, pool, attempt.reserved.uuid);
        if !entry.is_complete() {
            let key = self.source_key(volume, entry, &new.secrets)?;
            copies::snapshot_of(pool, &volume.image, &entry.image)?;
            self.name_objects(new, volume, entry)?;
            self.copy_key(volume, (&handle, entry), key.as_ref(), &new.secrets)?;
            attempt.complete(entry)?;
        }
        let image = Image::open(pool, &entry.image, OpenMode::ReadOnly)?;
        self.flattener.keep_short(pool, &image, &entry.image, 0)?;
        Ok(SnapshotInfo {
            handle,
            name: new.name.clone(),
            source: new.volume.clone(),
            bytes: image.size()?,
            created: image.created()?,
            local: false,
            group: None,
        })
    }

    /// Refuses a volume whose passphrase cannot be stored for a snapshot.
    pub(super) fn check_key(&self, volume: &FoundImage, secrets: &Secrets) -> Result<(), RbdError> {
        match Encryption::of_journal(&volume.recorded()?.entry)? {
            Some(encryption) => Ok(self.keeper(secrets).check(&encryption)?),
            None => Ok(()),
        }
    }

    /// The encryption of a volume, and what opens it before it is copied.
    pub(super) fn source_key(
        &self,
        volume: &FoundImage,
        entry: &JournalEntry,
        secrets: &Secrets,
    ) -> Result<Option<(Encryption, SourceKey)>, RbdError> {
        let Some(encryption) = Encryption::of_journal(entry)? else {
            return Ok(None);
        };
        let source = volume.open(OpenMode::ReadOnly)?;
        let keeper = self.keeper(secrets);
        let kept = (&encryption, &encryption);
        let key = keeper.of_source(kept, (&volume.handle, &source))?;
        Ok(Some((encryption, key)))
    }

    /// Stores a volume's passphrase for its snapshot, by the snapshot's handle and entry.
    pub(super) fn copy_key(
        &self,
        volume: &FoundImage,
        (handle, entry): (&str, &JournalEntry),
        key: Option<&(Encryption, SourceKey)>,
        secrets: &Secrets,
    ) -> Result<(), RbdError> {
        let Some((encryption, key)) = key else {
            return Ok(());
        };
        let source = volume.open(OpenMode::ReadOnly)?;
        let image = Image::open(&volume.pool, &entry.image, OpenMode::ReadWrite)?;
        let (kept, from) = ((encryption, encryption), (&*volume.handle, &source));
        let keeper = self.keeper(secrets);
        keeper.copy(kept, from, (handle, &image), key)
    }

    /// Gives the snapshot's image the names of its own objects in Kubernetes.
    fn name_objects(
        &self,
        new: &NewSnapshot,
        volume: &FoundImage,
        entry: &JournalEntry,
    ) -> Result<(), RbdError> {
        let names = self.names_of_objects.of(&new.parameters);
        if names.is_empty() {
            return Ok(());
        }
        let image = Image::open(&volume.pool, &entry.image, OpenMode::ReadWrite)?;
        let mut metadata: BTreeMap<_, _> = foreign(&image.metadata_list()?).into_iter().collect();
        metadata.extend(names);
        Ok(set_metadata(&image, metadata)?)
    }

    pub(super) fn delete_snapshot(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let _delete = self.purger.deletes.begin();
        let all = self.all_of_snapshot(handle, secrets)?;
        let _names = self.lock_names(&all, snapshot_named);
        for found in &all {
            // Without its group's entry nothing else would delete it.
            if let Some(Recorded { entry, .. }) = &found.recorded
                && !entry.group.is_empty()
                && self.group(&entry.group, secrets)?.is_some()
            {
                let (handle, group) = (found.handle.clone(), entry.group.clone());
                return Err(ProvisionError::InGroup { handle, group });
            }
        }
        self.delete_all(&self.snapshots, &all, secrets)
    }

    pub(super) fn get_snapshot(
        &self,
        handle: &str,
        secrets: &Secrets,
    ) -> Result<SnapshotInfo, ProvisionError> {
        let found = self.snapshot(handle, secrets)?;
        match show_snapshot(&found) {
            Err(RbdError::Lost { .. }) => Err(ProvisionError::NoSnapshot(found.handle)),
            shown => Ok(shown?),
        }
    }
}

/// The answer for a snapshot.
pub fn show_snapshot(found: &FoundImage) -> Result<SnapshotInfo, RbdError> {
    let image = found.open(OpenMode::ReadOnly)?;
    let Recorded { entry, .. } = found.recorded()?;
    Ok(SnapshotInfo {
        handle: found.handle.clone(),
        name: entry.name.clone(),
        source: source_of(found, entry),
        bytes: image.size()?,
        created: image.created()?,
        local: false,
        group: Some(entry.group.clone()).filter(|group| !group.is_empty()),
    })
}

/// The handle of a snapshot's source. ceph-csi enters its
/// image's name alone, which ends in the uuid.
fn source_of(found: &FoundImage, entry: &JournalEntry) -> String {
    if !entry.origin.is_empty() {
        return entry.origin.clone();
    }
    let at = entry.source.len().checked_sub(36);
    let uuid = at.and_then(|at| Uuid::try_parse(entry.source.get(at..)?).ok());
    uuid.map_or_else(String::new, |uuid| {
        handle_of(&found.link, &found.pool, uuid)
    })
}

/// The parameters of a snapshot class, as ceph-csi has them.
fn name_prefix(new: &NewSnapshot) -> Result<Option<&str>, ProvisionError> {
    const KNOWN: [&str; 3] = ["clusterID", "pool", "snapshotNamePrefix"];
    let own = |name: &String| !name.starts_with("csi.storage.k8s.io/");
    for (name, value) in new.parameters.iter().filter(|(name, _)| own(name)) {
        match KNOWN.into_iter().find(|known| known == name) {
            Some(known @ "snapshotNamePrefix") => check_name_prefix(known, value)?,
            Some(known) if value.is_empty() => {
                return Err(bad(known, value, "it must not be empty"));
            }
            Some(_) => {}
            None => pass_over("VolumeSnapshotClass", name),
        }
    }
    Ok(new.parameters.get("snapshotNamePrefix").map(String::as_str))
}
