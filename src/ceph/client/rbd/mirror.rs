//! The role of an image towards its mirrors in other clusters.

use std::{mem, ptr, slice};

use super::{
    Image, Watcher, abi,
    header::{MIRRORED, clients_watching},
};
use crate::ceph::client::{CephError, call::owned, rados::IoCtx};

/// The role of an image towards its mirrors. Their daemons (`rbd-mirror`) watch it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mirroring {
    /// It is not mirrored.
    None,
    /// Its mirrors follow it.
    Primary,
    /// It follows the primary image: it accepts no changes, and is removed with that image.
    Secondary,
    /// Its mirroring ends, as before a daemon removes it.
    Ending,
}

/// How the mirrors follow a primary image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorMode {
    /// By its journal.
    Journal,
    /// By snapshots.
    Snapshot,
}

/// What a daemon (`rbd-mirror`) does with an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MirrorState {
    /// It has nothing to do, as both sides are secondary; or none has reported.
    #[default]
    Unknown,
    Error,
    /// It copies the whole image.
    Syncing,
    /// It follows the primary image.
    Replaying,
    /// The image is primary.
    Stopped,
    /// It begins or ends to follow.
    Changing,
}

impl MirrorState {
    fn of(state: i32) -> Self {
        match state {
            abi::UNKNOWN => Self::Unknown,
            abi::ERROR => Self::Error,
            abi::SYNCING => Self::Syncing,
            abi::REPLAYING => Self::Replaying,
            abi::STOPPED => Self::Stopped,
            _ => Self::Changing,
        }
    }
}

/// An image at one site, as the daemon of that site reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MirrorSite {
    /// Whether the daemon runs.
    pub is_up: bool,
    pub state: MirrorState,
    /// The daemon's own words.
    pub description: String,
}

impl MirrorSite {
    /// Whether a running daemon follows the primary image.
    pub fn is_replaying(&self) -> bool {
        self.is_up && self.state == MirrorState::Replaying
    }

    /// Whether a running daemon found data that the primary image has not, which only a resync
    /// ends.
    pub fn is_split(&self) -> bool {
        self.is_up && self.state == MirrorState::Error && self.description.contains("split-brain")
    }

    /// Whether a running daemon has nothing to do.
    pub fn is_idle(&self) -> bool {
        self.is_up && self.state == MirrorState::Unknown
    }
}

/// An image at all sites that have reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MirrorSites {
    /// This cluster.
    pub own: MirrorSite,
    pub peers: Vec<MirrorSite>,
}

impl Image {
    /// These watchers without the mirror daemons. A daemon also watches the list of mirrored
    /// images, where the status that it reports depends on its watch (rbd-mirror's
    /// `MirrorStatusWatcher`); no other client of an image does.
    pub fn without_mirror_daemons(
        &self,
        mut watchers: Vec<Watcher>,
    ) -> Result<Vec<Watcher>, CephError> {
        if !watchers.is_empty() && self.mirroring()? != Mirroring::None {
            let daemons = clients_watching(self.io(), MIRRORED)?;
            watchers.retain(|watcher| !daemons.contains(&watcher.client));
        }
        Ok(watchers)
    }

    /// Its role when it was opened: for an image that is mirrored by snapshots, librbd finds
    /// the role in the list of snapshots that it read then.
    pub fn mirroring(&self) -> Result<Mirroring, CephError> {
        let functions = self.functions();
        let read = functions.rbd_mirror_image_get_info()?;
        let clean = functions.rbd_mirror_image_get_info_cleanup()?;
        let mut info = abi::MirrorInfo {
            global_id: ptr::null_mut(),
            state: 0,
            primary: false,
        };
        let size = mem::size_of_val(&info);
        // SAFETY: the library fills `info`, of the given size.
        let answer = unsafe { read(self.raw(), &raw mut info, size) };
        self.call("read the mirroring of").check(answer)?;
        // SAFETY: the library filled `info`, which is not used any more.
        unsafe { clean(&raw mut info) };
        Ok(match (info.state, info.primary) {
            (abi::MIRRORED, true) => Mirroring::Primary,
            (abi::MIRRORED, false) => Mirroring::Secondary,
            (abi::MIRRORING_ENDS, _) => Mirroring::Ending,
            _ => Mirroring::None,
        })
    }

    /// What the daemons do with the image.
    pub fn mirror_sites(&self) -> Result<MirrorSites, CephError> {
        let functions = self.functions();
        let read = functions.rbd_mirror_image_get_global_status()?;
        let clean = functions.rbd_mirror_image_global_status_cleanup()?;
        let mut status = abi::MirrorStatus {
            name: ptr::null_mut(),
            info: abi::MirrorInfo {
                global_id: ptr::null_mut(),
                state: 0,
                primary: false,
            },
            count: 0,
            sites: ptr::null_mut(),
        };
        let size = mem::size_of_val(&status);
        // SAFETY: the library fills `status`, of the given size.
        let answer = unsafe { read(self.raw(), &raw mut status, size) };
        self.call("read the mirror status of").check(answer)?;
        let mut found = MirrorSites::default();
        // SAFETY: the library has filled `status`, with so many sites, whose texts end in NUL;
        // none of it is used after the clean-up.
        unsafe {
            let sites = match status.sites {
                sites if sites.is_null() => &[],
                sites => slice::from_raw_parts(sites, status.count),
            };
            for site in sites {
                let uuid = owned(site.mirror_uuid);
                let reported = MirrorSite {
                    is_up: site.up,
                    state: MirrorState::of(site.state),
                    description: owned(site.description),
                };
                // That of this cluster has no uuid.
                if uuid.is_empty() {
                    found.own = reported;
                } else {
                    found.peers.push(reported);
                }
            }
            clean(&raw mut status);
        }
        Ok(found)
    }

    /// Has mirrors follow the image.
    pub fn mirror_enable(&self, mode: MirrorMode) -> Result<(), CephError> {
        let enable = self.functions().rbd_mirror_image_enable2()?;
        let mode = match mode {
            MirrorMode::Journal => abi::BY_JOURNAL,
            MirrorMode::Snapshot => abi::BY_SNAPSHOT,
        };
        // SAFETY: the image is open.
        self.call("mirror")
            .changed(unsafe { enable(self.raw(), mode) })
    }

    /// Has no mirror follow the image any more, which removes them; `force`: a secondary
    /// image becomes an image of its own.
    pub fn mirror_disable(&self, force: bool) -> Result<(), CephError> {
        let disable = self.functions().rbd_mirror_image_disable()?;
        // SAFETY: the image is open.
        let answer = unsafe { disable(self.raw(), force) };
        self.call("end the mirroring of").changed(answer)
    }

    /// Makes the image primary; `force`: although another is.
    pub fn mirror_promote(&self, force: bool) -> Result<(), CephError> {
        let promote = self.functions().rbd_mirror_image_promote()?;
        // SAFETY: the image is open.
        let answer = unsafe { promote(self.raw(), force) };
        self.call("promote").changed(answer)
    }

    /// Makes the image secondary.
    pub fn mirror_demote(&self) -> Result<(), CephError> {
        let demote = self.functions().rbd_mirror_image_demote()?;
        // SAFETY: the image is open.
        self.call("demote").changed(unsafe { demote(self.raw()) })
    }

    /// Has the daemon replace the image by a copy of the primary one.
    pub fn mirror_resync(&self) -> Result<(), CephError> {
        let resync = self.functions().rbd_mirror_image_resync()?;
        // SAFETY: the image is open.
        self.call("resync").changed(unsafe { resync(self.raw()) })
    }
}

/// Whether images of the pool may be mirrored.
pub fn is_mirroring_on(pool: &IoCtx) -> Result<bool, CephError> {
    let functions = &pool.cluster().libraries().rbd;
    let read = functions.rbd_mirror_mode_get()?;
    let mut mode = abi::MIRROR_MODE_DISABLED;
    // SAFETY: the pool is open, the library fills `mode`.
    let answer = unsafe { read(pool.raw(), &raw mut mode) };
    pool.call("read the mirror mode of", "pool", pool.pool())
        .check(answer)?;
    Ok(mode != abi::MIRROR_MODE_DISABLED)
}
