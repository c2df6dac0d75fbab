//! Format markers: records that a mkfs of an image is in progress.
//!
//! The agent makes the marker durable before mkfs starts, and removes it when mkfs has
//! ended: a partial format holds no user data and may be formatted again. The file is in
//! the pool, not on a node, so that the next node that attaches the image reads it, and no
//! node keeps a marker that another has removed.

use std::path::PathBuf;

use super::{
    Pool, PoolError,
    draft::{self, Durability::Durable},
};

fn path_of(pool: &Pool, image: &str) -> PathBuf {
    pool.meta_path("mkfs").join(image)
}

/// Sets the marker, before a mkfs of the image for this volume.
pub fn set(pool: &Pool, image: &str, volume_id: &str) -> Result<(), PoolError> {
    pool.meta_dir("mkfs")?;
    let (tmp, path) = (pool.meta_dir("tmp")?, path_of(pool, image));
    draft::replace(&tmp, &path, volume_id.as_bytes(), Durable)
        .map(drop)
        .map_err(|e| pool.io("write", &path, e))
}

/// Whether the image has a marker of this volume.
pub fn format_in_progress(pool: &Pool, image: &str, volume_id: &str) -> Result<bool, PoolError> {
    let path = path_of(pool, image);
    match std::fs::read(&path) {
        Ok(marked) => Ok(marked == volume_id.as_bytes()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(pool.io("read", &path, e)),
    }
}

/// Removes the marker: from now on the image may hold user data.
pub fn clear(pool: &Pool, image: &str) -> Result<(), PoolError> {
    let path = path_of(pool, image);
    draft::remove(&path, Durable)
        .map(drop)
        .map_err(|e| pool.io("remove", &path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Scope;

    #[test]
    fn a_marker_is_of_one_image_and_one_volume() {
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
