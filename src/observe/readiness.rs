//! Whether an agent is ready, and if not, why.

use std::sync::{Arc, Mutex, PoisonError};

/// The readiness for `/readyz` and `uringctl info`; CSI's `Probe` has one of its own, for
/// permanent conditions. Starts as not ready.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<Mutex<Option<String>>>);

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Some("starting".to_owned()))))
    }
}

impl Readiness {
    /// Sets it to ready (`None`), or to not ready for a reason.
    pub fn set(&self, not_ready_because: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = not_ready_because;
    }

    /// Why the agent is not ready; `None` when it is.
    pub fn reason(&self) -> Option<String> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
