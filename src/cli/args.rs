//! Arguments that several commands share, and their parsers.

use std::{collections::HashMap, time::Duration};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::{
    proto::csi::{
        CapacityRange, VolumeCapability, VolumeContentSource,
        volume_capability::{
            AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode as WireMode,
        },
        volume_content_source::{SnapshotSource, Type as SourceType, VolumeSource},
    },
    size::Size,
};

/// The access mode of a volume, by Kubernetes' short names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum)]
pub enum AccessModeArg {
    /// One node writes (ReadWriteOnce)
    #[default]
    Rwo,
    /// One pod on one node writes (ReadWriteOncePod)
    Rwop,
    /// Any number of nodes read (ReadOnlyMany)
    Rox,
    /// Any number of nodes write (ReadWriteMany; raw block)
    Rwx,
}

impl AccessModeArg {
    fn wire(self) -> WireMode {
        match self {
            Self::Rwo => WireMode::SingleNodeWriter,
            Self::Rwop => WireMode::SingleNodeSingleWriter,
            Self::Rox => WireMode::MultiNodeReaderOnly,
            Self::Rwx => WireMode::MultiNodeMultiWriter,
        }
    }
}

/// CSI's volume capability.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct AccessArgs {
    /// File system; default: the one on the volume, else the driver's default
    #[arg(long, value_name = "TYPE", value_parser = ["ext4", "xfs", "btrfs"])]
    pub fs: Option<String>,
    /// Use a raw block device instead of a file system
    #[arg(long, conflicts_with_all = ["fs", "mount_options"])]
    pub block: bool,
    /// Access mode
    #[arg(long, value_enum, default_value_t)]
    pub access: AccessModeArg,
    /// Mount option, such as `noatime` or `discard` (repeatable)
    #[arg(long = "mount-option", short = 'o', value_name = "OPTION")]
    pub mount_options: Vec<String>,
}

impl AccessArgs {
    /// As a CSI message.
    pub fn capability(&self) -> VolumeCapability {
        let access_type = if self.block {
            AccessType::Block(BlockVolume {})
        } else {
            AccessType::Mount(MountVolume {
                fs_type: self.fs.clone().unwrap_or_default(),
                mount_flags: self.mount_options.clone(),
                volume_mount_group: String::new(),
            })
        };
        VolumeCapability {
            access_type: Some(access_type),
            access_mode: Some(AccessMode {
                mode: self.access.wire().into(),
            }),
        }
    }

    /// Completed from the node's report of a staged volume (`ext4` … or `block`)
    /// where the command line gives neither.
    pub fn or_as_staged(mut self, staged_as: &str) -> Self {
        if self.fs.is_none() && !self.block {
            match staged_as {
                // A directory of an NFS server: no request names its file system.
                "" | "nfs" => {}
                "block" => self.block = true,
                fs => self.fs = Some(fs.to_owned()),
            }
        }
        self
    }
}

/// The pool, parameters and content source of a new volume.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct NewVolumeArgs {
    /// Pool of the volume; required where the controller has more than one
    #[arg(long)]
    pub pool: Option<String>,
    /// NBD server that exports the controller's pool and from which nodes attach the
    /// volume (HOST, HOST:PORT or an nbd:// or nbd+unix:// URI); default: nodes
    /// attach a loop device over their own pool. Sets the parameters backend=nbd and
    /// nbdServer=SERVER
    #[arg(long, value_name = "SERVER")]
    pub nbd_server: Option<String>,
    /// StorageClass parameter (repeatable)
    #[arg(long = "parameter", short = 'p', value_name = "KEY=VALUE", value_parser = key_value)]
    pub parameters: Vec<(String, String)>,
    /// Snapshot to create the volume from, by name or id
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
    pub from_snapshot: Option<String>,
    /// Volume to copy
    #[arg(long, value_name = "VOLUME")]
    pub from_volume: Option<String>,
}

impl NewVolumeArgs {
    /// The parameters of CreateVolume.
    pub fn parameters(&self) -> HashMap<String, String> {
        let named = [
            self.pool.as_ref().map(|pool| ("pool", pool.as_str())),
            self.nbd_server.as_ref().map(|_| ("backend", "nbd")),
            self.nbd_server
                .as_ref()
                .map(|server| ("nbdServer", server.as_str())),
        ];
        let named = named.into_iter().flatten();
        let named = named.map(|(key, value)| (key.to_owned(), value.to_owned()));
        self.parameters.iter().cloned().chain(named).collect()
    }
}

/// The content source of a snapshot's id.
pub fn from_snapshot(snapshot_id: String) -> VolumeContentSource {
    VolumeContentSource {
        r#type: Some(SourceType::Snapshot(SnapshotSource { snapshot_id })),
    }
}

/// The content source of a volume's id.
pub fn from_volume(volume_id: String) -> VolumeContentSource {
    VolumeContentSource {
        r#type: Some(SourceType::Volume(VolumeSource { volume_id })),
    }
}

/// A capacity of at least `size`.
pub fn at_least(size: Size) -> CapacityRange {
    CapacityRange {
        required_bytes: size.bytes(),
        limit_bytes: 0,
    }
}

/// A volume's size. So few bytes without a unit are a mistake, and would be rounded up.
pub fn volume_size(text: &str) -> Result<Size, String> {
    const LEAST: i64 = 1 << 20;
    let has_unit = text.bytes().any(|byte| byte.is_ascii_alphabetic());
    match text.parse::<Size>() {
        Ok(size) if size.bytes() < LEAST && !has_unit => Err(format!(
            "{text} would be bytes; add a unit, such as {text}Gi"
        )),
        parsed => parsed.map_err(|error| error.to_string()),
    }
}

/// `KEY=VALUE`; the value may hold further `=` and may be empty.
pub fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".to_owned()),
    }
}

/// `90s`, `2m`, `1h`, `500ms` or plain seconds; more than zero.
pub fn duration(text: &str) -> Result<Duration, String> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let milliseconds: u64 = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => 0,
    };
    let duration = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(milliseconds))
        .unwrap_or(0);
    // gRPC's own limit is eight digits of hours; a day is longer than any call.
    match duration {
        1..=86_400_000 => Ok(Duration::from_millis(duration)),
        _ => Err("write a time from 1ms to 24h, such as 90s or 2m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_size_of_a_few_bytes_needs_a_unit() {
        let bytes = |text| volume_size(text).map(Size::bytes);
        assert_eq!(bytes("10Gi"), Ok(10 << 30));
        assert_eq!(bytes("67108864"), Ok(64 << 20));
        assert_eq!(bytes("10B"), Ok(10));
        assert!(bytes("10").unwrap_err().contains("10Gi"));
        assert!(bytes("lots").unwrap_err().contains("not a size"));
    }

    #[test]
    fn pairs_split_at_the_first_equals_sign() {
        let pair = |k: &str, v: &str| Ok((k.to_owned(), v.to_owned()));
        assert_eq!(key_value("a=b=c"), pair("a", "b=c"));
        assert_eq!(key_value("a="), pair("a", ""));
        assert!(key_value("=b").is_err());
        assert!(key_value("ab").is_err());
    }

    #[test]
    fn durations_have_units() {
        for (text, milliseconds) in [
            ("500ms", 500),
            ("90", 90_000),
            ("90s", 90_000),
            ("2m", 120_000),
            ("24h", 86_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)));
        }
        for text in [
            "",
            "0",
            "s",
            "-1s",
            "1d",
            "25h",
            "1.5s",
            "99999999999999999999",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_published_volume_is_used_as_it_was_staged() {
        let access = |usage: &AccessArgs| usage.capability().access_type.unwrap();
        let staged = AccessArgs::default().or_as_staged("block");
        assert!(matches!(access(&staged), AccessType::Block(_)));
        let staged = AccessArgs::default().or_as_staged("xfs");
        assert!(matches!(access(&staged), AccessType::Mount(m) if m.fs_type == "xfs"));
        let staged = AccessArgs::default().or_as_staged("nfs");
        assert!(matches!(access(&staged), AccessType::Mount(m) if m.fs_type.is_empty()));
        let given = AccessArgs {
            fs: Some("ext4".to_owned()),
            ..Default::default()
        };
        let given = given.or_as_staged("xfs");
        assert!(matches!(access(&given), AccessType::Mount(m) if m.fs_type == "ext4"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,30}|[0-9]{1,25}(ms|s|m|h)") {
            let _ = duration(&text);
            let _ = key_value(&text);
        }
    }
}
