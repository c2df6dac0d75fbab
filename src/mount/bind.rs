//! bind.
