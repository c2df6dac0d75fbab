//! Entering this node's client with a volume, for a controller that fences nodes
//! that do not let go of one, and telling it which fences have served their turn.
//!
//! A client is entered before anything is written through it, and only while the
//! volume is published to this node ([`crate::ceph::fencing`]). It is left entered
//! when the volume is unstaged, which no secrets come with: once nothing watches the
//! image, nobody is fenced.

use super::{BoundCephImage, CephImageError, Known, below::Below};
use crate::{
    ceph::{
        fencing::{Attachments, Client, Fence, Fences, Published, Through},
        handle::VolumeHandle,
        rados::IoCtx,
        rbd::{self, Access},
    },
    chain,
    device::{Behind, Fencing, How, rbd::mapped},
    holder::devices::Server,
};

/// This node, this time.
#[derive(Clone, Debug)]
pub struct ThisNode {
    /// Its id.
    pub id: String,
    /// The running kernel's (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
}

impl BoundCephImage<'_> {
    /// Enters who has the image, where the controller asks for it and there is
    /// one writer.
    pub(super) fn enter(
        &self,
        known: &Known<'_>,
        below: &Below,
        how: &How,
    ) -> Result<(), CephImageError> {
        if how.fencing == Fencing::Off || how.read_only || how.shared {
            return Ok(());
        }
        let Ok(VolumeHandle::Journaled(handle)) = how.volume_id.parse() else {
            return Ok(());
        };
        let (monitors, credentials) = (&known.cluster.monitors, &known.credentials);
        let cluster = self.images.connections.get(monitors, credentials)?;
        let pool = cluster.ioctx(&known.image.pool, &known.image.namespace)?;
        let ThisNode { id, boot_id } = &self.images.this_node;
        let (address, through) = client(&pool, &known.image.name, below)?;
        let client = Client {
            address,
            boot_id: boot_id.clone(),
            through,
            process: None,
        };
        let nodes = Attachments::of(&pool, handle.uuid());
        if !nodes.attach(id, &client.clone().into(), Published::Now)? {
            return Err(CephImageError::Unpublished {
                image: known.image.to_string(),
                node: id.clone(),
            });
        }
        let has = (&*how.volume_id, &client);
        if let Err(error) = self.tell_what_is_gone(&Fences::of(&pool), has) {
            let error = chain(&error);
            tracing::warn!(error, "fences of this node stay, though it is back");
        }
        Ok(())
    }

    /// Says of which fenced clients of this node nothing is left, now that a volume
    /// has this one.
    fn tell_what_is_gone(
        &self,
        fences: &Fences,
        has: (&str, &Client),
    ) -> Result<(), CephImageError> {
        let this = &self.images.this_node;
        let all = fences.list()?.into_iter();
        for fence in all.filter(|fence| fence.node == this.id && !fence.gone) {
            if fence.client.boot_id == this.boot_id && is_left(&fence, has)? {
                continue;
            }
            fences.is_gone(&fence)?;
            let address = &fence.client.address;
            tracing::info!(address, "nothing is left of a client that was fenced");
        }
        Ok(())
    }
}

/// The client that has the image for a device.
fn client(pool: &IoCtx, image: &str, below: &Below) -> Result<(String, Through), CephImageError> {
    let unknown = || CephImageError::UnknownClient {
        image: format!("{pool}/{image}"),
        node: below.node.path.clone(),
    };
    if let Behind::Rbd(_) = below.behind {
        let found = mapped::address_of(below.node.dev).ok_or_else(unknown)?;
        let alone = mapped::Mapped::of(below.node.dev).is_some_and(|it| it.config.noshare);
        let through = if alone {
            Through::OwnKrbd
        } else {
            Through::SharedKrbd
        };
        return Ok((found, through));
    }
    // Nobody else was there before, and it does not say which it is.
    let opened = rbd::Image::open(pool, image, Access::ReadOnly)?;
    let mut watchers = opened.watchers()?;
    watchers.retain(|watcher| !watcher.own);
    match watchers.pop() {
        Some(watcher) if watchers.is_empty() => Ok((watcher.address, Through::RbdNbd)),
        _ => Err(unknown()),
    }
}

/// Whether something of a client of this boot may still hold data, when a volume has
/// this one.
fn is_left(fence: &Fence, has: (&str, &Client)) -> Result<bool, CephImageError> {
    let io = |error| crate::holder::client::ClientError::Io(error);
    Ok(match fence.client.through {
        Through::SharedKrbd | Through::OwnKrbd => {
            let addresses = mapped::addresses().map_err(io)?;
            addresses.contains(&fence.client.address)
        }
        Through::RbdNbd => {
            let servers = Server::all().map_err(io)?;
            let its = servers.iter().filter(|(_, one)| one.cookie == fence.volume);
            // A process has one client; which it is, its command line does not say.
            let others =
                usize::from(has.0 == fence.volume && has.1.address != fence.client.address);
            its.count() > others
        }
    })
}
