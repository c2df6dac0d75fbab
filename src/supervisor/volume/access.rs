//! By what a volume's daemons are begun: what to serve, for whom, and his key.
//!
//! A call brings both, and may be wrong: what has worked is kept until something
//! newer has.

use crate::{
    secret::Secret,
    supervisor::{Spec, SupervisorError},
};

/// All that a daemon is begun by.
#[derive(Clone, Debug)]
pub struct Access {
    pub spec: Spec,
    pub key: Secret,
}

/// What there is of it.
#[derive(Debug, Default)]
pub struct Accesses {
    /// What a next supervisor would know.
    pub recorded: Option<Spec>,
    /// A daemon was begun by it.
    proven: Option<Access>,
    /// Brought since, and not tried yet, or in vain for a reason that may pass.
    brought: Option<Access>,
}

impl Accesses {
    pub fn of_record(recorded: Option<Spec>) -> Self {
        Self {
            recorded,
            ..Self::default()
        }
    }

    /// What it is to serve, as far as that is known to have worked.
    pub fn spec(&self) -> Option<&Spec> {
        let brought = || self.brought.as_ref().map(|brought| &brought.spec);
        let proven = self.proven.as_ref().map(|proven| &proven.spec);
        proven.or(self.recorded.as_ref()).or_else(brought)
    }

    /// What a daemon is begun by, first of all.
    pub fn newest(&self) -> Option<&Access> {
        self.brought.as_ref().or(self.proven.as_ref())
    }

    /// Whether nodes are fenced is the controller's word, whatever has worked.
    pub fn bring(&mut self, access: Access) {
        if let Some(proven) = &mut self.proven {
            proven.spec.fencing.clone_from(&access.spec.fencing);
        }
        self.brought = Some(access);
    }

    /// A daemon was begun by it.
    pub fn worked(&mut self, access: Access) {
        (self.proven, self.brought) = (Some(access), None);
    }

    /// What was brought did not work. What else may.
    pub fn failed(&mut self, error: &SupervisorError) -> Option<Access> {
        let other = self.proven.clone()?;
        let brought = self.brought.as_ref()?;
        match error {
            SupervisorError::Denied { .. } => self.brought = None,
            SupervisorError::Silent { .. } if brought.spec.monitors != other.spec.monitors => {}
            _ => return None,
        }
        Some(other)
    }

    /// Nothing is served any more.
    pub fn forget_keys(&mut self) {
        (self.proven, self.brought) = (None, None);
    }
}
