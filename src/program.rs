//! The programs: their flags, the privileges that they drop, and the services that they
//! start. Their bodies are in this library so that the compiler finds code that none of
//! them uses; `src/bin` only calls them.

#[cfg(feature = "controller")]
pub mod controller;
#[cfg(feature = "node")]
pub mod node;
#[cfg(any(feature = "node", feature = "controller"))]
mod sockets;
#[cfg(feature = "holder")]
pub mod supervisor;
