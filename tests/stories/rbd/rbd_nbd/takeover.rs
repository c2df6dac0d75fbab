//! Volumes attached by rbd-nbd pass from ceph-csi to this driver and back. ceph-csi's
//! daemons are in its plugin's pod and end with it; the device, its cookie and the stage
//! file stay.

use std::{fs, path::Path};

use rustix::process::Pid;
use testkit::{
    Content, MIB, STAGE_FILE, Supervisor, Volume, ceph_csi_stage_file, ceph_story,
    publish_as_ceph_csi, run,
};

use super::{kill_unlocked, nbds, node_with, served};
use crate::rbd::{
    assert_nothing_staged, encrypted, takeover::unstaged_by_ceph_csi, write_or_check,
};

/// The process that connected the device.
fn connected(volume: &Volume) -> Pid {
    let device = nbds(volume).pop().unwrap();
    let name = Path::new(&device).file_name().unwrap().to_str().unwrap();
    let pid = fs::read_to_string(format!("/sys/block/{name}/pid")).unwrap();
    Pid::from_raw(pid.trim().parse().unwrap()).unwrap()
}

#[test]
fn rbd_nbd_volumes_staged_by_ceph_csi_are_used_and_unstaged() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        // Else the unmount waits for five minutes.
        let soon = |volume: Volume| served(volume).with("mapOptions", "nbd:reattach-timeout=2");
        for volume in [
            served(ceph.volume("ext4")),
            served(encrypted::volume(ceph, "ext4")),
            soon(ceph.volume("ext4")),
            soon(ceph.volume("block")),
        ] {
            let content = Content::new(&volume.handle);
            ceph.stage_as_ceph_csi(&node, &volume);
            let target = publish_as_ceph_csi(&node, &volume, "pod");
            write_or_check(&volume, &target, &content, true);
            if !volume.is_block() {
                run(&["sync", "-f", target.to_str().unwrap()]);
            }
            node.kill9().await;
            kill_unlocked(&volume, connected(&volume)).await;
            node.restart().await;
            if !volume.context.contains_key("mapOptions") {
                // As kubelet does after its own restart.
                node.up(&volume, "pod").await;
                write_or_check(&volume, &target, &content, false);
                assert_eq!(nbds(&volume).len(), 1);
                assert!(node.health(&volume, &target).await.unwrap().is_empty());
                let larger = 160 * MIB;
                ceph.resize(&volume, larger);
                node.expand(&volume, &target, larger).await.unwrap();
            }
            node.down(&volume, "pod").await;
            assert_nothing_staged(&node, &volume);
            assert!(nbds(&volume).is_empty() && supervisor.status(&volume).await.is_none());
            // It was the same volume all the time.
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, false);
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn ceph_csi_unstages_rbd_nbd_volumes_of_this_driver() {
    ceph_story(async |sandbox, ceph| {
        let supervisor = Supervisor::start(sandbox).await;
        let node = node_with(sandbox, ceph, &supervisor).await;
        for volume in [
            served(ceph.volume("ext4")).with("unmapOptions", "krbd:force"),
            served(ceph.volume("block")),
            served(encrypted::volume(ceph, "ext4")),
        ] {
            let content = Content::new(&volume.handle);
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, true);
            let left = fs::read_to_string(node.staging(&volume).join(STAGE_FILE)).unwrap();
            assert_eq!(left, ceph_csi_stage_file(&volume));
            unstaged_by_ceph_csi(&node, &volume, &target).await;
            assert!(nbds(&volume).is_empty());
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &content, false);
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
