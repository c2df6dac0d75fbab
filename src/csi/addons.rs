//! csi-addons: operations beside CSI, which its sidecar calls on a socket of their own
//! (`--csi-addons-endpoint`).
//!
//! ```text
//!  identity     which of them this process has
//!  node         those on a volume that a node has
//!  controller   those on a volume that no node has, and on clusters
//!  replication  volumes that another cluster follows
//! ```

#[cfg(feature = "controller")]
pub mod controller;
pub mod identity;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "controller")]
mod replication;

use std::collections::HashMap;

use tonic::Status;

use super::validate;

/// The cluster that a call on networks names, and checks of what else it has.
fn cluster_of(
    parameters: &HashMap<String, String>,
    secrets: &HashMap<String, String>,
) -> Result<String, Status> {
    validate::map("parameters", parameters)?;
    validate::secrets(secrets)?;
    let id = parameters.get("clusterID").map_or("", String::as_str);
    validate::required("parameters.clusterID", id).map(str::to_owned)
}
