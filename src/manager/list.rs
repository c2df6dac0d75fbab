//! The listing for operators: what is wanted, and how far it is.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    directory::DirectoryContent,
    dry_run::dry_run,
    plan::Actual,
    run::Manager,
    state::{BAD, BLOCKED, CHANGING, READY},
};

/// How long a listing waits for the directory.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// A volume as `uringctl wanted` shows it.
#[derive(Clone, Debug)]
pub struct WantedState {
    /// The name of its file.
    pub name: String,
    /// Its handle; empty where the file asks for no volume.
    pub handle: String,
    pub path: PathBuf,
    /// ready, changing, failed, blocked or bad.
    pub state: &'static str,
    /// The action, the error, or the reason.
    pub detail: String,
    /// How long it has not been ready.
    pub age: Duration,
    /// Whether a file asks for it.
    pub is_wanted: bool,
    /// Whether the manager has staged it.
    pub is_managed: bool,
}

/// A volume as `uringctl plan` shows it.
#[derive(Clone, Debug)]
pub struct PlannedState {
    /// The name of its file.
    pub name: String,
    /// Its handle; empty where the file asks for no volume.
    pub handle: String,
    pub path: PathBuf,
    /// ready, changing, blocked or bad.
    pub state: &'static str,
    /// What would be done, in this order.
    pub actions: Vec<String>,
    pub reason: String,
}

impl Manager {
    /// What would be done with the directory as it is now, if these files were in it, too.
    pub async fn dry_run(&self, files: BTreeMap<String, String>) -> io::Result<Vec<PlannedState>> {
        let unreadable = |error: io::Error| {
            let path = self.directory.path().display();
            io::Error::new(error.kind(), format!("cannot read {path}: {error}"))
        };
        self.refuse_unloaded()?;
        let mut content = self.read_in_time().await?.map_err(unreadable)?;
        for (name, text) in files {
            content.replace(name, text);
        }
        let (applied, is_parked) = {
            let state = self.state();
            (state.applied.clone(), state.is_parked)
        };
        let mut table = self.desired(&content, &applied);
        if is_parked {
            table.volumes.clear();
            table.incomplete = None;
        }
        let actual = self.actual(applied.clone()).await?;
        let mut rows: Vec<_> = dry_run(&table, &actual)
            .into_iter()
            .map(|(handle, run)| {
                let wanted = table.volumes.get(&handle);
                let of = wanted.map(|wanted| (&wanted.name, &wanted.desired));
                let applied = applied.get(&handle);
                let of = of.or_else(|| applied.map(|it| (&it.name, &it.desired)));
                let (name, path) = of
                    .map(|(name, desired)| (name.clone(), desired.path.clone()))
                    .unwrap_or_default();
                let (state, reason) = match &run.blocked {
                    Some(why) => (BLOCKED, format!("{}; {why}", run.reason)),
                    None if run.actions.is_empty() => (READY, run.reason),
                    None => (CHANGING, run.reason),
                };
                let actions = run.actions.iter().map(ToString::to_string).collect();
                PlannedState {
                    name,
                    handle,
                    path,
                    state,
                    actions,
                    reason,
                }
            })
            .collect();
        for (name, error) in &table.bad {
            rows.push(PlannedState {
                name: name.clone(),
                handle: String::new(),
                path: PathBuf::new(),
                state: BAD,
                actions: Vec::new(),
                reason: error.to_string(),
            });
        }
        rows.sort_by(|a, b| (&a.name, &a.handle).cmp(&(&b.name, &b.handle)));
        Ok(rows)
    }

    /// Whether the volumes are parked.
    pub fn is_parked(&self) -> bool {
        self.state().is_parked
    }

    /// Every volume that a file asks for, or that is still to go, and every file that asks for
    /// none.
    pub async fn list(&self) -> io::Result<Vec<WantedState>> {
        self.refuse_unloaded()?;
        // While the volumes are parked no file counts.
        let read = if self.is_parked() {
            None
        } else {
            self.read_in_time().await?.ok()
        };
        let (plan, actual) = self.plan().await?;
        let now = Instant::now();
        let state = self.state();
        // A file that was written just now counts as a change that is to come.
        let changed = match (read, &state.content) {
            (Some(content), Some(before)) => content.changed_since(before),
            _ => BTreeSet::new(),
        };
        let applied = (actual.iter()).filter(|(_, actual)| actual.applied.is_some());
        let handles: BTreeSet<_> = (state.desired.volumes.keys())
            .chain(plan.waiting.keys())
            .chain(applied.map(|(handle, _)| handle))
            .collect();
        let mut rows: Vec<_> = handles
            .into_iter()
            .map(|handle| {
                let wanted = state.desired.volumes.get(handle);
                // As the plan has it: a record may be gone by now.
                let applied = actual.get(handle).and_then(|it| it.applied.as_ref());
                let desired = wanted
                    .map(|wanted| (&wanted.name, &wanted.desired))
                    .or_else(|| applied.map(|applied| (&applied.name, &applied.desired)));
                let (name, path) = desired
                    .map(|(name, desired)| (name.clone(), desired.path.clone()))
                    .unwrap_or_default();
                let (shown, detail) = if changed.contains(&name) {
                    (CHANGING, format!("{name}.toml has just changed"))
                } else {
                    state.describe(&plan, handle)
                };
                let since = state.unsettled.get(handle);
                WantedState {
                    name,
                    handle: handle.clone(),
                    path,
                    state: shown,
                    detail,
                    age: since.map(|since| now - *since).unwrap_or_default(),
                    is_wanted: wanted.is_some(),
                    is_managed: actual.get(handle).is_some_and(Actual::is_managed),
                }
            })
            .collect();
        for (name, error) in &state.desired.bad {
            rows.push(WantedState {
                name: name.clone(),
                handle: String::new(),
                path: PathBuf::new(),
                state: BAD,
                detail: error.to_string(),
                age: Duration::ZERO,
                is_wanted: true,
                is_managed: false,
            });
        }
        rows.sort_by(|a, b| (&a.name, &a.handle).cmp(&(&b.name, &b.handle)));
        Ok(rows)
    }

    /// Fails until the records are read.
    pub(super) fn refuse_unloaded(&self) -> io::Result<()> {
        if self.state().is_loaded {
            return Ok(());
        }
        let why = "the volume manager has not read its records";
        Err(io::Error::other(why))
    }

    /// What is in the directory now, if it answers in time.
    async fn read_in_time(&self) -> io::Result<io::Result<DirectoryContent>> {
        let read = tokio::time::timeout(READ_WITHIN, self.read()).await;
        let path = self.directory.path().display();
        read.map_err(|_| io::Error::other(format!("{path} does not answer")))
    }

    async fn read(&self) -> io::Result<DirectoryContent> {
        let permit = Arc::clone(&self.reads).acquire_owned().await;
        let directory = self.directory.clone();
        let read = move || {
            // Until the read has ended, also if nobody waits for it any more.
            let _permit = permit;
            directory.read()
        };
        self.lanes.run("", "read", read).await
    }
}
