//! Volumes whose files are encrypted, as by ceph-csi: fscrypt, on ext4.

use std::{fs, path::Path};

use testkit::{
    Ceph, Content, MIB, Volume, ceph_story, refused, report_not_tested, run_err, spec_of,
};
use tonic::Code::{FailedPrecondition, InvalidArgument, Unauthenticated};

/// The directory that ceph-csi publishes.
const DIRECTORY: &str = "ceph-csi-encrypted";

fn volume(ceph: &Ceph, kind: &str) -> Volume {
    let volume = ceph.volume_of(kind, 96 * MIB, &[]);
    let volume = volume.with("encrypted", "true");
    with_passphrase(
        volume.with("encryptionType", "file"),
        "a passphrase of more than 32 characters",
    )
}

fn with_passphrase(mut volume: Volume, passphrase: &str) -> Volume {
    let name = "encryptionPassphrase".to_owned();
    volume.secrets.insert(name, passphrase.to_owned());
    volume
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().flatten();
    entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect()
}

#[test]
fn only_the_encrypted_directory_is_published() {
    ceph_story(async |sandbox, ceph| {
        let node = ceph.node(sandbox).await;
        let raw = node.stage(&volume(ceph, "block")).await;
        refused(raw, InvalidArgument, &["ext4"]);
        let volume = volume(ceph, "ext4");
        // Without its module the file would be missing, too.
        let _ = run_err(&["modprobe", "-q", "ext4"]);
        if !Path::new("/sys/fs/ext4/features/encryption").exists() {
            let staged = node.stage(&volume).await;
            refused(staged, FailedPrecondition, &["CONFIG_FS_ENCRYPTION"]);
            node.assert_clean().await;
            report_not_tested("encrypted files of Ceph volumes: this kernel has no encryption");
            return;
        }
        let short = node.stage(&with_passphrase(volume.clone(), "short")).await;
        refused(short, Unauthenticated, &["32 characters"]);

        let target = node.up(&volume, "pod").await;
        assert_eq!(names_in(&target), Vec::<String>::new());
        let content = Content::new("in the clear");
        content.put(&volume, &target);
        node.kill9().await;
        node.restart().await;
        refused(
            node.unstage(&volume).await,
            FailedPrecondition,
            &["published"],
        );
        // As ceph-csi's volumes are found.
        node.restart_without_records().await;
        refused(
            node.unstage(&volume).await,
            FailedPrecondition,
            &["published"],
        );
        node.publish(&volume, "other").await.unwrap();
        content.assert_kept(&volume, &node.target(&volume, "other"));
        node.unpublish(&volume, "other").await.unwrap();
        let staged = node.staging(&volume).join(&volume.handle);
        assert!(names_in(&staged).contains(&DIRECTORY.to_owned()));
        node.down(&volume, "pod").await;

        let wrong = with_passphrase(volume.clone(), "another one of more than 32 characters");
        let wrong = node.stage(&wrong).await;
        refused(wrong, Unauthenticated, &["does not open"]);
        let target = node.up(&volume, "pod").await;
        content.assert_kept(&volume, &target);
        node.down(&volume, "pod").await;

        let stored = sandbox.dir().join("stored");
        let stored = stored.to_str().unwrap();
        let spec = spec_of(&volume);
        let cluster = &ceph.cluster;
        cluster.rbd(&["export", "--no-progress", &spec, stored]);
        let found = run_err(&["grep", "-c", "-a", "-F", "in the clear", stored]);
        assert!(found.is_err(), "{found:?}");
        node.assert_clean().await;
    });
}
