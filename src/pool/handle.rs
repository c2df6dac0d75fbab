//! handle.
