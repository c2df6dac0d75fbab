//! Other options for the file system of a staged volume, while it is mounted.

use std::os::fd::AsFd as _;

use super::{
    Outcome,
    context::{Context, OnLane},
    error::Cause,
    publish,
    record::Record,
    spec::{Remount, Use},
};
use crate::mount::{
    options::MountOptions,
    reconfigure::{Reconfigure, reconfigure},
};

/// The agent's own call: no RPC asks for it.
pub(super) async fn remount(cx: Context<'_>, spec: &Remount) -> Result<Outcome, Cause> {
    let record = cx.staged()?;
    cx.expect_at(&spec.staging_path)?;
    if record.read_only && !spec.read_only {
        return Err(Cause::precondition(
            "it was attached to be read only, and becomes writable only by another stage",
        ));
    }
    let spec = spec.clone();
    cx.on_lane(|cx| Box::pin(on_lane(cx, record, spec))).await
}

async fn on_lane(cx: OnLane<'_>, mut record: Record, spec: Remount) -> Result<Outcome, Cause> {
    let (Use::Mount { options, .. }, Some(fs)) = (&mut record.usage, record.fs) else {
        return Err(Cause::precondition(
            "only file systems on devices get other options while they are mounted",
        ));
    };
    let words: Vec<_> = spec.set.iter().map(ToString::to_string).collect();
    MountOptions::parse(&words)?.refuse_unlisted(Some(fs.as_str()))?;
    options.clone_from(&spec.options);
    (record.read_only, record.mode) = (spec.read_only, spec.mode);
    let gate = &cx.node.config.gates.mount;
    let admission = cx.admit(gate, &record.source).await?;
    cx.step("remount", || {
        let staged = publish::open_staged(cx, &record)?;
        let change = Reconfigure {
            fs_type: fs.as_str(),
            options: &spec.options,
            set: &spec.set,
            read_only: spec.read_only,
        };
        reconfigure(staged.as_fd(), &record.mount_point(), &change).map_err(Cause::Mount)
    })?;
    drop(admission);
    // The kernel has them: a repeat after a crash sets the same once more.
    cx.remember(&record).await?;
    Ok(Outcome::Done)
}
