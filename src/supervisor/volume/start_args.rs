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
pub struct StartArgs {
    pub spec: Spec,
    pub key: Secret,
}

/// What there is of it.
#[derive(Debug, Default)]
pub struct StartCandidates {
    /// What a next supervisor would know.
    pub recorded: Option<Spec>,
    /// A daemon was begun by it.
    proven: Option<StartArgs>,
    /// Brought since, and not tried yet, or in vain for a reason that may pass.
    received: Option<StartArgs>,
}

impl StartCandidates {
    pub fn of_record(recorded: Option<Spec>) -> Self {
        Self {
            recorded,
            ..Self::default()
        }
    }

    /// What it is to serve, as far as that is known to have worked.
    pub fn spec(&self) -> Option<&Spec> {
        let received = || self.received.as_ref().map(|received| &received.spec);
        let proven = self.proven.as_ref().map(|proven| &proven.spec);
        proven.or(self.recorded.as_ref()).or_else(received)
    }

    /// What a daemon is begun by, first of all.
    pub fn newest(&self) -> Option<&StartArgs> {
        self.received.as_ref().or(self.proven.as_ref())
    }

    /// Whether nodes are fenced is the controller's word, whatever has worked.
    pub fn receive(&mut self, args: StartArgs) {
        if let Some(proven) = &mut self.proven {
            proven.spec.fencing.clone_from(&args.spec.fencing);
        }
        self.received = Some(args);
    }

    /// A daemon was begun by it.
    pub fn mark_proven(&mut self, args: StartArgs) {
        (self.proven, self.received) = (Some(args), None);
    }

    /// What was brought did not work. What else may.
    pub fn after_failure(&mut self, error: &SupervisorError) -> Option<StartArgs> {
        let other = self.proven.clone()?;
        let received = self.received.as_ref()?;
        match error {
            SupervisorError::Denied { .. } => self.received = None,
            SupervisorError::Silent { .. } if received.spec.monitors != other.spec.monitors => {}
            _ => return None,
        }
        Some(other)
    }

    /// Nothing is served any more.
    pub fn forget_keys(&mut self) {
        (self.proven, self.received) = (None, None);
    }
}
