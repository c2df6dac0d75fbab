//! Which of the controller's backends answers a call.
//!
//! A handle says by its form whose it is, a class by its parameter `clusterID`.
//! Listings go through one backend after the other, and their tokens say in
//! which of them they go on. What belongs to a backend that the controller was
//! not started with is refused with the option that is missing: to call it gone
//! would leak it.

use std::{
    collections::{BTreeMap, HashMap},
    str::FromStr as _,
    time::Duration,
};

use futures_util::future::BoxFuture;

use super::{
    Abilities, Ailment, Capacity, Error, Listing, NewSnapshot, NewVolume, Page, Provisioner,
    Publication, Published, Range, RoomFor, Snapshot, Usage, Volume, images::Images, rbd::Rbd,
};
use crate::{
    ceph::csi_format::handle::is_ours as is_ceph_s,
    pool::handle::{SnapshotHandle, VolumeHandle},
    secret::Secrets,
};

/// All backends of a controller, behind one face.
#[derive(Clone, Debug, Default)]
pub struct Backends {
    /// Image files: `--pool`.
    pub images: Option<Images>,
    /// Images in Ceph clusters: `--ceph-config`.
    pub rbd: Option<Rbd>,
}

/// One of them. The order is that of listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Images,
    Rbd,
}

impl Backend {
    const ALL: [Self; 2] = [Self::Images, Self::Rbd];

    /// What begins a token of its listings.
    fn prefix(self) -> &'static str {
        match self {
            Self::Images => "images.",
            Self::Rbd => "rbd.",
        }
    }

    /// The option that starts a controller with it.
    fn option(self) -> &'static str {
        match self {
            Self::Images => "--pool",
            Self::Rbd => "--ceph-config",
        }
    }

    /// Whose form a handle has.
    fn of_handle(handle: &str) -> Option<Self> {
        let is_of_a_pool =
            VolumeHandle::from_str(handle).is_ok() || SnapshotHandle::from_str(handle).is_ok();
        match handle {
            _ if is_of_a_pool => Some(Self::Images),
            _ if is_ceph_s(handle) => Some(Self::Rbd),
            _ => None,
        }
    }

    /// Whose class has these parameters; none: they do not say.
    fn of_class(parameters: &HashMap<String, String>) -> Option<Self> {
        let is_rbd = parameters.contains_key("clusterID")
            || parameters.get("backend").is_some_and(|name| name == "rbd");
        match parameters.len() {
            _ if is_rbd => Some(Self::Rbd),
            0 => None,
            _ => Some(Self::Images),
        }
    }
}

impl Backends {
    /// Says why a backend is of no use, if one is.
    pub async fn check(&self) -> Result<(), Error> {
        if let Some(images) = &self.images {
            images.check().await?;
        }
        match &self.rbd {
            Some(rbd) => rbd.check().await,
            None => Ok(()),
        }
    }

    fn get(&self, backend: Backend) -> Option<&dyn Provisioner> {
        match backend {
            Backend::Images => self.images.as_ref().map(|it| it as &dyn Provisioner),
            Backend::Rbd => self.rbd.as_ref().map(|it| it as &dyn Provisioner),
        }
    }

    fn there(&self) -> impl Iterator<Item = (Backend, &dyn Provisioner)> {
        let present = |backend| Some((backend, self.get(backend)?));
        Backend::ALL.into_iter().filter_map(present)
    }

    /// The one that is asked where nothing says which.
    fn any(&self) -> Result<&dyn Provisioner, Error> {
        let first = self.there().next();
        first.map(|(_, it)| it).ok_or(Error::NoBackend)
    }

    fn of_handle(&self, handle: &str) -> Result<&dyn Provisioner, Error> {
        let Some(backend) = Backend::of_handle(handle) else {
            return self.any();
        };
        self.get(backend).ok_or_else(|| Error::HandleOfNoBackend {
            handle: handle.to_owned(),
            option: backend.option(),
        })
    }

    fn of_class(&self, parameters: &HashMap<String, String>) -> Result<&dyn Provisioner, Error> {
        let Some(backend) = Backend::of_class(parameters) else {
            return self.any();
        };
        self.get(backend).ok_or_else(|| Error::ClassOfNoBackend {
            kind: match backend {
                Backend::Images => "has no clusterID: it is for image files",
                Backend::Rbd => "has a clusterID: it is for images in Ceph",
            },
            option: backend.option(),
        })
    }

    /// A page of a listing that goes through all backends.
    async fn page<'a, T>(
        &'a self,
        what: Listing,
        list: impl Fn(&'a dyn Provisioner, Listing) -> BoxFuture<'a, Result<Page<T>, Error>>,
    ) -> Result<Page<T>, Error> {
        let mut rest: Vec<_> = self.there().collect();
        let mut from = None;
        if let Some(token) = &what.from {
            let goes_on = |(backend, _): &(Backend, _)| token.starts_with(backend.prefix());
            let at = rest.iter().position(goes_on);
            let at = at.ok_or_else(|| Error::BadToken(token.clone()))?;
            rest.drain(..at);
            let own = &token[rest[0].0.prefix().len()..];
            from = Some(own.to_owned()).filter(|own| !own.is_empty());
        }
        let mut entries = Vec::new();
        for (backend, it) in rest {
            let prefix = backend.prefix();
            let max = match what.max {
                0 => 0,
                most if most == entries.len() => {
                    let next = Some(prefix.to_owned());
                    return Ok(Page { entries, next });
                }
                most => most - entries.len(),
            };
            let own = from.take();
            let omitted = what.omitted.clone();
            let own = Listing {
                from: own,
                max,
                omitted,
            };
            let page = list(it, own).await?;
            entries.extend(page.entries);
            if let Some(token) = page.next {
                let next = Some(format!("{prefix}{token}"));
                return Ok(Page { entries, next });
            }
        }
        let next = None;
        Ok(Page { entries, next })
    }
}

#[tonic::async_trait]
impl Provisioner for Backends {
    /// Listings are whole or not announced.
    fn abilities(&self) -> Abilities {
        let able: Vec<_> = self.there().map(|(_, it)| it.abilities()).collect();
        Abilities {
            lists: able.iter().all(|one| one.lists),
            modifies: able.iter().any(|one| one.modifies),
            publishes: able.iter().any(|one| one.publishes),
        }
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume, Error> {
        self.of_class(&new.parameters)?.create_volume(new).await
    }

    async fn delete_volume(&self, handle: String, secrets: Secrets) -> Result<(), Error> {
        let it = self.of_handle(&handle)?;
        it.delete_volume(handle, secrets).await
    }

    async fn expand_volume(
        &self,
        handle: String,
        range: Range,
        secrets: Secrets,
    ) -> Result<u64, Error> {
        let it = self.of_handle(&handle)?;
        it.expand_volume(handle, range, secrets).await
    }

    async fn modify_volume(
        &self,
        handle: String,
        mutable: HashMap<String, String>,
        secrets: Secrets,
    ) -> Result<(), Error> {
        let it = self.of_handle(&handle)?;
        it.modify_volume(handle, mutable, secrets).await
    }

    /// A static volume's handle may have any form; it is told by what the node is
    /// told of it, and nobody fences for it.
    async fn publish_volume(&self, new: Publication) -> Result<BTreeMap<String, String>, Error> {
        match Backend::of_handle(&new.handle) {
            None if new.context.is_empty() => Err(Error::NoVolume(new.handle)),
            None => Ok(BTreeMap::new()),
            Some(_) => self.of_handle(&new.handle)?.publish_volume(new).await,
        }
    }

    async fn unpublish_volume(
        &self,
        handle: String,
        node: String,
        within: Duration,
        secrets: Secrets,
    ) -> Result<(), Error> {
        if Backend::of_handle(&handle).is_none() {
            return Ok(());
        }
        let it = self.of_handle(&handle)?;
        it.unpublish_volume(handle, node, within, secrets).await
    }

    async fn get_volume(&self, handle: String) -> Result<Published, Error> {
        self.of_handle(&handle)?.get_volume(handle).await
    }

    async fn list_volumes(&self, what: Listing) -> Result<Page<Volume>, Error> {
        self.page(what, |it, what| it.list_volumes(what)).await
    }

    async fn check_usages(
        &self,
        handle: String,
        usages: Vec<Usage>,
        parameters: HashMap<String, String>,
        secrets: Secrets,
    ) -> Result<Option<String>, Error> {
        let it = self.of_handle(&handle)?;
        it.check_usages(handle, usages, parameters, secrets).await
    }

    async fn volume_ailment(
        &self,
        handle: String,
        secrets: Secrets,
    ) -> Result<Option<Ailment>, Error> {
        let it = self.of_handle(&handle)?;
        it.volume_ailment(handle, secrets).await
    }

    async fn capacity(&self, room: RoomFor) -> Result<Capacity, Error> {
        self.of_class(&room.parameters)?.capacity(room).await
    }

    async fn create_snapshot(&self, new: NewSnapshot) -> Result<Snapshot, Error> {
        self.of_handle(&new.volume)?.create_snapshot(new).await
    }

    async fn delete_snapshot(&self, handle: String, secrets: Secrets) -> Result<(), Error> {
        let it = self.of_handle(&handle)?;
        it.delete_snapshot(handle, secrets).await
    }

    async fn get_snapshot(&self, handle: String, secrets: Secrets) -> Result<Snapshot, Error> {
        let it = self.of_handle(&handle)?;
        it.get_snapshot(handle, secrets).await
    }

    async fn list_snapshots(
        &self,
        what: Listing,
        volume: Option<String>,
        secrets: Secrets,
    ) -> Result<Page<Snapshot>, Error> {
        self.page(what, |it, what| {
            it.list_snapshots(what, volume.clone(), secrets.clone())
        })
        .await
    }
}

#[cfg(test)]
mod tests;
