//! What a volume is asked for: raw or mounted, and by how many.

use serde::{Deserialize, Serialize};

/// Who may use a volume, and how (`VolumeCapability.AccessMode`).
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
    /// Nobody writes.
    pub fn reader_only(self) -> bool {
        matches!(self, Self::SingleNodeReader | Self::MultiNodeReader)
    }

    /// More than one node may use it at a time.
    pub fn multi_node(self) -> bool {
        matches!(
            self,
            Self::MultiNodeReader | Self::MultiNodeSingleWriter | Self::MultiNodeWriter
        )
    }

    /// More than one node may use it at a time, and one at least writes.
    pub fn multi_node_writer(self) -> bool {
        self.multi_node() && !self.reader_only()
    }
}

/// How a volume is handed to its users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessType {
    /// As a raw block device.
    Block,
    /// As a mounted file system.
    Mount {
        /// Empty: the driver's choice.
        fs_type: String,
        /// As kubelet passes them, one or more options a string.
        flags: Vec<String>,
        /// The group that shall own the volume's root; empty: unchanged.
        group: String,
    },
}

/// A `VolumeCapability` that makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Raw block or file system.
    pub access: AccessType,
    /// Who may use it.
    pub mode: AccessMode,
}
