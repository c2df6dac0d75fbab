//! Removes the images that stories leave in their common cluster, which is in memory and
//! would fill that.

use std::time::Duration;

use uring_csi::internals::{
    CephError, Cluster, Credentials, ImageName, IoCtx, OpenMode, Secret, Timeouts, rbd, trash,
};

use super::TestCluster;

/// Removes the images with this prefix, copies before their sources, as far as they can be
/// removed.
pub fn remove(cluster: &TestCluster, prefix: &str) -> Result<(), CephError> {
    let admin = Credentials {
        user: "admin".to_owned(),
        key: Secret::new(cluster.admin_key.clone()),
    };
    let connected = Cluster::connect(&cluster.monitors, &admin, Timeouts::default())?;
    let io = connected.ioctx(&cluster.pool, "")?;
    let mut before = usize::MAX;
    loop {
        let mut images = rbd::list(&io)?;
        images.retain(|image| image.name.starts_with(prefix));
        if images.is_empty() || images.len() == before {
            return Ok(());
        }
        before = images.len();
        for image in images {
            // An image with copies is removed in a later round.
            let _ = remove_image(&io, &image);
        }
    }
}

fn remove_image(io: &IoCtx, image: &ImageName) -> Result<(), CephError> {
    let open = rbd::Image::open(io, &image.name, OpenMode::ReadWrite)?;
    for snapshot in open.snapshots()? {
        open.snapshot_remove(&snapshot.name)?;
    }
    drop(open);
    trash::move_image(io, &image.name, Duration::ZERO)?;
    trash::remove(io, &image.id, true)
}
