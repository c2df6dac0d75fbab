//! claim.
