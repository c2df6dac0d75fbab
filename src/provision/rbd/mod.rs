//! Volumes as images in Ceph clusters (RBD), kept as ceph-csi keeps them, so that
//! each of the two drivers can go on with what the other made.
//!
//! ```text
//! store      clusters and journals; lookup: what a handle leads to in them
//! class      the parameters of a storage class; topology, qos, encryption
//! create     one CreateVolume; attempt: of which only one comes to its end
//! volumes    delete, grow, change
//! copies     clones; flatten: the length of their chains
//! snapshots  images that show a moment
//! fencing    nodes that do not let go of a volume
//! trash      what was deleted, emptied in the background, after all deletes
//! listing    for calls without secrets
//! ```
//!
//! A request carries the user and key of its cluster in its secrets; connections
//! are shared and kept ([`crate::ceph::client::connections`]). Calls that CSI gives no
//! secrets use those that the controller was given ([`SecretDir`]), and are not
//! announced without.
//!
//! All of it blocks and runs on lanes, in turns: calls for one handle or name one
//! after the other, all others at once.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
    sync::Mutex,
    time::{Duration, Instant},
};

use super::{
    Abilities, Ailment, Capacity, Error, Listing, NewSnapshot, NewVolume, Page, Provisioner,
    Publication, Published, Range, RoomFor, Snapshot, Usage, Volume,
    keyed::{Turns, snapshot_named, volume_named},
};
use crate::{
    ceph::{
        client::{connections::Connections, rados::Timeouts},
        csi_format::{
            config::{Clusters, Mappings},
            encryption::KmsConfig,
            journal::{Journal, Kind},
        },
    },
    lane::Lanes,
    secret::Secrets,
};

mod attempt;
mod class;
mod copies;
mod create;
mod deletes;
mod encryption;
mod error;
mod fencing;
mod flatten;
mod found;
mod listing;
mod lookup;
mod notes;
mod operators;
mod qos;
mod size;
mod snapshots;
mod store;
mod topology;
mod trash;
mod volumes;

pub use error::RbdError;
pub use flatten::Bounds;
pub use operators::{Operators, SecretDir};

use fencing::{Fencing, Release};
use flatten::Flattener;
use store::Store;
use trash::Bin;

/// How the controller was started.
#[derive(Debug)]
pub struct Settings<'a> {
    /// ceph-csi's `config.json`.
    pub config: &'a Path,
    /// ceph-csi's `cluster-mapping.json`, which need not exist.
    pub mapping: &'a Path,
    /// ceph-csi's configuration of key management systems.
    pub kms_config: &'a Path,
    /// Which journal: ceph-csi's `--instanceid`.
    pub instance: &'a str,
    /// The users for calls without secrets.
    pub operators: Operators,
    /// How long a node may take to let go of a volume that is unpublished from it,
    /// before it is fenced; none: nobody is.
    pub fence_after: Option<Duration>,
}

/// The provisioner of RBD images.
#[derive(Clone, Debug)]
pub struct Rbd {
    turns: Turns<Store>,
}

impl Rbd {
    /// Connects to nothing yet.
    pub fn new(settings: Settings<'_>, lanes: Lanes) -> io::Result<Self> {
        let store = Store {
            clusters: Clusters::new(settings.config),
            mappings: Mappings::new(settings.mapping),
            connections: Connections::new(Timeouts::default())?,
            operators: settings.operators,
            volumes: Journal::new(Kind::Volume, settings.instance),
            snapshots: Journal::new(Kind::Snapshot, settings.instance),
            kms: KmsConfig::new(settings.kms_config),
            bin: Bin::new(lanes.clone()),
            flattener: Flattener::new(lanes.clone(), Bounds::default()),
            fencing: Fencing::new(settings.fence_after),
            used: Mutex::default(),
        };
        let turns = Turns::new(store, lanes);
        Ok(Self { turns })
    }

    /// Empties the trash where an earlier attempt, or an earlier controller, did
    /// not; to be called at the start and every now and then. Says what could not
    /// be looked at.
    pub async fn sweep(&self) -> Vec<Error> {
        let errors = self.turns.run("sweep", "sweep", Store::sweep).await;
        errors.into_iter().map(Error::from).collect()
    }

    /// Says what is wrong with the files that this controller was given, if anything
    /// is; a cluster that is down leaves the others of use.
    pub async fn check(&self) -> Result<(), Error> {
        let read = |store: &Store| {
            store.clusters.check()?;
            store.operators.check()
        };
        let checked: Result<(), RbdError> = self.turns.run("check", "check", read).await;
        Ok(checked?)
    }
}

#[tonic::async_trait]
impl Provisioner for Rbd {
    fn abilities(&self) -> Abilities {
        Abilities {
            lists: self.turns.store().operators.any(),
            modifies: true,
            publishes: self.turns.store().fencing.after.is_some(),
        }
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume, Error> {
        let turn = volume_named(&new.name);
        self.turns
            .run(&turn, "create", move |store| store.create_volume(&new))
            .await
    }

    async fn delete_volume(&self, handle: String, secrets: Secrets) -> Result<(), Error> {
        let _delete = self.turns.store().bin.deletes.begin();
        let all = self
            .turns
            .run(&handle.clone(), "look up", move |store| {
                store.all_of_volume(&handle, &secrets)
            })
            .await?;
        for found in all {
            // A create of that name must not go on with it meanwhile.
            let turn = found
                .name()
                .map_or_else(|| found.handle.clone(), volume_named);
            self.turns
                .run(&turn, "delete", move |store| store.delete_volume(&found))
                .await?;
        }
        Ok(())
    }

    async fn expand_volume(
        &self,
        handle: String,
        range: Range,
        secrets: Secrets,
    ) -> Result<u64, Error> {
        self.turns
            .run(&handle.clone(), "expand", move |store| {
                store.expand_volume(&handle, range, &secrets)
            })
            .await
    }

    async fn modify_volume(
        &self,
        handle: String,
        mutable: HashMap<String, String>,
        secrets: Secrets,
    ) -> Result<(), Error> {
        self.turns
            .run(&handle.clone(), "modify", move |store| {
                store.modify_volume(&handle, &mutable, &secrets)
            })
            .await
    }

    async fn publish_volume(&self, new: Publication) -> Result<BTreeMap<String, String>, Error> {
        self.turns
            .run(&new.handle.clone(), "publish", move |store| {
                store.publish_volume(&new)
            })
            .await
    }

    async fn unpublish_volume(
        &self,
        handle: String,
        node: String,
        within: Duration,
        secrets: Secrets,
    ) -> Result<(), Error> {
        let until = Instant::now() + within;
        loop {
            let (handle, node, secrets) = (handle.clone(), node.clone(), secrets.clone());
            let release = self
                .turns
                .run(&handle.clone(), "unpublish", move |store| {
                    store.unpublish_volume(&handle, &node, &secrets)
                })
                .await?;
            match release {
                Release::Done => return Ok(()),
                Release::Waits(_, soon) if Instant::now() + soon < until => {
                    tokio::time::sleep(soon).await;
                }
                Release::Waits(error, _) => return Err(error.into()),
            }
        }
    }

    async fn get_volume(&self, handle: String) -> Result<Published, Error> {
        self.turns
            .run(&handle.clone(), "look up", move |store| {
                store.get_volume(&handle)
            })
            .await
    }

    async fn list_volumes(&self, what: Listing) -> Result<Page<Volume>, Error> {
        self.turns
            .run("list volumes", "list", move |store| {
                store.list_volumes(&what)
            })
            .await
    }

    async fn check_usages(
        &self,
        handle: String,
        usages: Vec<Usage>,
        parameters: HashMap<String, String>,
        secrets: Secrets,
    ) -> Result<Option<String>, Error> {
        self.turns
            .run(&handle.clone(), "check", move |store| {
                store.check_usages(&handle, &usages, &parameters, &secrets)
            })
            .await
    }

    async fn volume_ailment(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<Option<Ailment>, Error> {
        self.turns
            .run(&handle.clone(), "look up", move |store| {
                store.volume_ailment(&handle, &secrets)
            })
            .await
    }

    async fn capacity(&self, room: RoomFor) -> Result<Capacity, Error> {
        // So that a cluster that is slow holds up no other.
        let cluster_id = room.parameters.get("clusterID");
        let turn = format!("capacity of {}", cluster_id.map_or("", String::as_str));
        self.turns
            .run(&turn, "capacity", move |store| store.capacity(&room))
            .await
    }

    async fn create_snapshot(&self, new: NewSnapshot) -> Result<Snapshot, Error> {
        let turn = snapshot_named(&new.name);
        self.turns
            .run(&turn, "snapshot", move |store| store.create_snapshot(&new))
            .await
    }

    async fn delete_snapshot(&self, handle: String, secrets: Secrets) -> Result<(), Error> {
        let _delete = self.turns.store().bin.deletes.begin();
        let all = self
            .turns
            .run(&handle.clone(), "look up", move |store| {
                store.all_of_snapshot(&handle, &secrets)
            })
            .await?;
        for found in all {
            let turn = found
                .name()
                .map_or_else(|| found.handle.clone(), snapshot_named);
            self.turns
                .run(&turn, "delete", move |store| store.delete_snapshot(&found))
                .await?;
        }
        Ok(())
    }

    async fn get_snapshot(&self, handle: String, secrets: Secrets) -> Result<Snapshot, Error> {
        self.turns
            .run(&handle.clone(), "look up", move |store| {
                store.get_snapshot(&handle, &secrets)
            })
            .await
    }

    async fn list_snapshots(
        &self,
        what: Listing,
        volume: Option<String>,
        secrets: Secrets,
    ) -> Result<Page<Snapshot>, Error> {
        self.turns
            .run("list snapshots", "list", move |store| {
                store.list_snapshots(&what, volume.as_deref(), &secrets)
            })
            .await
    }
}

#[cfg(test)]
mod tests;
