//! The parameters of a storage class.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::{ProvisionError, VolumeUse};
use crate::{
    fs::{FsType, mkfs},
    parse_bool::parse_bool,
    pool::{Pool, Scope},
};

mod export;

pub use export::ExportParameters;

/// The parameters of a storage class. A volume's record has them, too: they decide whether
/// a repeated request is equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Parameters {
    /// `pool`: where the image is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// `fsType`: where the capability names no file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_type: Option<String>,
    /// `mkfsOptions`: further options of mkfs, split like a shell's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mkfs_options: Option<String>,
    /// `preallocate`: whether space is reserved for the whole image at once.
    #[serde(default)]
    pub preallocate: bool,
    /// `overcommit`: whether volumes may exceed the pool's space together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overcommit: bool,
    /// `directIO`: whether the loop device bypasses the page cache.
    #[serde(default, rename = "directIO", skip_serializing_if = "Option::is_none")]
    pub direct_io: Option<bool>,
    /// `sectorSize`: the loop device's logical block size, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector_size: Option<u32>,
    /// `backend: nbd`; without it, nodes attach images as loop devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<ExportParameters>,
}

impl Parameters {
    /// Refuses uses that would destroy data in a volume of the pool, with the reason.
    pub(super) fn refuse_uses(
        &self,
        pool: &Pool,
        uses: &[VolumeUse],
    ) -> Result<(), ProvisionError> {
        let file_systems = self.file_systems(uses)?;
        if let Some(options) = &self.mkfs_options {
            check_mkfs_options(options, &file_systems)?;
        }
        if let (Scope::Local, Some(served)) = (pool.scope, &self.nbd) {
            return Err(ProvisionError::BadParameter {
                name: "backend",
                value: "nbd".to_owned(),
                why: format!(
                    "pool {:?} is local to one node, and a volume on {} is not: any node may \
                     attach it, and any controller must be able to delete it; use a shared pool \
                     (--pool {}=DIR,shared at the controller; nodes need not have it)",
                    pool.name, served.server, pool.name
                ),
            });
        }
        for volume_use in uses.iter().filter(|volume_use| volume_use.many_nodes_write) {
            if volume_use.fs_type.is_some() {
                return Err(ProvisionError::UnsupportedUse(
                    "ext4, xfs and btrfs are for one node at a time: several nodes with a writer \
                     among them destroy the file system; request a block volume, or read-only access"
                        .to_owned(),
                ));
            }
            if pool.scope == Scope::Local {
                return Err(ProvisionError::UnsupportedUse(format!(
                    "pool {:?} is local to one node, so several nodes cannot write to its volumes",
                    pool.name
                )));
            }
            if self.direct_io == Some(false) {
                return Err(ProvisionError::BadParameter {
                    name: "directIO",
                    value: "false".to_owned(),
                    why: "the loop devices of nodes that write to one image must not cache"
                        .to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Parses a storage class' parameters.
    pub fn parse(given: &HashMap<String, String>) -> Result<Self, ProvisionError> {
        // Sorted, so that of two mistakes the error always names the same one.
        let given: BTreeMap<&str, &str> = given
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            // For logs and names; never refused (CSI specification).
            .filter(|(name, _)| !name.starts_with("csi.storage.k8s.io/"))
            .collect();
        let mut parsed = Self {
            nbd: match given.get("backend") {
                None | Some(&LOOP) => None,
                Some(&NBD) => Some(ExportParameters::parse(&given)?),
                Some(other) => return Err(bad("backend", other, "there are loop and nbd")),
            },
            ..Self::default()
        };
        for (name, value) in given {
            match name {
                "backend" => {}
                "pool" => parsed.pool = Some(value.to_owned()),
                "fsType" => parsed.fs_type = Some(file_system("fsType", value)?.to_owned()),
                "mkfsOptions" => parsed.mkfs_options = Some(value.to_owned()),
                "preallocate" => parsed.preallocate = yes_or_no("preallocate", value)?,
                "overcommit" => parsed.overcommit = yes_or_no("overcommit", value)?,
                "directIO" => parsed.direct_io = Some(yes_or_no("directIO", value)?),
                "sectorSize" => parsed.sector_size = Some(sector_size(value)?),
                name => match export::OWN.into_iter().find(|own| *own == name) {
                    Some(_) if parsed.nbd.is_some() => {}
                    Some(own) => return Err(bad(own, value, "only backend nbd has it")),
                    None => {
                        return Err(ProvisionError::UnknownParameter {
                            name: name.to_owned(),
                            known: [&KNOWN[..], &export::OWN].concat().join(", "),
                        });
                    }
                },
            }
        }
        Ok(parsed)
    }

    /// The volume context, by which the node attaches the image and formats the device.
    pub fn context(&self, image: &str) -> BTreeMap<String, String> {
        let mut context = BTreeMap::new();
        let mut tell = |key: &str, value: String| context.insert(key.to_owned(), value);
        if let Some(fs) = &self.fs_type {
            tell("fsType", fs.clone());
        }
        if let Some(options) = &self.mkfs_options {
            tell("mkfsOptions", options.clone());
        }
        if let Some(served) = &self.nbd {
            tell("backend", NBD.to_owned());
            for (key, value) in served.context(image) {
                tell(key, value);
            }
            return context;
        }
        tell("backend", LOOP.to_owned());
        tell("image", image.to_owned());
        if self.preallocate {
            tell("preallocate", true.to_string());
        }
        if let Some(on) = self.direct_io {
            tell("directIO", on.to_string());
        }
        if let Some(bytes) = self.sector_size {
            tell("sectorSize", bytes.to_string());
        }
        context
    }

    /// The file systems that a volume with these parameters is to hold.
    pub fn file_systems(&self, uses: &[VolumeUse]) -> Result<Vec<&'static str>, ProvisionError> {
        let mounts = uses
            .iter()
            .filter_map(|volume_use| volume_use.fs_type.as_deref());
        mounts
            .map(|fs| match (fs, &self.fs_type) {
                ("", Some(fs)) => file_system("fsType", fs),
                ("", None) => Ok(FILE_SYSTEMS[0]),
                (fs, _) => file_system("volume_capability.mount.fs_type", fs),
            })
            .collect()
    }
}

/// Refuses `mkfsOptions` with which a node would not make these file systems.
pub(super) fn check_mkfs_options(
    options: &str,
    file_systems: &[&'static str],
) -> Result<(), ProvisionError> {
    let known = FsType::ALL.into_iter();
    for fs in known.filter(|fs| file_systems.contains(&fs.as_str())) {
        mkfs::parse_options(fs, options)
            .map_err(|error| bad("mkfsOptions", options, &error.to_string()))?;
    }
    Ok(())
}

fn file_system(field: &'static str, name: &str) -> Result<&'static str, ProvisionError> {
    let known = FILE_SYSTEMS.into_iter().find(|known| *known == name);
    known.ok_or_else(|| bad(field, name, "there are ext4, xfs and btrfs"))
}

pub(super) fn yes_or_no(name: &'static str, value: &str) -> Result<bool, ProvisionError> {
    parse_bool(value).ok_or_else(|| bad(name, value, "it is `true` or `false`"))
}

/// What LOOP_CONFIGURE takes: a power of two from 512 to the page size.
fn sector_size(value: &str) -> Result<u32, ProvisionError> {
    match value.parse() {
        Ok(bytes @ (512 | 1024 | 2048 | 4096)) => Ok(bytes),
        _ => Err(bad("sectorSize", value, "it is 512, 1024, 2048 or 4096")),
    }
}

pub(super) fn bad(name: &'static str, value: &str, why: &str) -> ProvisionError {
    ProvisionError::BadParameter {
        name,
        value: value.to_owned(),
        why: why.to_owned(),
    }
}

const LOOP: &str = "loop";
const NBD: &str = "nbd";
/// The first is the default.
const FILE_SYSTEMS: [&str; 3] = ["ext4", "xfs", "btrfs"];
const KNOWN: [&str; 8] = [
    "backend",
    "pool",
    "fsType",
    "mkfsOptions",
    "preallocate",
    "overcommit",
    "directIO",
    "sectorSize",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn owned<M: FromIterator<(String, String)>>(given: &[(&str, &str)]) -> M {
        let pairs = given.iter();
        pairs
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    fn parse(given: &[(&str, &str)]) -> Result<Parameters, ProvisionError> {
        Parameters::parse(&owned(given))
    }

    #[test]
    fn node_parameters_go_into_the_volume_context() {
        let parsed = parse(&[
            ("backend", "loop"),
            ("pool", "fast"),
            ("fsType", "xfs"),
            ("mkfsOptions", "-K"),
            ("preallocate", "true"),
            ("overcommit", "true"),
            ("directIO", "true"),
            ("sectorSize", "4096"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ])
        .unwrap();
        assert!(parsed.preallocate && parsed.overcommit);
        let expected = [
            ("backend", "loop"),
            ("image", "i.img"),
            ("fsType", "xfs"),
            ("mkfsOptions", "-K"),
            ("preallocate", "true"),
            ("directIO", "true"),
            ("sectorSize", "4096"),
        ];
        assert_eq!(parsed.context("i.img"), owned(&expected));
        let json = serde_json::to_string(&parsed).unwrap();
        assert_eq!(serde_json::from_str::<Parameters>(&json).unwrap(), parsed);
    }

    #[test]
    fn an_exported_image_is_named_by_its_uri() {
        let parsed = parse(&[
            ("backend", "nbd"),
            ("nbdServer", "Storage:5"),
            ("preallocate", "true"),
            ("connections", "4"),
            ("requestTimeout", "5"),
            ("deadConnectionTimeout", "60"),
        ])
        .unwrap();
        let expected = [
            ("backend", "nbd"),
            ("uri", "nbd://storage:5/i.img"),
            ("connections", "4"),
            ("requestTimeout", "5"),
            ("deadConnectionTimeout", "60"),
        ];
        assert_eq!(parsed.context("i.img"), owned(&expected));
        let json = serde_json::to_string(&parsed).unwrap();
        assert_eq!(serde_json::from_str::<Parameters>(&json).unwrap(), parsed);
        let spelled_otherwise = [("backend", "nbd"), ("nbdServer", "nbd://storage:5/")];
        assert_eq!(
            parse(&spelled_otherwise).unwrap().nbd.unwrap().server,
            parsed.nbd.unwrap().server
        );

        for (name, value) in [
            ("nbdServer", ""),
            ("nbdServer", "nbds://storage"),
            ("nbdServer", "nbd://storage/disk"),
            ("nbdServer", "storage:0"),
            ("connections", "17"),
            ("requestTimeout", "none"),
            ("deadConnectionTimeout", "0"),
            ("directIO", "true"),
            ("sectorSize", "4096"),
        ] {
            let server = ("nbdServer", "storage");
            let error = parse(&[("backend", "nbd"), server, (name, value)]).unwrap_err();
            assert_eq!(error.kind(), crate::Kind::Invalid);
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn invalid_parameters_are_named() {
        for (name, value) in [
            ("Pool", "x"),
            ("fsType", "zfs"),
            ("preallocate", "yes"),
            ("overcommit", "2"),
            ("sectorSize", "513"),
            ("backend", "tape"),
            ("nbdServer", "storage"),
            ("connections", "2"),
        ] {
            let error = parse(&[(name, value)]).unwrap_err();
            assert_eq!(error.kind(), crate::Kind::Invalid);
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn the_capability_s_file_system_comes_first() {
        let volume_use = |fs: Option<&str>| VolumeUse {
            fs_type: fs.map(str::to_owned),
            many_nodes_write: false,
        };
        let class = parse(&[("fsType", "xfs")]).unwrap();
        let uses = [
            volume_use(Some("")),
            volume_use(None),
            volume_use(Some("btrfs")),
        ];
        assert_eq!(class.file_systems(&uses).unwrap(), ["xfs", "btrfs"]);
        let bare = Parameters::default();
        assert_eq!(bare.file_systems(&uses[..1]).unwrap(), ["ext4"]);
        assert!(bare.file_systems(&[volume_use(Some("ntfs"))]).is_err());
    }
}
