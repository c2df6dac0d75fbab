//! The gRPC code of each kind of error: the one table.
//!
//! Kubelet takes every code as final except CANCELLED, DEADLINE_EXCEEDED,
//! UNAVAILABLE, RESOURCE_EXHAUSTED and ABORTED: after a final one it may never
//! call unstage. So a call answers a final code only where it has undone everything and
//! a repeat would be refused as well; a cause that may pass by itself is UNAVAILABLE.

#[cfg(any(feature = "node", feature = "controller"))]
use tonic::{Code, Status};

#[cfg(any(feature = "node", feature = "controller"))]
use crate::Kind;
#[cfg(any(feature = "node", feature = "controller"))]
use crate::error_chain;
#[cfg(feature = "controller")]
use crate::provision;
#[cfg(feature = "node")]
use crate::volume;

#[cfg(feature = "controller")]
impl From<provision::ProvisionError> for Status {
    fn from(error: provision::ProvisionError) -> Self {
        status(error.kind(), &error)
    }
}

#[cfg(feature = "node")]
impl From<&volume::VolumeError> for Status {
    fn from(error: &volume::VolumeError) -> Self {
        status(error.kind(), error)
    }
}

/// The error of a request that was refused before it became a volume's call.
#[cfg(feature = "node")]
impl From<&volume::Cause> for Status {
    fn from(cause: &volume::Cause) -> Self {
        status(cause.kind(), cause)
    }
}

/// The status of a failed call.
#[cfg(any(feature = "node", feature = "controller"))]
fn status(kind: Kind, error: &dyn std::error::Error) -> Status {
    Status::new(code(kind), shortened(error_chain(error)))
}

/// A message that reaches the caller: it travels in a header, three bytes for one that is
/// not ASCII, and clients refuse headers of more than 16 KiB. Paths that a pod made are
/// what may be so long.
#[cfg(any(feature = "node", feature = "controller"))]
fn shortened(mut message: String) -> String {
    const MOST_BYTES: usize = 4096;
    if message.len() > MOST_BYTES {
        let is_boundary = |at: &usize| message.is_char_boundary(*at);
        let begin = (0..MOST_BYTES / 2).rev().find(is_boundary);
        let end = (message.len() - MOST_BYTES / 2..message.len()).find(is_boundary);
        if let (Some(begin), Some(end)) = (begin, end) {
            message.replace_range(begin..end, " … ");
        }
    }
    message
}

/// The code of a failed call.
#[cfg(any(feature = "node", feature = "controller"))]
fn code(kind: Kind) -> Code {
    match kind {
        Kind::Invalid => Code::InvalidArgument,
        Kind::NotFound => Code::NotFound,
        Kind::Conflict => Code::AlreadyExists,
        Kind::OutOfRange => Code::OutOfRange,
        Kind::Unsupported => Code::Unimplemented,
        Kind::Precondition => Code::FailedPrecondition,
        Kind::Exhausted => Code::ResourceExhausted,
        Kind::Unauthenticated => Code::Unauthenticated,
        Kind::InUse => Code::Aborted,
        Kind::Transient => Code::Unavailable,
        Kind::Deadline => Code::DeadlineExceeded,
        Kind::Internal => Code::Internal,
    }
}

#[cfg(all(test, feature = "node"))]
mod tests {
    use super::*;
    use crate::fs::grow::GrowError;

    #[test]
    fn a_long_message_keeps_its_begin_and_its_end() {
        let message = |middle: &str| format!("cannot copy {middle}: no space");
        let short = message(&"ä".repeat(2000));
        assert_eq!(shortened(short.clone()), short);
        let long = shortened(message(&"ä".repeat(5000)));
        assert!(long.len() <= 4096 + " … ".len(), "{}", long.len());
        assert!(long.starts_with("cannot copy ä") && long.ends_with("ä: no space"));
        assert_eq!(long.matches(" … ").count(), 1);
    }

    #[test]
    fn growth_that_needs_an_operator_is_failed_precondition() {
        let code = |error| Status::from(&volume::Cause::Grow(error)).code();
        for source in [
            GrowError::HasErrors,
            GrowError::SeveralDevices { devices: 2 },
        ] {
            assert_eq!(code(source), Code::FailedPrecondition);
        }
        let fs = crate::fs::FsType::Btrfs;
        assert_eq!(code(GrowError::Busy { fs }), Code::Unavailable);
    }
}
