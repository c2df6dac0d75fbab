//! Images that rbd-nbd serves: what krbd cannot map, or what is not to be its.
//!
//! The holder has rbd-nbd's daemons ([`crate::holder`]); here is what the agent
//! asks of it, and how it knows such a device without asking anybody: by the
//! device's cookie, which is the volume's handle.

use super::{
    Below, BoundCephImage, CephImageError, CephSource, Known, as_it_is_shown, mounter::Served,
};
use crate::{
    Done,
    device::{
        Ailment, Behind, Device, How, Source,
        backend::Found,
        error::{DeviceError, io},
        loopdev::Detached,
        luks,
        rbd::Image,
    },
    holder::{Spec, Trouble, Watch, client::ClientError, devices as nbd},
};

/// The device of a volume that rbd-nbd serves.
pub fn device(volume_id: &str) -> Result<Option<Device>, DeviceError> {
    let found = nbd::Device::of(volume_id).map_err(io("look at the NBD devices"))?;
    found
        .map(|device| as_it_is_shown(below(device, volume_id)))
        .transpose()
}

/// Whether rbd-nbd has the volume's device.
pub fn is_served(volume_id: &str) -> Result<bool, CephImageError> {
    let found = nbd::Device::of(volume_id).map_err(ClientError::Io)?;
    Ok(found.is_some())
}

/// The same with its source: the holder knows the image, or the command line of
/// whoever serves it.
pub fn find(holder: Option<&Watch>, volume_id: &str) -> Result<Option<Found>, DeviceError> {
    let Some(device) = device(volume_id)? else {
        return Ok(None);
    };
    let mut name = holder.and_then(|holder| holder.image(volume_id));
    if name.is_none() {
        let servers = nbd::Server::all().map_err(io("look at the processes"))?;
        let mut its = servers
            .into_iter()
            .filter(|(_, server)| server.cookie == volume_id);
        name = its.next().map(|(_, server)| server.image);
    }
    let Some(image) = name.as_deref().and_then(named) else {
        tracing::warn!(volume_id, node = %device.node.display(), "nobody knows what rbd-nbd served as this");
        return Ok(None);
    };
    let source = Source::Rbd(CephSource::found_served(image, volume_id));
    Ok(Some(Found { device, source }))
}

/// `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
fn named(text: &str) -> Option<Image> {
    let (path, snapshot) = match text.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
        None => (text, None),
    };
    let parts: Vec<_> = path.split('/').collect();
    let (pool, namespace, name) = match parts[..] {
        [pool, name] => (pool, "", name),
        [pool, namespace, name] => (pool, namespace, name),
        _ => return None,
    };
    let is_part = |text: &str| !text.is_empty() && !text.contains(['/', '@']);
    if !is_part(pool) || !is_part(name) || !snapshot.iter().all(|name| is_part(name)) {
        return None;
    }
    Some(Image {
        cluster_id: String::new(),
        pool: pool.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        snapshot,
    })
}

fn below(device: nbd::Device, cookie: &str) -> Below {
    Below {
        node: luks::Node {
            dev: device.dev,
            path: device.node,
        },
        behind: Behind::Served(cookie.to_owned()),
        read_only: device.read_only,
    }
}

impl BoundCephImage<'_> {
    fn holder(&self) -> Result<&Watch, CephImageError> {
        let image = || self.source.image.to_string();
        let holder = self.images.holder.as_ref();
        holder.ok_or_else(|| CephImageError::NoHolder { image: image() })
    }

    /// Has the image served, or finds that it is; brings the key at any rate.
    pub(super) fn serve(
        &self,
        known: &Known<'_>,
        served: &Served,
        how: &How,
    ) -> Result<(Below, Done), CephImageError> {
        let holder = self.holder()?;
        let look = || nbd::Device::of(&served.cookie).map_err(ClientError::Io);
        // As with krbd, a second writer destroys the image.
        if look()?.is_none() && !how.read_only && !how.shared {
            let _ = self.alone(known)?;
        }
        let spec = Spec {
            volume_id: served.cookie.clone(),
            image: known.image.clone(),
            monitors: known.cluster.monitors.clone(),
            user: known.credentials.user.clone(),
            options: served.options.clone(),
            read_only: how.read_only,
        };
        let (node, done) = holder.map(&spec, &known.credentials.key)?;
        let device = look()?.filter(|device| device.node == node);
        let device = device.ok_or_else(|| {
            let why = format!("{} went while it was looked at", node.display());
            ClientError::Io(std::io::Error::other(why))
        })?;
        Ok((below(device, &served.cookie), done))
    }

    pub(super) fn unmap(&self, below: &Below) -> Result<Detached, CephImageError> {
        match &below.behind {
            Behind::Rbd(identity) => Ok(crate::device::rbd::unmap(&below.krbd(identity))?),
            Behind::Served(cookie) => match self.holder()?.unmap(cookie)? {
                Done::Now => Ok(Detached::Now),
                Done::Already => Ok(Detached::Already),
            },
            Behind::Image(_) | Behind::Export(_) => unreachable!("a Ceph image is behind it"),
        }
    }

    pub(super) fn grow_served(&self, below: &Below, bytes: u64) -> Result<u64, CephImageError> {
        let Behind::Served(cookie) = &below.behind else {
            unreachable!("rbd-nbd serves it");
        };
        Ok(self.holder()?.grow(cookie, bytes)?)
    }

    /// What the holder says is wrong with an image that is served.
    pub(super) fn trouble(&self, below: &Below) -> Option<Ailment> {
        let Behind::Served(cookie) = &below.behind else {
            return None;
        };
        let Some(holder) = &self.images.holder else {
            let why = "this agent was started without --holder";
            return Some(Ailment::Unkept(why.to_owned()));
        };
        Some(match holder.trouble(cookie)? {
            Trouble::Unkept(why) => Ailment::Unkept(why),
            Trouble::Unserved(why) => Ailment::Away {
                failing: false,
                why: format!("({why})"),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_name_is_read_as_it_is_written_or_refused(text in "[a-c@/]{0,9}") {
            if let Some(image) = named(&text) {
                // An empty namespace is not written.
                prop_assert_eq!(image.to_string(), text.replacen("//", "/", 1));
            }
        }
    }
}
