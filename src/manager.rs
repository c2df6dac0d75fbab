//! The volume manager: volumes that files ask for, on a machine without an orchestrator.
//!
//! ```text
//!  DIR/*.toml ──directory──▶ desired ─┐
//!                                     ├─plan──▶ one action a volume ──▶ volume's calls
//!  kernel, records ─────────▶ actual ─┘
//! ```
//!
//! It mounts nothing by itself: each action is a call that kubelet could make as well, so
//! that tasks, records, lanes and recovery are [`crate::volume`]'s.

#[cfg(feature = "node")]
mod applied;
#[cfg(feature = "node")]
mod calls;
pub mod desired;
#[cfg(feature = "node")]
mod difference;
pub mod directory;
#[cfg(feature = "node")]
mod dry_run;
#[cfg(feature = "node")]
mod list;
#[cfg(feature = "node")]
mod maps;
#[cfg(feature = "node")]
mod plan;
#[cfg(feature = "node")]
mod populate;
#[cfg(feature = "node")]
pub mod records;
mod root;
#[cfg(feature = "node")]
mod run;
#[cfg(feature = "node")]
mod state;
#[cfg(feature = "node")]
mod table;

#[cfg(feature = "node")]
pub use list::{PlannedState, WantedState};
#[cfg(feature = "node")]
pub use run::Manager;
#[cfg(feature = "node")]
pub use state::Summary;
