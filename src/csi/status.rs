//! Which error becomes which gRPC code: the one table.
//!
//! Kubelet takes every code as final except CANCELLED, DEADLINE_EXCEEDED,
//! UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED: after a final one it may never
//! call unstage. So a final code is given only where everything was undone.

use std::error::Error;

/// The error and all that caused it, as one sentence.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
