//! Threads for calls that can hang.
