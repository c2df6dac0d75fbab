//! child.
