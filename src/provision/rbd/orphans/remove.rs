//! Removing one orphan, by its name.
//!
//! The cluster is surveyed anew, and the orphan looked at once more under the lock that
//! creates and deletes of its name take. What belongs to an attempt is removed as the next
//! create of that name would, so a controller that still works on it finds that it was
//! abandoned ([`Attempt`]). An image is moved to the trash, and purged from there.

use super::{
    super::{
        super::ProvisionError, RbdStore, attempt::Attempt, copies::temporary, error::RbdError,
    },
    KINDS, Named, Survey,
    look::{Candidate, Subject},
};
use crate::{
    Done,
    ceph::{
        client::{
            rados::IoCtx,
            rbd::{self, Remains},
        },
        csi_format::journal::{CreateState, JournalEntry},
    },
    secret::Secrets,
};

impl RbdStore {
    /// Removes the orphan of that path, `pool[/namespace]/name`. Already: nothing has the
    /// name.
    pub fn remove_orphan(&self, cluster_id: &str, path: &str) -> Result<Done, ProvisionError> {
        let _delete = self.purger.deletes.begin();
        let cluster_ids = self.orphan_clusters()?;
        let cluster_id = match (cluster_id, cluster_ids.as_slice()) {
            ("", [only]) => only,
            ("", _) => return Err(kept(path, "name its cluster (--cluster ID)").into()),
            (named, _) => named,
        };
        let mut survey = Survey::of(self, cluster_id)?;
        let found = survey.find()?;
        let (pool, name) = survey.split(path)?;
        let matching = found.into_iter().filter(|one| one.orphan.path() == path);
        // A deleted image may have the name of a later one.
        let Some(orphan) = matching.min_by_key(|one| !one.orphan.kept.is_empty()) else {
            return Ok(survey.explain(path, &pool, &name)?);
        };
        survey.remove(&orphan)?;
        let kind = orphan.orphan.kind;
        tracing::info!(orphan = path, %kind, why = orphan.orphan.why, "removed an orphan");
        Ok(Done::Now)
    }
}

const COMPLETED: &str = "it was completed a moment ago";

fn kept(path: &str, why: impl Into<String>) -> RbdError {
    RbdError::NoOrphan {
        path: path.to_owned(),
        why: why.into(),
    }
}

impl Survey<'_> {
    /// The pool and the name of a path.
    fn split(&self, path: &str) -> Result<(IoCtx, String), RbdError> {
        let named = self.pools.iter().filter_map(|pool| {
            let name = path.strip_prefix(&pool.to_string())?.strip_prefix('/')?;
            Some((pool.clone(), name.to_owned()))
        });
        // The names of pools may begin alike.
        named
            .min_by_key(|(_, name)| name.len())
            .filter(|(_, name)| !name.is_empty())
            .ok_or_else(|| RbdError::NoPool {
                cluster_id: self.link.config.cluster_id.clone(),
                pool: path.split('/').next().unwrap_or_default().to_owned(),
            })
    }

    /// Refuses what exists and is no orphan.
    fn explain(&self, path: &str, pool: &IoCtx, name: &str) -> Result<Done, RbdError> {
        let there = "a volume or a snapshot refers to it, or it is too young, or not this driver's";
        if rbd::remains(pool, name)? != Remains::Nothing {
            return Err(kept(path, there));
        }
        if let Some((uuid, _)) = self.uuid_in(name) {
            for kind in KINDS {
                if self.store.journal(kind).read(pool, uuid)?.is_some() {
                    return Err(kept(path, there));
                }
            }
        }
        for kind in KINDS {
            let journal = self.store.journal(kind);
            let Some(bare) = name.strip_prefix(&journal.key("")) else {
                continue;
            };
            if journal.find(pool, bare)?.is_some() {
                return Err(kept(path, there));
            }
        }
        if self.is_group(pool, name)? {
            return Err(kept(path, there));
        }
        Ok(Done::Already)
    }

    fn remove(&self, found: &Candidate) -> Result<(), ProvisionError> {
        let path = found.orphan.path();
        let _name = match &found.subject {
            Subject::Named(it) | Subject::Entry(it) => {
                Some(self.store.names.lock_on_lane(&it.lock()))
            }
            Subject::Group(it) => Some(self.store.names.lock_on_lane(&it.lock())),
            Subject::Image(_) | Subject::Trashed(_) => None,
        };
        let Some(now) = self.look_again(found)? else {
            return Err(kept(&path, "it has changed a moment ago; list the orphans again").into());
        };
        if !now.orphan.kept.is_empty() {
            return Err(kept(&path, now.orphan.kept).into());
        }
        match &now.subject {
            Subject::Named(it) | Subject::Entry(it) => self.undo(&path, it)?,
            Subject::Image(name) => {
                let images = [temporary(name), name.clone()];
                self.store.take_back(&now.pool, &images)?;
            }
            Subject::Trashed(_) => return Err(kept(&path, "it is in the trash already").into()),
            Subject::Group(it) if self.remove_group(it, now.orphan.kind)? => {}
            Subject::Group(_) => return Err(kept(&path, COMPLETED).into()),
        }
        Ok(())
    }

    /// Removes an attempt: its images, its name, its entry.
    fn undo(&self, path: &str, it: &Named) -> Result<(), RbdError> {
        let journal = self.store.journal(it.kind);
        let Some(pool) = &it.pool else {
            return Ok(journal.remove_name(&it.directory, &it.name, it.reserved)?);
        };
        let attempt = Attempt {
            store: self.store,
            link: &self.link,
            journal,
            directory: &it.directory,
            pool,
            name: &it.name,
            reserved: it.reserved,
            secrets: &Secrets::default(),
        };
        match &it.entry {
            Some(
                entry @ JournalEntry {
                    state: CreateState::None,
                    ..
                },
            ) => attempt.give_up(entry),
            _ if attempt.abandon(None)? => Ok(()),
            _ => Err(kept(path, COMPLETED)),
        }
    }
}
