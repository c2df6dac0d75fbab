/// The result of an idempotent change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Done {
    /// This call made the change.
    Now,
    /// An earlier call had made it; this one changed nothing.
    Already,
}

/// The result of a detach.
#[cfg(feature = "node")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Detached {
    /// The device has no backing any more.
    Now,
    /// The device did not have this backing before the call.
    Already,
    /// The kernel detaches it when another opener closes it: wait for its uevent, then
    /// check again.
    Deferred,
}
