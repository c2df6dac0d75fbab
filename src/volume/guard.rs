//! A device that is held open from step to step ([`HeldOpen`]).
//!
//! Only the volume's lane opens, uses and closes the descriptor. Between two steps the
//! runtime thread owns this guard, which does not show it.

use std::sync::Arc;

use super::context::Context;
use crate::{device::HeldOpen, lane::Lanes};

/// A device that is held open.
#[derive(Debug)]
pub(super) struct Guard {
    held: Option<Arc<HeldOpen>>,
    lanes: Lanes,
    volume_id: String,
}

impl Guard {
    /// Of a device that was opened on the volume's lane.
    pub fn new(cx: Context<'_>, held: Arc<HeldOpen>) -> Self {
        Self {
            held: Some(held),
            lanes: cx.node.lanes.clone(),
            volume_id: cx.volume.id.clone(),
        }
    }

    /// For a step on the lane, which does not keep it.
    pub fn lend(&self) -> Arc<HeldOpen> {
        Arc::clone(self.held.as_ref().expect("only closing takes it"))
    }

    /// For the last step, which closes it.
    pub fn give(mut self) -> Arc<HeldOpen> {
        self.held.take().expect("only closing takes it")
    }

    /// Closes it: nothing was built on the device.
    pub async fn close(self, cx: Context<'_>) {
        let held = self.give();
        cx.lane("close", move || drop(held)).await;
    }
}

impl Drop for Guard {
    /// After a panic of the call. A step that needs the device free does not wait for
    /// this close, but is repeated.
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            drop(self.lanes.run(&self.volume_id, "close", move || drop(held)));
        }
    }
}
