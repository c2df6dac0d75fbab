//! A cluster that a node reaches from another network namespace alone, as with Multus.

use std::fs::File;

use rustix::{
    fd::AsFd as _,
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use serde_json::json;
use testkit::{ceph_story, refused};
use tonic::Code::{FailedPrecondition, Unavailable};

use super::lifecycle;

#[test]
fn an_image_is_mapped_in_the_network_namespace_of_its_cluster() {
    ceph_story(async |sandbox, ceph| {
        let volume = ceph.volume("ext4");
        let served = ceph.volume("block").with("mounter", "rbd-nbd");
        let outside = format!("/proc/{}/ns/net", std::process::id());
        let configure = |file: &str| {
            let mut entry = ceph.entry();
            entry["rbd"] = json!({"netNamespaceFilePath": file});
            ceph.configure(&[entry]);
        };
        // SAFETY: the thread still shares the process's descriptor table.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        let node = ceph.node(sandbox).await;
        refused(node.stage(&volume).await, Unavailable, &["no monitor"]);
        configure("/nonexistent");
        refused(node.stage(&volume).await, Unavailable, &["/nonexistent"]);

        configure(&outside);
        lifecycle(&node, &volume).await;
        let by_nbd = node.stage(&served).await;
        refused(by_nbd, FailedPrecondition, &["rbd-nbd", &outside]);
        node.assert_clean().await;
        let outside = File::open(outside).unwrap();
        move_into_link_name_space(outside.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    });
}
