//! Inline ephemeral volumes: published without a stage, deleted at unpublish.
//!
//! Such a volume is staged at a place of the node's own and published from
//! there, so everything else is as with any other volume. Its record is durable
//! and written before its image is made: whatever instruction the agent dies
//! at, the record names the image that is to be deleted.

use super::{
    Outcome, context::Context, error::Cause, nested::PathOf, publish, spec::Inline, stage, unstage,
};

/// `NodePublishVolume` of an inline ephemeral volume.
pub(super) async fn publish(cx: Context<'_>, spec: &Inline) -> Result<Outcome, Cause> {
    // A wrong target is refused before anything is made for it.
    cx.refuse_nested(&spec.publish.target_path, PathOf::Target)?;
    let (places, target) = (cx.node.places.clone(), spec.publish.target_path.clone());
    let look = move || places.target(&target).map(drop);
    cx.look(&spec.stage.source, look).await??;
    stage::stage(cx, &spec.stage).await?;
    let published = publish::publish(cx, &spec.publish).await;
    if let (Err(_), Some(record)) = (&published, cx.volume.record())
        && cx.live_target().await.is_none()
    {
        // After a final error no unpublish follows.
        unstage::tear_down(cx, &record).await?;
    }
    published
}
