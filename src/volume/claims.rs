//! Pending releases: claims whose volumes are unstaged, released once their pool is back.

use std::{sync::Arc, time::Duration};

use super::{Node, Outcome, already, context::Context, error::Cause, spec::Call};
use crate::{
    device::{DeviceError, Source},
    error_chain, ring,
};

/// How often a missing pool is looked for.
const RETRY: Duration = Duration::from_secs(5);

/// Starts to look for claims in each pool: an earlier agent may have left some.
pub(super) fn keep(node: &Arc<Node>) {
    for pool in node.backends.pending_releases().pools() {
        ring::spawn(keep_in(Arc::clone(node), pool.clone()));
    }
}

async fn keep_in(node: Arc<Node>, pool: String) {
    loop {
        while !release_pending(&node, &pool).await {
            tokio::time::sleep(RETRY).await;
        }
        node.backends.pending_releases().added(&pool).await;
    }
}

/// Releases the pending claims of a pool. Returns whether the pool could be read and none
/// is left in it.
async fn release_pending(node: &Arc<Node>, pool: &str) -> bool {
    match pending_in(node, pool).await {
        Ok(Some(pending)) => {
            let mut all = true;
            for (source, id) in pending {
                let call = Call::ReleaseClaim(source);
                let released = Arc::clone(node)
                    .submit(id.clone(), call.into(), Duration::MAX)
                    .await;
                if let Err(error) = released {
                    tracing::warn!(
                        volume_id = id,
                        pool,
                        error = error_chain(&*error),
                        "cannot release the claim of an unstaged volume"
                    );
                    all = false;
                }
            }
            all
        }
        Ok(None) => false,
        Err(error) => {
            tracing::debug!(
                pool,
                error = error_chain(&error),
                "cannot list the claims in a pool"
            );
            false
        }
    }
}

/// The sources that are claimed, but neither held nor attached, with their volumes. An
/// attached one is a volume whose record is lost: its unstage releases the claim.
async fn pending_in(
    node: &Arc<Node>,
    pool: &str,
) -> Result<Option<Vec<(Source, String)>>, DeviceError> {
    let (backends, name) = (Arc::clone(&node.backends), pool.to_owned());
    let list = move || backends.claimed_in(&name);
    let Some(mut claimed) = node.lanes.run("", "claims", list).await? else {
        return Ok(None);
    };
    let is_held = |id: &str| {
        node.known(id)
            .is_some_and(|volume| volume.record().is_some())
    };
    claimed.retain(|(_, id)| !is_held(id));
    if claimed.is_empty() {
        return Ok(Some(claimed));
    }
    let backends = Arc::clone(&node.backends);
    let unattached = move || {
        let mut pending = Vec::new();
        for (source, id) in claimed {
            if backends.bind(&source).attached()?.is_none() {
                pending.push((source, id));
            }
        }
        Ok(Some(pending))
    };
    node.lanes.run("", "claims", unattached).await
}

/// Releases the claim of a volume that this node does not hold.
pub(super) async fn release_claim(cx: Context<'_>, source: &Source) -> Result<Outcome, Cause> {
    if cx.volume.record().is_some() {
        return Ok(Outcome::Done);
    }
    let source = source.clone();
    cx.run_on_lane(move |cx| {
        let bound = cx.node.backends.bind(&source);
        let done = cx.step("release", || bound.release_pending(&cx.volume.id))?;
        already("release the claim", done);
        Ok(Outcome::Done)
    })
    .await
}
