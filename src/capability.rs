//! Volume capabilities: access type and access mode.

use serde::{Deserialize, Serialize};

/// Bytes of the id of a volume, snapshot or group. CSI allows 128, unless a field says
/// otherwise, and the container orchestrators any number: csi-driver-nfs' ids have the server,
/// the path and the names, so more than 128.
pub const MAX_ID: usize = 1024;

/// Which nodes may read and write a volume (`VolumeCapability.AccessMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    /// One node writes, by any number of its pods (kubelet's ReadWriteOnce).
    /// `SINGLE_NODE_WRITER` and `SINGLE_NODE_MULTI_WRITER` mean the same here.
    SingleNodeWriter,
    /// One target on one node writes (kubelet's ReadWriteOncePod).
    SingleNodeSingleWriter,
    /// One node reads.
    SingleNodeReader,
    /// Any number of nodes read.
    MultiNodeReader,
    /// Any number of nodes read, one of them writes.
    MultiNodeSingleWriter,
    /// Any number of nodes write.
    MultiNodeWriter,
}

impl AccessMode {
    /// Whether no node writes.
    pub fn reader_only(self) -> bool {
        matches!(self, Self::SingleNodeReader | Self::MultiNodeReader)
    }

    /// Whether several nodes may use the volume at once.
    pub fn multi_node(self) -> bool {
        matches!(
            self,
            Self::MultiNodeReader | Self::MultiNodeSingleWriter | Self::MultiNodeWriter
        )
    }

    /// Whether several nodes may use it at once, and at least one writes.
    pub fn multi_node_writer(self) -> bool {
        self.multi_node() && !self.reader_only()
    }
}

/// How pods access a volume (`VolumeCapability.access_type`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessType {
    /// As a raw block device.
    Block,
    /// As a mounted file system.
    Mount {
        /// Empty: the default.
        fs_type: String,
        /// `mount_flags`: each may hold several options.
        flags: Vec<String>,
        /// `volume_mount_group`; empty: unchanged.
        group: String,
    },
}

/// A valid `VolumeCapability`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Raw block or file system.
    pub access: AccessType,
    /// Which nodes may use it.
    pub mode: AccessMode,
}
