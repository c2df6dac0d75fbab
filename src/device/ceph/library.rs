//! What only the cluster can tell of an image, asked through librbd where the
//! library is there: who has it open, its features, its metadata.
//!
//! The kernel's driver tells neither. Without the library plain volumes are
//! mapped all the same, and nothing but the orchestrator keeps a second writer off:
//! clients hand an image's exclusive lock on to whoever asks for it.

use std::time::Duration;

use super::error::CephImageError;
use crate::{
    ceph::{
        CephError, Credentials,
        config::ClusterConfig,
        connections::Connections,
        encryption::{ENCRYPTED, SEALED_KEY, STATE_KEY, noted},
        rbd::{self, Access, Watcher},
    },
    device::rbd::Image,
    kernel::busy,
};

/// How long others may take to let go of an image: the watch of a node that died
/// ends after 30 seconds (`osd_client_watch_timeout`).
const FREE_WITHIN: Duration = Duration::from_secs(40);

/// Opens the image to look at it; none where there is no librbd.
pub fn open(
    connections: &Connections,
    cluster: &ClusterConfig,
    credentials: &Credentials,
    image: &Image,
    access: Access,
) -> Result<Option<rbd::Image>, CephImageError> {
    let connected = match connections.get(&cluster.monitors, credentials) {
        Err(CephError::Library(missing)) => {
            tracing::debug!(%missing, "the cluster is not asked");
            return Ok(None);
        }
        connected => connected?,
    };
    let pool = connected.ioctx(&image.pool, &image.namespace)?;
    Ok(Some(rbd::Image::open(&pool, &image.name, access)?))
}

/// Who else has the image open, beside this connection and the client `own`. Those
/// who mirror it do no harm and are not named.
pub fn others(
    image: &rbd::Image,
    own: Option<i64>,
    mirror_daemons: u32,
) -> Result<Vec<Watcher>, CephError> {
    let mut others = image.watchers()?;
    others.retain(|watcher| !watcher.own && Some(watcher.client) != own);
    if others.is_empty() || !image.is_mirrored()? {
        return Ok(others);
    }
    let harmless = usize::try_from(mirror_daemons).unwrap_or(usize::MAX);
    Ok(if others.len() > harmless {
        others
    } else {
        Vec::new()
    })
}

/// Waits until nobody else has the image open, or names who has.
pub fn wait_until_free(image: &rbd::Image, mirror_daemons: u32) -> Result<(), CephImageError> {
    let watchers = busy::outwait_for(
        FREE_WITHIN,
        || others(image, None, mirror_daemons),
        |others| others.as_ref().is_ok_and(|some| !some.is_empty()),
    )?;
    nobody(image, watchers)
}

/// Names them, where there is anybody.
pub fn nobody(image: &rbd::Image, watchers: Vec<Watcher>) -> Result<(), CephImageError> {
    if watchers.is_empty() {
        return Ok(());
    }
    Err(CephImageError::InUse {
        image: image.to_string(),
        watchers,
    })
}

/// What the image's metadata say of its encryption.
#[derive(Debug, Default)]
pub struct Notes {
    /// It was encrypted.
    pub encrypted: bool,
    /// Its own passphrase, sealed.
    pub sealed: Option<String>,
}

impl Notes {
    /// Reads them.
    pub fn of(image: &rbd::Image) -> Result<Self, CephError> {
        let notes = image.metadata_list()?;
        Ok(Self {
            encrypted: noted(&notes, STATE_KEY) == Some(ENCRYPTED),
            sealed: noted(&notes, SEALED_KEY).map(str::to_owned),
        })
    }
}
