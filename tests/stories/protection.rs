//! `nosuid` and `nodev`: the defaults, and how a volume overrides them.

use std::path::Path;

use testkit::{Node, refused, run, story};
use tonic::Code::AlreadyExists;

/// Which of `nosuid`, `nodev` and `noexec` the mount at the path has.
pub fn protection_at(path: &Path) -> Vec<String> {
    let command = ["findmnt", "-no", "VFS-OPTIONS", path.to_str().unwrap()];
    let options = run(&command);
    let protects = |word: &&str| ["nosuid", "nodev", "noexec"].contains(word);
    let words = options.trim().split(',').filter(protects);
    words.map(str::to_owned).collect()
}

#[test]
fn targets_are_as_asked_for_and_staging_paths_protected() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let options: [(&[&str], &[&str]); 5] = [
            (&[], &["nodev"]),
            (&["nosuid"], &["nosuid", "nodev"]),
            (&["noexec", "suid"], &["nodev", "noexec"]),
            (&["dev", "nosuid"], &["nosuid"]),
            (&["dev,exec"], &[]),
        ];
        let fs = ["ext4", "xfs", "btrfs"];
        for (number, ((flags, has), fs)) in
            options.into_iter().zip(fs.into_iter().cycle()).enumerate()
        {
            let volume = sandbox.volume(&format!("v{number}"), fs).flags(flags);
            let target = node.up(&volume, "pod").await;
            assert_eq!(protection_at(&target), has, "{flags:?}");
            let staging = protection_at(&node.staging(&volume));
            assert!(
                staging.starts_with(&["nosuid".into(), "nodev".into()]),
                "{staging:?}"
            );
            // A publish without options gets those of the stage.
            let unsaid = volume.clone().flags(&[]);
            node.publish(&unsaid, "other").await.unwrap();
            assert_eq!(
                protection_at(&node.target(&unsaid, "other")),
                has,
                "{flags:?}"
            );
            node.unpublish(&unsaid, "other").await.unwrap();
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_target_of_an_earlier_version_is_as_published_unless_asked_otherwise() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let unsaid = sandbox.volume("unsaid", "ext4");
        let said = sandbox.volume("said", "ext4").flags(&["nosuid"]);
        for volume in [&unsaid, &said] {
            let target = node.up(volume, "pod").await;
            let at = target.to_str().unwrap();
            run(&["mount", "-o", "remount,bind,suid,dev", at]);
            node.kill9().await;
            node.restart().await;
            node.stage(volume).await.unwrap();
            let repeated = node.publish(volume, "pod").await;
            if volume.handle == said.handle {
                refused(repeated, AlreadyExists, &["nosuid", at]);
            } else {
                repeated.unwrap();
            }
            node.down(volume, "pod").await;
        }
        node.assert_clean().await;
    });
}
