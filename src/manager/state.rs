//! What the manager knows, and how it shows.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use super::{
    applied::Applied,
    directory::DirectoryContent,
    plan::{Action, Next, Plan, Unfinished},
    table::DesiredTable,
};

pub const READY: &str = "ready";
pub const CHANGING: &str = "changing";
pub const FAILED: &str = "failed";
pub const BLOCKED: &str = "blocked";
pub const BAD: &str = "bad";

/// Every state.
pub const STATES: [&str; 5] = [READY, CHANGING, FAILED, BLOCKED, BAD];

/// How far the wanted volumes are, in all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Every volume that a file asks for is there, or cannot be before somebody changes
    /// something.
    pub is_settled: bool,
    /// One line.
    pub text: String,
}

#[derive(Debug, Default)]
pub struct ManagerState {
    /// What was in the directory when it was last read.
    pub content: Option<DirectoryContent>,
    pub desired: DesiredTable,
    /// Whether no file counts until the next boot.
    pub is_parked: bool,
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
        let next = action.as_ref().or(plan.waiting.get(handle));
        let (running, failure) = match self.attempts.get(handle) {
            Some(Unfinished::Running(action, failure)) => (Some(action), failure.as_ref()),
            Some(Unfinished::Failed(failure)) => (None, Some(failure)),
            None => (None, None),
        };
        let planned = match next {
            Some(Next::Act(action)) => Some(action),
            _ => None,
        };
        let now = running.or(planned);
        let failure = failure.filter(|failure| Some(&failure.action) == now);
        match (now, failure) {
            // All that is missing is that it is larger.
            (Some(Action::Grow(_)), Some(failure)) if now == planned => {
                (READY, failure.to_string())
            }
            (Some(_), Some(failure)) if running.is_none() => {
                (FAILED, self.with_refusal(handle, failure.to_string()))
            }
            (Some(action), _) => (CHANGING, action.to_string()),
            (None, _) => match next {
                Some(Next::Blocked(why)) => (BLOCKED, why.to_string()),
                _ => (READY, String::new()),
            },
        }
    }

    /// The failure, and why the volume is set up anew although another change would do.
    fn with_refusal(&self, handle: &str, failure: String) -> String {
        let refused = self.applied.get(handle).and_then(|it| it.refused.as_ref());
        let wanted = self.desired.volumes.get(handle);
        match refused.zip(wanted) {
            Some((refused, wanted))
                if refused.is_of(&wanted.desired) && !failure.ends_with(&refused.why) =>
            {
                format!("{failure}; it is needed since {}", refused.why)
            }
            _ => failure,
        }
    }

    /// How far the wanted volumes are.
    pub fn summary(&self, plan: &Plan) -> Summary {
        if self.content.is_none() {
            let why = self.desired.incomplete.clone();
            return Summary {
                is_settled: false,
                text: why.unwrap_or_default(),
            };
        }
        let wanted = self.desired.volumes.iter();
        let described: Vec<_> = wanted
            .map(|(handle, wanted)| (handle, wanted, self.describe(plan, handle)))
            .collect();
        let is_pending = |handle: &str, state| {
            let has_failed = match self.attempts.get(handle) {
                Some(Unfinished::Running(_, failure)) => failure.as_ref(),
                Some(Unfinished::Failed(failure)) => Some(failure),
                None => None,
            };
            matches!(state, CHANGING | FAILED) && !has_failed.is_some_and(|it| it.is_final)
        };
        let is_settled =
            !(described.iter()).any(|(handle, _, (state, _))| is_pending(handle, *state));
        let missing: Vec<_> = (described.iter())
            .filter(|(_, _, (state, _))| *state != READY)
            .map(|(_, wanted, (_, detail))| format!("{}: {detail}", wanted.name))
            .chain(
                self.desired
                    .bad
                    .iter()
                    .map(|(name, error)| format!("{name}: {error}")),
            )
            .collect();
        let files = described.len() + self.desired.bad.len();
        let mut text = format!("{} of {files} volumes ready", files - missing.len());
        for missing in missing.iter().take(3) {
            text.push_str("; ");
            text.push_str(missing);
        }
        Summary {
            is_settled,
            text: text.replace('\n', ", "),
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

#[cfg(test)]
mod tests {
    use super::{super::plan::Failure, *};
    use crate::Kind;

    #[test]
    fn only_a_failed_growth_leaves_a_volume_ready() {
        let plan = |action: &Action| Plan {
            actions: BTreeMap::from([("v".to_owned(), action.clone())]),
            ..Plan::default()
        };
        let grow = Action::Grow("2Gi".parse().unwrap());
        for (action, is_ready) in [(grow, true), (Action::Publish, false)] {
            let text = "no room".to_owned();
            let failure = Failure::new(action.clone(), Kind::Exhausted, text, None, Instant::now());
            let state_of = |attempt: Option<Unfinished>| {
                let attempts = attempt.map(|attempt| ("v".to_owned(), attempt));
                let state = ManagerState {
                    attempts: attempts.into_iter().collect(),
                    ..ManagerState::default()
                };
                state.describe(&plan(&action), "v")
            };
            assert_eq!(state_of(None), (CHANGING, action.to_string()));
            let first = Unfinished::Running(action.clone(), None);
            assert_eq!(state_of(Some(first)).0, CHANGING);
            let failed = state_of(Some(Unfinished::Failed(failure.clone())));
            assert_eq!(failed.0, if is_ready { READY } else { FAILED });
            assert_eq!(failed.1, format!("cannot {action}: no room"));
            let repeated = Unfinished::Running(action.clone(), Some(failure));
            let expected = if is_ready { READY } else { CHANGING };
            assert_eq!(state_of(Some(repeated)).0, expected);
        }
    }
}
