//! Volumes encrypted as by ceph-csi: LUKS2, with the passphrase of the secret or one of the
//! volume's own, sealed in the image's metadata.

use std::collections::HashMap;

use testkit::{
    Ceph, Content, MIB, Node, NodeSetup, Sandbox, Volume, ceph_story, mapping_of, mappings_of,
    rbds_over, refused, run, run_err, spec_of,
};
use tonic::Code::{FailedPrecondition, InvalidArgument, Unauthenticated};
use uring_csi::internals::{Secret, Secrets, encryption};

use super::lifecycle;

const PASSPHRASE: &str = "correct horse battery staple";

/// An encrypted volume as ceph-csi's controller leaves it: still blank.
pub fn volume(ceph: &Ceph, kind: &str) -> Volume {
    let bytes = if kind == "xfs" { 360 } else { 96 } * MIB;
    described(ceph, ceph.volume_of(kind, bytes, &[]))
}

/// Records in the image's metadata that the volume is to be encrypted.
fn described(ceph: &Ceph, volume: Volume) -> Volume {
    set_metadata(ceph, &volume, encryption::STATE_KEY, encryption::PREPARED);
    with_passphrase(volume.with("encrypted", "true"), PASSPHRASE)
}

fn with_passphrase(mut volume: Volume, passphrase: &str) -> Volume {
    let name = "encryptionPassphrase".to_owned();
    volume.secrets.insert(name, passphrase.to_owned());
    volume
}

fn set_metadata(ceph: &Ceph, volume: &Volume, key: &str, value: &str) {
    let set = ["image-meta", "set", &spec_of(volume), key, value];
    ceph.cluster.rbd(&set);
}

fn metadata_of(ceph: &Ceph, volume: &Volume, key: &str) -> String {
    let said = ceph
        .cluster
        .rbd(&["image-meta", "get", &spec_of(volume), key]);
    said.trim().to_owned()
}

/// A node with the key management system `own`: a passphrase for each volume.
pub fn setup(sandbox: &Sandbox, ceph: &Ceph) -> NodeSetup {
    let config = sandbox.dir().join("kms.json");
    std::fs::write(&config, r#"{"own": {"encryptionKMSType": "metadata"}}"#).unwrap();
    let setup = ceph.setup(sandbox).arg("--kms-config");
    setup.arg(config.to_str().unwrap())
}

async fn node(sandbox: &Sandbox, ceph: &Ceph) -> Node {
    Node::start_with(sandbox, setup(sandbox, ceph)).await
}

/// Gives a volume a passphrase of its own, as ceph-csi's controller does.
pub fn sealed(ceph: &Ceph, volume: Volume) -> Volume {
    let secrets: HashMap<_, _> = volume.secrets.clone();
    let secrets = Secrets::from(secrets);
    let with = encryption::passphrase(&secrets).unwrap();
    let own = encryption::seal(with, &volume.handle, &encryption::generate());
    set_metadata(ceph, &volume, encryption::SEALED_KEY, &own);
    volume.with("encryptionKMSID", "own")
}

#[test]
fn lifecycle_with_the_secrets_passphrase() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        for kind in ["xfs", "block"] {
            encrypted_life(&node, ceph, &volume(ceph, kind)).await;
            assert!(mappings_of(sandbox.dir()).is_empty());
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_newline_is_part_of_a_passphrase_but_a_volume_opens_without_it() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        let of_echo = format!("{PASSPHRASE}\n");
        let ended = volume(ceph, "block");
        let (ended, bare) = (
            with_passphrase(ended.clone(), &of_echo),
            with_passphrase(ended, PASSPHRASE),
        );
        lifecycle(&node, &ended).await;
        refused(node.stage(&bare).await, Unauthenticated, &["passphrase"]);
        let bare = volume(ceph, "block");
        lifecycle(&node, &bare).await;
        lifecycle(&node, &with_passphrase(bare, &of_echo)).await;
        node.assert_clean().await;
    });
}

#[test]
fn lifecycle_with_a_passphrase_of_the_volumes_own() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        let volume = sealed(ceph, volume(ceph, "ext4"));
        encrypted_life(&node, ceph, &volume).await;
        node.assert_clean().await;
    });
}

/// Afterwards ceph-csi expects a header.
async fn encrypted_life(node: &Node, ceph: &Ceph, volume: &Volume) {
    lifecycle(node, volume).await;
    let state = metadata_of(ceph, volume, encryption::STATE_KEY);
    assert_eq!(state, encryption::ENCRYPTED);
}

#[test]
fn the_image_holds_ciphertext() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        let volume = volume(ceph, "block");
        let target = node.up(&volume, "pod").await;
        let content = Content::new("in the clear");
        content.write_at(&target, 0).unwrap();
        let mapped = rbds_over(&volume).pop().unwrap();
        let shown = format!("/dev/mapper/{}", mapping_of(&volume.handle));
        content.assert_at(std::path::Path::new(&shown), 0);
        let mapped = mapped.to_str().unwrap();
        let header = run(&["cryptsetup", "luksDump", mapped]);
        assert!(header.contains("Version:       \t2"), "{header}");
        // The memory to open it, in KiB: no more than a small container has.
        let memory = header.split("Memory:").nth(1).and_then(|rest| {
            let word = rest.split_whitespace().next()?;
            word.parse::<u32>().ok()
        });
        assert!(memory.is_some_and(|kib| kib <= 32 << 10), "{header}");
        let [size, below] = [target.to_str().unwrap(), mapped]
            .map(|device| run(&["blockdev", "--getsize64", device]));
        let [size, below] = [size, below].map(|text| text.trim().parse::<u64>().unwrap());
        assert!(size < below, "the header has its room");
        node.down(&volume, "pod").await;
        // Its first bytes as stored, without a passphrase.
        let stored = sandbox.dir().join("stored");
        let stored = stored.to_str().unwrap();
        let spec = spec_of(&volume);
        ceph.cluster
            .rbd(&["export", "--no-progress", &spec, stored]);
        let found = run_err(&["grep", "-c", "-a", "-F", "in the clear", stored]);
        assert!(found.is_err(), "{found:?}");
        node.assert_clean().await;
    });
}

#[test]
fn a_wrong_passphrase_opens_and_changes_nothing() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        for volume in [volume(ceph, "ext4"), sealed(ceph, volume(ceph, "ext4"))] {
            lifecycle(&node, &volume).await;
            let wrong = with_passphrase(volume.clone(), "another");
            refused(node.stage(&wrong).await, Unauthenticated, &["passphrase"]);
            let mut lacking = volume.clone();
            lacking.secrets.remove("encryptionPassphrase");
            refused(
                node.stage(&lacking).await,
                Unauthenticated,
                &["encryptionPassphrase"],
            );
            let mut unknown = volume.clone();
            unknown = unknown.with("encryptionKMSID", "elsewhere");
            let refused = node.stage(&unknown).await.unwrap_err();
            assert!(refused.message().contains("elsewhere"), "{refused:?}");
            assert!(rbds_over(&volume).is_empty());
            let target = node.up(&volume, "pod").await;
            Content::new(&volume.handle).assert_in(&target.join("file"));
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn other_encryption_parameters_are_refused() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        let volume = volume(ceph, "ext4");
        let key = "encryptionSectorSize";
        let tuned = volume.clone().with(key, "4096");
        refused(node.stage(&tuned).await, FailedPrecondition, &[key]);
        assert!(rbds_over(&volume).is_empty());
        lifecycle(&node, &volume).await;
        // Its header shows the format.
        lifecycle(&node, &tuned).await;
        let more = volume.with("integrityMode", "hmac-sha256");
        refused(node.stage(&more).await, InvalidArgument, &["integrityMode"]);
        node.assert_clean().await;
    });
}

#[test]
fn encrypted_volumes_grow_in_use() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        for kind in ["ext4", "block"] {
            let volume = volume(ceph, kind);
            let target = node.up(&volume, "pod").await;
            let before = size_of(&node, &volume).await;
            ceph.resize(&volume, 192 * MIB);
            // After a restart, too: the passphrase is not needed again.
            node.kill9().await;
            node.restart().await;
            for _ in 0..2 {
                node.expand(&volume, &target, 192 * MIB).await.unwrap();
            }
            let after = size_of(&node, &volume).await;
            assert!(after > before + 80 * MIB, "{kind}: {before}, then {after}");
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

async fn size_of(node: &Node, volume: &Volume) -> u64 {
    let target = node.target(volume, "pod");
    node.stats(volume, &target).await.unwrap()[0]
        .total
        .unsigned_abs()
}

#[test]
fn clones_open_with_their_source_s_passphrase() {
    ceph_story(async |sandbox, ceph| {
        let node = node(sandbox, ceph).await;
        let source = volume(ceph, "ext4");
        lifecycle(&node, &source).await;
        let mut clone = ceph.clone_of(&source, "ext4").with("encrypted", "true");
        clone.secrets.clone_from(&source.secrets);
        let target = node.up(&source, "pod").await;
        let copy = node.up(&clone, "pod").await;
        for target in [&target, &copy] {
            Content::new(&source.handle).assert_in(&target.join("file"));
        }
        node.down(&clone, "pod").await;
        node.down(&source, "pod").await;

        // A volume's own passphrase is sealed anew for its clone.
        let source = sealed(ceph, volume(ceph, "ext4"));
        lifecycle(&node, &source).await;
        let with = Secret::new(PASSPHRASE.to_owned());
        let kept = metadata_of(ceph, &source, encryption::SEALED_KEY);
        let own = encryption::open(&with, &source.handle, &kept).unwrap();
        let mut clone = ceph.clone_of(&source, "ext4");
        clone.secrets.clone_from(&source.secrets);
        clone = clone
            .with("encrypted", "true")
            .with("encryptionKMSID", "own");
        set_metadata(ceph, &clone, encryption::STATE_KEY, encryption::ENCRYPTED);
        let resealed = encryption::seal(&with, &clone.handle, &own);
        set_metadata(ceph, &clone, encryption::SEALED_KEY, &resealed);
        let copy = node.up(&clone, "pod").await;
        Content::new(&source.handle).assert_in(&copy.join("file"));
        node.down(&clone, "pod").await;
        node.assert_clean().await;
    });
}
