//! Inline ephemeral volumes: published without a stage, deleted at unpublish.
//!
//! Such a volume is staged at a place of the node's own and published from
//! there, so everything else is as with any other volume. Its record is durable
//! and written before its image is made: whatever instruction the agent dies
//! at, the record names the image that is to be deleted.

use std::rc::Rc;

use super::{
    Error, Node, Outcome,
    nested::PathOf,
    publish,
    spec::Inline,
    stage,
    task::{Progress, Volume},
    unstage,
};

/// `NodePublishVolume` of an inline ephemeral volume.
pub async fn publish(
    node: &Rc<Node>,
    volume: &Volume,
    spec: &Inline,
    progress: &Progress,
) -> Result<Outcome, Error> {
    // What is wrong with the target is found before anything is made for it.
    node.refuse_nested(volume, &spec.publish.target_path, PathOf::Target)?;
    let (places, target) = (node.places.clone(), spec.publish.target_path.clone());
    let look = move || places.target(&target).map(drop);
    node.look(volume, progress, &spec.stage.source, look)
        .await??;
    stage::stage(node, volume, &spec.stage, progress).await?;
    let published = publish::publish(node, volume, &spec.publish, progress).await;
    if let (Err(_), Some(record)) = (&published, volume.record())
        && node.live_target(volume, progress).await.is_none()
    {
        // After a final error nobody asks for an unpublish.
        unstage::tear_down(node, volume, &record, progress).await?;
    }
    published
}
