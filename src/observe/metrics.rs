//! metrics.
