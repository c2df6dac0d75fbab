//! Another passphrase for an encrypted volume in use.

use std::path::Path;

use super::{
    Outcome,
    context::{Context, OnLane},
    error::Cause,
    record::Record,
};

/// csi-addons' `EncryptionKeyRotate`.
pub(super) async fn rotate_key(cx: Context<'_>, volume_path: &Path) -> Result<Outcome, Cause> {
    let record = cx.staged()?;
    cx.expect_at(volume_path)?;
    // Two nodes that rotate at once would each remove the key of the other.
    if record.read_only || record.mode.multi_node() {
        return Err(Cause::precondition(
            "only a node that alone has it, for writing, rotates its key",
        ));
    }
    cx.run_on_lane(move |cx| on_lane(cx, &record)).await
}

fn on_lane(cx: OnLane<'_>, record: &Record) -> Result<Outcome, Cause> {
    let device = record.attached_device()?;
    if record.found && device.encrypted.is_some() {
        return Err(Cause::precondition(
            "another driver staged it, or its record was lost, so the KMS of its passphrase is not known until kubelet stages it again",
        ));
    }
    let (volume_id, secrets) = (&cx.volume.id, cx.secrets);
    let bound = cx.node.backends.bind(&record.source);
    cx.step("rotate-key", || {
        bound.rotate_key(&device, volume_id, secrets)
    })?;
    tracing::info!(volume_id, "passphrase rotated");
    Ok(Outcome::Done)
}
