//! The gRPC services: requests parsed into types, errors mapped to codes.
//!
//! Neither `volume` nor `provision` knows gRPC. `run_dir` locks the run directory for one
//! agent, [`validate`] has the rules for every request, [`status`] the one table of codes,
//! [`crate::endpoint`] the sockets.

pub mod addons;
#[cfg(feature = "node")]
pub mod admin;
pub mod call;
#[cfg(feature = "controller")]
pub mod controller;
pub mod identity;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "node")]
pub mod run_dir;
pub mod status;
mod storage;
pub mod validate;
