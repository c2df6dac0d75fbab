//! Whether an image is mapped already.
//!
//! Another cluster may have an image of the same names, so names alone never suffice. The
//! mark decides, or else the pool's id and the monitors. A device keeps the monitors that
//! it was mapped by, and a cluster may replace all of them: if none is known any more, the
//! cluster's fsid decides ([`Wanted::fsid`]), and without that the map is refused.

use std::{io, path::PathBuf};

use super::{
    ImageSpec, KrbdError, Mapped, Mark, RbdDevice, Wanted, error::failed, mapped, monitors,
};
use crate::kernel::sysfs;

/// The device of the requested image, if it is mapped already.
pub fn find(wanted: &Wanted<'_>) -> Result<Option<RbdDevice>, KrbdError> {
    let Wanted {
        image, read_only, ..
    } = *wanted;
    let Some(found) = recognised(wanted)? else {
        return Ok(None);
    };
    let device = match found.device() {
        Ok(device) => device,
        Err(error) if sysfs::is_missing(&error) => return Ok(None),
        Err(error) => return Err(failed("look at", format!("rbd{}", found.id))(error)),
    };
    let mark = found.config.mark.as_ref();
    let how = if mark.is_some_and(|mark| mark.volume_id != wanted.volume_id) {
        // One cluster may be configured by two names, and then each has handles.
        "for another volume"
    } else if device.read_only == read_only {
        return Ok(Some(device));
    } else if device.read_only {
        "read-only"
    } else {
        "writable"
    };
    Err(KrbdError::MappedOtherwise {
        image: image.to_string(),
        node: device.node,
        how,
    })
}

/// The relation of a mapped image to the requested one of the same name.
#[derive(Debug, PartialEq, Eq)]
pub enum Which {
    /// It is the requested one.
    It,
    /// It is another cluster's.
    Another,
    /// Unknown.
    Doubtful,
}

/// Compares a mapped image with the requested one, which has the same names.
pub fn which(mapped: &Mapped, wanted: &Wanted<'_>) -> Which {
    let mark = mapped.config.mark.as_ref();
    let is_its_pool = wanted.pool_id.map(|id| id == mapped.identity.pool_id);
    let is_ours = mark.is_some_and(|mark| mark.cluster_id == wanted.image.cluster_id);
    if is_ours && is_its_pool != Some(false) {
        return Which::It;
    }
    let shares_monitors = wanted.monitors.share(&mapped.config.monitors);
    let is_its_cluster = wanted.fsid.map(|fsid| fsid == mapped.identity.fsid);
    match (
        is_its_pool,
        is_its_cluster.or(shares_monitors.then_some(true)),
    ) {
        (Some(false), _) | (_, Some(false)) => Which::Another,
        (_, Some(true)) => Which::It,
        // By this driver, for another cluster without a common monitor.
        (_, None) if mark.is_some() => Which::Another,
        (_, None) => Which::Doubtful,
    }
}

fn recognised(wanted: &Wanted<'_>) -> Result<Option<Mapped>, KrbdError> {
    let image = wanted.image;
    let listed =
        mapped::named(&image.name).map_err(failed("list", "the mapped images".to_owned()))?;
    let mut found: Option<Mapped> = None;
    for mapped in listed {
        if !mapped.image.is_named_as(image) {
            continue;
        }
        match (which(&mapped, wanted), &found) {
            (Which::Another, _) => {}
            (Which::It, None) => found = Some(mapped),
            (Which::It, Some(other)) => {
                let nodes = [other.id, mapped.id].map(|id| format!("/dev/rbd{id}"));
                return Err(KrbdError::Twice {
                    image: image.to_string(),
                    nodes: nodes.into(),
                });
            }
            (Which::Doubtful, _) => {
                return Err(KrbdError::Doubtful {
                    image: image.to_string(),
                    node: PathBuf::from(format!("/dev/rbd{}", mapped.id)),
                    monitors: monitors::list(&mapped.config.monitors),
                });
            }
        }
    }
    Ok(found)
}

/// The device that was just mapped with this mark.
pub fn marked(image: &ImageSpec, mark: &Mark) -> Result<RbdDevice, KrbdError> {
    let look = || {
        let listed = mapped::named(&image.name)?.into_iter();
        let mut ours = listed.filter(|mapped| mapped.config.mark.as_ref() == Some(mark));
        ours.next().ok_or(io::ErrorKind::NotFound)?.device()
    };
    look().map_err(failed("find the device of image", image.to_string()))
}

/// The image that was mapped for the volume, if its agent did not record it.
pub fn find_marked(volume_id: &str) -> io::Result<Option<Mapped>> {
    let listed = mapped::list()?.into_iter();
    let mut its = listed.filter(|mapped| {
        let mark = mapped.config.mark.as_ref();
        mark.is_some_and(|mark| mark.volume_id == volume_id)
    });
    Ok(its.next())
}
