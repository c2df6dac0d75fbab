//! One attempt at a group snapshot. Ceph holds the writes to all images only while it takes
//! its own snapshot of the group.

use std::{collections::BTreeMap, time::SystemTime};

use uuid::Uuid;

use super::{
    super::{
        super::{
            GroupSnapshotInfo, NewGroupSnapshot, NewSnapshot, ProvisionError,
            serialized::snapshot_named,
        },
        copies,
        encryption::{Encryption, SourceKey},
        error::RbdError,
        found::{FoundImage, handle_of},
        temporary_group::temporary,
    },
    GroupPlace,
};
use crate::ceph::{
    client::rbd::{Image, OpenMode, group},
    csi_format::journal::{CreateState, GroupEntry, JournalEntry, JournalKind, NameEntry},
};

/// A snapshot of the group.
struct Member<'a> {
    source: &'a FoundImage,
    uuid: Uuid,
    handle: String,
    entry: JournalEntry,
    key: Option<(Encryption, SourceKey)>,
}

impl GroupPlace<'_> {
    /// Takes the snapshots under a new reservation; if that fails, removes them.
    pub(super) fn take(
        &self,
        new: &NewGroupSnapshot,
        sources: &[FoundImage],
        reserved: NameEntry,
        prefix: Option<&str>,
    ) -> Result<GroupSnapshotInfo, ProvisionError> {
        let group = JournalKind::Group.image(prefix, reserved.uuid);
        let handle = handle_of(&self.link, &self.pool, reserved.uuid);
        let members = sources.iter().map(|one| self.member(one, &group, &handle));
        let members: Result<Vec<_>, RbdError> = members.collect();
        let mut entry = GroupEntry {
            name: new.name.clone(),
            group,
            created: None,
            members: BTreeMap::new(),
            state: CreateState::UnderWay,
        };
        let cut = members.and_then(|members| {
            let names = members.iter();
            let names = names.map(|one| (one.handle.clone(), one.entry.name.clone()));
            entry.members = names.collect();
            self.cut(reserved, &entry, &members)
        });
        match cut {
            Ok(created) => {
                entry.created = Some(created);
                self.answer(reserved.uuid, &entry)
            }
            Err(error) => Err(self.undo(reserved, &entry, error)),
        }
    }

    /// A snapshot that is to be taken of that volume.
    fn member<'a>(
        &self,
        source: &'a FoundImage,
        group: &str,
        group_handle: &str,
    ) -> Result<Member<'a>, RbdError> {
        let uuid = Uuid::new_v4();
        let of_volume = source.recorded()?.reserved.uuid;
        let new = NewSnapshot {
            name: format!("{group}-{of_volume}"),
            volume: source.handle.clone(),
            parameters: [].into(),
            secrets: self.secrets.clone(),
        };
        let reserved = NameEntry {
            uuid,
            pool_id: None,
        };
        let entry = JournalEntry {
            journal_pool: None,
            group: group_handle.to_owned(),
            ..self.store.entry(&new, source, reserved, None)?
        };
        Ok(Member {
            source,
            uuid,
            handle: handle_of(&source.link, &source.pool, uuid),
            key: self.store.source_key(source, &entry, self.secrets)?,
            entry,
        })
    }

    /// Returns the moment of the snapshots.
    fn cut(
        &self,
        reserved: NameEntry,
        entry: &GroupEntry,
        members: &[Member<'_>],
    ) -> Result<SystemTime, RbdError> {
        let store = self.store;
        let contended = || RbdError::Contended(format!("{}/{}", self.pool, entry.group));
        if !store.groups.enter_group(&self.pool, reserved, entry)? {
            return Err(contended());
        }
        let attempt = |one| {
            let Member {
                source,
                uuid,
                entry,
                ..
            }: &Member<'_> = one;
            self.attempt(&source.pool, *uuid, &entry.name)
        };
        // A survey of orphans passes over names that a call holds.
        let locked = members.iter().map(|one| snapshot_named(&one.entry.name));
        let _names: Vec<_> = locked.map(|key| store.names.lock_on_lane(&key)).collect();
        for member in members {
            let attempt = attempt(member);
            let (pool, name) = (&member.source.pool, &member.entry.name);
            let there = store.snapshots.reserve(pool, name, attempt.reserved)?;
            if there.is_some() {
                return Err(contended());
            }
            attempt.enter(&member.entry)?;
        }

        let group = temporary(&entry.group);
        group::create(&self.pool, &group)?;
        for Member { source, .. } in members {
            match group::add_image(&self.pool, &group, &source.pool, &source.image) {
                Err(error) if error.is_exists() => {
                    let image = source.path();
                    let group = source.open(OpenMode::ReadOnly)?.group()?;
                    return Err(RbdError::OtherGroup { image, group });
                }
                added => added?,
            }
        }
        for Member { source, entry, .. } in members {
            let image = Image::open(&source.pool, &source.image, OpenMode::ReadWrite)?;
            image.snapshot_create(&entry.image)?;
        }
        group::create_snapshot(&self.pool, &group, &entry.group)?;
        let created = SystemTime::now();
        for member in members {
            let Member { source, .. } = member;
            let (volume, image) = (&source.image, &member.entry.image);
            let id = Image::open(&source.pool, volume, OpenMode::ReadOnly)?
                .snapshot_in_group(&group, &entry.group)?
                .ok_or_else(contended)?;
            copies::snapshot_at(&source.pool, volume, image, id)?;
            let of = (&*member.handle, &member.entry);
            store.copy_key(source, of, member.key.as_ref(), self.secrets)?;
        }
        group::remove(&self.pool, &group)?;
        for member in members {
            attempt(member).complete(&member.entry)?;
        }
        let uuid = reserved.uuid;
        if store.groups.complete_group(&self.pool, uuid, created)? {
            Ok(created)
        } else {
            Err(contended())
        }
    }
}
