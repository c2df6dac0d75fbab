//! Whether one name, image or deleted image is an orphan. A removal asks again.

use uuid::Uuid;

use super::{
    super::{
        super::{Orphan, OrphanKind as Kind},
        copies::temporary,
        error::RbdError,
        found::handle_of,
        left_snapshots::sort_snapshots,
        trash::Discarded,
    },
    KINDS, Named, NamedGroup, Survey,
};
use crate::ceph::{
    client::{
        rados::IoCtx,
        rbd::{self, Header, Image, Mirroring, OpenMode, Remains, trash},
    },
    csi_format::{
        handle::Handle,
        journal::{self, CreateState, JournalEntry, JournalKind, NameEntry},
    },
};

/// An orphan, and what a removal needs to know about it.
#[derive(Debug)]
pub struct Candidate {
    pub orphan: Orphan,
    pub pool: IoCtx,
    pub subject: Subject,
}

#[derive(Clone, Debug)]
pub enum Subject {
    /// A name and its entry.
    Named(Named),
    /// An entry without a name.
    Entry(Named),
    /// An image, by its name.
    Image(String),
    /// A deleted image.
    Trashed(Discarded),
    /// The name of a group snapshot, and its entry.
    Group(NamedGroup),
}

/// How a caller deletes a volume or a snapshot of that handle.
fn delete_by(kind: JournalKind, handle: &str) -> String {
    match kind {
        JournalKind::Volume => format!("uringctl delete {handle}"),
        JournalKind::Snapshot => format!("uringctl snapshot delete {handle}"),
        JournalKind::Group => format!("uringctl snapshot group delete {handle}"),
    }
}

impl Survey<'_> {
    /// The same candidate as it is now; none: it is no orphan any more.
    pub fn look_again(&self, one: &Candidate) -> Result<Option<Candidate>, RbdError> {
        match &one.subject {
            Subject::Named(it) => {
                let there = self.store.journal(it.kind).find(&it.directory, &it.name)?;
                if there != Some(it.reserved) {
                    return Ok(None);
                }
                let now = self.named(it.kind, &it.directory, &it.name, it.reserved)?;
                self.look_at_name(&now)
            }
            Subject::Entry(it) => {
                let uuid = it.reserved.uuid;
                match journal::read(it.kind, &one.pool, uuid)? {
                    Some(entry) => self.look_at_nameless(it.kind, &one.pool, uuid, &entry),
                    None => Ok(None),
                }
            }
            Subject::Image(name) => self.look_at_image(&one.pool, name),
            Subject::Trashed(image) => self.look_at_trashed(&one.pool, image),
            Subject::Group(it) => self.look_at_group(it),
        }
    }

    pub(super) fn look_at_name(&self, it: &Named) -> Result<Option<Candidate>, RbdError> {
        let object = self
            .store
            .journal(it.kind)
            .key(&it.reserved.uuid.to_string());
        let (Some(pool), Some(entry)) = (&it.pool, &it.entry) else {
            let (why, kept) = match &it.pool {
                None => ("it leads to a pool that does not exist".to_owned(), None),
                Some(pool) => (
                    format!("it leads to object {pool}/{object}, which does not exist"),
                    self.image_of(pool, it.reserved.uuid),
                ),
            };
            let kept = kept.map(|image| {
                format!(
                    "image {image} has its uuid, so the entry may have been lost: remove that \
                     image first, or restore the entry"
                )
            });
            return Ok(Some(self.name(it, why, kept)));
        };
        if !(entry.name.is_empty() || entry.name == it.name) {
            let why = format!(
                "it leads to object {pool}/{object}, which belongs to {:?}",
                entry.name
            );
            let kept = "correct the journal by hand".to_owned();
            return Ok(Some(self.name(it, why, Some(kept))));
        }
        if entry.is_complete() {
            return self.look_for_image(it, pool, entry);
        }
        let subject = Subject::Named(it.clone());
        self.incomplete(Kind::Incomplete, subject, it, pool, entry)
    }

    fn name(&self, it: &Named, why: String, kept: Option<String>) -> Candidate {
        let key = self.store.journal(it.kind).key(&it.name);
        let orphan = self.orphan(Kind::Name, &it.directory, key);
        Candidate {
            orphan: Orphan {
                why,
                kept: kept.unwrap_or_default(),
                ..orphan
            },
            pool: it.directory.clone(),
            subject: Subject::Named(it.clone()),
        }
    }

    /// The image in that pool with that uuid.
    fn image_of(&self, pool: &IoCtx, uuid: Uuid) -> Option<String> {
        let mut images = self.images.get(&pool.pool_id()).into_iter().flatten();
        let uuid = uuid.to_string();
        images.find(|name| name.ends_with(&uuid)).cloned()
    }

    /// Whether a complete entry has its image.
    fn look_for_image(
        &self,
        it: &Named,
        pool: &IoCtx,
        entry: &JournalEntry,
    ) -> Result<Option<Candidate>, RbdError> {
        let listed = self.images.get(&pool.pool_id());
        if listed.is_some_and(|images| images.contains(&entry.image))
            || rbd::remains(pool, &entry.image)? != Remains::Nothing
        {
            return Ok(None);
        }
        let (noun, handle) = (
            it.kind.noun(),
            handle_of(&self.link, pool, it.reserved.uuid),
        );
        let mut why = format!("the journal has {noun} {handle:?}, whose image does not exist");
        let mut age = None;
        match trash::get(pool, &entry.image_id) {
            Ok(trashed) => {
                age = self.age(trashed.deleted);
                if age.is_none() {
                    // A delete is about to remove the entry.
                    return Ok(None);
                }
                why = format!("the journal has {noun} {handle:?}, whose image is in the trash");
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        let orphan = self.orphan(Kind::Lost, pool, entry.image.clone());
        let delete = delete_by(it.kind, &handle);
        Ok(Some(Candidate {
            orphan: Orphan {
                age,
                why,
                kept: format!("restore the image, or delete the {noun} ({delete})"),
                ..orphan
            },
            pool: pool.clone(),
            subject: Subject::Named(it.clone()),
        }))
    }

    /// An entry that no name leads to. A complete one refers to its image by its handle, and
    /// another instance's journal may have its name.
    fn look_at_nameless(
        &self,
        kind: JournalKind,
        pool: &IoCtx,
        uuid: Uuid,
        entry: &JournalEntry,
    ) -> Result<Option<Candidate>, RbdError> {
        // Its name may be in a pool that this user cannot read.
        if entry.is_complete() || !self.is_whole {
            return Ok(None);
        }
        let elsewhere = entry.journal_pool.filter(|id| *id != pool.pool_id());
        let directory = match elsewhere.map(|id| self.link.pool(id)) {
            Some(Ok(directory)) => directory,
            _ => pool.clone(),
        };
        let it = Named {
            kind,
            directory,
            name: entry.name.clone(),
            reserved: NameEntry {
                uuid,
                pool_id: elsewhere.map(|_| pool.pool_id()),
            },
            pool: Some(pool.clone()),
            entry: Some(entry.clone()),
        };
        let subject = Subject::Entry(it.clone());
        self.incomplete(Kind::Nameless, subject, &it, pool, entry)
    }

    fn incomplete(
        &self,
        kind: Kind,
        subject: Subject,
        it: &Named,
        pool: &IoCtx,
        entry: &JournalEntry,
    ) -> Result<Option<Candidate>, RbdError> {
        let uuid = it.reserved.uuid;
        let is_foreign = entry.state == CreateState::None;
        // ceph-csi writes the keys to the journal's pool: see `lookup`.
        if is_foreign && entry.name.is_empty() && self.is_entered_elsewhere(it.kind, uuid)? {
            return Ok(None);
        }
        if self.is_of_group_under_way(entry)? {
            return Ok(None);
        }
        let modified = self.store.journal(it.kind).modified(pool, uuid)?;
        let Some(age) = modified.and_then(|time| self.age(time)) else {
            return Ok(None);
        };
        let noun = it.kind.noun();
        let mut why = match entry.state {
            CreateState::None => format!("ceph-csi has not completed {noun} {:?}", it.name),
            CreateState::UnderWay => format!("the create of {noun} {:?} was given up", it.name),
            CreateState::Abandoned => format!(
                "the create of {noun} {:?} was abandoned, and the removal of its remains \
                 interrupted",
                it.name
            ),
        };
        if kind == Kind::Nameless {
            why.push_str("; no name leads to its entry");
        }
        let mut kept = String::new();
        if is_foreign {
            for image in [entry.image.clone(), temporary(&entry.image)] {
                if rbd::remains(pool, &image)? == Remains::WithHeader {
                    let handle = handle_of(&self.link, pool, uuid);
                    kept = format!(
                        "image {image} may be complete; if no {noun} has the handle {handle:?}, \
                         delete it ({})",
                        delete_by(it.kind, &handle)
                    );
                }
            }
        }
        let orphan = self.orphan(kind, pool, entry.image.clone());
        Ok(Some(Candidate {
            orphan: Orphan {
                age: Some(age),
                why,
                kept,
                ..orphan
            },
            pool: pool.clone(),
            subject,
        }))
    }

    /// Whether the entry is of a group snapshot that is not complete: a controller may be at
    /// work on it, and the group's next create or delete removes its members.
    fn is_of_group_under_way(&self, entry: &JournalEntry) -> Result<bool, RbdError> {
        let Ok(group) = entry.group.parse::<Handle>() else {
            return Ok(false);
        };
        let pool = match self.link.pool(group.pool_id()) {
            // The pool was deleted, with the group's entry.
            Err(error) if error.is_not_found() => return Ok(false),
            pool => pool?,
        };
        let there = self.store.groups.read_group(&pool, group.uuid())?;
        Ok(there.is_some_and(|group| group.state == CreateState::UnderWay))
    }

    /// Whether any pool has a complete entry of that uuid.
    fn is_entered_elsewhere(&self, kind: JournalKind, uuid: Uuid) -> Result<bool, RbdError> {
        for pool in &self.pools {
            let entry = journal::read(kind, pool, uuid)?;
            if entry.is_some_and(|entry| entry.is_complete()) {
                return Ok(true);
            }
        }
        // It may be in a pool that this user cannot read.
        Ok(!self.is_whole)
    }

    pub(super) fn look_at_image(
        &self,
        pool: &IoCtx,
        name: &str,
    ) -> Result<Option<Candidate>, RbdError> {
        let Some((uuid, copy)) = self.uuid_in(name) else {
            return Ok(None);
        };
        if self.entered.contains(&(pool.pool_id(), uuid)) {
            return Ok(None);
        }
        for kind in KINDS {
            if let Some(entry) = journal::read(kind, pool, uuid)? {
                return self.look_at_nameless(kind, pool, uuid, &entry);
            }
        }
        if let Some(copy) = copy
            && rbd::remains(pool, copy)? != Remains::Nothing
        {
            // It is removed with the copy.
            return Ok(None);
        }
        let there = rbd::remains(pool, name)?;
        if there == Remains::Nothing {
            return Ok(None);
        }
        let orphan = self.orphan(Kind::Image, pool, name.to_owned());
        let mut candidate = Candidate {
            orphan,
            pool: pool.clone(),
            subject: Subject::Image(name.to_owned()),
        };
        let orphan = &mut candidate.orphan;
        orphan.why = match copy {
            None => format!("the journal has no entry {uuid}"),
            Some(copy) => format!("neither image {copy} nor its entry exists"),
        };
        if copy.is_some() {
            orphan.kind = Kind::Temporary;
        }
        let image = match Image::open(pool, name, OpenMode::ReadOnly) {
            Ok(image) => image,
            Err(error) if error.is_not_found() => {
                orphan.why.push_str("; it is half made, or half removed");
                return Ok(Some(candidate));
            }
            Err(error) => return Err(error.into()),
        };
        orphan.age = self.age(image.created()?);
        if orphan.age.is_none() {
            return Ok(None);
        }
        keep_image(pool, name, &image, orphan)?;
        Ok(Some(candidate))
    }

    pub(super) fn look_at_trashed(
        &self,
        pool: &IoCtx,
        image: &Discarded,
    ) -> Result<Option<Candidate>, RbdError> {
        let trashed = trash::get(pool, &image.id)?;
        // Otherwise an operator moved it there.
        let is_ours = !trashed.has_expiry();
        let Some(age) = self.age(trashed.deleted).filter(|_| is_ours) else {
            return Ok(None);
        };
        let open = Image::open_by_id(pool, &image.id, OpenMode::ReadOnly)?;
        let kept = kept_by(pool, &trashed.name, &open)?;
        if kept.is_empty() {
            return Ok(None);
        }
        let orphan = self.orphan(Kind::Trashed, pool, trashed.name);
        Ok(Some(Candidate {
            orphan: Orphan {
                age: Some(age),
                why: format!(
                    "it was deleted, and stays in the trash, with the id {}",
                    image.id
                ),
                kept: format!("{kept}; then it is removed by itself"),
                ..orphan
            },
            pool: pool.clone(),
            subject: Subject::Trashed(image.clone()),
        }))
    }

    pub(super) fn orphan(&self, kind: Kind, pool: &IoCtx, name: String) -> Orphan {
        Orphan {
            kind,
            cluster_id: self.link.config.cluster_id.clone(),
            fsid: self.link.cluster.fsid().to_owned(),
            pool: pool.pool().to_owned(),
            namespace: pool.namespace().to_owned(),
            name,
            age: None,
            why: String::new(),
            kept: String::new(),
        }
    }
}

/// Enters why an image without an entry must stay, if it must.
fn keep_image(
    pool: &IoCtx,
    name: &str,
    image: &Image,
    orphan: &mut Orphan,
) -> Result<(), RbdError> {
    let header = Header::of(pool, name)?;
    let role = if header.is_mirrored()? {
        image.mirroring()?
    } else {
        Mirroring::None
    };
    orphan.kept = match role {
        Mirroring::Secondary => {
            orphan.kind = Kind::Secondary;
            "its volume may be at the primary image's site: rbd-mirror removes it with the \
             primary image; else end the mirroring (rbd mirror image disable --force) first"
                .to_owned()
        }
        Mirroring::Ending => "its mirroring ends".to_owned(),
        Mirroring::Primary => "it is mirrored, and may be a volume that failed over and has \
                               no entry yet: end the mirroring (rbd mirror image disable) \
                               first"
            .to_owned(),
        Mirroring::None if header.is_grouped()? => {
            format!("it is a member of group {:?}", image.group()?)
        }
        Mirroring::None => kept_by(pool, name, image)?,
    };
    Ok(())
}

/// What keeps an image from being removed; empty: nothing does.
fn kept_by(pool: &IoCtx, name: &str, image: &Image) -> Result<String, RbdError> {
    let watchers = image.watchers()?.into_iter().filter(|one| !one.own);
    let watchers: Vec<_> = watchers.map(|one| one.address).collect();
    if !watchers.is_empty() {
        return Ok(format!(
            "it is in use by {}: unmap it there",
            watchers.join(", ")
        ));
    }
    let (_, others) = sort_snapshots(pool, name, image)?;
    if !others.is_empty() {
        return Ok(format!(
            "it has the snapshots {}, which no copy of this driver has left; remove them (rbd \
             snap rm)",
            others.join(", ")
        ));
    }
    Ok(String::new())
}
