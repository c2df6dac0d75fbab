//! The name of the group in Ceph that exists while a group snapshot is taken.

use uuid::Uuid;

/// Its end, after the name of the group snapshot's own, which ends in a uuid.
pub const TEMPORARY: &str = "-vg";

/// The name for the group of that name.
pub fn temporary(group: &str) -> String {
    format!("{group}{TEMPORARY}")
}

/// Whether a group in Ceph has such a name.
pub fn is_temporary(group: &str) -> bool {
    let name = group.strip_suffix(TEMPORARY);
    let uuid = name.and_then(|name| name.get(name.len().checked_sub(36)?..));
    uuid.is_some_and(|uuid| Uuid::try_parse(uuid).is_ok())
}
