//! Orphans: what no volume and no snapshot refers to, or what one refers to and is gone.
//!
//! ```text
//! incomplete   name → entry, no image id: its create was given up; or the entry of a group
//!              snapshot that is not complete (`groups`)
//! nameless     the same entry, and no name leads to it
//! name         name → no entry, no pool, or an entry of another name
//! lost         name → entry → no image
//! image        an image with a uuid of ours, and no entry
//! temporary    …-temp, without the copy that it was made for
//! trashed      deleted, and a user's snapshot or a client keeps it in the trash
//! secondary    an image without an entry that follows a primary one
//! ```
//!
//! A [`Survey`] reads the names, entries and images of one cluster, as the user of
//! `--ceph-secret`, then looks at each (`look`), and once more at those that seem to be
//! orphans, since calls go on meanwhile. What is younger than `quiet_for` is none: a create
//! or a delete may be under way, of another controller, too.
//!
//! Doubt keeps everything. A complete entry without a name may have its name in another
//! instance's journal (`--instanceid`), so it refers to its image all the same. An entry
//! without both name and image is not found: only a list of all objects of the pool would
//! show it.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::{Duration, SystemTime},
};

use serde_json::json;
use uuid::Uuid;

use super::{
    super::{
        OrphanReport,
        serialized::{group_snapshot_named, snapshot_named, volume_named},
    },
    RbdStore, age_of,
    error::RbdError,
    found::ClusterConnection,
    listing::{BATCH, pools},
    trash::{self, Discarded},
};
use crate::{
    ceph::{
        client::{rados::IoCtx, rbd},
        csi_format::journal::{
            Journal, JournalEntry, JournalError, JournalKind, NameEntry, TEMPORARY,
        },
    },
    error_chain,
    secret::Secrets,
};

mod groups;
mod look;
mod remove;

use look::Candidate;

/// A name in a journal, with its entry; or an entry that has lost its name.
#[derive(Clone, Debug)]
pub struct Named {
    kind: JournalKind,
    /// The pool of the name.
    directory: IoCtx,
    name: String,
    reserved: NameEntry,
    /// The pool of the entry; none: it was deleted.
    pool: Option<IoCtx>,
    entry: Option<JournalEntry>,
}

impl Named {
    /// The lock of creates and deletes of that name.
    fn lock(&self) -> String {
        match self.kind {
            JournalKind::Volume => volume_named(&self.name),
            JournalKind::Snapshot => snapshot_named(&self.name),
            JournalKind::Group => group_snapshot_named(&self.name),
        }
    }
}

/// The name of a group snapshot. Its entry is in the same pool.
#[derive(Clone, Debug)]
pub struct NamedGroup {
    pool: IoCtx,
    name: String,
    reserved: NameEntry,
}

impl NamedGroup {
    /// The lock of creates and deletes of that name.
    fn lock(&self) -> String {
        group_snapshot_named(&self.name)
    }
}

/// What is in a cluster, in the namespace that is configured.
pub struct Survey<'a> {
    store: &'a RbdStore,
    link: ClusterConnection,
    /// The pools that this user may read.
    pools: Vec<IoCtx>,
    /// Whether these are all.
    is_whole: bool,
    names: Vec<Named>,
    /// The names of group snapshots.
    groups: Vec<NamedGroup>,
    /// The entries that have a name.
    entered: HashSet<(i64, Uuid)>,
    /// The names of the images, by pool.
    images: HashMap<i64, BTreeSet<String>>,
    /// The prefixes of images' names: the default ones, and those that entries show.
    prefixes: BTreeSet<String>,
    /// What could not be looked at.
    omitted: Vec<String>,
}

impl RbdStore {
    /// The clusters of the configuration.
    pub fn orphan_clusters(&self) -> Result<Vec<String>, RbdError> {
        let all = self.clusters.all()?;
        Ok(all.iter().map(|one| one.cluster_id.clone()).collect())
    }

    /// The orphans of a cluster. Changes nothing.
    pub fn orphans(&self, cluster_id: &str) -> Result<OrphanReport, RbdError> {
        let mut survey = Survey::of(self, cluster_id)?;
        let found = survey.find()?;
        Ok(OrphanReport {
            orphans: found.into_iter().map(|one| one.orphan).collect(),
            omitted: survey.omitted,
        })
    }

    fn journal(&self, kind: JournalKind) -> &Journal {
        match kind {
            JournalKind::Volume => &self.volumes,
            JournalKind::Snapshot => &self.snapshots,
            JournalKind::Group => &self.groups,
        }
    }
}

impl<'a> Survey<'a> {
    fn of(store: &'a RbdStore, cluster_id: &str) -> Result<Self, RbdError> {
        let link = store.link(cluster_id, &Secrets::default())?;
        let mut survey = Self {
            store,
            link,
            pools: Vec::new(),
            is_whole: true,
            names: Vec::new(),
            groups: Vec::new(),
            entered: HashSet::new(),
            images: HashMap::new(),
            prefixes: KINDS
                .map(|kind| prefix_of(&kind.image(None, Uuid::nil())))
                .into(),
            omitted: Vec::new(),
        };
        let others = pools_of_others(&survey.link)?;
        for pool in pools(&survey.link)? {
            if others.contains(pool.pool()) {
                continue;
            }
            match survey.read(&pool) {
                Ok(()) => survey.pools.push(pool),
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    survey.is_whole = false;
                    survey.omit(&format!("pool {pool}"), error)?;
                }
            }
        }
        Ok(survey)
    }

    /// Reads a pool's images and names, with their entries.
    fn read(&mut self, pool: &IoCtx) -> Result<(), RbdError> {
        let images = rbd::list(pool)?.into_iter().map(|image| image.name);
        self.images.insert(pool.pool_id(), images.collect());
        for kind in KINDS {
            let mut next = Some(String::new());
            while let Some(after) = next {
                let page = self.store.journal(kind).page(pool, &after, BATCH)?;
                next = page.next;
                for (name, reserved) in page.names {
                    match self.named(kind, pool, &name, reserved) {
                        Ok(read) => self.enter(read),
                        Err(error) => self.omit(&format!("name {name:?} of pool {pool}"), error)?,
                    }
                }
            }
        }
        let mut next = Some(String::new());
        while let Some(after) = next {
            let page = self.store.groups.page(pool, &after, BATCH)?;
            next = page.next;
            for (name, reserved) in page.names {
                let pool = pool.clone();
                self.groups.push(NamedGroup {
                    pool,
                    name,
                    reserved,
                });
            }
        }
        Ok(())
    }

    fn enter(&mut self, named: Named) {
        if let (Some(pool), Some(entry)) = (&named.pool, &named.entry) {
            self.entered.insert((pool.pool_id(), named.reserved.uuid));
            if entry.image.ends_with(&named.reserved.uuid.to_string()) {
                self.prefixes.insert(prefix_of(&entry.image));
            }
        }
        self.names.push(named);
    }

    /// A name with its entry.
    fn named(
        &self,
        kind: JournalKind,
        directory: &IoCtx,
        name: &str,
        reserved: NameEntry,
    ) -> Result<Named, RbdError> {
        let pool = match reserved.pool_id.map(|id| self.link.pool(id)) {
            None => Some(directory.clone()),
            Some(Err(error)) if error.is_not_found() => None,
            Some(pool) => Some(pool?),
        };
        let journal = self.store.journal(kind);
        let entry = match &pool {
            Some(pool) => journal.read(pool, reserved.uuid)?,
            None => None,
        };
        Ok(Named {
            kind,
            directory: directory.clone(),
            name: name.to_owned(),
            reserved,
            pool,
            entry,
        })
    }

    /// Looks at everything, and twice at orphans.
    fn find(&mut self) -> Result<Vec<Candidate>, RbdError> {
        let mut seen = Vec::new();
        for named in std::mem::take(&mut self.names) {
            // Otherwise a create or delete of that name is under way here.
            if !self.store.names.is_held(&named.lock()) {
                seen.push(self.look_at_name(&named));
            }
        }
        for group in &self.groups {
            if !self.store.names.is_held(&group.lock()) {
                seen.push(self.look_at_group(group));
            }
        }
        for pool in &self.pools {
            for image in self.images.get(&pool.pool_id()).into_iter().flatten() {
                seen.push(self.look_at_image(pool, image));
            }
            match trash::listed(pool) {
                Ok(listed) => {
                    let looked = listed.into_iter().map(|(id, name)| {
                        let image = Discarded { id, name };
                        self.look_at_trashed(pool, &image)
                    });
                    seen.extend(looked);
                }
                Err(error) => seen.push(Err(error.into())),
            }
        }
        let mut found = Vec::new();
        for looked in seen {
            let again = match looked {
                Ok(Some(candidate)) => self.look_again(&candidate),
                looked => looked,
            };
            match again {
                Ok(candidate) => found.extend(candidate),
                Err(error) => self.omit("an orphan", error)?,
            }
        }
        Ok(found)
    }

    /// Leaves something out, and says so, unless it is gone, or not this user's. Fails where
    /// the cluster does not answer.
    fn omit(&mut self, what: &str, error: RbdError) -> Result<(), RbdError> {
        if error.is_uncertain() {
            return Err(error);
        }
        if !is_gone(&error) && !is_denied(&error) {
            let id = &self.link.config.cluster_id;
            let sentence = format!("cluster {id:?}, {what}: {}", error_chain(&error));
            self.omitted.push(sentence);
        }
        Ok(())
    }

    /// The age of what was made or changed at that time; none: it is too young to be an
    /// orphan.
    fn age(&self, since: SystemTime) -> Option<Duration> {
        let age = age_of(since);
        (age >= self.store.quiet_for).then_some(age)
    }

    /// The uuid in the name of an image of this driver or of ceph-csi, and the image that it
    /// was made for, if it is a temporary one.
    fn uuid_in<'n>(&self, image: &'n str) -> Option<(Uuid, Option<&'n str>)> {
        let copy = image.strip_suffix(TEMPORARY);
        let name = copy.unwrap_or(image);
        let text = name.get(name.len().checked_sub(UUID_LEN)?..)?;
        let uuid = Uuid::try_parse(text).ok()?;
        let is_ours = uuid.to_string() == text && self.prefixes.contains(&prefix_of(name));
        is_ours.then_some((uuid, copy))
    }
}

/// The pools of other applications than RBD: ceph-csi's journal for CephFS has entries of the
/// same names, without images.
fn pools_of_others(link: &ClusterConnection) -> Result<BTreeSet<String>, RbdError> {
    let command = json!({"prefix": "osd pool ls", "detail": "detail", "format": "json"});
    let pools = match link.cluster.mon_command(&command) {
        Err(error) if error.is_access_denied() => return Ok(BTreeSet::new()),
        answer => serde_json::from_slice::<serde_json::Value>(&answer?).unwrap_or_default(),
    };
    let is_of_another = |pool: &&serde_json::Value| {
        let applications = pool["application_metadata"].as_object();
        applications.is_some_and(|all| !all.is_empty() && !all.contains_key("rbd"))
    };
    let others = pools.as_array().into_iter().flatten().filter(is_of_another);
    let names = others.filter_map(|pool| pool["pool_name"].as_str());
    Ok(names.map(str::to_owned).collect())
}

const KINDS: [JournalKind; 2] = [JournalKind::Volume, JournalKind::Snapshot];

/// The length of a uuid's text.
const UUID_LEN: usize = 36;

/// What stands before the uuid in an image's name.
fn prefix_of(image: &str) -> String {
    let end = image.len().saturating_sub(UUID_LEN);
    image.get(..end).unwrap_or_default().to_owned()
}

/// Whether the object or pool was deleted meanwhile.
fn is_gone(error: &RbdError) -> bool {
    match error {
        RbdError::Journal(JournalError::Ceph(error)) => error.is_not_found(),
        error => error.is_not_found(),
    }
}

/// Whether the user may not read it.
fn is_denied(error: &RbdError) -> bool {
    match error {
        RbdError::Journal(JournalError::Ceph(error)) => error.is_access_denied(),
        error => error.is_access_denied(),
    }
}
