//! What only the cluster can tell of an image, asked through librbd where the
//! library is there: who has it open, its features, its metadata.
//!
//! The kernel's driver tells neither. Without the library plain volumes are
//! mapped all the same, and a second writer is kept off by the image's lock alone.

use std::time::{Duration, Instant};

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

/// Waits until nobody else has the image open, or names who has. Those who mirror
/// it do no harm.
pub fn wait_until_free(image: &rbd::Image, mirror_daemons: u32) -> Result<(), CephImageError> {
    let began = Instant::now();
    let mirrors = if image.is_mirrored()? {
        usize::try_from(mirror_daemons).unwrap_or(usize::MAX)
    } else {
        0
    };
    let others = busy::outwait_for(
        FREE_WITHIN,
        || {
            let others: Vec<Watcher> = image
                .watchers()?
                .into_iter()
                .filter(|watcher| !watcher.own)
                .collect();
            Ok::<_, CephError>(others)
        },
        |others| others.as_ref().is_ok_and(|others| others.len() > mirrors),
    )?;
    if others.len() <= mirrors {
        let waited = began.elapsed();
        if waited > Duration::from_secs(1) {
            tracing::info!(%image, seconds = waited.as_secs(), "waited for another client to let go");
        }
        return Ok(());
    }
    Err(CephImageError::InUse {
        image: image.to_string(),
        watchers: others,
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
