//! The process that keeps the rbd-nbd daemons: `uring-csi-holder`.
//!
//! rbd-nbd serves an image from user space: while its daemon is down, all I/O of the
//! volume waits. A daemon that the node agent had started would end with the agent's
//! container at each update, and could not be restarted without the key, which neither
//! the kernel nor kubelet has. So a small process that updates leave alone starts the
//! daemons and keeps their keys in locked memory:
//!
//! ```text
//!  node agent ── unix socket ──▶ supervisor ── starts, reads, restarts ──▶ rbd-nbd ──▶ /dev/nbd7
//!  uringctl reattach ──▶           └── a record on a tmpfs, without the key
//! ```
//!
//! **Identity.** A device is found by its cookie, which is the volume's handle
//! (`/sys/block/nbd7/backend`, Linux 5.14), a daemon by the cookie in its command line.
//! ceph-csi uses the same cookies, so the supervisor finds its devices and daemons, too.
//!
//! **Failures are independent.** If the agent ends, the daemons run on. If a daemon ends,
//! the supervisor starts another, and I/O goes on. If the supervisor ends, its daemons run
//! on; the next supervisor finds them by its records, and reports for each that it cannot
//! restart it until the next stage or `uringctl reattach` brings the key.
//!
//! **One daemon a volume.** Two daemons that serve one device, or that have one image
//! mapped, destroy its data. So each volume has a task that makes all its changes one
//! after the other, and finishes them even if the caller disconnects.

use std::time::Duration;

pub mod client;
mod error;
pub(crate) mod processes;
mod spec;

#[cfg(feature = "holder")]
pub mod child;
#[cfg(feature = "holder")]
mod daemon;
#[cfg(feature = "holder")]
pub mod keeper;
#[cfg(feature = "holder")]
pub mod memory_lock;
#[cfg(feature = "holder")]
mod records;
#[cfg(feature = "holder")]
pub mod service;
#[cfg(feature = "holder")]
mod shared;
#[cfg(feature = "holder")]
mod volume;
mod watch;

#[cfg(all(test, feature = "holder"))]
mod tests;

/// The longest time until the supervisor answers. Work that takes longer goes on, and a
/// repeated call waits for it.
const ANSWERS_WITHIN: Duration = Duration::from_secs(80);

pub use crate::ceph::csi_format::map_options::NbdOptions;
pub use error::SupervisorError;
pub use spec::{RegistrationKey, Spec, SpecError};
pub use watch::{DaemonCondition, Watch};
