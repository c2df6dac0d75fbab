//! The role of an image towards its mirrors in other clusters.

use std::{mem, ptr};

use super::{Image, Watcher, abi};
use crate::ceph::client::CephError;

/// The role of an image towards its mirrors. Their daemons (`rbd-mirror`) watch it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mirroring {
    /// It has none.
    None,
    /// They follow it.
    Primary,
    /// It follows another: it takes no changes, and goes when that one goes.
    Secondary,
}

impl Image {
    /// These watchers, if there are more than the `known` ones and, for a mirrored image,
    /// the daemons; else none. A watcher does not tell whether it is a daemon.
    pub fn harmful(
        &self,
        watchers: Vec<Watcher>,
        known: usize,
        daemons: u32,
    ) -> Result<Vec<Watcher>, CephError> {
        let mut harmless = known;
        if watchers.len() > harmless && self.mirroring()? != Mirroring::None {
            harmless = harmless.saturating_add(usize::try_from(daemons).unwrap_or(usize::MAX));
        }
        Ok(if watchers.len() > harmless {
            watchers
        } else {
            Vec::new()
        })
    }

    /// What it was to its mirrors when it was opened: where they follow its
    /// snapshots, its own list of those says it.
    pub fn mirroring(&self) -> Result<Mirroring, CephError> {
        let functions = self.functions();
        let mut info = abi::MirrorInfo {
            global_id: ptr::null_mut(),
            state: 0,
            primary: false,
        };
        let size = mem::size_of_val(&info);
        // SAFETY: the library fills what it is given, of that size.
        let answer =
            unsafe { (functions.rbd_mirror_image_get_info)(self.raw(), &raw mut info, size) };
        self.call("ask for the mirroring of").check(answer)?;
        // SAFETY: the library filled it, and it is not used any more.
        unsafe { (functions.rbd_mirror_image_get_info_cleanup)(&raw mut info) };
        Ok(match (info.state, info.primary) {
            (abi::MIRRORED, true) => Mirroring::Primary,
            (abi::MIRRORED, false) => Mirroring::Secondary,
            _ => Mirroring::None,
        })
    }
}
