//! A mapped image's own device, and the mapping that decrypts it.

use crate::{
    ceph::krbd::{MappedIds, RbdDevice},
    device::{Backing, Device},
    kernel::block::BlockDev,
};

/// A mapped image's own device, below an encrypted volume's.
#[derive(Clone, Debug)]
pub struct LowerDevice {
    pub block: BlockDev,
    pub backing: Backing,
    pub read_only: bool,
}

impl From<RbdDevice> for LowerDevice {
    fn from(device: RbdDevice) -> Self {
        Self {
            block: BlockDev {
                dev: device.dev,
                node: device.node,
            },
            backing: Backing::Rbd(device.identity),
            read_only: device.read_only,
        }
    }
}

impl LowerDevice {
    pub fn of(device: &Device) -> Self {
        Self {
            block: device.encrypted.clone().unwrap_or_else(|| device.block()),
            backing: device.backing.clone(),
            read_only: device.read_only,
        }
    }

    /// The device that shows it: itself if it is not encrypted.
    pub fn shown(self, over: Option<BlockDev>) -> Device {
        let (shown, encrypted) = match over {
            Some(over) => (over, Some(self.block)),
            None => (self.block, None),
        };
        Device {
            dev: shown.dev,
            node: shown.node,
            backing: self.backing,
            read_only: self.read_only,
            diskseq: None,
            encrypted,
        }
    }

    /// As a device of krbd.
    pub fn krbd(&self, identity: &MappedIds) -> RbdDevice {
        RbdDevice {
            dev: self.block.dev,
            node: self.block.node.clone(),
            identity: identity.clone(),
            read_only: self.read_only,
        }
    }
}
