//! The demands of the CSI specification on each call of the Node service: the code of each
//! refused request, and that a repeat changes nothing.

use std::{fs, path::PathBuf};

use testkit::{
    MIB, Node, NodeSetup, Sandbox, Volume, loops_over, mounts_below, refused, run, story,
};
use tonic::Code::{
    Aborted, FailedPrecondition, InvalidArgument, NotFound, OutOfRange, ResourceExhausted,
};
use uring_csi::proto::csi::{
    CapacityRange, NodeExpandVolumeRequest, NodeGetInfoRequest, NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, VolumeCapability, volume_capability::AccessMode,
};

/// A request with one defect, and the words that the refusal must have.
type Wrong<T> = (&'static str, fn(&mut T));

/// Longer than any id may be.
fn long() -> String {
    "x".repeat(1025)
}

/// More than a map may hold.
fn big() -> std::collections::HashMap<String, String> {
    [("key".to_owned(), "v".repeat(4096))].into()
}

#[test]
fn stage_refuses_missing_and_oversized_fields() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        fs::create_dir_all(node.staging(&volume)).unwrap();
        let wrong: &[Wrong<NodeStageVolumeRequest>] = &[
            ("volume_id", |r| r.volume_id.clear()),
            ("volume_id", |r| r.volume_id = long()),
            ("volume_id", |r| r.volume_id = "a\nb".to_owned()),
            ("staging_target_path", |r| r.staging_target_path.clear()),
            ("rel", |r| {
                r.staging_target_path = "rel".to_owned();
            }),
            ("staging_target_path", |r| {
                let name = r.staging_target_path.rfind('/').expect("absolute") + 1;
                r.staging_target_path
                    .replace_range(name.., &"x".repeat(256));
            }),
            ("volume_context.image", |r| {
                r.volume_context
                    .insert("image".to_owned(), "v.img\0".to_owned());
            }),
            ("volume_capability", |r| r.volume_capability = None),
            ("access_mode", |r| {
                capability(&mut r.volume_capability).access_mode = None;
            }),
            ("access_type", |r| {
                capability(&mut r.volume_capability).access_type = None;
            }),
            ("access mode", |r| {
                capability(&mut r.volume_capability).access_mode = Some(AccessMode { mode: 99 });
            }),
            ("volume_context", |r| r.volume_context = big()),
            ("secrets", |r| r.secrets = big()),
            ("publish_context", |r| r.publish_context = big()),
            ("pool", |r| drop(r.volume_context.remove("pool"))),
            ("image", |r| drop(r.volume_context.remove("image"))),
            ("main", |r| {
                r.volume_context
                    .insert("pool".to_owned(), "none".to_owned());
            }),
            ("image", |r| {
                r.volume_context
                    .insert("image".to_owned(), "../v.img".to_owned());
            }),
            ("backend", |r| {
                r.volume_context
                    .insert("backend".to_owned(), "tape".to_owned());
            }),
        ];
        for (word, spoil) in wrong {
            let mut request = node.stage_request(&volume);
            spoil(&mut request);
            refused(node.send_stage(request).await, InvalidArgument, &[word]);
        }
        assert_untouched(sandbox, &volume);
        node.assert_clean().await;
    });
}

#[test]
fn publish_refuses_missing_and_oversized_fields() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        node.stage(&volume).await.unwrap();
        let wrong: &[Wrong<NodePublishVolumeRequest>] = &[
            ("volume_id", |r| r.volume_id.clear()),
            ("volume_id", |r| r.volume_id = long()),
            ("target_path", |r| r.target_path.clear()),
            ("volume_capability", |r| r.volume_capability = None),
            ("access_mode", |r| {
                capability(&mut r.volume_capability).access_mode = None;
            }),
            ("volume_context", |r| r.volume_context = big()),
            ("secrets", |r| r.secrets = big()),
        ];
        let before = mounts_below(sandbox.dir());
        for (word, spoil) in wrong {
            let mut request = node.publish_request(&volume, "pod");
            spoil(&mut request);
            refused(node.send_publish(request).await, InvalidArgument, &[word]);
        }
        assert_eq!(mounts_below(sandbox.dir()), before);

        // Without a staging path there is nothing to publish from.
        let mut request = node.publish_request(&volume, "pod");
        request.staging_target_path.clear();
        refused(
            node.send_publish(request).await,
            FailedPrecondition,
            &["staging_target_path"],
        );
        node.unstage(&volume).await.unwrap();
        refused(
            node.publish(&volume, "pod").await,
            FailedPrecondition,
            &["v"],
        );
        assert!(!node.target(&volume, "pod").exists());
        node.assert_clean().await;
    });
}

#[test]
fn the_other_calls_refuse_missing_and_oversized_fields() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for (id, path, word) in [
            (String::new(), "/p", "volume_id"),
            (long(), "/p", "volume_id"),
            ("v".to_owned(), "", "path"),
        ] {
            let volume_id = id.clone();
            let message = NodeUnstageVolumeRequest {
                volume_id,
                staging_target_path: path.to_owned(),
            };
            let answer = node.client().node_unstage_volume(message).await;
            refused(answer, InvalidArgument, &[word]);

            let volume_id = id.clone();
            let message = NodeUnpublishVolumeRequest {
                volume_id,
                target_path: path.to_owned(),
            };
            let answer = node.client().node_unpublish_volume(message).await;
            refused(answer, InvalidArgument, &[word]);

            let volume_id = id.clone();
            let message = NodeGetVolumeStatsRequest {
                volume_id,
                volume_path: path.to_owned(),
                ..Default::default()
            };
            let answer = node.client().node_get_volume_stats(message).await;
            refused(answer, InvalidArgument, &[word]);

            let message = NodeExpandVolumeRequest {
                volume_id: id,
                volume_path: path.to_owned(),
                ..Default::default()
            };
            let answer = node.client().node_expand_volume(message).await;
            refused(answer, InvalidArgument, &[word]);
        }
        node.assert_clean().await;
    });
}

#[test]
fn missing_images_and_paths_are_not_found() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let gone = Volume::filesystem("gone", "ext4").over("main", "gone.img");
        refused(node.stage(&gone).await, NotFound, &["gone.img"]);

        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        let nowhere = node.target(&volume, "other");
        refused(node.stats(&volume, &nowhere).await, NotFound, &[]);
        refused(node.expand(&volume, &nowhere, MIB).await, NotFound, &[]);
        refused(
            node.stats(&gone, &node.target(&gone, "pod")).await,
            NotFound,
            &[],
        );
        // Another volume's path is not this one's.
        refused(node.stats(&gone, &target).await, NotFound, &["gone"]);
        let other = node.target(&gone, "pod");
        refused(node.expand(&gone, &other, MIB).await, NotFound, &[]);

        // Kubelet repeats these calls: they succeed without the volume.
        node.unpublish(&volume, "other").await.unwrap();
        node.unpublish(&gone, "pod").await.unwrap();
        node.unstage(&gone).await.unwrap();
        node.down(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn paths_outside_of_kubelets_directory_are_refused() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let outside = sandbox.dir().join("outside");
        std::fs::create_dir(&outside).unwrap();
        let kubelet = node.kubelet.clone();
        std::os::unix::fs::symlink(&outside, kubelet.join("link")).unwrap();
        let wrong: [PathBuf; 4] = [
            outside.join("mount"),
            kubelet.join("../outside/mount"),
            kubelet.join("link/mount"),
            kubelet.clone(),
        ];
        for path in &wrong {
            let mut request = node.stage_request(&volume);
            request.staging_target_path = path.display().to_string();
            refused(node.send_stage(request).await, InvalidArgument, &[]);
        }
        node.stage(&volume).await.unwrap();
        for path in &wrong {
            let mut request = node.publish_request(&volume, "pod");
            request.target_path = path.display().to_string();
            refused(node.send_publish(request).await, InvalidArgument, &[]);
        }
        node.unstage(&volume).await.unwrap();
        assert!(!outside.join("mount").exists());
        node.assert_clean().await;
    });
}

#[test]
fn no_path_of_a_volume_is_above_or_below_another() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = sandbox.volume_in("main", &format!("{kind}-v"), kind, 64 * MIB);
            let other = sandbox.volume_in("main", &format!("{kind}-other"), kind, 64 * MIB);
            let target = node.up(&volume, "pod").await;
            node.stage(&other).await.unwrap();
            let staging = node.staging(&volume);
            let mounts = mounts_below(sandbox.dir());
            let above = |path: &PathBuf| path.parent().unwrap().to_owned();
            for (volume, path) in [
                (&volume, staging.clone()),
                (&volume, staging.join("below")),
                (&volume, above(&staging)),
                (&volume, node.staging(&other).join("below")),
                (&other, staging.join("below")),
                (&other, target.join("below")),
                (&other, above(&target)),
            ] {
                let target_path = path.display().to_string();
                let words = ["target_path", &target_path];
                let request = NodePublishVolumeRequest {
                    target_path: target_path.clone(),
                    ..node.publish_request(volume, "pod")
                };
                // Its parent is there, or is a file.
                let sent = node.client().node_publish_volume(request).await;
                refused(sent, InvalidArgument, &words);
                let request = NodeUnpublishVolumeRequest {
                    volume_id: volume.handle.clone(),
                    target_path: target_path.clone(),
                };
                let sent = node.client().node_unpublish_volume(request).await;
                refused(sent, InvalidArgument, &words);
            }
            for path in [&target, &target.join("below"), &above(&target)] {
                let staging_target_path = path.display().to_string();
                let words = ["staging_target_path", &staging_target_path];
                let request = NodeStageVolumeRequest {
                    staging_target_path: staging_target_path.clone(),
                    ..node.stage_request(&volume)
                };
                refused(node.send_stage(request).await, InvalidArgument, &words);
            }
            assert_eq!(mounts_below(sandbox.dir()), mounts);
            if kind == "ext4" {
                // A pod changed it, or an earlier version allowed it.
                let below = target.join("below");
                fs::create_dir(&below).unwrap();
                let below = below.display().to_string();
                run(&["mount", "--bind", &target.display().to_string(), &below]);
                node.kill9().await;
                node.restart().await;
                node.up(&volume, "pod").await;
                refused(
                    node.unpublish(&volume, "pod").await,
                    Aborted,
                    &["a mount is below it"],
                );
                run(&["umount", &below]);
            }
            node.down(&volume, "pod").await;
            node.unstage(&other).await.unwrap();
        }
        node.assert_clean().await;
    });
}

#[test]
fn growth_keeps_to_the_range() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        // It has that size already.
        let bytes = node.expand(&volume, &target, 64 * MIB).await.unwrap();
        assert_eq!(u64::try_from(bytes).unwrap(), 64 * MIB);
        let message = NodeExpandVolumeRequest {
            volume_id: volume.handle.clone(),
            volume_path: target.display().to_string(),
            staging_target_path: "staging".to_owned(),
            ..Default::default()
        };
        let answer = node.client().node_expand_volume(message).await;
        refused(answer, InvalidArgument, &["staging_target_path"]);
        for (required_bytes, limit_bytes, code) in [
            (2 << 20, 1 << 20, InvalidArgument),
            (-1, 0, InvalidArgument),
            (0, 1 << 20, OutOfRange),
        ] {
            let message = NodeExpandVolumeRequest {
                volume_id: volume.handle.clone(),
                volume_path: target.display().to_string(),
                capacity_range: Some(CapacityRange {
                    required_bytes,
                    limit_bytes,
                }),
                ..Default::default()
            };
            let answer = node.client().node_expand_volume(message).await;
            refused(answer, code, &[]);
        }
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn files_at_a_target_are_not_hidden_by_a_publish() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        node.stage(&volume).await.unwrap();
        node.stage(&raw).await.unwrap();
        let [target, device] = [&volume, &raw].map(|volume| node.target(volume, "pod"));
        std::fs::create_dir_all(&target).unwrap();
        std::fs::create_dir_all(device.parent().unwrap()).unwrap();
        std::fs::write(target.join("precious"), "").unwrap();
        std::fs::write(&device, "precious").unwrap();
        for (volume, path) in [(&volume, &target), (&raw, &device)] {
            let words = ["not empty", path.to_str().unwrap()];
            refused(
                node.publish(volume, "pod").await,
                FailedPrecondition,
                &words,
            );
        }
        assert!(target.join("precious").exists());
        assert_eq!(std::fs::read(&device).unwrap(), b"precious");

        std::fs::remove_file(target.join("precious")).unwrap();
        std::fs::write(&device, "").unwrap();
        for volume in [&volume, &raw] {
            node.publish(volume, "pod").await.unwrap();
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_full_node_is_resource_exhausted() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--max-volumes=1");
        let node = Node::start_with(sandbox, setup).await;
        let info = node.client().node_get_info(NodeGetInfoRequest {}).await;
        assert_eq!(info.unwrap().into_inner().max_volumes_per_node, 1);
        let [first, second] = ["first", "second"].map(|name| sandbox.volume(name, "ext4"));
        node.stage(&first).await.unwrap();
        node.stage(&first).await.unwrap();
        refused(node.stage(&second).await, ResourceExhausted, &["second"]);
        assert_untouched(sandbox, &second);
        node.unstage(&first).await.unwrap();
        node.stage(&second).await.unwrap();
        node.unstage(&second).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn only_the_volumes_own_mounts_are_unmounted() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let [volume, unknown] = ["v", "unknown"].map(|name| sandbox.volume(name, "ext4"));
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let foreign = sandbox.dir().join("foreign.img");
        std::fs::File::create(&foreign)
            .unwrap()
            .set_len(64 * MIB)
            .unwrap();
        run(&["mkfs.ext4", "-q", foreign.to_str().unwrap()]);
        let theirs = node.up(&volume, "pod").await;
        let device = node.up(&raw, "pod").await;
        // Kubelet tears down by its own disk, also volumes without a record.
        node.restart_without_records().await;
        let target = node.target(&unknown, "pod");
        std::fs::create_dir_all(&target).unwrap();
        let at = target.to_str().unwrap();
        let mounts: [(&[&str], &[&str]); 4] = [
            (&["mount", "-t", "tmpfs", "none"], &["tmpfs"]),
            (
                &["mount", "-o", "loop", foreign.to_str().unwrap()],
                &["ext4 of /dev/loop"],
            ),
            (
                &["mount", "--bind", theirs.to_str().unwrap()],
                &["volume v", "ext4"],
            ),
            (&["mount", "--bind", "/proc"], &["proc"]),
        ];
        for (mount, words) in mounts {
            run(&[mount, &[at]].concat());
            let before = mounts_below(sandbox.dir());
            refused(
                node.unpublish(&unknown, "pod").await,
                FailedPrecondition,
                &[words, &[at]].concat(),
            );
            assert_eq!(mounts_below(sandbox.dir()), before);
            run(&["umount", at]);
        }
        std::fs::remove_dir(&target).unwrap();
        std::fs::write(&target, "").unwrap();
        run(&["mount", "--bind", device.to_str().unwrap(), at]);
        refused(
            node.unpublish(&unknown, "pod").await,
            FailedPrecondition,
            &["volume raw", "block device"],
        );
        run(&["umount", at]);
        node.unpublish(&unknown, "pod").await.unwrap();
        let staging = node.staging(&unknown);
        std::fs::create_dir_all(&staging).unwrap();
        let at = staging.to_str().unwrap();
        run(&["mount", "--bind", theirs.to_str().unwrap(), at]);
        let before = mounts_below(sandbox.dir());
        refused(
            node.unstage(&unknown).await,
            FailedPrecondition,
            &["volume v", at],
        );
        assert_eq!(mounts_below(sandbox.dir()), before);
        run(&["umount", at]);
        node.unstage(&unknown).await.unwrap();
        for volume in [&volume, &raw] {
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

/// A publish binds the staged volume, also with the context of another source.
#[test]
fn a_publish_context_selects_no_other_volume() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let [volume, other] = ["v", "other"].map(|name| sandbox.volume(name, "ext4"));
        let theirs = node.up(&other, "theirs").await;
        node.stage(&volume).await.unwrap();
        let devices: std::collections::HashMap<_, _> =
            [("devicePath", "/dev/null"), ("image", "other.img")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into();
        let mut stage = node.stage_request(&volume);
        stage.publish_context = devices.clone();
        node.send_stage(stage).await.unwrap();
        let mut publish = node.publish_request(&volume, "pod");
        publish.publish_context = devices;
        publish.volume_context = other.context.clone();
        node.send_publish(publish).await.unwrap();
        let dev = |path: &std::path::Path| rustix::fs::stat(path).unwrap().st_dev;
        let target = node.target(&volume, "pod");
        assert_eq!(dev(&target), dev(&node.staging(&volume)));
        assert_ne!(dev(&target), dev(&theirs));
        node.down(&volume, "pod").await;
        node.down(&other, "theirs").await;
        node.assert_clean().await;
    });
}

fn capability(capability: &mut Option<VolumeCapability>) -> &mut VolumeCapability {
    capability.as_mut().expect("a capability")
}

/// Neither attached nor written.
#[track_caller]
fn assert_untouched(sandbox: &Sandbox, volume: &Volume) {
    let image = sandbox.image(volume);
    assert!(loops_over(&image).is_empty());
    let bytes = std::fs::read(image).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0), "the image was written");
}
