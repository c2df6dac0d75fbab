//! The role of an image towards its mirrors in other clusters.

use std::{mem, ptr, slice};

use super::{
    Image, Watcher, abi,
    header::{MIRRORED, clients_watching},
};
use crate::ceph::client::{CephError, call::owned};

/// The role of an image towards its mirrors. Their daemons (`rbd-mirror`) watch it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mirroring {
    /// It is not mirrored.
    None,
    /// Its mirrors follow it.
    Primary,
    /// It follows the primary image: it accepts no changes, and is removed with that image.
    Secondary,
}

/// The state of a secondary image, as the daemon of its cluster reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// Whether the daemon runs (`up`) and replays the primary's changes (`replaying`).
    pub is_active: bool,
    /// The daemon's own words.
    pub description: String,
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
            _ => Mirroring::None,
        })
    }

    /// What the daemon of this cluster (`rbd-mirror`) does with the image.
    pub fn replay(&self) -> Result<Replay, CephError> {
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
        // SAFETY: the library has filled `status`, with so many sites, whose texts end in NUL;
        // none of it is used after the clean-up.
        unsafe {
            let sites = match status.sites {
                sites if sites.is_null() => &[],
                sites => slice::from_raw_parts(sites, status.count),
            };
            // That of this cluster has no uuid.
            let own = sites.iter().find(|site| owned(site.mirror_uuid).is_empty());
            let replay = own.map_or_else(Replay::default, |own| Replay {
                is_active: own.up && own.state == abi::REPLAYING,
                description: owned(own.description),
            });
            clean(&raw mut status);
            Ok(replay)
        }
    }
}
