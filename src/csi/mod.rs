//! The gRPC face: requests in, parsed into types; errors out, as codes.
//!
//! Nothing below this module knows gRPC. `run_dir` owns the directory that one
//! agent has, [`validate`] the rules that every request has to keep, [`status`] the
//! one table of which error becomes which code. [`crate::endpoint`] has the sockets.

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
pub mod validate;
