//! What the reconciler would do, if every action succeeded and nobody else did anything.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::{
    applied::Applied,
    difference::changed_keys,
    plan::{Action, Actual, Blocked, Next, Presence, applied_names, next_of},
    table::{DesiredTable, WantedFile},
};

/// More actions than lead any volume to its desired state.
const MAX_ACTIONS: usize = 16;

/// What would be done for one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryRun {
    /// In this order.
    pub actions: Vec<Action>,
    /// Why nothing is done after these.
    pub blocked: Option<Blocked>,
    /// Why anything is done, or nothing.
    pub reason: String,
}

/// What would be done for each volume that is wanted or recorded, by handle.
pub fn dry_run(
    desired: &DesiredTable,
    actual: &BTreeMap<String, Actual>,
) -> BTreeMap<String, DryRun> {
    let names = applied_names(actual);
    let absent = Actual::default();
    let handles: BTreeSet<_> = desired.volumes.keys().chain(actual.keys()).collect();
    let of_one = |handle: &String| {
        let actual = actual.get(handle).unwrap_or(&absent);
        let wanted = desired.volumes.get(handle);
        let run = of_volume(desired, &names, wanted, actual.clone());
        let is_ours = wanted.is_some() || actual.applied.is_some() || run.blocked.is_some();
        is_ours.then(|| (handle.clone(), run))
    };
    handles.into_iter().filter_map(of_one).collect()
}

fn of_volume(
    desired: &DesiredTable,
    names: &BTreeSet<&str>,
    wanted: Option<&WantedFile>,
    mut actual: Actual,
) -> DryRun {
    let reason = reason(wanted, &actual);
    let mut run = DryRun {
        actions: Vec::new(),
        blocked: None,
        reason,
    };
    while run.actions.len() < MAX_ACTIONS {
        match next_of(desired, names, wanted, &actual) {
            Next::Done => break,
            Next::Blocked(why) => {
                run.blocked = Some(why);
                break;
            }
            Next::Act(action) => {
                succeed(&mut actual, &action);
                run.actions.push(action);
            }
        }
    }
    run
}

/// The volume after this action.
fn succeed(actual: &mut Actual, action: &Action) {
    match (action, &mut actual.presence) {
        (Action::Record(applied), _) => actual.applied = Some((**applied).clone()),
        (Action::Forget, _) => actual.applied = None,
        (Action::Stage, Presence::Managed { staged, .. }) => *staged = true,
        (Action::Stage, _) => {
            actual.presence = Presence::Managed {
                staged: true,
                targets: BTreeSet::new(),
            };
        }
        (Action::Publish, Presence::Managed { targets, .. }) => {
            if let Some(applied) = &mut actual.applied {
                targets.insert(applied.desired.path.clone());
                applied.has_options = true;
            }
        }
        (Action::Unpublish(path), Presence::Managed { targets, .. }) => {
            targets.remove(path);
        }
        (Action::Remount(options), _) => {
            if let Some(applied) = &mut actual.applied {
                applied.desired.access.set_options(options);
                applied.has_options = true;
            }
        }
        (Action::Reconfigure { options, read_only }, _) => {
            if let Some(applied) = &mut actual.applied {
                applied.reconfigured(options, *read_only);
            }
        }
        (Action::Grow(size), _) => {
            if let Some(applied) = &mut actual.applied {
                applied.grown_to = Some(*size);
            }
        }
        (Action::Unstage, _) => actual.presence = Presence::Absent,
        (Action::Publish | Action::Unpublish(_), _) => {}
    }
}

/// Why the volume is not as desired.
fn reason(wanted: Option<&WantedFile>, actual: &Actual) -> String {
    match (wanted, &actual.applied) {
        (None, _) => "no file asks for it".to_owned(),
        (Some(wanted), None) => format!("{}.toml asks for it", wanted.name),
        (Some(wanted), Some(applied)) => {
            let changed = changed_keys(&applied.desired, &wanted.desired);
            if !changed.is_empty() {
                return format!("{}.toml changed: {}", wanted.name, changed.join(", "));
            }
            if wanted.name != applied.name {
                return format!("its file was {}.toml", applied.name);
            }
            missing(applied, &actual.presence)
        }
    }
}

/// What a volume lacks whose file did not change.
fn missing(applied: &Applied, presence: &Presence) -> String {
    let path: &Path = &applied.desired.path;
    match presence {
        Presence::Absent | Presence::Foreign(_) => "it is not attached".to_owned(),
        Presence::Managed { staged: false, .. } => "it is not staged".to_owned(),
        Presence::Managed { targets, .. } if !targets.contains(path) => {
            format!("it is not mounted at {}", path.display())
        }
        Presence::Managed { .. } => match applied.desired.size {
            Some(size) if applied.grown_to < Some(size) => {
                format!("it was not grown to {size}")
            }
            _ => "it is as its file asks".to_owned(),
        },
    }
}
