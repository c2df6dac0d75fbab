//! The journal of group snapshots, letter for letter as ceph-csi has it.
//!
//! ```text
//! csi.groups.<instance>     csi.volume.group.<name>  →  <uuid>
//! csi.volume.group.<uuid>   csi.volname              →  <name>
//!                           csi.groupname            →  <group>
//!                           csi.creationtime         →  the moment of the snapshots
//!                           <handle of a snapshot>   →  <name of the snapshot>
//! ```

use std::{collections::BTreeMap, time::SystemTime};

use prost_types::Timestamp;
use uuid::Uuid;

use super::{
    CreateState, Journal, JournalError, JournalKind, NameEntry,
    entry::{self, CREATE_STATE},
};
use crate::ceph::client::{
    or_missing,
    rados::{IoCtx, WriteOp},
};

const GROUP: &str = "csi.groupname";
const CREATED: &str = "csi.creationtime";

/// The entry of a group snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupEntry {
    /// The name of the request.
    pub name: String,
    /// The name of the group.
    pub group: String,
    /// The moment that the snapshots show; none: they are not complete.
    pub created: Option<SystemTime>,
    /// The names of its snapshots, by their handles.
    pub members: BTreeMap<String, String>,
    /// The state of this driver's create. Abandoned, with the moment of its snapshots: a
    /// complete group that is being deleted.
    pub state: CreateState,
}

impl GroupEntry {
    /// Whether it is not of a group snapshot, but of ceph-csi's for a group of volumes, whose
    /// members have no snapshots.
    pub fn is_of_volumes(&self) -> bool {
        let has_snapshots =
            !self.members.is_empty() && !self.members.values().any(String::is_empty);
        self.state == CreateState::None && !has_snapshots
    }

    /// Whether it was complete, and its delete is not.
    pub fn is_being_deleted(&self) -> bool {
        self.state == CreateState::Abandoned && self.created.is_some()
    }
}

/// Of a journal of groups.
impl Journal {
    /// Writes the entry of a new reservation; false if another controller has abandoned it
    /// already.
    pub fn enter_group(
        &self,
        pool: &IoCtx,
        reserved: NameEntry,
        entry: &GroupEntry,
    ) -> Result<bool, JournalError> {
        let own = [
            (self.kind.name_key(), entry.name.as_str()),
            (GROUP, &entry.group),
            (CREATE_STATE, entry.state.value()),
        ];
        let members = entry
            .members
            .iter()
            .map(|(handle, name)| (&**handle, &**name));
        let op = WriteOp::new().create().set(own.into_iter().chain(members));
        match pool.operate(&self.object(reserved.uuid), &op) {
            Ok(()) => Ok(self.find(pool, &entry.name)? == Some(reserved)),
            Err(error) if error.is_exists() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The entry of a group snapshot, if there is one.
    pub fn read_group(&self, pool: &IoCtx, uuid: Uuid) -> Result<Option<GroupEntry>, JournalError> {
        let object = self.object(uuid);
        let keys = super::or_empty(pool.omap_list(&object, ""))?;
        if keys.is_empty() {
            return Ok(None);
        }
        let entry = from_keys(keys).map_err(|value| JournalError::Corrupt {
            object: format!("{pool}/{object}"),
            key: CREATED.to_owned(),
            value,
        })?;
        Ok(Some(entry))
    }

    /// Enters the moment of the snapshots: then the entry is complete. False if another
    /// controller has abandoned it meanwhile.
    pub fn complete_group(
        &self,
        pool: &IoCtx,
        uuid: Uuid,
        created: SystemTime,
    ) -> Result<bool, JournalError> {
        let created = Timestamp::from(created).to_string();
        let op = WriteOp::new()
            .assert_exists()
            .compare(CREATE_STATE, CreateState::UnderWay.value())
            .set([(CREATED, created.as_str())])
            .unset([CREATE_STATE]);
        match pool.operate(&self.object(uuid), &op) {
            Ok(()) => Ok(true),
            Err(error) if error.is_mismatch() || error.is_not_found() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Marks a group snapshot as being deleted, complete or not: from then on it is abandoned.
    pub fn mark_group_deleted(&self, pool: &IoCtx, uuid: Uuid) -> Result<(), JournalError> {
        let op = WriteOp::new()
            .assert_exists()
            .set([(CREATE_STATE, CreateState::Abandoned.value())]);
        Ok(or_missing(pool.operate(&self.object(uuid), &op))?)
    }
}

/// On failure: the invalid time.
fn from_keys(mut keys: BTreeMap<String, String>) -> Result<GroupEntry, String> {
    let mut take = |key: &str| keys.remove(key).unwrap_or_default();
    let name = take(JournalKind::Group.name_key());
    let group = take(GROUP);
    let created = match take(CREATED) {
        none if none.is_empty() => None,
        text => {
            let time: Option<Timestamp> = text.parse().ok();
            let time = time.and_then(|time| SystemTime::try_from(time).ok());
            Some(time.ok_or(text)?)
        }
    };
    let state = CreateState::of(&take(entry::CREATE_STATE));
    keys.retain(|key, _| !key.starts_with("csi."));
    Ok(GroupEntry {
        name,
        group,
        created,
        members: keys,
        state,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_entry_has_the_keys_of_ceph_csi() {
        let keys = [
            ("csi.volname", "groupsnapshot-1"),
            ("csi.groupname", "csi-vol-group-x"),
            ("csi.creationtime", "2025-02-03T04:05:06.5Z"),
            ("csi.later", "unknown"),
            ("0001-handle", "snapshot-1"),
        ];
        let own = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        let entry = from_keys(keys.into_iter().map(own).collect()).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1_738_555_506_500);
        assert_eq!(
            entry,
            GroupEntry {
                name: "groupsnapshot-1".to_owned(),
                group: "csi-vol-group-x".to_owned(),
                created: Some(time),
                members: [own(("0001-handle", "snapshot-1"))].into(),
                state: CreateState::None,
            }
        );
        let text = Timestamp::from(time).to_string();
        assert_eq!(text, "2025-02-03T04:05:06.500Z");
        let bad = BTreeMap::from([own(("csi.creationtime", "yesterday"))]);
        assert_eq!(from_keys(bad), Err("yesterday".to_owned()));
    }
}
