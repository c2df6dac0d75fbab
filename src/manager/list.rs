//! The listing for operators: what is wanted, and how far it is.

use std::{
    collections::BTreeSet,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    run::Manager,
    state::{BAD, CHANGING},
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
}

impl Manager {
    /// Every volume that a file asks for, or that is still to go, and every file that asks for
    /// none.
    pub async fn list(&self) -> io::Result<Vec<WantedState>> {
        let directory = self.directory.clone();
        let read = self.lanes.run("", "read", move || directory.read());
        let read = tokio::time::timeout(READ_WITHIN, read).await;
        let (plan, actual) = self.plan().await?;
        let now = Instant::now();
        let state = self.state();
        // A file that was written just now counts as a change that is to come.
        let changed = match (read, &state.content) {
            (Ok(Ok(content)), Some(before)) => content.changed_since(before),
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
                let applied = state.applied.get(handle);
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
            });
        }
        rows.sort_by(|a, b| (&a.name, &a.handle).cmp(&(&b.name, &b.handle)));
        Ok(rows)
    }
}
