/// What an idempotent change did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Done {
    /// It was made by this call.
    Now,
    /// It had been made before; nothing was changed.
    Already,
}
