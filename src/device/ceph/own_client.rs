//! This node's client of a cluster, as the cluster sees it.

use std::net::IpAddr;

use super::{CephImageError, CephImages};
use crate::{
    ceph::{client::Credentials, fencing::host_of},
    device::error::{DeviceError, io},
    secret::Secrets,
};

/// A client by which this node uses a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageClient {
    /// The cluster's own id.
    pub cluster: String,
    /// The address that all clients of this node have there.
    pub host: IpAddr,
}

impl CephImages {
    /// The client by which this node would be fenced. The kernel's have the same address as
    /// this connection's, which is in the same network namespace.
    pub fn own_client(
        &self,
        cluster_id: &str,
        secrets: &Secrets,
    ) -> Result<StorageClient, DeviceError> {
        let cluster = self.cluster(cluster_id)?;
        let credentials = Credentials::from_secrets(secrets).map_err(CephImageError::from)?;
        let connected = self.connections.get(
            cluster_id,
            &cluster.monitors,
            &credentials,
            cluster.net_namespace(),
        );
        let connected = connected.map_err(CephImageError::from)?;
        let address = connected.address().map_err(CephImageError::from)?;
        let host = host_of(&address).trim_matches(['[', ']']).parse();
        let host = host.map_err(|_| {
            let what = format!("{address:?} is no address of a client");
            io("read the address of this node's client")(std::io::Error::other(what))
        })?;
        let cluster = connected.fsid().to_owned();
        Ok(StorageClient { cluster, host })
    }
}
