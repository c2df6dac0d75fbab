//! Group snapshots whose create nobody repeats, or whose delete. A survey finds them by their
//! names. Their entries differ from those of images, and no image shows whether one of
//! ceph-csi is complete, so of ceph-csi's only a name without any entry counts.

use uuid::Uuid;

use super::{
    super::{
        super::{Orphan, OrphanKind as Kind, ProvisionError},
        error::RbdError,
        temporary_group::TEMPORARY,
    },
    NamedGroup, Survey,
    look::{Candidate, Subject},
};
use crate::{
    ceph::{
        client::{rados::IoCtx, rbd::group},
        csi_format::journal::{CreateState, JournalKind},
    },
    secret::Secrets,
};

/// The group of Ceph in that pool with that uuid.
fn group_with(pool: &IoCtx, uuid: Uuid) -> Result<Option<String>, RbdError> {
    let uuid = uuid.to_string();
    let has_it = |name: &String| {
        let name = name.strip_suffix(TEMPORARY).unwrap_or(name);
        name.ends_with(&uuid)
    };
    Ok(group::list(pool)?.into_iter().find(has_it))
}

impl Survey<'_> {
    pub(super) fn look_at_group(&self, it: &NamedGroup) -> Result<Option<Candidate>, RbdError> {
        let groups = &self.store.groups;
        if groups.find(&it.pool, &it.name)? != Some(it.reserved) {
            return Ok(None);
        }
        let uuid = it.reserved.uuid;
        let candidate = |kind, name: String, why: String| Candidate {
            orphan: Orphan {
                why,
                ..self.orphan(kind, &it.pool, name)
            },
            pool: it.pool.clone(),
            subject: Subject::Group(it.clone()),
        };
        let object = format!("{}/{}", it.pool, groups.key(&uuid.to_string()));
        let modified = groups.modified(&it.pool, uuid)?;
        let entry = groups.read_group(&it.pool, uuid)?;
        let (Some(modified), Some(entry)) = (modified, entry) else {
            if modified.is_some() {
                // ceph-csi reserves the object of a group before it has keys.
                return Ok(None);
            }
            let why = format!("it leads to object {object}, which does not exist");
            let mut name = candidate(Kind::Name, groups.key(&it.name), why);
            if let Some(group) = group_with(&it.pool, uuid)? {
                name.orphan.kept = format!(
                    "group {group} of Ceph has its uuid, so the entry may have been lost: remove \
                     that group first (rbd group remove), or restore the entry"
                );
            }
            return Ok(Some(name));
        };
        if !(entry.name.is_empty() || entry.name == it.name) {
            let why = format!(
                "it leads to object {object}, which belongs to {:?}",
                entry.name
            );
            let mut other = candidate(Kind::Name, groups.key(&it.name), why);
            "correct the journal by hand".clone_into(&mut other.orphan.kept);
            return Ok(Some(other));
        }
        let why = match entry.state {
            CreateState::None => return Ok(None),
            _ if entry.is_being_deleted() => "the delete of group snapshot {} was interrupted",
            CreateState::UnderWay => "the create of group snapshot {} was given up",
            CreateState::Abandoned => {
                "the create of group snapshot {} was abandoned, and the removal of its remains \
                 interrupted"
            }
        };
        let Some(age) = self.age(modified) else {
            return Ok(None);
        };
        let name = match entry.group.as_str() {
            "" => JournalKind::Group.image(None, uuid),
            group => group.to_owned(),
        };
        let why = why.replace("{}", &format!("{:?}", it.name));
        let mut candidate = candidate(Kind::Incomplete, name, why);
        candidate.orphan.age = Some(age);
        Ok(Some(candidate))
    }

    /// Removes a name without an entry, or a group with its snapshots; false if it was
    /// completed meanwhile.
    pub(super) fn remove_group(&self, it: &NamedGroup, kind: Kind) -> Result<bool, ProvisionError> {
        let groups = &self.store.groups;
        if kind == Kind::Name {
            let removed = groups.remove_name(&it.pool, &it.name, it.reserved);
            removed.map_err(RbdError::from)?;
            return Ok(true);
        }
        let secrets = Secrets::default();
        let place = (self.store).group_place(self.link.clone(), it.pool.clone(), &secrets);
        place.abandon(&it.name, it.reserved, None)
    }

    /// Whether a group snapshot has that name in the pool, or its name that key.
    pub(super) fn is_group(&self, pool: &IoCtx, name: &str) -> Result<bool, RbdError> {
        let groups = &self.store.groups;
        let of_pool = |it: &&NamedGroup| it.pool.pool_id() == pool.pool_id();
        for it in self.groups.iter().filter(of_pool) {
            let entry = groups.read_group(pool, it.reserved.uuid)?;
            if groups.key(&it.name) == name || entry.is_some_and(|entry| entry.group == name) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
