//! The manager's loop: looks at what is there, plans, and makes the calls.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{Notify, Semaphore, watch};

use super::{
    applied::{Applied, Refused},
    calls,
    difference::{change_in_place, is_read_only},
    directory::{DirectoryContent, MARKER, VolumesDir},
    plan::{Action, Actual, Failure, Plan, Presence, Unfinished, plan},
    populate,
    records::AppliedRecords,
    state::{ManagerState, Summary},
    table::DesiredTable,
};
use crate::{
    Kind, error_chain,
    lane::Lanes,
    mount::table,
    observe::metrics,
    ring,
    secret::Secrets,
    size::Size,
    volume::{
        Appearance, Cause, Node,
        spec::{Call, Request},
    },
};

/// How long a change that no call of the manager made may go unnoticed, such as an unmount
/// by others.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The volume manager of a node.
pub struct Manager {
    node: Arc<Node>,
    pub(super) lanes: Lanes,
    pub(super) directory: VolumesDir,
    records: AppliedRecords,
    state: Mutex<ManagerState>,
    summary: watch::Sender<Summary>,
    /// Something was done, or the desired state is another.
    changed: Notify,
    /// Of listings, one at a time reads the directory, whose disk may hang.
    pub(super) reads: Arc<Semaphore>,
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

/// Why an action failed.
struct Failed {
    kind: Kind,
    error: String,
}

impl Failed {
    fn io(what: &str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self {
            kind: Kind::Transient,
            error: format!("cannot {what}: {error}"),
        }
    }
}

impl From<Cause> for Failed {
    fn from(cause: Cause) -> Self {
        Self {
            kind: cause.kind(),
            error: error_chain(&cause),
        }
    }
}

/// The desired state before the directory is read.
fn unread(directory: &VolumesDir) -> DesiredTable {
    DesiredTable {
        incomplete: Some(format!("{} is not read yet", directory.path().display())),
        ..DesiredTable::default()
    }
}

impl Manager {
    /// The manager of the volumes that the files of `directory` ask for.
    pub fn new(
        node: Arc<Node>,
        lanes: Lanes,
        directory: VolumesDir,
        records: AppliedRecords,
    ) -> Arc<Self> {
        let state = ManagerState {
            desired: unread(&directory),
            ..ManagerState::default()
        };
        Arc::new(Self {
            node,
            lanes,
            directory,
            records,
            state: Mutex::new(state),
            summary: watch::Sender::default(),
            changed: Notify::new(),
            reads: Arc::new(Semaphore::new(1)),
        })
    }

    /// The directory of the files.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// How far the wanted volumes are, from now on.
    pub fn summary(&self) -> watch::Receiver<Summary> {
        self.summary.subscribe()
    }

    /// Brings the volumes into their desired state, and keeps them there.
    pub async fn run(self: Arc<Self>) {
        let records = self.records.clone();
        let load = move || io::Result::Ok((records.load()?, records.is_parked()?));
        match self.lanes.run("", "recover", load).await {
            Ok((mut applied, is_parked)) => {
                // While no agent ran.
                applied.values_mut().for_each(Applied::lose_lock);
                let mut state = self.state();
                state.applied = applied;
                state.is_parked = is_parked;
                state.is_loaded = true;
            }
            Err(error) => {
                tracing::error!(%error, "cannot read the records of the volume manager; it manages nothing");
                return;
            }
        }
        let follower = Arc::clone(&self);
        let follow = populate::follow(self.directory.clone(), self.lanes.clone(), move |content| {
            follower.take(content);
        });
        ring::spawn(follow);
        loop {
            let due = self.reconcile().await;
            let pause = due.map_or(LOOK_EVERY, |due| {
                LOOK_EVERY.min(due.saturating_duration_since(Instant::now()))
            });
            let _ = tokio::time::timeout(pause, self.changed.notified()).await;
        }
    }

    /// Takes what is in the directory as the desired state.
    fn take(&self, content: io::Result<DirectoryContent>) {
        let mut state = self.state();
        match content {
            _ if state.is_parked => {
                state.desired = DesiredTable::default();
                state.content = content.ok();
            }
            Err(error) => {
                let path = self.directory.path().display();
                tracing::error!(directory = %path, %error, "cannot read the directory of volumes; they stay as they are");
                state.desired.incomplete = Some(format!("{path} cannot be read: {error}"));
            }
            Ok(content) => {
                state.desired = self.desired(&content, &state.applied);
                if let Some(why) = &state.desired.incomplete {
                    tracing::warn!("{why}");
                }
                for (name, error) in &state.desired.bad {
                    tracing::error!(file = %format_args!("{name}.toml"), %error, "cannot use a file; its volume stays as it is");
                }
                state.content = Some(content);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Unmounts and detaches all volumes, as if no file asked for any, until the machine's next
    /// boot; or ends that. Does not wait.
    pub async fn park(self: Arc<Self>, is_parked: bool) -> io::Result<()> {
        self.refuse_unloaded()?;
        // Callers repeat it while they wait.
        if self.is_parked() == is_parked {
            return Ok(());
        }
        let records = self.records.clone();
        let record = move || records.park(is_parked);
        self.lanes.run("", "record", record).await?;
        let mut state = self.state();
        state.is_parked = is_parked;
        state.desired = match &state.content {
            _ if is_parked => DesiredTable::default(),
            Some(content) => self.desired(content, &state.applied),
            None => unread(&self.directory),
        };
        drop(state);
        if is_parked {
            tracing::info!("parked the volumes that files ask for");
        } else {
            tracing::info!("files ask for volumes again");
        }
        self.changed.notify_one();
        Ok(())
    }

    /// The desired state that these files ask for.
    pub(super) fn desired(
        &self,
        content: &DirectoryContent,
        applied: &BTreeMap<String, Applied>,
    ) -> DesiredTable {
        let incomplete = (!content.has_marker).then(|| {
            let path = self.directory.path().display();
            format!("{path} has no file {MARKER}, without which nothing is undone")
        });
        let files = content.parse().into_iter().map(|(name, file)| {
            let file = file.and_then(|desired| calls::check(&self.node, &name, desired));
            (name, file)
        });
        let applied = applied.iter().map(|(handle, it)| it.as_file(handle));
        DesiredTable::of(files.collect(), incomplete, &applied.collect())
    }

    /// Begins what is to be done now. Answers when the next repeat of a failed action is due.
    async fn reconcile(self: &Arc<Self>) -> Option<Instant> {
        let plan = match self.plan().await {
            Ok((plan, actual)) => {
                let managed = actual.values().filter(|actual| actual.is_managed());
                self.note_unsettled(&plan, managed.count());
                plan
            }
            Err(error) => {
                tracing::error!(%error, "cannot look at the volumes of this node");
                return None;
            }
        };
        for (handle, action) in plan.actions {
            let mut state = self.state();
            let earlier = match state.attempts.remove(&handle) {
                Some(Unfinished::Failed(failure)) => Some(failure),
                _ => None,
            };
            let running = Unfinished::Running(action.clone(), earlier.clone());
            state.attempts.insert(handle.clone(), running);
            drop(state);
            let manager = Arc::clone(self);
            ring::spawn(async move { manager.act(handle, action, earlier).await });
        }
        plan.due
    }

    /// Notes which volumes are not as desired, and shows it. `managed`: how many it has staged.
    fn note_unsettled(&self, plan: &Plan, managed: usize) {
        let now = Instant::now();
        let mut state = self.state();
        let is_ready = |handle: &String| {
            !plan.actions.contains_key(handle) && !plan.waiting.contains_key(handle)
        };
        state.unsettled.retain(|handle, _| !is_ready(handle));
        for handle in plan.actions.keys().chain(plan.waiting.keys()) {
            state.unsettled.entry(handle.clone()).or_insert(now);
        }
        let oldest = state.unsettled.values().min().map(|since| now - *since);
        metrics::wanted_volumes(state.count(plan), managed, oldest.unwrap_or_default());
        let now = state.summary(plan);
        self.summary.send_if_modified(|before| {
            let is_other = *before != now;
            *before = now;
            is_other
        });
    }

    /// What is to be done and what waits, and the volumes as they are.
    pub(super) async fn plan(&self) -> io::Result<(Plan, BTreeMap<String, Actual>)> {
        // Of a volume whose action ends while this looks, what it finds may be old: the volume
        // counts as one with a running action.
        let (applied, attempts) = {
            let state = self.state();
            (state.applied.clone(), state.attempts.clone())
        };
        let actual = self.actual(applied).await?;
        let plan = plan(&self.state().desired, &actual, &attempts, Instant::now());
        Ok((plan, actual))
    }

    /// The volumes of this node.
    pub(super) async fn actual(
        &self,
        applied: BTreeMap<String, Applied>,
    ) -> io::Result<BTreeMap<String, Actual>> {
        let appearances = Arc::clone(&self.node).appearances().await?;
        let mut actual: BTreeMap<_, _> = (applied.into_iter())
            .map(|(handle, applied)| {
                let applied = Some(applied);
                let presence = Presence::Absent;
                (handle, Actual { applied, presence })
            })
            .collect();
        for volume in appearances {
            let presence = self.presence(&volume);
            if presence != Presence::Absent {
                actual.entry(volume.volume_id).or_default().presence = presence;
            }
        }
        Ok(actual)
    }

    /// Whether and by whom a volume is on this node.
    fn presence(&self, volume: &Appearance) -> Presence {
        let at = &volume.staging_path;
        if at.as_os_str().is_empty() {
            return Presence::Absent;
        }
        if *at != self.staging_path(&volume.volume_id) {
            return Presence::Foreign(at.clone());
        }
        Presence::Managed {
            staged: volume.is_staged,
            targets: volume.targets.clone(),
        }
    }

    fn staging_path(&self, handle: &str) -> PathBuf {
        self.node
            .canonical(&calls::staging_path(&self.node, handle))
    }

    /// Does one action, and notes how it ended.
    async fn act(self: Arc<Self>, handle: String, action: Action, earlier: Option<Failure>) {
        let name = self.name_of(&handle);
        let done = self.perform(&handle, &action).await;
        let mut state = self.state();
        match done {
            Ok(()) => {
                tracing::info!(volume_id = handle, file = name, "{action}: done");
                state.attempts.remove(&handle);
            }
            Err(Failed { kind, error }) => {
                let failure = Failure::new(action, kind, error, earlier.as_ref(), Instant::now());
                // Repeats are many.
                if failure.times.is_power_of_two() {
                    tracing::error!(
                        volume_id = handle,
                        file = name,
                        times = failure.times,
                        error = failure.error,
                        "cannot {}",
                        failure.action
                    );
                }
                state.attempts.insert(handle, Unfinished::Failed(failure));
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    async fn perform(&self, handle: &str, action: &Action) -> Result<(), Failed> {
        match action {
            Action::Record(applied) => {
                let before = self.applied(handle).map(|before| before.desired.path);
                if let Ok(before) = before
                    && before != applied.desired.path
                {
                    self.leave(handle, before).await?;
                }
                self.record(handle, (**applied).clone()).await
            }
            Action::Forget => {
                let (records, of) = (self.records.clone(), handle.to_owned());
                let forgotten = self
                    .lanes
                    .run(handle, "record", move || records.forget(&of));
                forgotten.await.map_err(Failed::io("remove its record"))?;
                self.state().applied.remove(handle);
                Ok(())
            }
            Action::Stage => {
                let applied = self.applied(handle)?;
                let stage = calls::stage(&self.node, handle, &applied.desired)?;
                let secrets = match applied.desired.secrets {
                    None => Secrets::default(),
                    Some(dir) => {
                        let what = format!("read the secrets in {}", dir.display());
                        let read = move || Secrets::read_dir(&dir);
                        let read = self.lanes.run(handle, "secrets", read).await;
                        read.map_err(Failed::io(&what))?
                    }
                };
                let call = Call::Stage(stage);
                self.submit(handle, Request { call, secrets }).await
            }
            Action::Publish => self.publish(handle, self.applied(handle)?).await,
            Action::Remount(options) => {
                let mut applied = self.applied(handle)?;
                applied.has_options = false;
                self.record(handle, applied.clone()).await?;
                applied.desired.access.set_options(options);
                self.publish(handle, applied).await
            }
            Action::Reconfigure { options, read_only } => {
                self.reconfigure(handle, options, *read_only).await
            }
            Action::Grow(size) => self.grow(handle, *size).await,
            Action::Unpublish(path) => self.unpublish(handle, path.clone()).await,
            Action::Unstage => {
                let path = self.applied(handle)?.desired.path;
                self.leave(handle, path).await?;
                let staging_path = self.staging_path(handle);
                let call = Call::Unstage(staging_path.clone());
                self.submit(handle, call.into()).await?;
                // Like kubelet, the caller removes the directory. It is empty.
                let remove = move || match rustix::fs::rmdir(&staging_path) {
                    Err(error) if error != rustix::io::Errno::NOENT => Err(error.into()),
                    _ => Ok(()),
                };
                let removed = self.lanes.run(handle, "remove", remove).await;
                removed.map_err(Failed::io("remove its staging directory"))
            }
        }
    }

    /// Removes the mount point of a volume that is not mounted there any more: an agent may
    /// have been killed between the two. Anything else there is not the volume's: it keeps the
    /// volume neither attached nor from another path.
    async fn leave(&self, handle: &str, path: PathBuf) -> Result<(), Failed> {
        match self.unpublish(handle, path.clone()).await {
            Err(Failed {
                kind: Kind::Invalid | Kind::Precondition,
                error,
            }) => {
                // The volume's own mount may be below that of others.
                let at = path.clone();
                let mounts_there = move || {
                    let mounts = table::list()?.into_iter();
                    Ok(mounts.filter(|mount| mount.mount_point == at).count())
                };
                let mounts = self.lanes.run(handle, "look", mounts_there).await;
                if mounts.map_err(Failed::io("read the mount table"))? > 1 {
                    let kind = Kind::InUse;
                    return Err(Failed { kind, error });
                }
                tracing::warn!(
                    volume_id = handle,
                    path = %path.display(),
                    error,
                    "what is there is left as it is"
                );
                Ok(())
            }
            left => left,
        }
    }

    /// Unmounts the volume there, and removes the mount point. A raw volume's lock and map go
    /// before its mount, which stays if it is in use.
    async fn unpublish(&self, handle: &str, path: PathBuf) -> Result<(), Failed> {
        let is_raw = self.state().applied.get_mut(handle).is_some_and(|applied| {
            applied.lose_lock();
            applied.is_raw()
        });
        if is_raw {
            let (records, of) = (self.records.clone(), handle.to_owned());
            let unmap = move || {
                records.unmap(&of);
                Ok(())
            };
            let unmapped = self.lanes.run(handle, "record", unmap).await;
            unmapped.map_err(Failed::io("remove its map"))?;
        }
        self.submit(handle, Call::Unpublish(path).into()).await
    }

    /// Lets the volume appear at its path with its options, also if it appears there.
    async fn publish(&self, handle: &str, mut applied: Applied) -> Result<(), Failed> {
        let publish = calls::publish(&self.node, handle, &applied.desired)?;
        self.submit(handle, Call::Publish(publish).into()).await?;
        applied.has_options = true;
        self.record(handle, applied).await
    }

    /// Gives the mounted file system these options. What may be in force is recorded before,
    /// and a refusal, so that the volume is set up anew once nothing uses it.
    async fn reconfigure(
        &self,
        handle: &str,
        options: &[String],
        read_only: bool,
    ) -> Result<(), Failed> {
        let before = self.applied(handle)?;
        let mut wanted = before.desired.clone();
        wanted.access.set_options(options);
        wanted.read_only = read_only;
        let set = change_in_place(&before, &wanted);
        let call = match set {
            Some(set) => calls::remount(&self.node, handle, &wanted, set)?,
            None => None,
        };
        let Some(call) = call else {
            let kind = Kind::Conflict;
            let error = "it is set up otherwise meanwhile".to_owned();
            return Err(Failed { kind, error });
        };
        let mut begun = before.clone();
        let ro = is_read_only(&wanted).then(|| "ro".to_owned());
        let in_doubt = begun.in_doubt.get_or_insert_default();
        for word in options.iter().cloned().chain(ro) {
            if !in_doubt.contains(&word) {
                in_doubt.push(word);
            }
        }
        begun.has_options = false;
        self.record(handle, begun).await?;
        match self.submit(handle, Call::Remount(call).into()).await {
            Ok(()) => {
                let mut after = before;
                after.reconfigured(options, read_only);
                self.record(handle, after).await
            }
            Err(Failed {
                kind: kind @ (Kind::Invalid | Kind::Precondition),
                error,
            }) => {
                let refused = Refused {
                    options: options.to_vec(),
                    read_only,
                    why: error.clone(),
                };
                let refused = Some(refused);
                self.record(handle, Applied { refused, ..before }).await?;
                Err(Failed { kind, error })
            }
            Err(failed) => {
                // The kernel looks for writers before it changes anything.
                if failed.kind == Kind::InUse {
                    self.record(handle, before).await?;
                }
                Err(failed)
            }
        }
    }

    async fn grow(&self, handle: &str, size: Size) -> Result<(), Failed> {
        let mut applied = self.applied(handle)?;
        let path = &applied.desired.path;
        let expand = calls::expand(self.staging_path(handle), path, size.bytes());
        self.submit(handle, Call::Expand(expand).into()).await?;
        applied.grown_to = Some(size);
        self.record(handle, applied).await
    }

    async fn record(&self, handle: &str, applied: Applied) -> Result<(), Failed> {
        let (records, of, new) = (self.records.clone(), handle.to_owned(), applied.clone());
        let saved = self
            .lanes
            .run(handle, "record", move || records.save(&of, &new));
        saved.await.map_err(Failed::io("write its record"))?;
        self.state().applied.insert(handle.to_owned(), applied);
        Ok(())
    }

    /// Makes a call, and waits for its end: however long it takes, nothing else is done for
    /// the volume meanwhile.
    async fn submit(&self, handle: &str, request: Request) -> Result<(), Failed> {
        let node = Arc::clone(&self.node);
        let answer = node.submit(handle.to_owned(), request, Duration::MAX).await;
        answer.map(drop).map_err(|error| Failed {
            kind: error.kind(),
            error: error_chain(&error.cause),
        })
    }

    /// What was recorded before an action that needs it was planned.
    fn applied(&self, handle: &str) -> Result<Applied, Failed> {
        let applied = self.state().applied.get(handle).cloned();
        applied.ok_or_else(|| Failed::io("find its record")(io::ErrorKind::NotFound.into()))
    }

    fn name_of(&self, handle: &str) -> String {
        let state = self.state();
        let wanted = (state.desired.volumes.get(handle)).map(|wanted| wanted.name.clone());
        let applied = || {
            state
                .applied
                .get(handle)
                .map(|applied| applied.name.clone())
        };
        wanted.or_else(applied).unwrap_or_default()
    }

    /// Nothing can panic under this lock.
    pub(super) fn state(&self) -> MutexGuard<'_, ManagerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
