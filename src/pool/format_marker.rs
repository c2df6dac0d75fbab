//! Which images have a file system under way.
//!
//! A note beside the image, durable before mkfs begins and removed when it has
//! ended: what a killed mkfs left is nobody's data and may be formatted again.
//! It is kept in the pool, not on a node, so that whichever node gets the image
//! next knows of it, and no node holds on to one that another has settled.

use std::path::PathBuf;

use super::{
    Pool, PoolError,
    draft::{self, Durability::Durable},
};

fn note(pool: &Pool, image: &str) -> PathBuf {
    pool.meta_path("mkfs").join(image)
}

/// A mkfs of the image is about to begin, for this volume.
pub fn set(pool: &Pool, image: &str, volume_id: &str) -> Result<(), PoolError> {
    pool.meta_dir("mkfs")?;
    let (tmp, path) = (pool.meta_dir("tmp")?, note(pool, image));
    draft::replace(&tmp, &path, volume_id.as_bytes(), Durable)
        .map_err(|e| pool.io("write", &path, e))
}

/// Whether a mkfs of the image, for this volume, has begun and not ended.
pub fn format_in_progress(pool: &Pool, image: &str, volume_id: &str) -> Result<bool, PoolError> {
    let path = note(pool, image);
    match std::fs::read(&path) {
        Ok(noted) => Ok(noted == volume_id.as_bytes()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(pool.io("read", &path, e)),
    }
}

/// The image holds, or may hold from now on, somebody's data.
pub fn clear(pool: &Pool, image: &str) -> Result<(), PoolError> {
    let path = note(pool, image);
    draft::remove(&path, Durable)
        .map(drop)
        .map_err(|e| pool.io("remove", &path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Scope;

    #[test]
    fn a_note_is_for_one_volume_and_goes_once() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool {
            name: "p".to_owned(),
            dir: dir.path().to_owned(),
            scope: Scope::Shared,
            mounted: false,
        };
        assert!(!format_in_progress(&pool, "i.img", "v").unwrap());
        set(&pool, "i.img", "v").unwrap();
        assert!(format_in_progress(&pool, "i.img", "v").unwrap());
        assert!(!format_in_progress(&pool, "i.img", "w").unwrap());
        assert!(!format_in_progress(&pool, "j.img", "v").unwrap());
        clear(&pool, "i.img").unwrap();
        clear(&pool, "i.img").unwrap();
        assert!(!format_in_progress(&pool, "i.img", "v").unwrap());
    }
}
