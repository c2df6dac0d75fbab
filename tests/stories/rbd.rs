//! Images of Ceph clusters, mapped by krbd, as volumes of a node, which ceph-csi describes
//! and stages in the same way. On a real cluster; skipped where the kernel has no RBD
//! driver.

mod cryptsetup;
pub mod encrypted;
mod encrypted_files;
mod fenced;
mod growth;
mod killed;
mod lifecycle;
mod lost_devices;
mod moved;
mod net_namespace;
mod outages;
mod partial_formats;
mod provisioned;
pub mod rbd_nbd;
mod refusals;
mod rotation;
mod secrets;
mod takeover;
mod watchers;
mod without_librbd;

use std::{
    fs,
    path::{Path, PathBuf},
};

use testkit::{Content, MIB, Node, Volume, nbds_over, rbds_over};

/// The devices of a volume, mapped by any program.
fn devices_over(volume: &Volume) -> Vec<PathBuf> {
    let nbds = nbds_over(&volume.handle).into_iter().map(PathBuf::from);
    rbds_over(volume).into_iter().chain(nbds).collect()
}

/// Writes into a published volume in the first round, and checks that content in later ones.
fn write_or_check(volume: &Volume, target: &Path, content: &Content, is_first: bool) {
    match (volume.is_block(), is_first) {
        (true, true) => content.write_at(target, MIB).unwrap(),
        (true, false) => content.assert_at(target, MIB),
        (false, true) => content.write(&target.join("file")),
        (false, false) => content.assert_in(&target.join("file")),
    }
}

/// Two full lives, with every call that reads.
async fn lifecycle(node: &Node, volume: &Volume) {
    let content = Content::new(&volume.handle);
    for round in 0..2 {
        let target = node.up(volume, "pod").await;
        write_or_check(volume, &target, &content, round == 0);
        assert!(!node.stats(volume, &target).await.unwrap().is_empty());
        let conditions = node.health(volume, &target).await.unwrap();
        assert!(conditions.is_empty(), "{conditions:?}");
        node.down(volume, "pod").await;
        assert_nothing_staged(node, volume);
    }
}

/// Kubelet removes the staging directory next, which must be empty then.
fn assert_nothing_staged(node: &Node, volume: &Volume) {
    let staging = node.staging(volume);
    let left: Vec<_> = fs::read_dir(&staging)
        .into_iter()
        .flatten()
        .flatten()
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
