//! End to end: the real binaries, called through their sockets as kubelet and
//! the sidecars call them, on real loop devices, file systems and mounts. One
//! file a story. Needs root. What takes more than that is ignored, and runs in
//! `make test-kernel`. `STORY_SEED` repeats a random story, `SOAK_OPERATIONS` makes the
//! long ones longer, `EVERY_STEP` leaves out none at which an agent may be killed,
//! `EVERY_FS` no file system of those that stories have by turns, and `ENDS` says how
//! often one ends that must end well.

// The ban on children is the product's, not its tests'.
#![allow(clippy::disallowed_methods, missing_docs)]

mod block;
mod controller_rules;
mod copies;
mod crashes;
mod faults;
mod filesystems;
mod groups;
mod growth;
mod inline;
mod nbd;
mod nbd_pool;
mod node_rules;
mod nodes;
mod operator;
mod paths;
mod pools;
mod privileges;
mod protection;
mod rbd;
mod rbd_controller;
mod repeats;
mod reused;
mod soak;
mod starts;
mod storms;
mod stuck;
mod telling;
mod test_bed;
mod udevd;
mod wire;
