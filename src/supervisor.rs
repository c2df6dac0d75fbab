//! The process that keeps the rbd-nbd daemons: `uring-csi-holder`.
//!
//! rbd-nbd serves an image from user space: while its daemon is gone, all I/O of
//! the volume waits. A daemon that the node agent had started would go with the
//! agent's container at each update, and could not come back before somebody
//! brought the key again, which neither the kernel nor kubelet does. So a small
//! process that nothing ever updates has the daemons and, in locked memory, their
//! keys:
//!
//! ```text
//!  node agent ── unix socket ──▶ supervisor ── starts, reads, restarts ──▶ rbd-nbd ──▶ /dev/nbd7
//!  uringctl reattach ──▶           └── a record on a tmpfs, without the key
//! ```
//!
//! **Recognised** is a device by its cookie, which is the volume's handle
//! (`/sys/block/nbd7/backend`, Linux 5.14), and a daemon by the cookie in its
//! command line. ceph-csi calls them the same, so what it mapped is found, too.
//!
//! **Each of the three dies alone.** The agent: nobody notices. A daemon: the
//! supervisor starts another, and I/O goes on. The supervisor: its daemons run on; the
//! next supervisor finds them by its records, and says of each that it could not be
//! brought back until the next stage or `uringctl reattach` brings the key.
//!
//! **One daemon a volume.** Two that serve one device, or have one image mapped,
//! destroy what they serve. So whatever changes a volume is done by a task of its
//! own, one after the other, and goes on when its caller has gone.

use std::time::Duration;

pub mod client;
mod error;
pub(crate) mod processes;
mod spec;

#[cfg(feature = "holder")]
mod daemon;
#[cfg(feature = "holder")]
pub mod keeper;
#[cfg(feature = "holder")]
pub mod memory_lock;
#[cfg(feature = "holder")]
mod records;
#[cfg(feature = "holder")]
pub mod registration;
#[cfg(feature = "holder")]
pub mod service;
#[cfg(feature = "holder")]
mod shared;
#[cfg(feature = "holder")]
mod volume;
mod watch;

#[cfg(all(test, feature = "holder"))]
mod tests;

/// How long the supervisor takes for an answer at most. What is not done by then goes
/// on, and a repeated call waits for it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(80);

pub use crate::ceph::csi_format::map_options::NbdOptions;
pub use error::SupervisorError;
pub use spec::{RegistrationKey, Spec, SpecError};
pub use watch::{Trouble, Watch};
