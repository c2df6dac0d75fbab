//! Mapping an image as a device: by which driver, and for a single writer only while no
//! other client has the image open.
//!
//! ```text
//!  one writer   no other client? ─ krbd maps ─ still no other client?
//!  others       krbd maps
//!  rbd-nbd      likewise; an image has krbd or rbd-nbd on a node, never both
//! ```

use std::{cell::OnceCell, sync::Once};

use super::{
    BoundCephImage, CephImageError, CephSource, Mounter,
    library::{OwnClient, QueriedImage},
    lower_device::LowerDevice,
    nbd_backed,
};
use crate::{
    Done,
    ceph::{
        client::{Credentials, connections::Connections},
        csi_format::config::ClusterConfig,
        krbd::{self, Greeting, ImageSpec, Monitors, RbdDevice, Wanted},
    },
    device::AttachOptions,
    secret::Secrets,
};

/// An image with its cluster and credentials, for one call.
pub struct Known<'a> {
    pub source: &'a CephSource,
    pub cluster: ClusterConfig,
    /// Where this node is in that cluster, if reads go to the nearest copy.
    location: Option<String>,
    pub credentials: Credentials,
    pub image: ImageSpec,
    /// The pool's id, where it is known.
    pub(super) pool_id: Option<i64>,
    /// The image in its cluster, opened once for all queries.
    queried: OnceCell<Option<QueriedImage>>,
}

impl Known<'_> {
    /// The image, for queries to its cluster; none where librbd is missing.
    pub fn queried(
        &self,
        connections: &Connections,
    ) -> Result<Option<&QueriedImage>, CephImageError> {
        if let Some(queried) = self.queried.get() {
            return Ok(queried.as_ref());
        }
        let queried = QueriedImage::of(connections, &self.cluster, &self.credentials, &self.image)?;
        Ok(self.queried.get_or_init(|| queried).as_ref())
    }

    pub(super) fn wanted<'a>(
        &'a self,
        options: &'a AttachOptions,
        monitors: &'a Monitors,
    ) -> Wanted<'a> {
        if self.cluster.read_affinity.enabled && self.location.is_none() {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                let cluster_id = &self.cluster.cluster_id;
                tracing::warn!(cluster_id, "readAffinity is enabled, but neither --crush-location nor a label of --node-labels tells where this node is: reads go to any replica");
            });
        }
        Wanted {
            image: &self.image,
            volume_id: &options.volume_id,
            pool_id: self.pool_id,
            fsid: None,
            features: self.source.features,
            monitors,
            credentials: &self.credentials,
            options: &self.source.map_options,
            location: self.location.as_deref(),
            read_only: options.read_only,
            net_namespace: self.cluster.net_namespace(),
        }
    }
}

impl BoundCephImage<'_> {
    /// Maps the image where it is: in its own cluster, or in one that stands in for
    /// that after a fail-over. It is called the same there, and so is its pool.
    pub(super) fn map_where_it_is(
        &self,
        options: &AttachOptions,
    ) -> Result<(Known<'_>, LowerDevice, Done), CephImageError> {
        let map = |known: &Known<'_>| self.map(known, options);
        let (known, (lower, done)) = self.where_it_is(&options.volume_id, &options.secrets, map)?;
        Ok((known, lower, done))
    }

    /// Works on the image where it is: where this node has mapped it, else in the first of
    /// these clusters that has it.
    pub(super) fn where_it_is<T>(
        &self,
        volume_id: &str,
        secrets: &Secrets,
        work: impl Fn(&Known<'_>) -> Result<T, CephImageError>,
    ) -> Result<(Known<'_>, T), CephImageError> {
        let at = |cluster_id: &str, pool_id| -> Result<_, CephImageError> {
            let known = self.known(cluster_id, pool_id, secrets)?;
            let done = work(&known)?;
            Ok((known, done))
        };
        let mut places = self.images.places_of(self.source);
        if places.len() > 1
            && let Some(monitors) = nbd_backed::monitors_of_device(volume_id)
        {
            // Its own cluster may have such an image again, or may not answer.
            places.sort_by_key(|(cluster_id, _)| !self.images.is_of(cluster_id, &monitors));
        }
        let mut errors = Vec::new();
        for (cluster_id, pool_id) in places {
            match at(&cluster_id, pool_id) {
                Err(error) if error.is_elsewhere() => errors.push(error),
                found => return found,
            }
        }
        if let Some(pool_id) = self.source.pool_id {
            // Where the mappings cannot be read, there may be more places.
            let own = &self.source.image.cluster_id;
            let _ = self.images.mappings.of(own, pool_id)?;
        }
        let told = errors.iter().position(CephImageError::has_other_device);
        Err(errors.swap_remove(told.unwrap_or(0)))
    }

    fn known(
        &self,
        cluster_id: &str,
        pool_id: Option<i64>,
        secrets: &Secrets,
    ) -> Result<Known<'_>, CephImageError> {
        let cluster = self.images.cluster(cluster_id)?;
        let mut image = self.source.image.clone();
        if image.namespace.is_empty() {
            image.namespace = cluster.rados_namespace.clone().unwrap_or_default();
        }
        Ok(Known {
            source: self.source,
            location: self.images.location.within(&cluster.read_affinity),
            credentials: Credentials::from_secrets(secrets)?,
            cluster,
            image,
            pool_id,
            queried: OnceCell::new(),
        })
    }

    fn map(
        &self,
        known: &Known<'_>,
        options: &AttachOptions,
    ) -> Result<(LowerDevice, Done), CephImageError> {
        let krbd = || {
            self.map_by_krbd(known, options)
                .map(|(device, done)| (device.into(), done))
        };
        match &self.source.mounter {
            Mounter::Krbd => krbd(),
            Mounter::RbdNbd(served) => self.serve(known, served, options),
            Mounter::Either(served) if nbd_backed::is_nbd_backed(&served.cookie)? => {
                self.serve(known, served, options)
            }
            Mounter::Either(served) => match krbd() {
                Err(CephImageError::Rbd(error)) if error.is_for_another_mounter() => {
                    tracing::info!(%error, "krbd cannot map the image; mapping it by rbd-nbd");
                    self.serve(known, served, options)
                }
                mapped => mapped,
            },
        }
    }

    fn map_by_krbd(
        &self,
        known: &Known<'_>,
        options: &AttachOptions,
    ) -> Result<(RbdDevice, Done), CephImageError> {
        let monitors = Monitors::resolve(&known.cluster.monitors)?;
        nbd_backed::refuse_nbd_backed(&known.image, &options.volume_id, &monitors)?;
        // The map of a killed agent would be taken for another client's, if it ended between
        // the looks at this node's devices and at the image's clients.
        self.images.mapper.is_under_way(&options.volume_id)?;
        let mut wanted = known.wanted(options, &monitors);
        let one_writer = !options.read_only && !options.shared;
        if let Some(device) = self.find_mapped(known, &mut wanted)? {
            // A killed agent had not checked yet, or was delayed.
            if one_writer
                && !options.staged
                && let Some(queried) = known.queried(&self.images.connections)?
            {
                queried.is_alone(own_client(&device))?;
            }
            return Ok((device, Done::Already));
        }
        // A second device would be nobody's: an unstage detaches the one that is recorded.
        if options.staged {
            return Err(CephImageError::Unmapped {
                image: known.image.to_string(),
            });
        }
        let greeting = Greeting::ask(&wanted)?;
        self.refuse_other_pool(known)?;
        self.refuse_secondary(known)?;
        // A second writer destroys the image. Readers do not, nor do writers that share
        // it by agreement.
        let alone = if one_writer { self.alone(known)? } else { None };
        let Some(queried) = alone else {
            return self.map_now(&wanted, greeting);
        };
        wanted.features = queried.features;
        let mapped = self.map_now(&wanted, greeting)?;
        // Another node may have checked at the same time. If two see each other, both
        // unmap; neither has written yet.
        match queried.is_alone(own_client(&mapped.0)) {
            Ok(()) => Ok(mapped),
            Err(cause) => Err(match krbd::unmap(&mapped.0) {
                Ok(_) => cause,
                Err(undo) => CephImageError::not_undone(&cause, &undo),
            }),
        }
    }

    /// Volumes share the kernel's client. After a fence the remaining devices keep the
    /// fenced client, so a new mapping gets a client of its own.
    fn map_now(
        &self,
        wanted: &Wanted<'_>,
        greeting: Greeting,
    ) -> Result<(RbdDevice, Done), CephImageError> {
        let mapper = &self.images.mapper;
        match mapper.map(wanted, greeting) {
            Err(error) if error.is_fenced() => {
                let image = wanted.image.to_string();
                tracing::warn!(
                    image,
                    "the client that this node's volumes share was fenced: this image gets a client of its own; restart the pods with older volumes of that cluster"
                );
                let options = &wanted.options.alone();
                let wanted = Wanted { options, ..*wanted };
                Ok(mapper.map(&wanted, Greeting::ask(&wanted)?)?)
            }
            other => Ok(other?),
        }
    }

    /// The device of the image, if krbd has mapped it. Asks the cluster for its fsid where
    /// the monitors do not tell whether a device is of this cluster.
    pub(super) fn find_mapped<'a>(
        &self,
        known: &'a Known<'_>,
        wanted: &mut Wanted<'a>,
    ) -> Result<Option<RbdDevice>, CephImageError> {
        match krbd::find(wanted) {
            Err(error) if error.is_doubtful() => {
                let queried = known.queried(&self.images.connections)?;
                wanted.fsid = queried.map(QueriedImage::fsid);
                Ok(krbd::find(wanted)?)
            }
            found => Ok(found?),
        }
    }

    /// Refuses an image that is in the pool of another of these places, where librbd tells. The
    /// clusters of two sites may have one id, which here is this site's alone, while the pool has
    /// another id at each. Under the other site's id no later call would recognise the device.
    pub(super) fn refuse_other_pool(&self, known: &Known<'_>) -> Result<(), CephImageError> {
        let Some(wanted) = known.pool_id else {
            return Ok(());
        };
        let Some(queried) = known.queried(&self.images.connections)? else {
            return Ok(());
        };
        let is = queried.pool_id();
        let its_place = (known.cluster.cluster_id.clone(), Some(is));
        if is == wanted || !self.images.places_of(self.source).contains(&its_place) {
            return Ok(());
        }
        Err(CephImageError::OtherPool {
            image: known.image.to_string(),
            is,
            wanted,
        })
    }

    /// Refuses the secondary image of a mirror, where librbd tells.
    pub(super) fn refuse_secondary(&self, known: &Known<'_>) -> Result<(), CephImageError> {
        match known.queried(&self.images.connections)? {
            Some(queried) => queried.refuse_secondary(),
            None => Ok(()),
        }
    }

    /// Waits until no client has the image open; none where librbd is missing.
    pub(super) fn alone<'a>(
        &self,
        known: &'a Known<'_>,
    ) -> Result<Option<&'a QueriedImage>, CephImageError> {
        let queried = known.queried(&self.images.connections)?;
        if let Some(queried) = queried {
            queried.wait_until_alone(OwnClient::None)?;
        }
        Ok(queried)
    }
}

/// The client of the cluster that maps the image.
fn own_client(device: &RbdDevice) -> OwnClient {
    krbd::mapped::client_of(device.dev).map_or(OwnClient::None, OwnClient::Krbd)
}
