//! Blocklisting the clients of a daemon that has died.
//!
//! A daemon has its image's exclusive lock, where the image has that feature. librbd breaks
//! the lock of a client that is no watcher of the image any more, after it has blocklisted
//! that client; but the OSDs keep the watch of a dead client for 30 seconds, and all I/O waits
//! for that. They drop it at once if the client is blocklisted. So the supervisor, which knows
//! that the process has ended, blocklists the client as librbd would, for as long, and before
//! a successor takes the lock. What the dead client has sent and no OSD has carried out yet is
//! refused from then on.
//!
//! **Whose client.** The daemon logged its client ids. The monitors give each id once, and the
//! watcher's address has a nonce, so no other client is meant; but monitors whose store was
//! restored from a backup may give an id again, and then another watcher of the image is.

use super::{ClusterAnswer, Spec, SupervisorError, Task, ask, watchers_among};
use crate::{
    ceph::{
        client::{CephError, rados::IoCtx},
        fencing::blocklist_dead,
    },
    secret::Secret,
};

/// Blocklists those of these clients that are watchers of the image; blocks for a while.
/// Returns whether there was one.
pub fn blocklist(spec: &Spec, key: &Secret, clients: Vec<i64>) -> Result<bool, SupervisorError> {
    let image = spec.image.to_string();
    let message = match ask(spec, key, Task::Blocklist(clients))? {
        ClusterAnswer::Done => return Ok(true),
        // A missing image has no lock, either.
        ClusterAnswer::NotThere | ClusterAnswer::Missing => return Ok(false),
        ClusterAnswer::Denied => {
            let user = spec.user.clone();
            return Err(SupervisorError::Denied { image, user });
        }
        ClusterAnswer::Silent(message) => return Err(SupervisorError::Silent { image, message }),
        ClusterAnswer::Failed(message) => message,
        other @ ClusterAnswer::Unpublished => format!("{other:?}"),
    };
    Err(SupervisorError::Failed { image, message })
}

pub(super) fn carry_out(
    pool: &IoCtx,
    image: &str,
    clients: &[i64],
) -> Result<ClusterAnswer, CephError> {
    let dead = watchers_among(pool, image, clients)?;
    for watcher in &dead {
        blocklist_dead(pool.cluster(), &watcher.address)?;
    }
    Ok(if dead.is_empty() {
        ClusterAnswer::NotThere
    } else {
        ClusterAnswer::Done
    })
}
