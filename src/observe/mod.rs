//! Metrics, logs, the HTTP listener, readiness.

pub mod http;
pub mod logs;
pub mod metrics;
mod readiness;

pub use readiness::Readiness;
