//! What the processes tell about themselves: log lines, metrics, readiness, and
//! the HTTP listener that shows the latter two.
//!
//! Called from anywhere, calls nobody in the house.

pub mod http;
pub mod logs;
pub mod metrics;
mod readiness;

pub use readiness::Readiness;
