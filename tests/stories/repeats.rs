//! The same call again, a similar call, and a second target.

use futures_util::future::{join_all, try_join_all};
use testkit::{MIB, Mode, Node, Volume, files_below, loops_over, mounts_below, refused, story};
use tonic::Code::{Aborted, AlreadyExists, FailedPrecondition, InvalidArgument};

#[test]
fn a_repeat_changes_nothing() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = sandbox.volume_in("main", kind, kind, 64 * MIB);
            let target = node.up(&volume, "pod").await;
            let mounts = mounts_below(sandbox.dir());
            let loops = loops_over(&sandbox.image(&volume));
            for _ in 0..3 {
                node.up(&volume, "pod").await;
            }
            assert_eq!(mounts_below(sandbox.dir()), mounts);
            assert_eq!(loops_over(&sandbox.image(&volume)), loops);

            // The same options in another order and spelling are the same.
            for _ in 0..2 {
                node.unpublish(&volume, "pod").await.unwrap();
                assert!(!target.exists(), "the target path is removed");
            }
            for _ in 0..2 {
                node.unstage(&volume).await.unwrap();
            }
            let staging = node.staging(&volume);
            assert!(!mounts_below(sandbox.dir()).contains(&staging));
        }
        let flags = sandbox.volume("flags", "ext4").flags(&["noatime,nosuid"]);
        node.stage(&flags).await.unwrap();
        let reordered = flags.clone().flags(&["nosuid", "noatime", "noatime"]);
        node.stage(&reordered).await.unwrap();
        node.unstage(&flags).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn of_volumes_with_one_source_one_is_staged() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        sandbox.volume("v", "ext4");
        let alias = |n| Volume::filesystem(&format!("alias {n}"), "ext4").over("main", "v.img");
        let volumes: Vec<_> = (0..8).map(alias).collect();
        for _ in 0..30 {
            let staged = join_all(volumes.iter().map(|volume| node.stage(volume))).await;
            let winners = staged
                .iter()
                .zip(&volumes)
                .filter(|(staged, _)| staged.is_ok());
            let winners: Vec<_> = winners.map(|(_, volume)| volume).collect();
            assert_eq!(winners.len(), 1, "{staged:?}");
            node.unstage(winners[0]).await.unwrap();
            for loser in staged.into_iter().filter(Result::is_err) {
                refused(loser, FailedPrecondition, &["in use on this node"]);
            }
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_refused_unstage_interrupts_no_other_call() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        node.stage(&volume).await.unwrap();
        let elsewhere = node.staging(&volume).join("elsewhere");
        for _ in 0..30 {
            let (unstaged, staged) =
                tokio::join!(node.unstage_at(&volume, &elsewhere), node.stage(&volume));
            staged.unwrap();
            // If the stage was first, it may still be under way.
            let code = unstaged.unwrap_err().code();
            assert!(matches!(code, FailedPrecondition | Aborted), "{code}");
        }
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn a_repeat_with_other_arguments_is_refused() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        sandbox.volume("w", "ext4");
        node.stage(&volume).await.unwrap();
        for other in [
            volume.clone().flags(&["noatime"]),
            Volume::filesystem("v", "xfs").over("main", "v.img"),
            Volume::filesystem("v", "ext4").over("main", "w.img"),
            volume.clone().mode(Mode::SingleNodeReaderOnly),
        ] {
            refused(node.stage(&other).await, AlreadyExists, &["v"]);
        }
        let mut elsewhere = node.stage_request(&volume);
        elsewhere.staging_target_path += "-2";
        std::fs::create_dir_all(&elsewhere.staging_target_path).unwrap();
        refused(node.send_stage(elsewhere).await, AlreadyExists, &["v"]);
        // The same image under another handle would be mounted twice.
        let alias = Volume::filesystem("alias", "ext4").over("main", "v.img");
        refused(node.stage(&alias).await, FailedPrecondition, &["volume v"]);

        // Secrets, and the keys that Kubernetes adds, do not make it another request.
        let mut same = volume.clone().with("csi.storage.k8s.io/pod.name", "p");
        same.secrets.insert("key".to_owned(), "value".to_owned());
        node.stage(&same).await.unwrap();

        node.publish(&volume, "pod").await.unwrap();
        refused(
            node.publish_read_only(&volume, "pod").await,
            AlreadyExists,
            &[],
        );
        let mut another = volume.clone();
        another.handle = "w".to_owned();
        refused(node.publish(&another, "pod").await, FailedPrecondition, &[]);
        node.publish(&volume, "pod").await.unwrap();
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_published_volume_outlives_a_stage_with_other_arguments() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "block");
        node.up(&volume, "pod").await;
        node.kill9().await;
        // As a repeat of the stage leaves it that failed.
        let records = files_below(&node.run_dir.join("volumes"));
        let file = records.first().expect("a record");
        let record = std::fs::read_to_string(file).unwrap();
        let begun = record.replace(r#""phase":"staged""#, r#""phase":"staging""#);
        assert_ne!(begun, record);
        std::fs::write(file, begun).unwrap();
        node.restart().await;

        let loops = loops_over(&sandbox.image(&volume));
        let other = Volume::filesystem("v", "ext4").over("main", "v.img");
        refused(node.stage(&other).await, AlreadyExists, &["v"]);
        assert_eq!(loops_over(&sandbox.image(&volume)), loops);
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn access_modes_limit_the_users_of_a_volume() {
    use Mode::{
        MultiNodeReaderOnly, MultiNodeSingleWriter, SingleNodeMultiWriter, SingleNodeReaderOnly,
        SingleNodeSingleWriter, SingleNodeWriter,
    };
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for (mode, second) in [
            (SingleNodeWriter, true),
            (SingleNodeMultiWriter, true),
            (SingleNodeSingleWriter, false),
        ] {
            let name = format!("{mode:?}");
            let volume = sandbox.volume(&name, "ext4").mode(mode);
            node.up(&volume, "one").await;
            let answer = node.publish(&volume, "two").await;
            if second {
                answer.unwrap();
                node.unpublish(&volume, "two").await.unwrap();
            } else {
                refused(answer, FailedPrecondition, &[&name]);
                assert!(!node.target(&volume, "two").exists());
                // The first pod's own call is a repeat, and succeeds.
                node.publish(&volume, "one").await.unwrap();
            }
            node.down(&volume, "one").await;
        }

        // Readers: the file system must be there already, and stays as it is.
        let writer = sandbox.volume("readers", "ext4");
        node.up(&writer, "writer").await;
        node.down(&writer, "writer").await;
        for mode in [SingleNodeReaderOnly, MultiNodeReaderOnly] {
            let reader = writer.clone().mode(mode);
            let target = node.up(&reader, "one").await;
            node.publish(&reader, "two").await.unwrap();
            assert!(std::fs::write(target.join("file"), "x").is_err());
            node.unpublish(&reader, "two").await.unwrap();
            node.down(&reader, "one").await;
        }

        // Several nodes that write to a local file system destroy it.
        for mode in [MultiNodeSingleWriter, Mode::MultiNodeMultiWriter] {
            let shared = writer.clone().mode(mode);
            let refusal = node.stage(&shared).await.unwrap_err();
            assert!(
                [InvalidArgument, FailedPrecondition].contains(&refusal.code()),
                "{refusal:?}"
            );
        }
        node.assert_clean().await;
    });
}

/// Kubelet begins them all at once, and repeats a call half a second after an answer that
/// another is under way.
#[test]
fn pods_that_share_a_volume_come_and_go_at_once() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        node.stage(&volume).await.unwrap();
        let pods: Vec<_> = (0..32).map(|pod| format!("pod{pod}")).collect();
        let (first, second) = pods.split_at(16);
        let publish = async |pod: &String| node.publish(&volume, pod).await;
        let unpublish = async |pod: &String| node.unpublish(&volume, pod).await;
        try_join_all(first.iter().map(publish)).await.unwrap();
        let (unstaged, staged) = tokio::join!(
            try_join_all(first.iter().map(unpublish)),
            try_join_all(second.iter().map(publish))
        );
        unstaged.unwrap();
        staged.unwrap();
        try_join_all(second.iter().map(unpublish)).await.unwrap();
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}
