//! The mapped images of this node, by sysfs. Reading it never waits for a device.
//!
//! The line of a map stays readable in `config_info`, with the key's name, which the agent
//! chooses: it has the volume's handle, by which the next agent finds the map of one that
//! was killed. Maps of other programs are identified by the ids of pool and image and by
//! the monitors: a name alone does not suffice, as another cluster may have the same.
//!
//! Source: Documentation/ABI/testing/sysfs-bus-rbd.

use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    os::unix::fs::DirEntryExt as _,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use super::{ImageSpec, RbdDevice};
use crate::{
    ceph::csi_format::map_options::NOSHARE,
    kernel::{Dev, sysfs},
};

/// Below it is a directory for each mapped image.
const DEVICES: &str = "/sys/bus/rbd/devices";

/// sysfs's word for an image that is not a snapshot.
const NO_SNAPSHOT: &str = "-";

/// The address of the client that has an image open.
const CLIENT_ADDRESS: &str = "client_addr";

/// The prefix of marks.
const OURS: &str = "uring-csi";

/// The characters that a part of a mark does not escape.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');

/// The volume that an image was mapped for: the name of the key it was mapped with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The `clusterID` of the configuration that it was mapped by.
    pub cluster_id: String,
    pub volume_id: String,
    /// A value that no other mark has.
    pub nonce: String,
}

impl Mark {
    /// A new mark.
    pub fn new(cluster_id: &str, volume_id: &str) -> Self {
        Self {
            cluster_id: cluster_id.to_owned(),
            volume_id: volume_id.to_owned(),
            nonce: uuid::Uuid::new_v4().simple().to_string(),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        if parts.next()? != OURS {
            return None;
        }
        let mut part = || {
            Some(
                percent_decode_str(parts.next()?)
                    .decode_utf8()
                    .ok()?
                    .into_owned(),
            )
        };
        let mark = Self {
            cluster_id: part()?,
            volume_id: part()?,
            nonce: part()?,
        };
        parts.next().is_none().then_some(mark)
    }
}

impl std::fmt::Display for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [cluster_id, volume_id, nonce] = [&self.cluster_id, &self.volume_id, &self.nonce]
            .map(|part| utf8_percent_encode(part, PLAIN));
        write!(f, "{OURS}:{cluster_id}:{volume_id}:{nonce}")
    }
}

/// The identity of a mapped image, by the cluster's own ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedIds {
    /// The cluster.
    pub fsid: String,
    /// The pool; it may be renamed.
    pub pool_id: i64,
    /// The image; it may be renamed, or its name used again.
    pub image_id: String,
    /// The snapshot, by its name; none where the image itself is mapped.
    pub snapshot: Option<String>,
}

/// A mapped image.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// The `7` of `rbd7`.
    pub id: u32,
    /// Its names; the cluster's is empty.
    pub image: ImageSpec,
    /// Its ids.
    pub identity: MappedIds,
    /// The arguments of its map.
    pub config: MapConfig,
}

/// The arguments of a map that are needed, none of them secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapConfig {
    pub monitors: Vec<SocketAddr>,
    /// Its mark, if an agent of this driver mapped it.
    pub mark: Option<Mark>,
    /// Whether its client is its own.
    pub noshare: bool,
    /// Whether it was to be read-only.
    pub read_only: bool,
}

impl MapConfig {
    /// Reads `config_info`: `<monitors> <options> <pool> <image> <snapshot>`.
    fn parse(text: &str) -> Self {
        let mut words = text.split_ascii_whitespace();
        let monitors = words.next().unwrap_or_default().split(',');
        let mut options = words.next().unwrap_or_default().split(',');
        let noshare = options.clone().any(|option| option == NOSHARE);
        let read_only = options.clone().rev().find_map(|option| match option {
            "ro" | "read_only" => Some(true),
            "rw" | "read_write" => Some(false),
            _ => None,
        });
        Self {
            monitors: monitors
                .filter_map(|monitor| monitor.parse().ok())
                .collect(),
            mark: options.find_map(|option| Mark::parse(option.strip_prefix("key=")?)),
            noshare,
            read_only: read_only == Some(true),
        }
    }
}

impl Mapped {
    /// The image that is mapped as the device of that number; none if the device belongs
    /// to another driver, or is detached.
    pub fn of(dev: Dev) -> Option<Self> {
        Self::of_id(id_of(dev)?).ok()
    }

    fn of_id(id: u32) -> io::Result<Self> {
        let identity = ids_of(id)?;
        Ok(Self {
            id,
            image: image_of(id, identity.snapshot.clone())?,
            identity,
            config: MapConfig::parse(&attribute(id, "config_info")?),
        })
    }

    /// The block device; `NotFound` while it is being made.
    pub fn device(&self) -> io::Result<RbdDevice> {
        let dev = sysfs::dev_of(&format!("rbd{}", self.id))?;
        Ok(RbdDevice {
            dev,
            node: PathBuf::from(format!("/dev/rbd{}", self.id)),
            identity: self.identity.clone(),
            // Not as sysfs shows it: a raw volume may be marked read-only.
            read_only: self.config.read_only || self.identity.snapshot.is_some(),
        })
    }
}

impl MappedIds {
    /// Those of the image that is mapped as the device of that number; none as for
    /// [`Mapped::of`].
    pub fn of(dev: Dev) -> Option<Self> {
        ids_of(id_of(dev)?).ok()
    }
}

impl ImageSpec {
    /// The names of the image that is mapped as the device of that number, without the
    /// cluster's; none as for [`Mapped::of`].
    pub fn mapped_as(dev: Dev) -> Option<Self> {
        let id = id_of(dev)?;
        image_of(id, snapshot_of(id).ok()?).ok()
    }
}

fn ids_of(id: u32) -> io::Result<MappedIds> {
    let pool_id = attribute(id, "pool_id")?;
    Ok(MappedIds {
        fsid: attribute(id, "cluster_fsid")?,
        pool_id: pool_id.parse().map_err(io::Error::other)?,
        image_id: attribute(id, "image_id")?,
        snapshot: snapshot_of(id)?,
    })
}

fn image_of(id: u32, snapshot: Option<String>) -> io::Result<ImageSpec> {
    Ok(ImageSpec {
        cluster_id: String::new(),
        pool: attribute(id, "pool")?,
        namespace: attribute(id, "pool_ns")?,
        name: attribute(id, "name")?,
        snapshot,
    })
}

fn snapshot_of(id: u32) -> io::Result<Option<String>> {
    let name = attribute(id, "current_snap")?;
    Ok(Some(name).filter(|name| name != NO_SNAPSHOT))
}

/// The `7` of the device `rbd7`.
fn id_of(dev: Dev) -> Option<u32> {
    let name = sysfs::name_of(dev).ok()?;
    name.strip_prefix("rbd")?.parse().ok()
}

/// The mapped images of that name, whatever their pools.
pub fn named(name: &str) -> io::Result<Vec<Mapped>> {
    let mut found = list_where(|id, inode| is_named(id, inode, name))?;
    // Another image may have been mapped with that id since the look at the name.
    found.retain(|mapped| mapped.image.name == name);
    Ok(found)
}

/// All mapped images.
pub fn list() -> io::Result<Vec<Mapped>> {
    list_where(|_, _| Ok(true))
}

/// Those of which `is` tells by the device's id and the inode of its entry.
fn list_where(is: impl Fn(u32, u64) -> io::Result<bool>) -> io::Result<Vec<Mapped>> {
    let entries = match fs::read_dir(DEVICES) {
        // Without the driver no image is mapped.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(id) = entry.file_name().to_str().and_then(|id| id.parse().ok()) else {
            continue;
        };
        let look = || {
            let is_one = is(id, entry.ino())?;
            is_one.then(|| Mapped::of_id(id)).transpose()
        };
        match look() {
            Ok(mapped) => found.extend(mapped),
            // It was unmapped meanwhile.
            Err(error) if sysfs::is_missing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// The names of the images by the ids of their devices, with the inodes of their entries: a
/// name never changes, and sysfs gives the entry of a later map another inode. Each map looks
/// for its image among all, and this has it read the names of new ones only.
static NAMES: Mutex<BTreeMap<u32, (u64, String)>> = Mutex::new(BTreeMap::new());

fn is_named(id: u32, inode: u64, name: &str) -> io::Result<bool> {
    let names = || NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((known, has)) = names().get(&id)
        && *known == inode
    {
        return Ok(has == name);
    }
    let has = attribute(id, "name")?;
    let is = has == name;
    names().insert(id, (inode, has));
    Ok(is)
}

/// The id of the driver's client that has the image open for the device, as among the
/// image's watchers.
pub fn client_of(dev: Dev) -> Option<i64> {
    let text = attribute(id_of(dev)?, "client_id").ok()?;
    text.strip_prefix("client")?.parse().ok()
}

/// That client's address as its cluster sees it.
pub fn address_of(dev: Dev) -> Option<String> {
    attribute(id_of(dev)?, CLIENT_ADDRESS).ok()
}

/// The addresses of all of the driver's clients.
pub fn addresses() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for mapped in list()? {
        match attribute(mapped.id, CLIENT_ADDRESS) {
            Err(error) if sysfs::is_missing(&error) => {}
            address => found.push(address?),
        }
    }
    Ok(found)
}

fn attribute(id: u32, name: &str) -> io::Result<String> {
    let text = sysfs::attribute(format!("{DEVICES}/{id}/{name}"))?;
    Ok(text.trim_end_matches('\n').to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn monitors_and_mark_are_read_from_the_drivers_config() {
        let mark = Mark::new("c", "0001-0001-c-0000000000000001-u");
        let line =
            format!("10.0.0.1:6789,[fd00::1]:3300 name=csi,key={mark},ms_mode=secure rbd a -");
        let config = MapConfig::parse(&line);
        assert_eq!(config.monitors.len(), 2);
        assert_eq!(config.mark.as_ref(), Some(&mark));
        let theirs = MapConfig::parse("10.0.0.1:6789 name=csi,key=client.csi rbd a -");
        assert_eq!((theirs.monitors.len(), theirs.mark), (1, None));
        let alone = MapConfig::parse("10.0.0.1:6789 name=csi,noshare,ro rbd a -");
        assert!(alone.noshare && !config.noshare);
        assert_eq!(MapConfig::parse(""), MapConfig::default());
    }

    proptest! {
        #[test]
        fn a_mark_is_one_word_and_parses_back(cluster_id in "\\PC{0,40}", volume_id in "\\PC{0,128}") {
            let mark = Mark::new(&cluster_id, &volume_id);
            let text = mark.to_string();
            prop_assert!(crate::ceph::csi_format::map_options::is_word(&text) && !text.contains(','));
            prop_assert_eq!(Mark::parse(&text), Some(mark));
        }

        #[test]
        fn any_line_is_read(line in "\\PC{0,80}") {
            let _ = MapConfig::parse(&line);
        }
    }
}
