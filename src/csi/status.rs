//! Which error becomes which gRPC code: the one table.
//!
//! Kubelet takes every code as final except CANCELLED, DEADLINE_EXCEEDED,
//! UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED: after a final one it may never
//! call unstage. So a final code is given only where everything was undone.

use std::error::Error;

#[cfg(feature = "controller")]
use crate::provision;
#[cfg(feature = "controller")]
use tonic::{Code, Status};

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

#[cfg(feature = "controller")]
impl From<provision::Error> for Status {
    fn from(error: provision::Error) -> Self {
        use provision::Kind as K;
        let code = match error.kind() {
            K::InvalidArgument => Code::InvalidArgument,
            K::NotFound => Code::NotFound,
            K::AlreadyExists => Code::AlreadyExists,
            K::OutOfRange => Code::OutOfRange,
            K::FailedPrecondition => Code::FailedPrecondition,
            K::ResourceExhausted => Code::ResourceExhausted,
            K::Aborted => Code::Aborted,
            K::Unavailable => Code::Unavailable,
            K::Internal => Code::Internal,
        };
        Self::new(code, chain(&error))
    }
}
