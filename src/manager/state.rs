//! What the manager knows, and how it shows.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use super::{
    directory::DirectoryContent,
    plan::{Applied, Next, Plan, Unfinished},
    table::DesiredTable,
};

pub const READY: &str = "ready";
pub const CHANGING: &str = "changing";
pub const FAILED: &str = "failed";
pub const BLOCKED: &str = "blocked";
pub const BAD: &str = "bad";

/// Every state.
pub const STATES: [&str; 5] = [READY, CHANGING, FAILED, BLOCKED, BAD];

#[derive(Debug, Default)]
pub struct ManagerState {
    /// What was in the directory when it was last read.
    pub content: Option<DirectoryContent>,
    pub desired: DesiredTable,
    /// Whether `applied` was read from the records.
    pub is_loaded: bool,
    /// By handle.
    pub applied: BTreeMap<String, Applied>,
    /// By handle.
    pub attempts: BTreeMap<String, Unfinished>,
    /// Since when volumes are not as desired, by handle.
    pub unsettled: BTreeMap<String, Instant>,
}

impl ManagerState {
    /// The state of a volume, and what there is to say about it.
    pub fn describe(&self, plan: &Plan, handle: &str) -> (&'static str, String) {
        let action = plan.actions.get(handle).cloned().map(Next::Act);
        match (
            self.attempts.get(handle),
            action.as_ref().or(plan.waiting.get(handle)),
        ) {
            (Some(Unfinished::Failed(failure)), Some(Next::Act(action)))
                if failure.action == *action =>
            {
                (FAILED, format!("cannot {action}: {}", failure.error))
            }
            (Some(Unfinished::Running(action)), _) | (_, Some(Next::Act(action))) => {
                (CHANGING, action.to_string())
            }
            (_, Some(Next::Blocked(why))) => (BLOCKED, why.to_string()),
            (_, Some(Next::Done) | None) => (READY, String::new()),
        }
    }

    /// How many volumes and files are in each state.
    pub fn count(&self, plan: &Plan) -> BTreeMap<&'static str, usize> {
        let mut counts: BTreeMap<_, _> = STATES.map(|state| (state, 0)).into();
        let handles: BTreeSet<_> = (self.desired.volumes.keys())
            .chain(plan.actions.keys())
            .chain(plan.waiting.keys())
            .collect();
        let described = handles
            .into_iter()
            .map(|handle| self.describe(plan, handle).0);
        for shown in described.chain(self.desired.bad.keys().map(|_| BAD)) {
            *counts.entry(shown).or_default() += 1;
        }
        counts
    }
}
