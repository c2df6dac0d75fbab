//! The claim of a controller, while it copies or deletes an image.
//!
//! Its file in `claims/` is a link of a [`Draft`], its token, that the controller keeps
//! locked meanwhile: once the lock is gone, the claim is stale. It stays `asking`, as the
//! controller never asks again in this name. A delete may need it in a full file system, so
//! its file and directory may be spare ones.

use std::{io, path::Path, sync::PoisonError};

use super::{
    CONTROLLER, Claim, ClaimError, ClaimState, Sharing, claims_dir, create_dir, marker_path,
    process_lock, refuse_conflict, remove, text_of, unlink,
};
use crate::{
    Done, crash_point,
    pool::{Pool, PoolError, draft::Draft, spares::is_full},
};

/// A controller's claim, of one image or several, valid until this is dropped.
#[derive(Debug)]
pub struct ControllerClaim {
    token: Draft,
    claim: Claim,
}

impl ControllerClaim {
    /// A claim of no image yet.
    pub fn new(pool: &Pool, boot_id: &str, access: Sharing) -> Result<Self, PoolError> {
        let by = |token: &str| Claim {
            node_id: format!("{CONTROLLER}{token}"),
            boot_id: boot_id.to_owned(),
            volume_id: String::new(),
            access,
            read_only: access == Sharing::Readers,
        };
        let tmp = pool.meta_dir("tmp")?;
        let content = |token: &str| text_of(&by(token), ClaimState::Asking);
        let token = Draft::written(&tmp, &pool.spares(), content)
            .map_err(|e| pool.io("write in", &tmp, e))?;
        let claim = by(token.id());
        Ok(Self { token, claim })
    }

    /// Claims an image.
    pub fn take(&self, pool: &Pool, image: &str) -> Result<(), ClaimError> {
        let lock = process_lock(pool);
        let _locked = lock.lock().unwrap_or_else(PoisonError::into_inner);
        pool.initialize()?;
        let mine = marker_path(pool, image, &self.claim.node_id);
        loop {
            create_or_take_dir(pool, &claims_dir(pool, image))?;
            match self.token.link(&mine) {
                Ok(()) => break,
                // A node released the last claim, and removed the directory.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(pool.io("write", &mine, e).into()),
            }
        }
        crash_point();
        let refused = refuse_conflict(pool, image, &mine, &self.claim);
        if refused.is_err() {
            let _: Done = remove(pool, image, &mine)?;
        }
        refused
    }

    /// Releases an image.
    pub fn release(&self, pool: &Pool, image: &str) -> Result<(), ClaimError> {
        let mine = marker_path(pool, image, &self.claim.node_id);
        let has_all = pool.spares().has_all_dirs();
        // The directory may be a spare one; the next claim finds it there.
        let _: Done = if has_all.map_err(|e| pool.io("remove", &mine, e))? {
            remove(pool, image, &mine)?
        } else {
            unlink(pool, &mine)?
        };
        Ok(())
    }
}

fn create_or_take_dir(pool: &Pool, dir: &Path) -> Result<(), PoolError> {
    match create_dir(pool, dir) {
        Err(PoolError::Io { source, .. }) if is_full(&source) => {
            match pool.spares().take_dir(dir) {
                Ok(true) => Ok(()),
                Ok(false) => Err(pool.io("make directory", dir, source)),
                Err(e) => Err(pool.io("make directory", dir, e)),
            }
        }
        made => made.map(drop),
    }
}
