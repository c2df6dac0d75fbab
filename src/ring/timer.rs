//! timer.
