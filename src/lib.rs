//! uring-csi: a CSI driver for block volumes on storage-heavy nodes.
//!
//! Arrows run one way, `bin → csi → volume → {device, fs, mount} → {ring, lane,
//! kernel}`; nothing below [`csi`] knows gRPC, nothing above [`device`] knows a
//! backend's name. See `docs/architecture.md`.

mod capability;
mod digest;
mod done;
pub mod endpoint;
mod error_chain;
#[cfg(test)]
#[path = "../tests/left_out.rs"]
mod left_out;

#[cfg(feature = "node")]
pub mod admission;
pub mod ceph;
pub mod config;
mod crash;
pub mod csi;
mod kind;
pub mod lane;
pub mod nbd;
pub mod observe;
#[cfg(any(feature = "node", feature = "controller"))]
mod parse_bool;
pub mod pool;
pub mod proto;
pub mod secret;
pub mod size;

#[cfg(feature = "controller")]
pub mod provision;

#[cfg(feature = "cli")]
pub mod cli;

#[cfg(feature = "node")]
pub mod device;
#[cfg(any(feature = "node", feature = "controller"))]
pub mod fs;
pub mod kernel;
#[cfg(feature = "node")]
pub mod mount;
#[cfg(feature = "node")]
pub mod ring;
#[cfg(feature = "node")]
pub mod supervisor;
#[cfg(feature = "node")]
pub mod volume;

pub(crate) use crash::crash_point;
#[cfg(feature = "node")]
pub(crate) use crash::hold_point;
#[cfg(feature = "node")]
pub use done::Detached;
pub use done::Done;
pub use error_chain::error_chain;
pub use kind::Kind;
