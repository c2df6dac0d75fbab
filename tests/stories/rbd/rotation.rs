//! csi-addons' rotation of encryption keys.

use testkit::{
    Ceph, Content, MIB, Node, Sandbox, Supervisor, VaultServer, Volume, ceph_story,
    crash_at_each_step, rbds_of, refused, run_err, spec_of,
};
use tonic::{
    Code::{FailedPrecondition, InvalidArgument, NotFound, Unauthenticated, Unimplemented},
    Status,
};
use uring_csi::internals::encryption;
use uring_csi::proto::addons::{
    encryptionkeyrotation::{
        EncryptionKeyRotateRequest,
        encryption_key_rotation_controller_client::EncryptionKeyRotationControllerClient,
    },
    identity::capability::Type,
};

use super::{encrypted, provisioned::Class, rbd_nbd::served, write_or_check};
use crate::addons::Addons;

impl Addons {
    async fn rotate(&self, volume: &Volume) -> Result<(), Status> {
        self.send_rotate(EncryptionKeyRotateRequest {
            volume_id: volume.handle.clone(),
            secrets: volume.secrets.clone(),
            ..Default::default()
        })
        .await
    }

    async fn send_rotate(&self, message: EncryptionKeyRotateRequest) -> Result<(), Status> {
        let mut client = EncryptionKeyRotationControllerClient::new(self.channel());
        client.encryption_key_rotate(message).await.map(drop)
    }
}

/// A class with passphrases in Vault, or in the images' metadata, where Vault is none.
async fn class<'a>(sandbox: &Sandbox, ceph: &'a Ceph, vault: Option<&VaultServer>) -> Class<'a> {
    let kms = if vault.is_some() { "vault" } else { "own" };
    let more = [("encrypted", "true"), ("encryptionKMSID", kms)];
    Class::with_kms(sandbox, ceph, &more, vault).await
}

/// The encrypted device of the staged volume, and whether a passphrase opens it.
fn opens(sandbox: &Sandbox, passphrase: &str) -> bool {
    let under = rbds_of(sandbox.dir()).pop().expect("a mapped image");
    let key = sandbox.dir().join("key");
    std::fs::write(&key, passphrase).unwrap();
    let key = format!("--key-file={}", key.display());
    let open = ["cryptsetup", "open", "--test-passphrase", &key];
    run_err(&[&open[..], &[under.to_str().unwrap()]].concat()).is_ok()
}

#[test]
fn a_rotated_passphrase_is_in_vault_and_opens_the_volume() {
    ceph_story(async |sandbox, ceph| {
        let Some(vault) = VaultServer::start() else {
            return;
        };
        let class = class(sandbox, ceph, Some(&vault)).await;
        let announced = class.addons.capabilities().await;
        assert!(
            announced
                .iter()
                .any(|one| matches!(one, Type::EncryptionKeyRotation(_)))
        );
        let volume = class.made(class.claim("ext4", "claim", 128 * MIB)).await;
        refused(
            class.addons.rotate(&volume).await,
            NotFound,
            &["not staged"],
        );
        let content = Content::new("rotated");
        let target = class.node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &content, true);

        let old = vault.passphrase(&volume.handle).unwrap();
        assert!(opens(sandbox, &old));
        class.addons.rotate(&volume).await.unwrap();
        let new = vault.passphrase(&volume.handle).unwrap();
        assert!(new != old && opens(sandbox, &new) && !opens(sandbox, &old));
        write_or_check(&volume, &target, &content, false);
        class.node.down(&volume, "pod").await;
        let target = class.node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &content, false);

        // While Vault does not answer, the old one stays.
        vault.bao(&["operator", "seal"]);
        let failed = class.addons.rotate(&volume).await;
        refused(failed, tonic::Code::Unavailable, &["503"]);
        assert!(opens(sandbox, &new));
        class.node.down(&volume, "pod").await;
    });
}

#[test]
fn an_agent_may_be_killed_at_each_step_of_a_rotation() {
    ceph_story(async |sandbox, ceph| {
        let class = class(sandbox, ceph, None).await;
        let volume = class.made(class.claim("ext4", "claim", 128 * MIB)).await;
        let content = Content::new("rotated");
        let node = &class.node;
        let target = node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &content, true);
        crash_at_each_step(node, 5, async |agent| {
            let rotate = async || class.addons.rotate(&volume).await;
            agent.complete("rotate", rotate, async || {}).await;
            write_or_check(&volume, &target, &content, false);
        })
        .await;
        // Without steps that are left to crash at.
        node.kill9().await;
        node.restart().await;
        node.down(&volume, "pod").await;
        let target = node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &content, false);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_key_that_cannot_be_rotated_is_refused() {
    ceph_story(async |sandbox, ceph| {
        for (more, code, words) in [
            (&[][..], Unimplemented, "not encrypted"),
            (&[("encrypted", "true")], FailedPrecondition, "the secret's"),
        ] {
            let class = Class::with_kms(sandbox, ceph, more, None).await;
            let volume = class.made(class.claim("block", "claim", 64 * MIB)).await;
            class.node.stage(&volume).await.unwrap();
            refused(class.addons.rotate(&volume).await, code, &[words]);
            let mut message = EncryptionKeyRotateRequest {
                volume_id: volume.handle.clone(),
                encryption_key: "given".to_owned(),
                ..Default::default()
            };
            let given = class.addons.send_rotate(message.clone()).await;
            refused(given, InvalidArgument, &["encryption_key"]);
            message.encryption_key.clear();
            message.volume_path = "/elsewhere".to_owned();
            let elsewhere = class.addons.send_rotate(message).await;
            refused(elsewhere, NotFound, &["/elsewhere"]);
            class.node.unstage(&volume).await.unwrap();
            class.controller.delete(&volume.handle).await.unwrap();
        }

        let class = class(sandbox, ceph, None).await;
        let mut volume = class.made(class.claim("block", "claim", 64 * MIB)).await;
        class.node.stage(&volume).await.unwrap();
        // As after ceph-csi has staged it.
        class.node.restart_without_records().await;
        let unknown = class.addons.rotate(&volume).await;
        refused(unknown, FailedPrecondition, &["another driver", "KMS"]);
        class.node.stage(&volume).await.unwrap();
        class.addons.rotate(&volume).await.unwrap();
        let wrong = ("encryptionPassphrase".to_owned(), "another".to_owned());
        volume.secrets.extend([wrong]);
        let refusal = class.addons.rotate(&volume).await;
        refused(refusal, Unauthenticated, &["encryptionPassphrase"]);
        class.node.unstage(&volume).await.unwrap();
    });
}

#[test]
fn a_device_of_the_former_cluster_keeps_its_key_after_a_fail_over() {
    ceph_story(async |sandbox, ceph| {
        let other = Ceph::another(sandbox);
        let file = sandbox.dir().join("cluster-mapping.json");
        let addons = Addons::new(sandbox);
        let setup = encrypted::setup(sandbox, ceph).arg("--cluster-mapping");
        let mut setup = setup.arg(file.to_str().expect("UTF-8"));
        setup.args.extend(addons.args());
        let supervisor = Supervisor::start(sandbox).await;
        let socket = supervisor.socket().display().to_string();
        let node = Node::start_with(sandbox, setup.arg("--holder").arg(&socket)).await;

        let volume = || encrypted::sealed(ceph, encrypted::volume(ceph, "block"));
        let mut volumes = [volume(), served(volume())];
        for volume in &volumes {
            node.stage(volume).await.unwrap();
        }
        let pool = |ceph: &Ceph| ceph.pool_id(&ceph.cluster.pool).to_string();
        let mapping = serde_json::json!([{
            "clusterIDMapping": {&ceph.cluster_id: &other.cluster_id},
            "RBDPoolIDMapping": [{pool(ceph): pool(&other)}],
        }]);
        std::fs::write(&file, mapping.to_string()).unwrap();
        ceph.configure(&[other.entry()]);
        for volume in &mut volumes {
            let spec = spec_of(volume);
            let create = ["create", "-s", "96M", "--image-feature", "layering"];
            other.cluster.rbd(&[&create[..], &[&spec]].concat());
            let key = encryption::SEALED_KEY;
            let sealed = ceph.cluster.rbd(&["image-meta", "get", &spec, key]);
            let copy = ["image-meta", "set", &spec, key, sealed.trim()];
            other.cluster.rbd(&copy);
            volume.secrets.extend(other.secrets());
            let refusal = addons.rotate(volume).await;
            refused(refusal, FailedPrecondition, &["another cluster"]);
            let kept = other.cluster.rbd(&["image-meta", "get", &spec, key]);
            assert_eq!(kept, sealed);
            node.unstage(volume).await.unwrap();
        }
        node.assert_clean().await;
    });
}
