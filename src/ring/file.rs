//! file.
