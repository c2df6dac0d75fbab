//! What a check of storage found, for the operator who asked for it.

/// What was found of one pool, cluster or share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The pool, cluster or share.
    pub subject: String,
    /// Its state, or what is wrong with it.
    pub state: Result<String, Fault>,
}

/// What is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// A sentence.
    pub what: String,
    /// A sentence.
    pub remedy: String,
}

impl Finding {
    /// Of a subject that can be used.
    pub fn usable(subject: impl Into<String>, state: impl Into<String>) -> Self {
        Self {
            subject: subject.into(),
            state: Ok(state.into()),
        }
    }

    /// Of a subject that cannot.
    pub fn faulty(
        subject: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (what, remedy) = (what.into(), remedy.into());
        Self {
            subject: subject.into(),
            state: Err(Fault { what, remedy }),
        }
    }
}
