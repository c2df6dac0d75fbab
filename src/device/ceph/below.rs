//! A mapped image's own device, and what shows it.

use crate::{
    ceph::krbd::{Identity, RbdDevice},
    device::{Behind, Device, luks},
};

/// A mapped image's own device, below an encrypted volume's.
#[derive(Clone, Debug)]
pub struct Below {
    pub node: luks::Node,
    pub behind: Behind,
    pub read_only: bool,
}

impl From<RbdDevice> for Below {
    fn from(device: RbdDevice) -> Self {
        Self {
            node: luks::Node {
                dev: device.dev,
                path: device.node,
            },
            behind: Behind::Rbd(device.identity),
            read_only: device.read_only,
        }
    }
}

impl Below {
    pub fn of(device: &Device) -> Self {
        let own = || luks::Node {
            dev: device.dev,
            path: device.node.clone(),
        };
        Self {
            node: device.encrypted.clone().unwrap_or_else(own),
            behind: device.behind.clone(),
            read_only: device.read_only,
        }
    }

    /// What shows it, which is itself where it is not encrypted.
    pub fn shown(self, over: Option<luks::Node>) -> Device {
        let (shown, encrypted) = match over {
            Some(over) => (over, Some(self.node)),
            None => (self.node, None),
        };
        Device {
            dev: shown.dev,
            node: shown.path,
            behind: self.behind,
            read_only: self.read_only,
            diskseq: None,
            encrypted,
        }
    }

    /// As the kernel's driver has it.
    pub fn krbd(&self, identity: &Identity) -> RbdDevice {
        RbdDevice {
            dev: self.node.dev,
            node: self.node.path.clone(),
            identity: identity.clone(),
            read_only: self.read_only,
        }
    }
}
