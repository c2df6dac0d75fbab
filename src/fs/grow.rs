//! grow.
