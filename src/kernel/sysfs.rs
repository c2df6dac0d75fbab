//! Properties of block devices in sysfs. Reading them never waits for the device, except
//! below `queue/` while the limits of a device in use are being changed.
//!
//! Sources: Documentation/ABI/stable/sysfs-block, drivers/block/loop.c
//! (`loop/backing_file`), Documentation/ABI/testing/sysfs-fs-ext4.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use super::Dev;

/// Bytes of a sector in sysfs, whatever the device's sector size.
const SECTOR: u64 = 512;

/// The numbers of a driver's devices, attached or not, in the order of sysfs: for `nbd`,
/// the 7 of `nbd7`.
pub fn numbers(driver: &str) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        numbers.extend(name.to_str().and_then(|name| number_in(name, driver)));
    }
    Ok(numbers)
}

/// The number in the name of one of a driver's devices.
pub fn number_in(name: &str, driver: &str) -> Option<u32> {
    name.strip_prefix(driver)?.parse().ok()
}

/// The number of the device that the kernel calls `name`.
pub fn dev_of(name: &str) -> io::Result<Dev> {
    let text = attribute(format!("/sys/class/block/{name}/dev"))?;
    text.parse().map_err(io::Error::other)
}

/// The kernel's name of `dev`, e.g. `loop7`.
pub fn name_of(dev: Dev) -> io::Result<String> {
    let target = fs::read_link(directory(dev))?;
    let name = target.file_name().and_then(|name| name.to_str());
    Ok(name
        .ok_or_else(|| broken(dev, target.display()))?
        .to_owned())
}

/// The path of the node of `dev` below `/dev`. The node may be missing, or another
/// device's: [`crate::kernel::block::open`] checks it.
pub fn node_of(dev: Dev) -> io::Result<PathBuf> {
    let uevent = attribute(directory(dev).join("uevent"))?;
    let name = uevent
        .lines()
        .find_map(|line| line.strip_prefix("DEVNAME="));
    Ok(Path::new("/dev").join(name.ok_or_else(|| broken(dev, &uevent))?))
}

/// The path of the node of `dev`; an error if the node is missing or has another number.
pub fn present_node_of(dev: Dev) -> io::Result<PathBuf> {
    let node = node_of(dev)?;
    let metadata = fs::metadata(&node)?;
    if metadata.file_type().is_block_device() && Dev::from_raw(metadata.rdev()) == dev {
        return Ok(node);
    }
    let why = format!(
        "{} is not the node of device {dev}: is the host's /dev mounted here?",
        node.display()
    );
    Err(io::Error::other(why))
}

/// The size of `dev` in bytes.
pub fn size_bytes(dev: Dev) -> io::Result<u64> {
    let sectors = number(dev, "size")?;
    sectors
        .checked_mul(SECTOR)
        .ok_or_else(|| broken(dev, sectors))
}

/// Whether the device refuses writes.
pub fn is_read_only(dev: Dev) -> io::Result<bool> {
    Ok(number(dev, "ro")? != 0)
}

/// The disk's sequence number ([`crate::kernel::block::diskseq`]). None on a kernel
/// before 5.15.
pub fn diskseq(dev: Dev) -> io::Result<Option<u64>> {
    match number(dev, "diskseq") {
        // For a removed device the whole directory is missing.
        Err(error) if error.kind() == io::ErrorKind::NotFound && directory(dev).exists() => {
            Ok(None)
        }
        number => number.map(Some),
    }
}

/// The suffix that the kernel appends to the path of a deleted file.
pub const DELETED: &str = " (deleted)";

/// The backing file of a loop device, as the kernel names it, with the suffix [`DELETED`]
/// if it was deleted. `NotFound` if the device is not attached.
pub fn backing_file(dev: Dev) -> io::Result<PathBuf> {
    let text = attribute(directory(dev).join("loop/backing_file"))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).into())
}

/// The backend identifier of an NBD device (Linux 5.14). `NotFound` if the device is not
/// attached, or was attached without an identifier.
pub fn nbd_backend(dev: Dev) -> io::Result<String> {
    backend(&directory(dev))
}

/// The same of the NBD device of that index, the 7 of `nbd7`.
pub fn nbd_backend_at(index: u32) -> io::Result<String> {
    backend(Path::new(&format!("/sys/block/nbd{index}")))
}

fn backend(device: &Path) -> io::Result<String> {
    let text = attribute(device.join("backend"))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Whether an NBD device is attached, by this driver or another.
pub fn nbd_is_attached(dev: Dev) -> bool {
    directory(dev).join("pid").exists()
}

/// The same of the NBD device of that index.
pub fn nbd_is_attached_at(index: u32) -> io::Result<bool> {
    fs::exists(format!("/sys/block/nbd{index}/pid"))
}

/// The most bytes of one WRITE_ZEROES to the device; 0 where it takes none.
pub fn most_zeroes(dev: Dev) -> io::Result<u64> {
    number(dev, "queue/write_zeroes_max_bytes")
}

/// How many hardware queues the device has; of an NBD device, connections.
pub fn queues(dev: Dev) -> io::Result<usize> {
    Ok(fs::read_dir(directory(dev).join("mq"))?.count())
}

/// How many CPUs the machine has, online or not
/// (Documentation/ABI/testing/sysfs-devices-system-cpu).
pub fn cpus() -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir("/sys/devices/system/cpu")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        count += usize::from(number.is_some_and(|number| number.parse::<u32>().is_ok()));
    }
    Ok(count)
}

/// How many requests the device has not answered yet.
pub fn in_flight(dev: Dev) -> io::Result<u64> {
    let text = attribute(directory(dev).join("inflight"))?;
    let counts = text.split_ascii_whitespace().map(str::parse::<u64>);
    counts.sum::<Result<_, _>>().map_err(|_| broken(dev, &text))
}

/// The device's logical block size in bytes.
pub fn block_bytes(dev: Dev) -> io::Result<u64> {
    number(dev, "queue/logical_block_size")
}

/// The size of the largest request to the device in KiB.
pub fn largest_kibibytes(dev: Dev) -> io::Result<u64> {
    number(dev, "queue/max_sectors_kb")
}

/// Limits the size of the device's requests to `kibibytes`, unless the limit is lower
/// already. The kernel waits for the requests in flight.
pub fn limit_requests(dev: Dev, kibibytes: u32) -> io::Result<()> {
    if largest_kibibytes(dev)? > u64::from(kibibytes) {
        let path = directory(dev).join("queue/max_sectors_kb");
        fs::write(path, kibibytes.to_string())?;
    }
    Ok(())
}

/// The milliseconds after which the driver looks at a request that is not answered.
#[cfg(feature = "holder")]
pub fn request_timeout(dev: Dev) -> io::Result<u64> {
    number(dev, REQUEST_TIMEOUT)
}

/// Sets it for later requests. Newer kernels wait for the requests in flight, and let no
/// others begin meanwhile.
#[cfg(feature = "holder")]
pub fn set_request_timeout(dev: Dev, milliseconds: u64) -> io::Result<()> {
    if request_timeout(dev)? == milliseconds {
        return Ok(());
    }
    let path = directory(dev).join(REQUEST_TIMEOUT);
    fs::write(path, milliseconds.to_string())
}

#[cfg(feature = "holder")]
const REQUEST_TIMEOUT: &str = "queue/io_timeout";

/// How many errors the mounted ext4 on this device has counted.
pub fn ext4_errors(dev: Dev) -> io::Result<u64> {
    let path = Path::new("/sys/fs/ext4").join(name_of(dev)?);
    let text = attribute(path.join("errors_count"))?;
    text.trim().parse().map_err(|_| broken(dev, text))
}

fn number(dev: Dev, name: &str) -> io::Result<u64> {
    let text = attribute(directory(dev).join(name))?;
    text.trim().parse().map_err(|_| broken(dev, text))
}

/// The text of an attribute. One read(2) returns it: the kernel writes it whole, into one
/// page (kernel document filesystems/sysfs).
pub fn attribute(path: impl AsRef<Path>) -> io::Result<String> {
    let mut page = [0; 4096];
    let length = File::open(path)?.read(&mut page)?;
    let text = std::str::from_utf8(&page[..length]).map_err(io::Error::other)?;
    Ok(text.to_owned())
}

/// Whether an attribute is missing. ENODEV: its device went while it was open (kernel document
/// filesystems/sysfs).
pub fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(Errno::NODEV.raw_os_error())
}

fn directory(dev: Dev) -> PathBuf {
    format!("/sys/dev/block/{dev}").into()
}

fn broken(dev: Dev, found: impl Display) -> io::Error {
    let why = format!("unexpected text in sysfs for device {dev}: {found}");
    io::Error::new(io::ErrorKind::InvalidData, why)
}
