//! Fencing networks, on csi-addons' request.

use super::{
    super::{Cidr, ProvisionError},
    RbdStore,
    error::RbdError,
};
use crate::{ceph::fencing::FencedNetworks, secret::Secrets};

impl RbdStore {
    pub(super) fn fence_networks(
        &self,
        cluster_id: &str,
        networks: &[Cidr],
        fenced: bool,
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let link = self.link(cluster_id, secrets)?;
        let blocklist = FencedNetworks::of(&link.cluster);
        for network in networks {
            let changed = if fenced {
                tracing::warn!(cluster_id, %network, "fencing a network");
                blocklist.fence(*network)
            } else {
                tracing::info!(cluster_id, %network, "lifting the fence of a network");
                blocklist.unfence(*network)
            };
            changed.map_err(RbdError::Network)?;
        }
        Ok(())
    }

    pub(super) fn fenced_networks(
        &self,
        cluster_id: &str,
        secrets: &Secrets,
    ) -> Result<Vec<Cidr>, ProvisionError> {
        let link = self.link(cluster_id, secrets)?;
        let listed = FencedNetworks::of(&link.cluster).list();
        Ok(listed.map_err(RbdError::Network)?)
    }
}
