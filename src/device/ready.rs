//! ready.
