//! Attaching an image as a loop device, finding it attached, and the read-only mark that
//! stays on the device's number.

use std::{fs::File, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{OFlags, SeekFrom, Stat},
    io::Errno,
};

use super::{
    AttachOptions, Backing, Device, ImageSource,
    error::{DeviceError, io},
    in_use,
    loopdev::{self, AttachedLoop, FileId, LoopDevice, LoopOptions},
    openers, read_only_mark,
};
use crate::{
    kernel::{block, lease},
    pool::Pool,
};

/// Attaches the image as a loop device, or finds it attached as it should be. Returns the
/// descriptor of a device that it attached. `other`: another volume for which this node has
/// claimed the image, and which may have it attached.
pub fn attach_loop(
    source: &ImageSource,
    pool: &Pool,
    (file, stat): (&File, &Stat),
    options: &AttachOptions,
    other: Option<&str>,
) -> Result<(Device, Option<OwnedFd>), DeviceError> {
    let path = pool.image_path(&source.image);
    let id = FileId::from(stat);
    let device = |device: LoopDevice| Device {
        dev: device.dev,
        node: device.node,
        backing: Backing::Image(id),
        read_only: options.read_only,
        diskseq: device.diskseq,
        encrypted: None,
    };
    // Most images are not attached yet, and a look at every loop device would show no more.
    let found = match lease::is_open_elsewhere(file) {
        Some(false) => None,
        Some(true) | None => attached_to(id, &source.image, options.known.as_deref())?,
    };
    if let Some(found) = found {
        if let Some(volume) = other {
            return Err(DeviceError::AttachedFor {
                image: path,
                device: found.attached.device.node,
                volume: volume.to_owned(),
            });
        }
        let is_known = options.known.as_deref() == Some(&*found.attached.device.node);
        // Other readers keep their device; this one gets another.
        let another = options.shared && options.read_only && found.busy && !is_known;
        match otherwise(&found.attached, options) {
            _ if another => {}
            _ if found.attached.detaching => {
                return Err(DeviceError::Busy {
                    openers: openers::openers(found.attached.device.dev),
                    device: found.attached.device.node,
                });
            }
            None => {
                let attached = device(found.attached.device);
                in_use::refuse(&attached.node, attached.dev, options)?;
                if !found.busy {
                    read_only_mark::clear_left(&attached, options.purpose)?;
                }
                return Ok((attached, None));
            }
            Some(difference) => {
                return Err(DeviceError::AttachedOtherwise {
                    image: path,
                    device: found.attached.device.node,
                    how: difference,
                });
            }
        }
    }
    let bytes = u64::try_from(stat.st_size).unwrap_or_default();
    if bytes < SMALLEST {
        return Err(DeviceError::TooSmall { image: path, bytes });
    }
    let loop_options = LoopOptions {
        read_only: options.read_only,
        direct_io: source.direct_io,
        sector_size: source.sector_size,
        name: &path,
    };
    let (attached, exclusive) = loopdev::attach(file, &loop_options)?;
    Ok((device(attached), Some(exclusive)))
}

/// One sector, the smallest block device.
const SMALLEST: u64 = 512;

/// Whether nothing was ever written to the file (lseek(2), `SEEK_DATA`).
pub fn is_all_hole(file: &File) -> std::io::Result<bool> {
    match rustix::fs::seek(file, SeekFrom::Data(0)) {
        Err(Errno::NXIO) => Ok(true),
        Ok(_) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// The loop device of a record. Its node has its number; that it is the device's,
/// [`block::open`] checks.
pub fn loop_device(device: &Device) -> Result<LoopDevice, DeviceError> {
    let number = loopdev::number_of(&device.node)
        .ok_or_else(|| {
            std::io::Error::other(format!("{} is no loop device", device.node.display()))
        })
        .map_err(io("find the device"))?;
    Ok(LoopDevice {
        number,
        dev: device.dev,
        node: device.node.clone(),
        diskseq: device.diskseq,
    })
}

/// A loop device over an image.
pub struct Over {
    /// The device.
    pub attached: AttachedLoop,
    /// Mounted, or open exclusively.
    pub busy: bool,
}

/// The loop device over an image; of several the known one, else one that is not in use.
pub fn attached_to(
    id: FileId,
    image: &str,
    known: Option<&Path>,
) -> Result<Option<Over>, DeviceError> {
    let image = Path::new(image);
    let over = |attached: AttachedLoop| Over {
        busy: block::open(&attached.device.node, attached.device.dev, OFlags::EXCL).is_err(),
        attached,
    };
    // A look at every loop device takes a while.
    let at_known = known.map(|node| loopdev::find_at(node, id, image));
    let at_known = at_known
        .transpose()
        .map_err(io("look at the loop device"))?;
    if let Some(found) = at_known.flatten() {
        return Ok(Some(over(found)));
    }
    let found = loopdev::find(id, image).map_err(io("list the loop devices"))?;
    let found = found.into_iter().map(over);
    Ok(found.min_by_key(|one| one.busy))
}

/// The difference between an attached loop device and the one that is needed.
fn otherwise(found: &AttachedLoop, options: &AttachOptions) -> Option<String> {
    if found.offset != 0 || found.size_limit != 0 {
        return Some(format!(
            "from byte {} on, {} bytes of it",
            found.offset, found.size_limit
        ));
    }
    (found.read_only != options.read_only).then(|| {
        if found.read_only {
            "read-only"
        } else {
            "writable"
        }
        .to_owned()
    })
}
