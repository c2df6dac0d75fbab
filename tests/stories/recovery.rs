//! An agent that starts serves at once, and acts on no volume before it is recovered.

use std::{fs, io::ErrorKind, path::Path, time::Duration};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use testkit::{
    Content, MIB, Node, NodeSetup, STAGE_FILE, Volume, all_loops, files_below, hex, refused, run,
    story,
};
use tonic::Code;
use uring_csi::proto::{
    admin::{ListHeldVolumesRequest, node_admin_client::NodeAdminClient},
    csi::{GetPluginInfoRequest, NodeGetInfoRequest, identity_client::IdentityClient},
};

/// Copies the existing record, for so many volumes that a killed agent had begun to stage.
fn begun(node: &Node, count: usize) -> Vec<Volume> {
    let files = files_below(&node.run_dir.join("volumes"));
    assert_eq!(files.len(), 1, "{files:?}");
    let file = files.first().expect("a record");
    let mut record: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    record["phase"] = json!("staging");
    record["device"] = Value::Null;
    (0..count)
        .map(|n| {
            let volume = Volume::filesystem(&format!("begun-{n}"), "ext4").over("main", "no.img");
            record["volume_id"] = json!(volume.handle);
            record["staging_path"] = json!(node.staging(&volume));
            let digest = hex(&Sha256::digest(&volume.handle));
            let file = file.with_file_name(format!("{digest}.json"));
            fs::write(file, record.to_string()).unwrap();
            volume
        })
        .collect()
}

#[test]
fn an_unstage_without_a_record_leaves_the_stage_file_of_another_volume() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = Volume::filesystem("none", "ext4");
        let staging = node.staging(&volume);
        let [file, other] = [STAGE_FILE, "another"].map(|name| staging.join(name));
        fs::create_dir_all(&other).unwrap();
        fs::write(&file, "{}").unwrap();
        node.unstage(&volume).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "{}");

        // Its own mount point.
        fs::rename(&other, staging.join(&volume.handle)).unwrap();
        node.unstage(&volume).await.unwrap();
        assert!(files_below(&staging).is_empty());
        assert_eq!(fs::read_dir(&staging).unwrap().count(), 0);
        fs::remove_dir(&staging).unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn an_agent_starts_with_a_full_run_directory_and_ends_its_volumes() {
    story(async |sandbox| {
        let mut node = Node::prepare(sandbox, NodeSetup::new(sandbox));
        fs::create_dir_all(&node.run_dir).unwrap();
        let run_dir = node.run_dir.to_str().unwrap();
        run(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", run_dir]);
        node.start_first().await;
        let volume = sandbox.volume("v", "ext4");
        let content = Content::new("kept");
        content.put(&volume, &node.up(&volume, "pod").await);
        node.kill9().await;
        let filler = node.run_dir.join("filler");
        let full = fs::write(&filler, vec![1; 2 << 20]).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);

        node.restart().await;
        content.assert_kept(&volume, &node.target(&volume, "pod"));
        node.down(&volume, "pod").await;
        fs::remove_file(&filler).unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn an_unrecorded_attach_of_a_killed_agent_waits_for_its_pool() {
    story(async |sandbox| {
        let (real, pool) = (sandbox.pool("real"), sandbox.pool("main"));
        let [real, pool] = [&real, &pool].map(|path| path.to_str().unwrap());
        run(&["mount", "--bind", real, pool]);
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw-left", "block", 64 * MIB);
        node.stage(&volume).await.unwrap();
        node.kill9().await;
        let files = files_below(&node.run_dir.join("volumes"));
        let file = files.first().expect("a record");
        let mut record: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        record["phase"] = json!("staging");
        record["device"] = Value::Null;
        fs::write(file, record.to_string()).unwrap();
        // The attached image keeps it alive.
        run(&["umount", "--lazy", pool]);
        node.restart().await;

        let image = Path::new(&volume.context["image"]).file_name();
        let attached = || {
            let backing = all_loops().into_iter().map(|(_, backing)| backing);
            backing.filter(|it| it.file_name() == image).count()
        };
        let answer = node.unstage(&volume).await;
        refused(answer, Code::Unavailable, &["main", "is it mounted?"]);
        assert_eq!(attached(), 1);
        run(&["mount", "--bind", real, pool]);
        node.unstage(&volume).await.unwrap();
        assert_eq!(attached(), 0);
        node.assert_clean().await;
    });
}

#[test]
fn a_mount_outside_of_kubelets_directory_is_no_target_after_a_restart() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = sandbox.volume_in("main", kind, kind, 64 * MIB);
            let target = node.up(&volume, "pod").await;
            let outside = sandbox.dir().join(format!("outside-{kind}"));
            if volume.is_block() {
                fs::write(&outside, "").unwrap();
            } else {
                fs::create_dir(&outside).unwrap();
            }
            let [target, outside] = [&target, &outside].map(|path| path.to_str().unwrap());
            run(&["mount", "--bind", target, outside]);
            node.kill9().await;
            node.restart().await;
            node.unpublish(&volume, "pod").await.unwrap();
            if !volume.is_block() {
                let answer = node.unstage(&volume).await;
                refused(answer, Code::Aborted, &["is busy"]);
            }
            run(&["umount", outside]);
            node.unstage(&volume).await.unwrap();
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_agent_serves_before_its_volumes_are_recovered() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        let content = Content::new("v");
        content.write(&target.join("file"));
        node.kill9().await;
        let begun = begun(&node, 300);

        let held = node.hold("recover", "records");
        node.restart().await;
        let mut identity = IdentityClient::new(node.channel());
        identity
            .get_plugin_info(GetPluginInfoRequest {})
            .await
            .unwrap();
        node.client()
            .node_get_info(NodeGetInfoRequest {})
            .await
            .unwrap();
        // Calls on volumes wait within their deadlines.
        let patient = node.timeout.replace(Duration::from_secs(3));
        let (stats, unstaged, unpublished, staged) = tokio::join!(
            node.stats(&volume, &target),
            node.unstage(&volume),
            node.unpublish(&volume, "pod"),
            node.stage(&begun[0]),
        );
        let words = &["just started"];
        refused(stats, Code::Unavailable, words);
        for answer in [unstaged, unpublished, staged] {
            refused(answer, Code::Unavailable, words);
        }
        assert_eq!(node.probe().await, Some(true));
        node.timeout.set(patient);

        // The calls that wait get the right answer once the volumes are recovered.
        let mut admin = NodeAdminClient::new(node.channel());
        let resume = async {
            node.probe().await.expect("it answers");
            drop(held);
        };
        let (stats, unstaged, published, listed, ()) = tokio::join!(
            node.stats(&volume, &target),
            node.unstage(&volume),
            node.publish_read_only(&begun[1], "pod"),
            admin.list_held_volumes(ListHeldVolumesRequest {}),
            resume,
        );
        assert!(stats.unwrap()[0].used > 0);
        refused(unstaged, Code::FailedPrecondition, &["still published"]);
        refused(published, Code::FailedPrecondition, &["not staged"]);
        assert_eq!(listed.unwrap().into_inner().volumes.len(), 301);
        content.assert_in(&target.join("file"));

        node.down(&volume, "pod").await;
        for volume in &begun {
            node.unstage(volume).await.unwrap();
        }
        node.assert_clean().await;
    });
}
