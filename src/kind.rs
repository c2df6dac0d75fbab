//! What an error means to the caller of the call that failed.

/// What a caller may do about an error. Each kind has its gRPC code in `csi::status`,
/// and nowhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Correct the request.
    Invalid,
    /// What the request names does not exist.
    NotFound,
    /// What the request names exists, but not as requested.
    Conflict,
    /// Request a size that is possible.
    OutOfRange,
    /// Do without: the volume, or its backend, does not support the operation.
    Unsupported,
    /// Change something first: no repeat succeeds before that.
    Precondition,
    /// Make room, or use less.
    Exhausted,
    /// Pass other secrets.
    Unauthenticated,
    /// Repeat the call once another user or call is done.
    InUse,
    /// Repeat the call: the cause may pass by itself.
    Transient,
    /// Repeat the call to wait on: its work continues.
    Deadline,
    /// Report a defect of a program.
    Internal,
}
