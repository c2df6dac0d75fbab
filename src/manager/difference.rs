//! What differs between two desired states of a volume, and what can be changed while it is
//! mounted.

use super::{
    applied::Applied,
    desired::{Desired, DesiredAccess},
};
use crate::{
    device::Source,
    mount::options::{FsOption, MountOptions},
};

/// Whether a volume that was set up as `before` asks needs no other setup for `now`: the two
/// differ at most in what can be changed while it is attached.
pub fn is_same_setup(before: &Desired, now: &Desired) -> bool {
    before.source == now.source
        && before.read_only == now.read_only
        && without_options(&before.access) == without_options(&now.access)
        && options(before).without_target_attributes() == options(now).without_target_attributes()
}

/// The options to set on the mounted file system of a volume that was set up as recorded,
/// for it to be as `now` asks; `None` where it takes another setup.
pub fn change_in_place(applied: &Applied, now: &Desired) -> Option<Vec<FsOption>> {
    let before = &applied.desired;
    let is_mount = |of: &Desired| matches!(of.access, DesiredAccess::Mount { .. });
    let in_doubt =
        (applied.in_doubt.as_ref()).map(|words| MountOptions::parse(words).unwrap_or_default());
    let was_read_only =
        is_read_only(before) || in_doubt.as_ref().is_some_and(MountOptions::read_only);
    // Attached to be read only, it may be attached elsewhere.
    let becomes_writable = was_read_only && !is_read_only(now);
    let is_refused = (applied.refused.as_ref()).is_some_and(|refused| refused.is_of(now));
    let context = now.source.clone().into_iter().collect();
    if before.source != now.source
        || !is_mount(now)
        || !Source::has_device_by(&context)
        || without_options(&before.access) != without_options(&now.access)
        || becomes_writable
        || is_refused
    {
        return None;
    }
    options(now)
        .to_set(&options(before), in_doubt.as_ref())
        .ok()
}

/// Whether this machine only reads it.
pub fn is_read_only(of: &Desired) -> bool {
    of.read_only || options(of).read_only()
}

/// Whether a target that was mounted as `before` asks has the options of `now`.
pub fn is_same_mount(before: &Desired, now: &Desired) -> bool {
    options(before) == options(now)
}

/// The mount options. Those of a file were checked before anything is done with it.
pub fn options(of: &Desired) -> MountOptions {
    let DesiredAccess::Mount { options, .. } = &of.access else {
        return MountOptions::default();
    };
    MountOptions::parse(options).unwrap_or_default()
}

fn without_options(access: &DesiredAccess) -> DesiredAccess {
    let mut access = access.clone();
    if let DesiredAccess::Mount { options, .. } = &mut access {
        options.clear();
    }
    access
}

/// The keys of a file whose values differ.
pub fn changed_keys(before: &Desired, now: &Desired) -> Vec<&'static str> {
    let is_same_access = without_options(&before.access) == without_options(&now.access);
    let differ = [
        ("source", before.source != now.source),
        ("mount", !is_same_access),
        ("options", is_same_access && before.access != now.access),
        ("path", before.path != now.path),
        ("read-only", before.read_only != now.read_only),
        ("size", before.size != now.size),
        ("secrets", before.secrets != now.secrets),
        ("handle", before.handle != now.handle),
    ];
    let changed = differ.into_iter().filter(|(_, differs)| *differs);
    changed.map(|(key, _)| key).collect()
}
