/// What an idempotent change did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Done {
    /// It was made by this call.
    Now,
    /// It had been made before; nothing was changed.
    Already,
}

/// What became of a detach.
#[cfg(feature = "node")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Detached {
    /// The device let go of its backing.
    Now,
    /// It did not have this backing any more.
    Already,
    /// It lets go when another opener closes it: wait for its uevent, then look
    /// again.
    Deferred,
}
