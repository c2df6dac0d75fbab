//! validate.
