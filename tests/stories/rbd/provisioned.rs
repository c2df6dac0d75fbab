//! Controller and node on one cluster, from a claim to its deletion.

use std::{collections::HashMap, fs, path::Path};

use serde_json::json;
use testkit::{
    Ceph, Content, Controller, ControllerSetup, MIB, Node, Sandbox, Supervisor, VaultServer,
    Volume, ceph_story, claim, from_snapshot, from_volume, provisioned, rbds_of, refused, run,
    unmap_by_rbd, unstage_as_ceph_csi,
};
use tonic::Code::{FailedPrecondition, Unavailable};
use uring_csi::proto::csi::CreateVolumeRequest;

use super::{assert_nothing_staged, write_or_check};
use crate::{addons::Addons, operator::Operator};

/// Both, and a storage class with a pool of its own.
pub struct Class<'a> {
    ceph: &'a Ceph,
    pool: String,
    pub controller: Controller,
    pub node: Node,
    pub addons: Addons,
    /// Where the class is served by rbd-nbd.
    supervisor: Option<Supervisor>,
    parameters: Vec<(&'static str, String)>,
}

impl<'a> Class<'a> {
    async fn new(sandbox: &Sandbox, ceph: &'a Ceph, more: &[(&'static str, &str)]) -> Self {
        Self::with_kms(sandbox, ceph, more, None).await
    }

    /// The same where the KMS `vault` is that server.
    pub async fn with_kms(
        sandbox: &Sandbox,
        ceph: &'a Ceph,
        more: &[(&'static str, &str)],
        vault: Option<&VaultServer>,
    ) -> Self {
        let kms = sandbox.dir().join("kms.json");
        let token = sandbox.dir().join("kms-token");
        let mut sections = json!({"own": {"encryptionKMSType": "metadata"}});
        if let Some(vault) = vault {
            sections["vault"] = vault.section(&[]);
            fs::write(&token, vault.web_token()).unwrap();
        }
        fs::write(&kms, sections.to_string()).unwrap();
        let addons = Addons::new(sandbox);
        let kms = [
            "--kms-config",
            kms.to_str().unwrap(),
            "--kms-token",
            token.to_str().unwrap(),
        ];
        let mut setup = ControllerSetup::new(sandbox);
        setup.pools.clear();
        let config = ceph.config();
        let args = ["--ceph-config", config.to_str().unwrap()];
        setup.args = [&args[..], &kms]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect();
        setup.secrets = ceph.secrets();
        let passphrase = ("encryptionPassphrase", "correct horse battery staple");
        let secrets = [passphrase].map(|(name, value)| (name.to_owned(), value.to_owned()));
        setup.secrets.extend(secrets);
        let ca = vault.map(|vault| ("vault-ca".to_owned(), vault.ca()));
        setup.secrets.extend(ca);
        // For listings.
        let own = secrets_in(sandbox, &setup.secrets);
        setup.args.extend(["--ceph-secret".to_owned(), own]);
        let pool = ceph.cluster.fresh_pool();
        let mut parameters = vec![
            ("clusterID", ceph.cluster_id.clone()),
            ("imageFeatures", "layering".to_owned()),
            ("volumeNamePrefix", ceph.prefix()),
        ];
        parameters.extend(more.iter().map(|(key, value)| (*key, (*value).to_owned())));
        let mut node = (kms.iter()).fold(ceph.setup(sandbox), |node, arg| node.arg(arg));
        node.args.extend(addons.args());
        let mut supervisor = None;
        if more.contains(&("mounter", "rbd-nbd")) {
            let supervisor = supervisor.insert(Supervisor::start(sandbox).await);
            let socket = supervisor.socket().display().to_string();
            node = node.arg("--holder").arg(&socket);
        }
        Self {
            ceph,
            pool,
            controller: Controller::start_with(sandbox, setup).await,
            node: Node::start_with(sandbox, node).await,
            addons,
            supervisor,
            parameters,
        }
    }

    pub fn claim(&self, kind: &str, name: &str, bytes: u64) -> (CreateVolumeRequest, Volume) {
        let requested = match kind {
            "block" => Volume::block(name),
            kind => Volume::filesystem(name, kind),
        };
        let mut request = claim(name, &self.pool, &requested.capability, bytes);
        let parameters = self.parameters.iter();
        (request.parameters)
            .extend(parameters.map(|(key, value)| ((*key).to_owned(), value.clone())));
        (request, requested)
    }

    pub async fn made(&self, (request, requested): (CreateVolumeRequest, Volume)) -> Volume {
        let made = self.controller.create(request).await.unwrap();
        let mut volume = provisioned(&made, &requested.capability);
        volume.secrets.clone_from(&self.controller.secrets);
        volume
    }

    /// From a claim to its deletion, with growth, snapshots and clones.
    async fn lifecycle(&self, kind: &str) {
        let Self {
            controller, node, ..
        } = self;
        let small = if kind == "xfs" { 384 } else { 128 } * MIB;
        let volume = self.made(self.claim(kind, "claim", small)).await;
        let content = Content::new(kind);
        let target = node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &content, true);
        if let Some(supervisor) = &self.supervisor {
            assert!(supervisor.status(&volume).await.is_some());
        }
        if kind != "block" {
            run(&["sync", "-f", target.to_str().unwrap()]);
        }
        refused(
            controller.delete(&volume.handle).await,
            FailedPrecondition,
            &["in use"],
        );

        // In use, both.
        let snapshot = controller
            .snapshot(&volume.handle, "snapshot")
            .await
            .unwrap();
        let mut restored = self.claim(kind, "restored", 2 * small);
        restored.0.volume_content_source = Some(from_snapshot(&snapshot.snapshot_id));
        let mut cloned = self.claim(kind, "cloned", small);
        cloned.0.volume_content_source = Some(from_volume(&volume.handle));
        let copies = [self.made(restored).await, self.made(cloned).await];
        for copy in &copies {
            let target = node.up(copy, "pod").await;
            write_or_check(copy, &target, &content, false);
            write_or_check(copy, &target, &Content::new(&copy.handle), true);
        }
        let restored = self.size(&copies[0]).await;
        assert!(restored > small + small / 2, "{kind}: {restored}");
        write_or_check(&volume, &target, &content, false);

        let (size, on_node) = controller.expand(&volume.handle, 2 * small).await.unwrap();
        assert!(on_node, "the node has its part in it");
        let size = size.unsigned_abs();
        assert_eq!(
            node.expand(&volume, &target, size)
                .await
                .unwrap()
                .unsigned_abs(),
            size
        );
        assert!(self.size(&volume).await > small + small / 2, "{kind}");

        for volume in [&copies[0], &volume, &copies[1]] {
            node.down(volume, "pod").await;
            assert_nothing_staged(node, volume);
            controller.delete(&volume.handle).await.unwrap();
        }
        controller
            .delete_snapshot(&snapshot.snapshot_id)
            .await
            .unwrap();
        assert_eq!(self.ceph.cluster.rbd(&["ls", &self.pool]), "");
        node.assert_clean().await;
    }

    async fn size(&self, volume: &Volume) -> u64 {
        let target = self.node.target(volume, "pod");
        let usage = self.node.stats(volume, &target).await.unwrap();
        usage[0].total.unsigned_abs()
    }
}

#[test]
fn provisioned_file_systems_live_from_create_to_delete() {
    ceph_story(async |sandbox, ceph| {
        let class = Class::new(sandbox, ceph, &[]).await;
        class.lifecycle("ext4").await;
        class.lifecycle("xfs").await;
    });
}

#[test]
fn provisioned_raw_devices_live_from_create_to_delete() {
    ceph_story(async |sandbox, ceph| {
        let class = Class::new(sandbox, ceph, &[]).await;
        class.lifecycle("block").await;
    });
}

#[test]
fn provisioned_nbd_backed_volumes_live_from_create_to_delete() {
    ceph_story(async |sandbox, ceph| {
        let served = ("mounter", "rbd-nbd");
        for (more, kinds) in [
            (&[served][..], &["ext4", "block"][..]),
            (&[served, ("encrypted", "true")], &["ext4"]),
        ] {
            let class = Class::new(sandbox, ceph, more).await;
            for kind in kinds {
                class.lifecycle(kind).await;
            }
        }
    });
}

#[test]
fn provisioned_encrypted_volumes_live_from_create_to_delete() {
    ceph_story(async |sandbox, ceph| {
        let class = Class::new(sandbox, ceph, &[("encrypted", "true")]).await;
        class.lifecycle("ext4").await;
    });
}

#[test]
fn provisioned_volumes_with_own_passphrases_live_from_create_to_delete() {
    ceph_story(async |sandbox, ceph| {
        let more = [("encrypted", "true"), ("encryptionKMSID", "own")];
        let class = Class::new(sandbox, ceph, &more).await;
        class.lifecycle("block").await;
    });
}

#[test]
fn provisioned_volumes_with_passphrases_in_vault_live_from_create_to_delete() {
    ceph_story(async |sandbox, ceph| {
        let Some(vault) = VaultServer::start() else {
            return;
        };
        let more = [("encrypted", "true"), ("encryptionKMSID", "vault")];
        let class = Class::with_kms(sandbox, ceph, &more, Some(&vault)).await;
        class.lifecycle("ext4").await;

        let volume = class.made(class.claim("ext4", "sealed", 128 * MIB)).await;
        class.node.stage(&volume).await.unwrap();
        vault.bao(&["operator", "seal"]);
        // A repeat needs no passphrase, a first stage does.
        class.node.stage(&volume).await.unwrap();
        class.node.unstage(&volume).await.unwrap();
        refused(
            class.node.stage(&volume).await,
            Unavailable,
            &["Vault", "503"],
        );
        assert_nothing_staged(&class.node, &volume);
    });
}

#[test]
fn ceph_csi_stages_volumes_of_the_controller() {
    ceph_story(async |sandbox, ceph| {
        let class = Class::new(sandbox, ceph, &[]).await;
        let node = &class.node;
        let volume = class.made(class.claim("ext4", "claim", 128 * MIB)).await;
        let content = Content::new("theirs");
        ceph.stage_as_ceph_csi(node, &volume);
        write_or_check(&volume, &point(node, &volume), &content, true);
        unstage_as_ceph_csi(node, &volume);
        let target = node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &content, false);
        node.down(&volume, "pod").await;
        assert!(rbds_of(sandbox.dir()).is_empty());
        class.controller.delete(&volume.handle).await.unwrap();
    });
}

/// Where ceph-csi stages.
fn point(node: &Node, volume: &Volume) -> std::path::PathBuf {
    let staging = node.staging(volume);
    Path::new(&staging).join(&volume.handle)
}

/// Where uringctl, or the controller, finds the secrets of a class.
fn secrets_in(sandbox: &Sandbox, secrets: &HashMap<String, String>) -> String {
    let dir = sandbox.dir().join("secrets");
    fs::create_dir_all(&dir).unwrap();
    for (name, value) in secrets {
        fs::write(dir.join(name), value).unwrap();
    }
    dir.display().to_string()
}

#[test]
fn uringctl_format_replaces_a_partial_format() {
    ceph_story(async |sandbox, ceph| {
        let class = Class::new(sandbox, ceph, &[("encrypted", "true")]).await;
        let (controller, node) = (&class.controller, &class.node);
        let volume = class.made(class.claim("ext4", "claim", 128 * MIB)).await;
        // Without a format marker: a LUKS header without keys.
        let mapped = ceph.map_by_rbd(&volume, "noudev");
        let device = mapped.to_str().unwrap();
        fs::write(sandbox.dir().join("key"), "any").unwrap();
        let key = sandbox.dir().join("key").display().to_string();
        run(&["cryptsetup", "luksFormat", "-q", device, &key]);
        run(&["cryptsetup", "luksErase", "-q", device]);
        let words = ["is incomplete", "uringctl format"];
        unmap_by_rbd(&mapped);
        refused(node.stage(&volume).await, FailedPrecondition, &words);

        let secrets = secrets_in(sandbox, &controller.secrets);
        let operator = Operator::new(node, controller);
        let handle = &volume.handle;
        let format = ["format", handle, "--fs", "ext4", "--confirm", handle];
        operator.json(&[&["--secrets", &secrets], &format[..]].concat());
        let target = node.up(&volume, "pod").await;
        write_or_check(&volume, &target, &Content::new(handle), true);
        node.down(&volume, "pod").await;
        controller.delete(handle).await.unwrap();
        node.assert_clean().await;
    });
}

#[test]
fn uringctl_format_replaces_unknown_data() {
    ceph_story(async |sandbox, ceph| {
        for more in [&[][..], &[("encrypted", "true")]] {
            let class = Class::new(sandbox, ceph, more).await;
            let (controller, node) = (&class.controller, &class.node);
            let volume = class.made(class.claim("ext4", "claim", 384 * MIB)).await;
            let noise = Content::new("noise");
            let raw = Volume {
                capability: Volume::block("raw").capability,
                ..volume.clone()
            };
            noise.write_at(&node.up(&raw, "pod").await, 0).unwrap();
            node.down(&raw, "pod").await;
            let words = ["unknown data", "uringctl format"];
            refused(node.stage(&volume).await, FailedPrecondition, &words);

            let secrets = secrets_in(sandbox, &controller.secrets);
            let operator = Operator::new(node, controller);
            let handle = &volume.handle;
            let format = ["format", handle, "--fs", "xfs", "--confirm", handle];
            let (code, _, said) = operator.run(&format);
            assert!(code != 0 && said.contains("userID"), "{said}");
            let done = operator.json(&[&["--secrets", &secrets], &format[..]].concat());
            assert!(done["was"].as_str().unwrap().contains("unknown"), "{done}");

            let volume = Volume {
                capability: Volume::filesystem("any", "xfs").capability,
                ..volume.clone()
            };
            let target = node.up(&volume, "pod").await;
            write_or_check(&volume, &target, &noise, true);
            node.down(&volume, "pod").await;
            assert!(rbds_of(sandbox.dir()).is_empty());
            controller.delete(handle).await.unwrap();
            node.assert_clean().await;
        }
    });
}
