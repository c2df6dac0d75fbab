//! Logs, metrics, readiness, and the HTTP listener that serves the latter two.
//!
//! Any module may use this one; it uses no other.

pub mod http;
pub mod logs;
pub mod metrics;
mod readiness;

pub use readiness::Readiness;
