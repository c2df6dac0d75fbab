//! poll.
