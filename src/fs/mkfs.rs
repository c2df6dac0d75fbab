//! mkfs.
