//! Ceph images as block devices, by the kernel's own RBD driver (krbd).
//!
//! ```text
//!  map    monitors answer? ─ already mapped? ─ add_key ─ one line to sysfs ─▶ /dev/rbd7
//!  unmap  still this image? ─ one line to sysfs, refused while it is in use
//! ```
//!
//! **One lock.** The driver makes its connections to a cluster under one lock
//! for the whole node: a cluster that does not answer delays the maps of all
//! others by up to `mount_timeout`, and the thread in the driver cannot be interrupted. So
//! a monitor must have answered the agent before it asks the driver.
//!
//! **The key** is passed in the keyring of the thread that writes, under a name of its own,
//! and removed when the write returns. The line itself stays readable in sysfs, so it
//! never has the key.
//!
//! **Identity.** The map of an earlier agent is found by that name ([`Mark`]), others by
//! the ids and monitors of the mapped image ([`mapped`]). If none decides, the map is
//! refused: two clients that write to one image destroy it.
//!
//! **Killed meanwhile.** A write to sysfs outlives the agent that made it and
//! may map the image at any later time. A lock file that the writing process
//! holds says that it is under way; the kernel keeps it held for as long as the
//! thread is in the driver.
//!
//! All of this may block for as long as the cluster does: call it on a lane.

use std::{
    fmt, fs,
    fs::File,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use crate::{
    Detached, Done,
    ceph::{
        client::{Credentials, rbd::Features},
        csi_format::map_options::MapOptions,
    },
    crash_point, digest,
    kernel::{Dev, busy, keys::ThreadKey, net_namespace::within, sysfs},
};

mod error;
mod features;
mod greeting;
mod line;
pub mod mapped;
mod monitors;
mod recognise;

pub use error::KrbdError;
pub use greeting::Greeting;
pub use mapped::{Mapped, MappedIds, Mark};
pub use monitors::Monitors;
pub use recognise::{find, find_marked};

use error::failed;
use recognise::marked;

/// How long an image may stay busy before its opener is named: udevd opens each device that
/// was just mapped or written.
const BUSY_FOR: Duration = Duration::from_secs(10);

/// The driver's files, with one major number for all devices and without.
const ADD: [&str; 2] = ["/sys/bus/rbd/add_single_major", "/sys/bus/rbd/add"];
const REMOVE: [&str; 2] = ["/sys/bus/rbd/remove_single_major", "/sys/bus/rbd/remove"];

/// An image of a cluster, or a snapshot of one, by its names: an *image-spec*.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpec {
    /// The `clusterID` of the configuration; empty where it is not known.
    pub cluster_id: String,
    /// The pool's name.
    pub pool: String,
    /// The RADOS namespace; empty for the default one.
    #[serde(default)]
    pub namespace: String,
    /// The image's name.
    pub name: String,
    /// The snapshot's name.
    #[serde(default)]
    pub snapshot: Option<String>,
}

impl ImageSpec {
    /// Whether both are the same names within their cluster.
    pub fn is_named_as(&self, other: &Self) -> bool {
        let names = |image: &Self| [&image.pool, &image.namespace, &image.name].map(String::clone);
        names(self) == names(other) && self.snapshot == other.snapshot
    }
}

impl fmt::Display for ImageSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{snapshot}")?;
        }
        if self.cluster_id.is_empty() {
            return Ok(());
        }
        write!(f, " of cluster {}", self.cluster_id)
    }
}

/// A mapped image's block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdDevice {
    /// Its device number.
    pub dev: Dev,
    /// `/dev/rbd7`.
    pub node: PathBuf,
    /// The image.
    pub identity: MappedIds,
    /// It refuses writes.
    pub read_only: bool,
}

/// A request to map an image.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub image: &'a ImageSpec,
    pub volume_id: &'a str,
    /// The pool's id, if the handle has it.
    pub pool_id: Option<i64>,
    /// The cluster's id, if known. Only the cluster itself tells it, so it is not asked for
    /// before it is needed ([`KrbdError::Doubtful`]).
    pub fsid: Option<&'a str>,
    /// The image's features, if known.
    pub features: Features,
    /// The cluster's monitors.
    pub monitors: &'a Monitors,
    /// The user and its key.
    pub credentials: &'a Credentials,
    /// The driver's options.
    pub options: &'a MapOptions,
    /// Where this node is, for reads from the nearest copy: the driver's
    /// `crush_location`, such as `zone:a|rack:b`.
    pub location: Option<&'a str>,
    /// The device refuses writes.
    pub read_only: bool,
    /// The file of the network namespace in which the driver reaches the cluster; none: the
    /// agent's own.
    pub net_namespace: Option<&'a Path>,
}

/// Whether this image is mapped as `dev`. Waits for nothing.
pub fn is_behind(dev: Dev, identity: &MappedIds) -> bool {
    MappedIds::of(dev).as_ref() == Some(identity)
}

/// Maps images, with one directory for the locks of all agents of this node.
#[derive(Clone, Debug)]
pub struct Mapper {
    dir: PathBuf,
}

impl Mapper {
    /// With lock files in a directory on a tmpfs, made if missing.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }

    /// Maps the image after its monitors' greeting, or finds it mapped as it should
    /// be.
    pub fn map(
        &self,
        wanted: &Wanted<'_>,
        greeting: Greeting,
    ) -> Result<(RbdDevice, Done), KrbdError> {
        let Wanted { image, .. } = *wanted;
        let supported = features::supported().map_err(KrbdError::NoDriver)?;
        let lacking = wanted.features.without(supported);
        if lacking != Features::default() {
            return Err(KrbdError::Features {
                image: image.to_string(),
                lacking,
                supported,
            });
        }
        let _lock = self.lock(wanted.volume_id)?;
        if let Some(device) = find(wanted)? {
            return Ok((device, Done::Already));
        }
        let mark = Mark::new(&image.cluster_id, wanted.volume_id);
        let line = line::of(wanted, &mark)?;
        greeting.wait()?;
        let write = || write_with_key(&line, &mark, wanted.credentials);
        within(wanted.net_namespace, write)
            .map_err(failed("enter", entered(wanted.net_namespace)))?
            .map_err(|error| KrbdError::of_map(image, &wanted.credentials.user, error))?;
        let device = marked(image, &mark)?;
        Ok((device, Done::Now))
    }

    /// Whether an agent that was killed is still mapping an image for the volume.
    pub fn is_under_way(&self, volume_id: &str) -> Result<(), KrbdError> {
        self.lock(volume_id).map(drop)
    }

    /// Locks out other agents while the file is open.
    fn lock(&self, volume_id: &str) -> Result<Lock, KrbdError> {
        let path = self.dir.join(digest::sha256_hex(volume_id));
        let locked = || failed("lock", path.display().to_string());
        loop {
            let file = File::create(&path).map_err(locked())?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    return Err(KrbdError::UnderWay);
                }
                Err(errno) => return Err(locked()(errno.into())),
            }
            // Its last owner may have removed it meanwhile.
            if file.metadata().map_err(locked())?.nlink() > 0 {
                return Ok(Lock { path, _file: file });
            }
        }
    }
}

/// A network namespace, in words for errors.
fn entered(file: Option<&Path>) -> String {
    format!(
        "network namespace {}",
        file.unwrap_or_else(|| Path::new("")).display()
    )
}

/// Removes the lock file while it is held: an agent that opened it before looks again.
#[derive(Debug)]
struct Lock {
    path: PathBuf,
    _file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A file that stays means nothing without its lock.
        let _ = fs::remove_file(&self.path);
    }
}

/// Writes the line by which the driver maps an image, on this very thread with
/// the key in its keyring.
fn write_with_key(line: &str, mark: &Mark, credentials: &Credentials) -> io::Result<()> {
    let key = ThreadKey::add("ceph", &mark.to_string(), &credentials.key_bytes())?;
    let written = write(ADD, line);
    crash_point();
    drop(key);
    written
}

/// Writes to the first of the driver's files that is there.
fn write(files: [&str; 2], line: &str) -> io::Result<()> {
    let [single_major, old] = files;
    let open = |path: &str| File::options().write(true).open(path);
    let mut file = match open(single_major) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => open(old)?,
        file => file?,
    };
    // By one write: each is a request.
    io::Write::write_all(&mut file, line.as_bytes())
}

/// Unmaps the image. The driver refuses while the device is open.
pub fn unmap(device: &RbdDevice) -> Result<Detached, KrbdError> {
    let node = &device.node;
    let mapped = Mapped::of(device.dev);
    let Some(mapped) = mapped.filter(|mapped| mapped.identity == device.identity) else {
        return Ok(Detached::Already);
    };
    let id = mapped.id.to_string();
    let is = |removed: &io::Result<()>, errno: Errno| {
        removed
            .as_ref()
            .is_err_and(|error| error.raw_os_error() == Some(errno.raw_os_error()))
    };
    let removed = busy::retry_while_busy_for(
        BUSY_FOR,
        || write(REMOVE, &id),
        |removed| is(removed, Errno::BUSY) && is_behind(device.dev, &device.identity),
    );
    crash_point();
    match removed {
        Ok(()) => Ok(Detached::Now),
        removed if is(&removed, Errno::NOENT) => Ok(Detached::Already),
        // Another process is removing it.
        removed if is(&removed, Errno::INPROGRESS) => Ok(Detached::Deferred),
        removed if is(&removed, Errno::BUSY) => Err(KrbdError::Busy { node: node.clone() }),
        Err(error) => Err(failed("unmap", node.display().to_string())(error)),
    }
}

/// Makes the driver read the image's size, of which it is notified anyhow. Returns the
/// device's size in bytes.
pub fn refresh(image: &ImageSpec, device: &RbdDevice, wanted: u64) -> Result<u64, KrbdError> {
    let node = &device.node;
    let looked = || failed("look how large the image is of", node.display().to_string());
    let size = || sysfs::size_bytes(device.dev).map_err(looked());
    let bytes = size()?;
    if bytes >= wanted && wanted > 0 {
        return Ok(bytes);
    }
    let mapped = Mapped::of(device.dev).filter(|mapped| mapped.identity == device.identity);
    let mapped = mapped.ok_or_else(|| looked()(io::ErrorKind::NotFound.into()))?;
    fs::write(refresh_file(mapped.id), "1").map_err(looked())?;
    let bytes = size()?;
    if bytes < wanted {
        return Err(KrbdError::Small {
            image: image.to_string(),
            node: node.clone(),
            bytes,
            wanted,
        });
    }
    Ok(bytes)
}

fn refresh_file(id: u32) -> PathBuf {
    Path::new("/sys/bus/rbd/devices")
        .join(id.to_string())
        .join("refresh")
}

#[cfg(test)]
mod tests;
