//! Registering this node's client with a volume, for a controller that fences nodes which
//! do not release it, and reporting to the controller which fences it may lift.
//!
//! A client is registered before anything is written through it, and only while the
//! volume is published to this node ([`crate::ceph::fencing`]): the kernel's here,
//! those of rbd-nbd by the supervisor, which starts them. It stays registered when the
//! volume is unstaged, for which there are no secrets: once nothing watches the image,
//! no client is fenced.

use super::{BoundCephImage, CephImageError, Known, lower_device::LowerDevice};
use crate::{
    ceph::{
        csi_format::handle::CephVolumeHandle,
        fencing::{CephClient, Fence, Fences, Published, RegisteredNodes, Through},
        krbd::{Mapped, mapped},
    },
    device::{AttachOptions, Backing, Fencing},
    error_chain,
    supervisor::{
        self,
        processes::{DaemonProcess, process},
    },
};

/// This node in this boot.
#[derive(Clone, Debug)]
pub struct ThisNode {
    pub id: String,
    /// The running kernel's (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
}

impl BoundCephImage<'_> {
    /// The key under which the supervisor registers rbd-nbd's clients, if the controller
    /// asks for it and there is a single writer.
    pub(super) fn fencing(&self, options: &AttachOptions) -> Option<supervisor::RegistrationKey> {
        if options.fencing == Fencing::Off || options.read_only || options.shared {
            return None;
        }
        let Ok(CephVolumeHandle::Journaled(handle)) = options.volume_id.parse() else {
            return None;
        };
        Some(supervisor::RegistrationKey {
            node_id: self.images.this_node.id.clone(),
            volume: handle.uuid(),
        })
    }

    pub(super) fn unpublished(&self, known: &Known<'_>) -> CephImageError {
        CephImageError::Unpublished {
            image: known.image.to_string(),
            node: self.images.this_node.id.clone(),
        }
    }

    /// Registers the kernel's client; the supervisor registers its own.
    pub(super) fn register(
        &self,
        known: &Known<'_>,
        lower: &LowerDevice,
        options: &AttachOptions,
    ) -> Result<(), CephImageError> {
        let Some(supervisor::RegistrationKey { node_id, volume }) = self.fencing(options) else {
            return Ok(());
        };
        let (config, connections) = (&known.cluster, &self.images.connections);
        let (monitors, namespace) = (&config.monitors, config.net_namespace());
        let cluster =
            connections.get(&config.cluster_id, monitors, &known.credentials, namespace)?;
        let pool = cluster.ioctx(&known.image.pool, &known.image.namespace)?;
        let nodes = RegisteredNodes::of(&pool, volume);
        if let Backing::Rbd(_) = lower.backing {
            let client = self.client(known, lower)?;
            if !nodes.attach(&node_id, &client.into(), Published::Now)? {
                return Err(self.unpublished(known));
            }
        }
        if let Err(error) = self.report_ended_clients(&Fences::of(&pool), &nodes) {
            let error = error_chain(&error);
            tracing::warn!(
                error,
                "cannot report which fenced clients of this node have ended"
            );
        }
        Ok(())
    }

    /// The kernel's client that maps the device's image.
    fn client(&self, known: &Known<'_>, lower: &LowerDevice) -> Result<CephClient, CephImageError> {
        let dev = lower.block.dev;
        let address = mapped::address_of(dev).ok_or_else(|| CephImageError::UnknownClient {
            image: known.image.to_string(),
            node: lower.block.node.clone(),
        })?;
        let alone = Mapped::of(dev).is_some_and(|it| it.config.noshare);
        Ok(CephClient {
            address,
            boot_id: self.images.this_node.boot_id.clone(),
            through: if alone {
                Through::OwnKrbd
            } else {
                Through::SharedKrbd
            },
            process: None,
        })
    }

    /// Reports the fenced clients of this node that have ended; `nodes` are those of the
    /// volume that is staged.
    fn report_ended_clients(
        &self,
        fences: &Fences,
        nodes: &RegisteredNodes,
    ) -> Result<(), CephImageError> {
        let this = &self.images.this_node;
        let all = fences.list()?.into_iter();
        for fence in all.filter(|fence| fence.node == this.id && !fence.ended) {
            if fence.client.boot_id == this.boot_id && is_left(&fence, nodes)? {
                continue;
            }
            fences.record_ended(&fence)?;
            let address = &fence.client.address;
            tracing::info!(address, "fenced client has ended");
        }
        Ok(())
    }
}

/// Whether a client of this boot may still hold data.
fn is_left(fence: &Fence, nodes: &RegisteredNodes) -> Result<bool, CephImageError> {
    let io = |error| crate::supervisor::client::ClientError::Io(error);
    let client = &fence.client;
    Ok(match (client.through, client.process) {
        (Through::SharedKrbd | Through::OwnKrbd, _) => {
            let addresses = mapped::addresses().map_err(io)?;
            addresses.contains(&client.address)
        }
        (Through::RbdNbd, Some(its)) => process(its.pid) == Some(its),
        // It was fenced before it was registered: it may belong to any process of that
        // volume except the one registered since.
        (Through::RbdNbd, None) => {
            let mut nodes = nodes.list()?.into_iter();
            let registered = nodes.find(|one| one.node == fence.node);
            let registered = registered.and_then(|one| one.entry.client?.process);
            let may_be = |pid| process(pid).is_some_and(|its| registered != Some(its));
            let mut servers = DaemonProcess::all().map_err(io)?.into_iter();
            servers.any(|(pid, one)| one.cookie == fence.volume && may_be(pid))
        }
    })
}
