//! The node's heart.
