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
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let link = self.link(cluster_id, secrets)?;
        for network in networks {
            tracing::warn!(cluster_id, %network, "fencing a network");
            let fenced = FencedNetworks::of(&link.cluster).fence(*network);
            fenced.map_err(RbdError::Network)?;
        }
        Ok(())
    }

    pub(super) fn unfence_networks(
        &self,
        cluster_id: &str,
        networks: &[Cidr],
        secrets: &Secrets,
    ) -> Result<(), ProvisionError> {
        let link = self.link(cluster_id, secrets)?;
        for network in networks {
            tracing::info!(cluster_id, %network, "lifting the fence of a network");
            let unfenced = FencedNetworks::of(&link.cluster).unfence(*network);
            unfenced.map_err(RbdError::Network)?;
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
