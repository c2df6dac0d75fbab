//! Devices that others detach and attach while the agent has them on record.

use std::{fs, path::Path};

use testkit::{
    Ceph, Content, Node, Volume, ceph_story, files_below, rbds_of, rbds_over, refused, story,
    unmap_by_rbd,
};

use super::{assert_nothing_staged, write_or_check};

/// Maps an image at this device, whose number was just freed; false if another story has
/// the number now. The driver gives an image the lowest free number.
fn map_as(ceph: &Ceph, volume: &Volume, device: &Path) -> bool {
    let number = |device: &Path| {
        let name = device.file_name().unwrap().to_str().unwrap();
        name.trim_start_matches("rbd").parse::<u32>().unwrap()
    };
    let mut others = Vec::new();
    let is_mapped = loop {
        let mapped = ceph.map_by_rbd(volume, "noudev");
        if mapped == device {
            break true;
        }
        let is_beyond = number(&mapped) > number(device);
        others.push(mapped);
        if is_beyond {
            break false;
        }
    };
    for other in &others {
        unmap_by_rbd(other);
    }
    is_mapped
}

#[test]
fn a_device_number_reused_by_another_image_is_not_the_volumes() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let [volume, other] = [(); 2].map(|()| ceph.volume("block"));
        let [ours, theirs] = [&volume, &other].map(|volume| Content::new(&volume.handle));
        let (target, device) = loop {
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &ours, true);
            // No process has it open, so it can be unmapped.
            let device = rbds_over(&volume).pop().unwrap();
            unmap_by_rbd(&device);
            let conditions = node.health(&volume, &target).await.unwrap();
            assert!(!conditions.is_empty(), "its device is detached");
            if map_as(ceph, &other, &device) {
                break (target, device);
            }
            node.down(&volume, "pod").await;
        };
        theirs.write_at(&device, 0).unwrap();

        let conditions = node.health(&volume, &target).await.unwrap();
        assert!(!conditions.is_empty(), "another image is not the volume");
        node.unpublish(&volume, "pod").await.unwrap();
        // Another pod gets the volume or nothing.
        if node.stage(&volume).await.is_ok() && node.publish(&volume, "another").await.is_ok() {
            write_or_check(&volume, &node.target(&volume, "another"), &ours, false);
        }
        node.unpublish(&volume, "another").await.unwrap();
        node.unstage(&volume).await.unwrap();
        assert_nothing_staged(&node, &volume);
        // The other device is untouched.
        assert_eq!(rbds_of(sandbox.dir()), std::slice::from_ref(&device));
        theirs.assert_at(&device, 0);
        unmap_by_rbd(&device);
        node.assert_clean().await;
    });
}

#[test]
fn a_restarted_agent_detects_a_lost_device() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        for number_is_taken in [false, true] {
            loop {
                let volume = ceph.volume("block");
                node.up(&volume, "pod").await;
                node.kill9().await;
                let device = rbds_over(&volume).pop().unwrap();
                unmap_by_rbd(&device);
                let other = ceph.volume("block");
                let is_mapped = number_is_taken && map_as(ceph, &other, &device);
                node.restart().await;
                node.down(&volume, "pod").await;
                assert_nothing_staged(&node, &volume);
                assert_eq!(rbds_of(sandbox.dir()).len(), usize::from(is_mapped));
                if is_mapped {
                    unmap_by_rbd(&device);
                }
                if is_mapped == number_is_taken {
                    break;
                }
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn equal_image_names_in_several_pools_are_distinct() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let here = ceph.volume("ext4");
        let name = &here.context["imageName"];
        let pool = ceph.cluster.fresh_pool();
        let create = ["create", "-s", "64M", "--image-feature", "layering"];
        let spec = format!("{pool}/{name}");
        ceph.cluster.rbd(&[&create[..], &[&spec]].concat());
        let there = ceph.over_in(&pool, name, "ext4");
        let volumes = [&here, &there];
        for volume in volumes {
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), true);
        }
        assert_eq!(rbds_of(sandbox.dir()).len(), volumes.len());
        // An agent without records recognises each by its mount.
        node.kill9().await;
        for file in files_below(&node.run_dir) {
            fs::remove_file(file).unwrap();
        }
        node.restart().await;
        for (gone, volume) in volumes.into_iter().enumerate() {
            assert_eq!(rbds_of(sandbox.dir()).len(), volumes.len() - gone);
            node.down(volume, "pod").await;
            let target = node.up(volume, "pod").await;
            write_or_check(volume, &target, &Content::new(&volume.handle), false);
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_missing_kernel_module_is_named() {
    if Path::new("/sys/bus/rbd").exists() {
        return;
    }
    story(async |sandbox| {
        let Some(ceph) = Ceph::shared(sandbox) else {
            return;
        };
        let node: Node = ceph.node(sandbox).await;
        let answer = node.stage(&ceph.volume("ext4")).await;
        refused(answer, tonic::Code::Unavailable, &["kernel module \"rbd\""]);
        node.assert_clean().await;
    });
}
