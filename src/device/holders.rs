//! holders.
