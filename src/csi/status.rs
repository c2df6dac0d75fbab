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
        Self::new(code(error.kind()), error_chain(&error))
    }
}

#[cfg(feature = "node")]
impl From<&volume::VolumeError> for Status {
    fn from(error: &volume::VolumeError) -> Self {
        Self::new(code(error.kind()), error_chain(error))
    }
}

/// The error of a request that was refused before it became a volume's call.
#[cfg(feature = "node")]
impl From<&volume::Cause> for Status {
    fn from(cause: &volume::Cause) -> Self {
        Self::new(code(cause.kind()), error_chain(cause))
    }
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
