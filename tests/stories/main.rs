//! End to end: the real binaries, called through their sockets as kubelet and the sidecars
//! call them, on real loop devices, file systems and mounts. Needs root. A story that needs
//! more than that is ignored, and runs in `make test-kernel`.
//!
//! `STORY_SEED` repeats a random story, `SOAK_OPERATIONS` makes the soak longer,
//! `EVERY_STEP` kills an agent at each of its steps, `EVERY_FS` tests every file system
//! where a story picks one, and `ENDS` is how often a story of `exits` ends a process.

// The ban on children is the product's, not its tests'.
#![allow(clippy::disallowed_methods, missing_docs)]

mod addons;
mod bench_command;
mod block;
mod completion;
mod controller_rules;
mod copies;
mod crashes;
mod doctor;
mod faults;
mod filesystems;
mod fs_group;
mod growth;
mod hung_devices;
mod inline;
mod limits;
mod manager;
mod metrics;
mod nbd;
mod nbd_pool;
mod nfs;
mod nfs_controller;
mod nfs_quota;
mod nfs_rules;
mod node_rules;
mod nodes;
mod observability;
mod operator;
mod paths;
mod pools;
mod privileges;
mod protection;
mod rbd;
mod rbd_controller;
mod recovery;
mod repeats;
mod reused_devices;
mod soak;
mod test_bed;
mod udevd;
mod wire;
