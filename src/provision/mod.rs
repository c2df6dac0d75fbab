//! The controller's backends.
