//! The one place that names tokio-uring and io-uring.

pub mod child;
pub mod file;
pub mod poll;
pub mod probe;
pub mod timer;
