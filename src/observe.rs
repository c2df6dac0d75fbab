//! Logs, metrics, traces, readiness, and the HTTP listener that serves metrics and readiness.
//!
//! Any module may use this one; it uses no other.

pub mod http;
pub mod logs;
pub mod metrics;
mod readiness;
pub mod traces;

pub use readiness::Readiness;
