//! Volumes as raw image files in pools.
//!
//! A create goes through these steps, each durable before the next:
//!
//! ```text
//! 1. reserve    the name gets a random id           names/<hash>.json, locked
//! 2. build      size, data, allocation              tmp/<draft>, locked
//! 3. announce   the record says `making`            volumes/<id>.json
//! 4. place      the image gets its name             POOL/<id>.img
//! 5. record     the record says `ready`: complete
//! ```
//!
//! and a delete through these:
//!
//! ```text
//! 1. claim      nobody has it attached, nobody may  claims/<id>.img/…
//! 2. mark       the record says `deleting`
//! 3. erase      image, reservation, record; then the claims
//! ```
//!
//! A failure undoes its create; a crash leaves what [`catalogue`] can tell
//! apart, and the next equal call, or the next start ([`Images::sweep`]),
//! finishes or undoes it. The truth of a volume's size is its file's size.
//!
//! Nodes attach images as loop devices, or, with `backend: nbd`, as exports of an
//! NBD server over the pool's directory. Which of the two is part of a volume's
//! record; all else is the same, but for how it is known who uses an image:
//! claims beside it, or [`writers`]. Exports are named by files directly in that
//! directory, so a server shows complete images only.
//!
//! Images are thin: a sparse file takes space as it is written. What is promised
//! counts as taken, in [`Provisioner::capacity`] and where a volume is made or
//! grown, unless its class says `overcommit`; only `preallocate` makes sure.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::{
    Abilities, Ailment, Capacity, Error, Kind, Listing, NewSnapshot, NewVolume, Page, Provisioner,
    Publication, Published, Range, RoomFor, Snapshot, Usage, Volume,
    keyed::{Turns, snapshot_named, volume_named},
};
use crate::{lane::Lanes, pool::Pools, secret::Secrets};

mod capacity;
mod catalogue;
mod listing;
mod origin;
mod snapshots;
mod store;
mod sweep;
mod volumes;
mod writers;

use store::Store;

/// The provisioner of image files.
#[derive(Clone, Debug)]
pub struct Images {
    turns: Turns<Store>,
}

impl Images {
    /// Over these pools; `node_id` is that of the node of local pools, and
    /// `boot_id` that of the running kernel.
    pub fn new(pools: Pools, node_id: Option<String>, boot_id: String, lanes: Lanes) -> Self {
        let store = Store {
            pools,
            node_id,
            boot_id,
        };
        let turns = Turns::new(store, lanes);
        Self { turns }
    }

    /// Finishes or undoes what dead controllers left, and says what could not
    /// be dealt with. Live calls, here and in other controllers, are not
    /// touched.
    pub async fn sweep(&self) -> Vec<Error> {
        self.turns.run("sweep", "sweep", Store::sweep).await
    }

    /// Says why a pool cannot be used, if one cannot.
    pub async fn check(&self) -> Result<(), Error> {
        self.turns.run("check", "check", Store::check).await
    }
}

#[tonic::async_trait]
impl Provisioner for Images {
    fn abilities(&self) -> Abilities {
        Abilities {
            lists: true,
            modifies: false,
            publishes: false,
        }
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume, Error> {
        refuse_any(&new.mutable, "none that can be changed later")?;
        let turn = volume_named(&new.name);
        self.turns
            .run(&turn, "create", move |store| store.create_volume(&new))
            .await
    }

    async fn delete_volume(&self, handle: String, _: Secrets) -> Result<(), Error> {
        self.turns
            .run(&handle.clone(), "delete", move |store| {
                store.delete_volume(&handle)
            })
            .await
    }

    async fn modify_volume(
        &self,
        _: String,
        mutable: HashMap<String, String>,
        _: Secrets,
    ) -> Result<(), Error> {
        refuse_any(&mutable, "none that can be changed later")
    }

    async fn expand_volume(&self, handle: String, range: Range, _: Secrets) -> Result<u64, Error> {
        self.turns
            .run(&handle.clone(), "expand", move |store| {
                store.expand_volume(&handle, range)
            })
            .await
    }

    /// Nodes claim images by themselves.
    async fn publish_volume(&self, new: Publication) -> Result<BTreeMap<String, String>, Error> {
        match self.get_volume(new.handle).await {
            // It may be in the local pool of another node.
            Err(error) if error.kind() != Kind::NotFound => Ok(BTreeMap::new()),
            found => found.map(|_| BTreeMap::new()),
        }
    }

    async fn unpublish_volume(
        &self,
        _: String,
        _: String,
        _: Duration,
        _: Secrets,
    ) -> Result<(), Error> {
        Ok(())
    }

    async fn get_volume(&self, handle: String) -> Result<Published, Error> {
        self.turns
            .run(&handle.clone(), "look up", move |store| {
                store.get_volume(&handle)
            })
            .await
    }

    async fn list_volumes(&self, what: Listing) -> Result<Page<Volume>, Error> {
        self.page_of_volumes(&what).await
    }

    async fn check_usages(
        &self,
        handle: String,
        usages: Vec<Usage>,
        parameters: HashMap<String, String>,
        _: Secrets,
    ) -> Result<Option<String>, Error> {
        self.turns
            .run(&handle.clone(), "check", move |store| {
                store.check_usages(&handle, &usages, &parameters)
            })
            .await
    }

    async fn volume_ailment(&self, handle: String, _: Secrets) -> Result<Option<Ailment>, Error> {
        self.turns
            .run(&handle.clone(), "look up", move |store| {
                store.volume_ailment(&handle)
            })
            .await
    }

    async fn capacity(&self, room: RoomFor) -> Result<Capacity, Error> {
        self.turns
            .run("capacity", "capacity", move |store| {
                store.capacity(&room.parameters, &room.usages, room.here_will_do)
            })
            .await
    }

    async fn create_snapshot(&self, new: NewSnapshot) -> Result<Snapshot, Error> {
        refuse_any(&new.parameters, "none for snapshots")?;
        let NewSnapshot { name, volume, .. } = new;
        let turn = snapshot_named(&name);
        self.turns
            .run(&turn, "snapshot", move |store| {
                store.create_snapshot(&name, &volume)
            })
            .await
    }

    async fn delete_snapshot(&self, handle: String, _: Secrets) -> Result<(), Error> {
        self.turns
            .run(&handle.clone(), "delete", move |store| {
                store.delete_snapshot(&handle)
            })
            .await
    }

    async fn get_snapshot(&self, handle: String, _: Secrets) -> Result<Snapshot, Error> {
        self.turns
            .run(&handle.clone(), "look up", move |store| {
                store.get_snapshot(&handle)
            })
            .await
    }

    async fn list_snapshots(
        &self,
        what: Listing,
        volume: Option<String>,
        _: Secrets,
    ) -> Result<Page<Snapshot>, Error> {
        self.page_of_snapshots(&what, volume).await
    }
}

/// Refuses parameters where there are none.
fn refuse_any(parameters: &HashMap<String, String>, known: &str) -> Result<(), Error> {
    match parameters.keys().min() {
        None => Ok(()),
        Some(name) => Err(Error::UnknownParameter {
            name: name.clone(),
            known: known.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests;
