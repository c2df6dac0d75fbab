//! The arguments by which a volume's daemons are started: the image, the user, and the
//! key.
//!
//! A call brings new arguments, which may be wrong: the supervisor keeps those that worked
//! until the new ones have worked.

use crate::{
    secret::Secret,
    supervisor::{Spec, SupervisorError},
};

/// The arguments of a start.
#[derive(Clone, Debug)]
pub struct StartArgs {
    pub spec: Spec,
    pub key: Secret,
}

/// The start arguments at hand.
#[derive(Debug, Default)]
pub struct StartCandidates {
    /// From the record: without a key.
    pub recorded: Option<Spec>,
    /// A daemon was started by these.
    proven: Option<StartArgs>,
    /// From a later call, and not tried yet, or failed for a transient reason.
    received: Option<StartArgs>,
}

impl StartCandidates {
    pub fn of_record(recorded: Option<Spec>) -> Self {
        Self {
            recorded,
            ..Self::default()
        }
    }

    /// The image to serve, from the arguments that worked.
    pub fn spec(&self) -> Option<&Spec> {
        let received = || self.received.as_ref().map(|received| &received.spec);
        let proven = self.proven.as_ref().map(|proven| &proven.spec);
        proven.or(self.recorded.as_ref()).or_else(received)
    }

    /// The arguments to try first.
    pub fn newest(&self) -> Option<&StartArgs> {
        self.received.as_ref().or(self.proven.as_ref())
    }

    /// Takes newer arguments. Their fencing, which the controller decides, applies at once.
    pub fn receive(&mut self, args: StartArgs) {
        if let Some(proven) = &mut self.proven {
            proven.spec.fencing.clone_from(&args.spec.fencing);
        }
        self.received = Some(args);
    }

    /// Notes that a daemon was started by them.
    pub fn mark_proven(&mut self, args: StartArgs) {
        (self.proven, self.received) = (Some(args), None);
    }

    /// Notes that the newest did not work; returns those to try next.
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

    /// Drops the keys of a volume that is unmapped.
    pub fn forget_keys(&mut self) {
        (self.proven, self.received) = (None, None);
    }
}
