//! Metrics, logs, the HTTP listener.

pub mod http;
pub mod logs;
pub mod metrics;
