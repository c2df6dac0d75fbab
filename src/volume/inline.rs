//! Inline ephemeral volumes: published without a stage, deleted at unpublish.
//!
//! Such a volume is staged at a place of the node's own and published from
//! there, so everything else is as with any other volume. The record of one with an
//! image is durable and written before the image is made: whatever instruction the
//! agent dies at, the record names the image that is to be deleted. A publish that fails
//! deletes only what it made itself; what it found is deleted by the unpublish, or once the
//! pod is gone.

use std::path::Path;

use super::{
    Outcome,
    context::{Context, OnLane},
    error::Cause,
    nested::PathOf,
    places::absent_is_none,
    publish,
    spec::Inline,
    stage, unstage,
};

/// `NodePublishVolume` of an inline ephemeral volume.
pub(super) async fn publish(cx: Context<'_>, spec: &Inline) -> Result<Outcome, Cause> {
    // A wrong target is refused before anything is made for it.
    cx.refuse_nested(&spec.publish.target_path, PathOf::Target)?;
    let target = spec.publish.target_path.clone();
    let looking = cx.admit_look(&spec.stage.source).await?;
    cx.run_on_lane(move |cx| {
        let _looking = looking;
        cx.step("look", || cx.node.places.target(&target).map(drop))
    })
    .await?;
    // Of an earlier call: it may hold what a pod wrote before a reboot.
    let record = cx.volume.record();
    let existed = record.is_some_and(|record| record.outlives_reboot());
    stage::stage(cx, &spec.stage).await?;
    let cause = match publish::publish(cx, &spec.publish).await {
        Ok(published) => return Ok(published),
        Err(cause) => cause,
    };
    if existed {
        return Err(stage::kept(cause));
    }
    // After a final error no unpublish follows.
    match cx.on_lane(|cx| Box::pin(undo(cx))).await {
        Ok(()) => Err(cause),
        Err(undo) => Err(cause.not_undone(undo)),
    }
}

/// Deletes a volume whose pod is gone, as no caller will unpublish it; keeps it where the pod's
/// directory is back, since the pod is starting, and unmounts no target.
pub(super) async fn delete_orphan(cx: Context<'_>, target: &Path) -> Result<Outcome, Cause> {
    let target = target.to_owned();
    cx.on_lane(|cx| {
        Box::pin(async move {
            let find = || Ok::<_, Cause>(absent_is_none(cx.node.places.target(&target))?.is_some());
            if cx.step("find", find)? {
                tracing::info!(
                    volume_id = cx.volume.id,
                    target = %target.display(),
                    "the pod of an orphaned inline volume is back; keeping the volume"
                );
            } else {
                undo(cx).await?;
            }
            Ok(Outcome::Done)
        })
    })
    .await
}

/// Deletes the volume, unless it is published at a target.
async fn undo(cx: OnLane<'_>) -> Result<(), Cause> {
    match cx.volume.record() {
        Some(record) if cx.live_target().is_none() => unstage::tear_down(cx, &record).await,
        _ => Ok(()),
    }
}
