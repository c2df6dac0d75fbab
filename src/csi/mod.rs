//! The gRPC face.

#[cfg(feature = "controller")]
pub mod controller;
pub mod identity;
#[cfg(feature = "node")]
pub mod node;
pub mod serve;
pub mod status;
pub mod validate;
