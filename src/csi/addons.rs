//! csi-addons: operations beside CSI, which its sidecar calls on a socket of their own
//! (`--csi-addons-endpoint`).
//!
//! ```text
//!  identity     which of them this process has
//!  node         those on a volume that a node has
//! ```

pub mod identity;
#[cfg(feature = "node")]
pub mod node;
