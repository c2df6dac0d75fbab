//! A volume as the orchestrator's objects describe it.

use std::collections::HashMap;

use uring_csi::proto::csi::{
    VolumeCapability,
    volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode},
};

pub use access_mode::Mode;

/// The contents of a PersistentVolume, from which every request is made.
#[derive(Clone, Debug)]
pub struct Volume {
    pub handle: String,
    /// The PersistentVolume's name, a part of kubelet's paths.
    pub spec: String,
    pub context: HashMap<String, String>,
    pub secrets: HashMap<String, String>,
    pub capability: VolumeCapability,
}

impl Volume {
    /// A formatted volume; an empty `fs_type` requests the default.
    pub fn filesystem(handle: &str, fs_type: &str) -> Self {
        Self::new(
            handle,
            AccessType::Mount(MountVolume {
                fs_type: fs_type.to_owned(),
                ..Default::default()
            }),
        )
    }

    /// A raw block device.
    pub fn block(handle: &str) -> Self {
        Self::new(handle, AccessType::Block(BlockVolume {}))
    }

    fn new(handle: &str, access_type: AccessType) -> Self {
        Self {
            handle: handle.to_owned(),
            spec: format!("pv-{handle}"),
            context: HashMap::new(),
            secrets: HashMap::new(),
            capability: VolumeCapability {
                access_mode: Some(AccessMode {
                    mode: Mode::SingleNodeWriter.into(),
                }),
                access_type: Some(access_type),
            },
        }
    }

    /// Over an image in a pool, as a static volume's attributes name it.
    pub fn over(self, pool: &str, image: &str) -> Self {
        self.with("backend", "loop")
            .with("pool", pool)
            .with("image", image)
    }

    /// With one more attribute in the volume context.
    pub fn with(mut self, key: &str, value: &str) -> Self {
        self.context.insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn mode(mut self, mode: Mode) -> Self {
        self.capability.access_mode = Some(AccessMode { mode: mode.into() });
        self
    }

    pub fn flags(mut self, flags: &[&str]) -> Self {
        let Some(AccessType::Mount(mount)) = &mut self.capability.access_type else {
            panic!("a raw block device has no mount flags");
        };
        mount.mount_flags = flags.iter().map(|&flag| flag.to_owned()).collect();
        self
    }

    /// The requested file system; empty where none is.
    pub fn fs_type(&self) -> &str {
        match &self.capability.access_type {
            Some(AccessType::Mount(mount)) => &mount.fs_type,
            _ => "",
        }
    }

    pub fn is_block(&self) -> bool {
        matches!(self.capability.access_type, Some(AccessType::Block(_)))
    }
}
