//! A panic at a place of a test's choice.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

/// Panics once, if it is armed. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct PanicOnce(Arc<AtomicBool>);

impl PanicOnce {
    pub fn arm(&self) {
        self.0.store(true, Relaxed);
    }

    pub fn maybe(&self) {
        assert!(!self.0.swap(false, Relaxed), "as the test has asked");
    }
}
