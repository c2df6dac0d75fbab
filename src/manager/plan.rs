//! The reconciler: from desired and actual state to the next action of each volume. It does
//! nothing itself, and knows no clock.
//!
//! One action at a time leads a volume from its actual to its desired state. Every action
//! can be repeated, so that a plan which a crash interrupted continues from what is there.
//! Only what the manager itself has set up is undone: what it sets out to do is recorded
//! before it begins ([`Applied`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    applied::Applied,
    desired::DesiredAccess,
    difference::{change_in_place, is_read_only, is_same_mount, is_same_setup},
    table::{DesiredTable, WantedFile},
};
use crate::{Kind, size::Size};

/// A volume as it is on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Actual {
    pub applied: Option<Applied>,
    pub presence: Presence,
}

impl Actual {
    /// Whether the manager has staged it.
    pub fn is_managed(&self) -> bool {
        self.applied.is_some() && matches!(self.presence, Presence::Managed { .. })
    }
}

/// Whether and by whom a volume is attached to this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    #[default]
    Absent,
    /// Others have staged it, there.
    Foreign(PathBuf),
    /// It is staged where only the manager stages.
    Managed {
        /// The stage is complete, and still there.
        staged: bool,
        /// Where it is published.
        targets: BTreeSet<PathBuf>,
    },
}

/// What is to be done next for a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Record what is to be done from now on.
    Record(Box<Applied>),
    /// Attach it, make a file system if it is blank, and mount it where only the manager does.
    Stage,
    /// Let it appear at its path.
    Publish,
    /// Give its mount these options, while it is in use.
    Remount(Vec<String>),
    /// Give its file system these options, while it is in use.
    Reconfigure {
        options: Vec<String>,
        read_only: bool,
    },
    /// Grow it to this size at least.
    Grow(Size),
    /// Let it disappear from this path.
    Unpublish(PathBuf),
    /// Unmount and detach it.
    Unstage,
    /// Remove the record of what was done.
    Forget,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record(applied) => write!(f, "take over {}.toml", applied.name),
            Self::Stage => f.write_str("attach and mount"),
            Self::Publish => f.write_str("publish"),
            Self::Remount(options) if options.is_empty() => f.write_str("remount without options"),
            Self::Remount(options) => write!(f, "remount with {}", options.join(",")),
            Self::Reconfigure { options, read_only } => {
                f.write_str("change the file system to ")?;
                match (&*options.join(","), read_only) {
                    ("", false) => f.write_str("no options"),
                    ("", true) => f.write_str("read-only"),
                    (options, false) => f.write_str(options),
                    (options, true) => write!(f, "{options}, read-only"),
                }
            }
            Self::Grow(size) => write!(f, "grow to {size}"),
            Self::Unpublish(path) => write!(f, "unmount from {}", path.display()),
            Self::Unstage => f.write_str("unmount and detach"),
            Self::Forget => f.write_str("forget"),
        }
    }
}

/// Why nothing is done for a volume that is not as desired.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Blocked {
    /// Others staged it.
    ///
    /// Remedy: `uringctl volumes` shows it; end its pods or users, after which the file counts.
    #[error("it is staged by others at {}", .0.display())]
    Foreign(PathBuf),
    /// Others published it.
    ///
    /// Remedy: end what uses the path; it is detached then.
    #[error("others published it at {}; it is detached once they are done", .0.display())]
    Used(PathBuf),
    /// It is staged where only the manager stages, and the manager has no record of it.
    #[error(
        "it was staged by an earlier manager whose record is lost; `uringctl unstage` detaches it"
    )]
    Unrecorded,
    /// Whether it is wanted is not known.
    ///
    /// Remedy: correct the files that `uringctl wanted` names; `uringctl plan` shows what follows.
    #[error("no file asks for it, and it is left as it is: {0}")]
    Doubted(String),
}

/// The next step of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// It is as desired.
    Done,
    Act(Action),
    Blocked(Blocked),
}

/// The next step towards `wanted`; `None`: the volume is wanted no more.
fn next(wanted: Option<&WantedFile>, actual: &Actual) -> Next {
    let Some(applied) = &actual.applied else {
        return match (&actual.presence, wanted) {
            (Presence::Absent, Some(wanted)) => record(wanted, None),
            (Presence::Foreign(at), Some(_)) => Next::Blocked(Blocked::Foreign(at.clone())),
            (Presence::Managed { .. }, _) => Next::Blocked(Blocked::Unrecorded),
            (Presence::Absent | Presence::Foreign(_), None) => Next::Done,
        };
    };
    match wanted {
        Some(wanted)
            if applied.in_doubt.is_none() && is_same_setup(&applied.desired, &wanted.desired) =>
        {
            change(wanted, applied, &actual.presence)
        }
        Some(wanted) if actual.presence == Presence::Absent => record(wanted, None),
        Some(wanted) => match reconfigure(wanted, applied, &actual.presence) {
            Some(action) => Next::Act(action),
            None => tear_down(applied, &actual.presence),
        },
        None => tear_down(applied, &actual.presence),
    }
}

/// The change of the mounted file system that is enough for `wanted`, if one is.
fn reconfigure(wanted: &WantedFile, applied: &Applied, presence: &Presence) -> Option<Action> {
    let Presence::Managed {
        staged: true,
        targets,
    } = presence
    else {
        return None;
    };
    let now = &wanted.desired;
    let has_others = targets.iter().any(|path| *path != applied.desired.path);
    if has_others && is_read_only(now) != is_read_only(&applied.desired) {
        return None;
    }
    let _ = change_in_place(applied, now)?;
    let DesiredAccess::Mount { options, .. } = &now.access else {
        return None;
    };
    Some(Action::Reconfigure {
        options: options.clone(),
        read_only: now.read_only,
    })
}

fn record(wanted: &WantedFile, before: Option<&Applied>) -> Next {
    let (name, desired) = (wanted.name.clone(), wanted.desired.clone());
    let is_same = |before: &&Applied| {
        before.desired.path == desired.path && is_same_mount(&before.desired, &desired)
    };
    let has_options = before.filter(is_same).is_some_and(|it| it.has_options);
    Next::Act(Action::Record(Box::new(Applied {
        name,
        desired,
        grown_to: before.and_then(|before| before.grown_to),
        has_options,
        in_doubt: None,
        refused: None,
    })))
}

/// The next step of a volume whose setup is the one that is wanted.
fn change(wanted: &WantedFile, applied: &Applied, presence: &Presence) -> Next {
    let nowhere = BTreeSet::new();
    let (staged, targets) = match presence {
        Presence::Foreign(at) => return Next::Blocked(Blocked::Foreign(at.clone())),
        Presence::Absent => (false, &nowhere),
        Presence::Managed { staged, targets } => (*staged, targets),
    };
    let (before, path) = (&applied.desired.path, &wanted.desired.path);
    if before != path && targets.contains(before) {
        return Next::Act(Action::Unpublish(before.clone()));
    }
    let has_options = applied.has_options && is_same_mount(&applied.desired, &wanted.desired);
    if before == path && targets.contains(path) && !has_options {
        return Next::Act(match &wanted.desired.access {
            DesiredAccess::Mount { options, .. } => Action::Remount(options.clone()),
            DesiredAccess::Raw => Action::Publish,
        });
    }
    if applied.name != wanted.name || applied.desired != wanted.desired {
        return record(wanted, Some(applied));
    }
    if !staged {
        return Next::Act(Action::Stage);
    }
    if !targets.contains(path) {
        return Next::Act(Action::Publish);
    }
    match wanted.desired.size {
        Some(size) if applied.grown_to < Some(size) => Next::Act(Action::Grow(size)),
        _ => Next::Done,
    }
}

/// The next step of a volume that is wanted no more, or not like this.
fn tear_down(applied: &Applied, presence: &Presence) -> Next {
    let path = &applied.desired.path;
    Next::Act(match presence {
        // What the manager set up is gone.
        Presence::Absent | Presence::Foreign(_) => Action::Forget,
        Presence::Managed { targets, .. } => {
            // Unpublished only if the rest can follow: else nobody could use it, and it would
            // be attached all the same.
            if let Some(other) = targets.iter().find(|target| *target != path) {
                return Next::Blocked(Blocked::Used(other.clone()));
            }
            if targets.contains(path) {
                Action::Unpublish(path.clone())
            } else {
                Action::Unstage
            }
        }
    })
}

/// The last action of a volume, if it did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// It has not ended. With the failure before it.
    Running(Action, Option<Failure>),
    Failed(Failure),
}

/// A failed action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub action: Action,
    pub error: String,
    /// Whether no repeat succeeds before something is changed.
    pub is_final: bool,
    /// How often it has failed without success.
    pub times: u32,
    /// When it is repeated.
    pub repeat: Instant,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.action, self.error)
    }
}

impl Failure {
    /// A failure of an action after these earlier attempts.
    pub fn new(
        action: Action,
        kind: Kind,
        error: String,
        earlier: Option<&Failure>,
        now: Instant,
    ) -> Self {
        let earlier = earlier.filter(|earlier| earlier.action == action);
        let times = earlier.map_or(0, |earlier| earlier.times).saturating_add(1);
        Self {
            action,
            error,
            is_final: is_final(kind),
            times,
            repeat: now + pause(kind, times),
        }
    }
}

/// Whether something has to be changed first, which may not be in the file.
fn is_final(kind: Kind) -> bool {
    match kind {
        Kind::InUse | Kind::Transient | Kind::Deadline | Kind::Exhausted => false,
        Kind::Invalid
        | Kind::NotFound
        | Kind::Conflict
        | Kind::OutOfRange
        | Kind::Unsupported
        | Kind::Precondition
        | Kind::Unauthenticated
        | Kind::Internal => true,
    }
}

/// How long to wait after so many failures: twice as long after each, up to a limit.
fn pause(kind: Kind, times: u32) -> Duration {
    let (first, limit) = match kind {
        // The user may end at any time.
        Kind::InUse => (1, 10),
        kind if is_final(kind) => (5, 300),
        _ => (1, 60),
    };
    let doubled = 1_u64.checked_shl(times - 1).unwrap_or(u64::MAX);
    Duration::from_secs(limit.min(doubled.saturating_mul(first)))
}

/// The next step of each volume that is not as desired.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be done now, by handle.
    pub actions: BTreeMap<String, Action>,
    /// To be done later, or not known when.
    pub waiting: BTreeMap<String, Next>,
    /// When the first of these is due.
    pub due: Option<Instant>,
}

/// The names of all files that were applied.
pub fn applied_names(actual: &BTreeMap<String, Actual>) -> BTreeSet<&str> {
    (actual.values())
        .filter_map(|actual| Some(&*actual.applied.as_ref()?.name))
        .collect()
}

/// The next step of a volume for which `wanted` asks; without a file it may be wanted
/// nevertheless. `names`: of all files that were applied.
pub fn next_of(
    desired: &DesiredTable,
    names: &BTreeSet<&str>,
    wanted: Option<&WantedFile>,
    actual: &Actual,
) -> Next {
    match (&actual.applied, wanted) {
        (Some(applied), None) => match desired.doubt(&applied.name, names) {
            Some(why) => Next::Blocked(Blocked::Doubted(why)),
            None => next(None, actual),
        },
        _ => next(wanted, actual),
    }
}

/// Plans the next step of each volume. A volume has one action at a time.
pub fn plan(
    desired: &DesiredTable,
    actual: &BTreeMap<String, Actual>,
    attempts: &BTreeMap<String, Unfinished>,
    now: Instant,
) -> Plan {
    let names = applied_names(actual);
    let mut plan = Plan::default();
    let absent = Actual::default();
    let handles: BTreeSet<_> = desired.volumes.keys().chain(actual.keys()).collect();
    for handle in handles {
        let actual = actual.get(handle).unwrap_or(&absent);
        let next = next_of(desired, &names, desired.volumes.get(handle), actual);
        match (next, attempts.get(handle)) {
            (next, Some(Unfinished::Running(..))) => {
                plan.waiting.insert(handle.clone(), next);
            }
            (Next::Act(action), Some(Unfinished::Failed(failure)))
                if failure.action == action && failure.repeat > now =>
            {
                let due = failure.repeat;
                plan.due = Some(plan.due.map_or(due, |before| before.min(due)));
                plan.waiting.insert(handle.clone(), Next::Act(action));
            }
            (Next::Act(action), _) => {
                plan.actions.insert(handle.clone(), action);
            }
            (blocked @ Next::Blocked(_), _) => {
                plan.waiting.insert(handle.clone(), blocked);
            }
            (Next::Done, _) => {}
        }
    }
    plan
}

#[cfg(test)]
mod tests;
