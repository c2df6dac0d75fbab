//! Volumes that nodes encrypt, and their copies.

use serde_json::{Value, json};
use testkit::{KmipServer, VaultServer};

use super::*;
use crate::{
    ceph::{
        client::rbd::{Image, OpenMode},
        csi_format::encryption::{PREPARED, SEALED_KEY, STATE_KEY, open},
    },
    secret::Secret,
};

const PASSPHRASE: &str = "of all volumes";

impl Home {
    /// A volume of a class with that KMS; `own` keeps each volume's own passphrase.
    fn encrypted(&self, name: &str, kms: &str) -> NewVolume {
        self.configure_kms(&json!({"own": {"encryptionKMSType": "metadata"}}));
        self.encrypted_by(name, kms)
    }

    pub fn configure_kms(&self, config: &Value) {
        std::fs::write(self.dir.path().join("kms.json"), config.to_string()).unwrap();
    }

    /// A volume of a class with that KMS, whatever the configuration.
    pub fn encrypted_by(&self, name: &str, kms: &str) -> NewVolume {
        let mut new = self.volume(name, MIB);
        for (key, value) in [("encrypted", "True"), ("encryptionKMSID", kms)] {
            new.parameters.insert(key.to_owned(), value.to_owned());
        }
        let mut secrets = self.secrets().to_wire();
        secrets.insert("encryptionPassphrase".to_owned(), PASSPHRASE.to_owned());
        new.secrets = secrets.into();
        new
    }

    fn metadata_of(&self, volume: &VolumeInfo, key: &str) -> Option<String> {
        let name = &volume.context["imageName"];
        let image = Image::open(&self.io(), name, OpenMode::ReadOnly).unwrap();
        image.metadata_list().unwrap().remove(key)
    }

    /// The object of a volume's entry.
    pub(super) fn entry(handle: &str) -> String {
        format!("csi.volume.{}", &handle[handle.len() - 36..])
    }
}

#[tokio::test]
async fn a_volume_that_is_encrypted_otherwise_is_not_copied_without_its_key() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("otherwise", MIB)).await;
    let keys = [
        ("csi.volume.encryptKMS", "a-kms"),
        ("csi.volume.encryptionType", "disk"),
    ];
    let io = home.io();
    io.omap_set(&Home::entry(&made.handle), &keys).unwrap();
    let new = home.snapshot("moment", &made.handle);
    let snapshot = home.rbd.create_snapshot(new).await.map(drop);
    let copy = NewVolume {
        source: Some(ContentSource::Volume(made.handle.clone())),
        ..home.volume("copy", MIB)
    };
    let copy = home.rbd.create_volume(copy).await.map(drop);
    for refused in [snapshot, copy] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
        assert!(refused.to_string().contains("encryptionType"), "{refused}");
    }
    assert_eq!(home.images(), [made.context["imageName"].clone()]);
    home.configure_kms(&json!({}));
    home.delete(&made.handle).await.unwrap();
}

#[tokio::test]
async fn a_copy_may_have_another_kms_if_that_can_keep_its_passphrase() {
    let Some(home) = Home::new() else { return };
    let with = Secret::new(PASSPHRASE.to_owned());
    let opened = |volume: &VolumeInfo| {
        let sealed = home.metadata_of(volume, SEALED_KEY).unwrap();
        let opened = open(&with, &volume.handle, &sealed).unwrap();
        opened.reveal().to_owned()
    };
    let shared = home.make(home.encrypted("shared", "default")).await;
    let own = home.make(home.encrypted("own", "own")).await;
    assert_eq!(home.metadata_of(&shared, SEALED_KEY), None);
    let copy = |of: &VolumeInfo, name: &str, kms: &str| {
        let source = Some(ContentSource::Volume(of.handle.clone()));
        let new = home.encrypted(name, kms);
        home.rbd.create_volume(NewVolume { source, ..new })
    };
    let kept = copy(&shared, "shared-kept", "own").await.unwrap();
    assert_eq!(opened(&kept), PASSPHRASE);
    assert_eq!(
        home.metadata_of(&kept, STATE_KEY).as_deref(),
        Some(PREPARED)
    );
    // What has the secret's passphrase goes back.
    copy(&kept, "and-back", "default").await.unwrap();
    let same = copy(&own, "own-kept", "own").await.unwrap();
    assert_eq!(opened(&same), opened(&own));
    let before = home.images();
    let refused = copy(&own, "own-lost", "default").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    assert!(refused.to_string().contains("passphrase"), "{refused}");
    assert_eq!(home.images(), before);
}

#[tokio::test]
async fn an_unconfigured_kms_is_named() {
    let Some(home) = Home::new() else { return };
    let new = home.encrypted("lost", "own");
    std::fs::remove_file(home.dir.path().join("kms.json")).unwrap();
    let refused = home.rbd.create_volume(new).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    assert!(refused.to_string().contains("kms.json"), "{refused}");
}

/// A volume whose files are encrypted.
fn of_files(mut new: NewVolume) -> NewVolume {
    let kind = ("encryptionType".to_owned(), "file".to_owned());
    new.parameters.extend([kind]);
    new.uses = vec![VolumeUse {
        fs_type: Some("ext4".to_owned()),
        many_nodes_write: false,
    }];
    new
}

/// A class whose passphrases are in Vault, and another whose are in the metadata.
pub struct VaultHome {
    pub home: Home,
    pub vault: VaultServer,
}

impl VaultHome {
    pub fn new() -> Option<Self> {
        let (home, vault) = (Home::new()?, VaultServer::start()?);
        std::fs::write(home.dir.path().join("kms-token"), vault.web_token()).unwrap();
        let own = Self { home, vault };
        own.configure(&[]);
        Some(own)
    }

    fn configure(&self, settings: &[(&str, &str)]) {
        let vault = self.vault.section(settings);
        let metadata = json!({"encryptionKMSType": "metadata"});
        (self.home).configure_kms(&json!({"vault": vault, "own": metadata}));
    }

    pub fn volume(&self, name: &str, kms: &str) -> NewVolume {
        let mut new = self.home.encrypted_by(name, kms);
        let mut secrets = new.secrets.to_wire();
        secrets.insert("vault-ca".to_owned(), self.vault.ca());
        new.secrets = secrets.into();
        new
    }

    async fn copy(&self, name: &str, kms: &str, source: ContentSource) -> VolumeInfo {
        let source = Some(source);
        let new = NewVolume {
            source,
            ..self.volume(name, kms)
        };
        self.home.rbd.create_volume(new).await.unwrap()
    }

    pub fn secrets(&self) -> Secrets {
        self.volume("any", "vault").secrets
    }
}

#[tokio::test]
async fn a_passphrase_is_in_vault_as_long_as_its_volume_exists() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    let made = home.make(there.volume("one", "vault")).await;
    let own = vault.passphrase(&made.handle).unwrap();
    assert_eq!(home.metadata_of(&made, SEALED_KEY), None);
    assert_eq!(
        home.metadata_of(&made, STATE_KEY).as_deref(),
        Some(PREPARED)
    );
    // A repeat keeps it.
    home.make(there.volume("one", "vault")).await;
    assert_eq!(vault.passphrase(&made.handle), Some(own.clone()));

    let mut new = home.snapshot("moment", &made.handle);
    new.secrets = there.secrets();
    let snapshot = home.rbd.create_snapshot(new).await.unwrap();
    let source = ContentSource::Snapshot(snapshot.handle.clone());
    let restored = there.copy("restored", "vault", source).await;
    // To another KMS and back.
    let source = ContentSource::Volume(made.handle.clone());
    let moved = there.copy("moved", "own", source).await;
    assert_eq!(vault.passphrase(&moved.handle), None);
    let source = ContentSource::Volume(moved.handle.clone());
    let back = there.copy("back", "vault", source).await;
    for handle in [&snapshot.handle, &restored.handle, &back.handle] {
        assert_eq!(vault.passphrase(handle), Some(own.clone()), "{handle}");
    }

    for handle in [&restored.handle, &back.handle, &moved.handle, &made.handle] {
        home.rbd
            .delete_volume(handle.clone(), there.secrets())
            .await
            .unwrap();
        assert_eq!(vault.passphrase(handle), None, "{handle}");
    }
    let deleted = home
        .rbd
        .delete_snapshot(snapshot.handle.clone(), there.secrets());
    deleted.await.unwrap();
    assert_eq!(vault.passphrase(&snapshot.handle), None);
    assert!(home.images().is_empty());
}

#[tokio::test]
async fn the_secret_of_encrypted_files_goes_with_their_copies() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    let volume = |name: &str, kms: &str| of_files(there.volume(name, kms));
    let made = home.make(volume("one", "vault")).await;
    let own = vault.passphrase(&made.handle).unwrap();
    assert_eq!(own.len(), 88, "64 bytes in base64");
    // Nothing says that the block device is encrypted.
    assert_eq!(home.metadata_of(&made, STATE_KEY), None);
    let entry = home
        .io()
        .omap_list(&Home::entry(&made.handle), "csi.")
        .unwrap();
    assert_eq!(entry["csi.volume.encryptionType"], "file");
    home.make(volume("one", "vault")).await;
    assert_eq!(vault.passphrase(&made.handle), Some(own.clone()));

    let mut new = home.snapshot("moment", &made.handle);
    new.secrets = there.secrets();
    let snapshot = home.rbd.create_snapshot(new).await.unwrap();
    let restore = |new: NewVolume| {
        let source = Some(ContentSource::Snapshot(snapshot.handle.clone()));
        home.rbd.create_volume(NewVolume { source, ..new })
    };
    let restored = restore(volume("restored", "vault")).await.unwrap();
    for handle in [&snapshot.handle, &restored.handle] {
        assert_eq!(vault.passphrase(handle), Some(own.clone()), "{handle}");
    }
    // Of these KMS the files of all volumes have one secret, which does not open these.
    for kms in ["own", "default"] {
        let refused = restore(volume("elsewhere", kms)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{kms}: {refused}");
    }
    let refused = restore(there.volume("block", "vault")).await.unwrap_err();
    assert!(
        refused.to_string().contains("encryptionType file"),
        "{refused}"
    );
    let handles = [&restored.handle, &made.handle];
    for handle in handles {
        let delete = home.rbd.delete_volume(handle.clone(), there.secrets());
        delete.await.unwrap();
        assert_eq!(vault.passphrase(handle), None, "{handle}");
    }
}

#[tokio::test]
async fn a_delete_waits_for_a_vault_that_does_not_answer() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    let made = home.make(there.volume("one", "vault")).await;
    let delete = || home.rbd.delete_volume(made.handle.clone(), there.secrets());
    // While its configuration is edited, or not mounted yet.
    let file = home.dir.path().join("kms.json");
    let states: [&dyn Fn(); 3] = [
        &|| std::fs::write(&file, "{").unwrap(),
        &|| std::fs::remove_file(&file).unwrap(),
        // As kubelet mounts a missing ConfigMap.
        &|| {
            std::fs::create_dir_all(file.join("..2026")).unwrap();
            std::os::unix::fs::symlink("..2026", file.join("..data")).unwrap();
        },
    ];
    for state in states {
        state();
        let refused = delete().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Transient, "{refused}");
        assert!(refused.to_string().contains("kms.json"), "{refused}");
        assert!(vault.passphrase(&made.handle).is_some());
    }
    std::fs::remove_dir_all(&file).unwrap();
    there.configure(&[("vaultAddress", "https://127.0.0.1:1")]);
    let refused = delete().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Transient, "{refused}");
    assert!(refused.to_string().contains("127.0.0.1:1/"), "{refused}");
    let unmade = home.rbd.create_volume(there.volume("two", "vault")).await;
    assert_eq!(unmade.unwrap_err().kind(), ErrorKind::Transient);
    there.configure(&[]);
    delete().await.unwrap();
    assert_eq!(vault.passphrase(&made.handle), None);
    // Nothing of the other is left.
    assert!(home.images().is_empty());
    let listed = vault.try_bao(&["kv", "list", "secret/csi"]);
    assert!(listed.unwrap_err().contains("No value found"));
}

#[tokio::test]
async fn a_failed_create_leaves_no_passphrase() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    // Vault may be read there, not written.
    let read_only = home.dir.path().join("policy");
    let rules = r#"path "secret/data/csi/*" { capabilities = ["read"] }"#;
    std::fs::write(&read_only, rules).unwrap();
    vault.bao(&["policy", "write", "csi", read_only.to_str().unwrap()]);
    let refused = home.rbd.create_volume(there.volume("one", "vault")).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthenticated, "{refused}");
    assert!(
        refused.to_string().contains("permission denied"),
        "{refused}"
    );
    assert!(home.images().is_empty());
}

#[tokio::test]
async fn a_copy_asks_its_kms_before_and_after() {
    let Some(home) = Home::new() else { return };
    let Some(server) = KmipServer::start() else {
        return;
    };
    server.mount_secret(&home.dir.path().join("kms-secrets"));
    home.configure_kms(&json!({"kmip": server.section(&[])}));
    let files = of_files(home.encrypted_by("files", "kmip"));
    let refused = home.rbd.create_volume(files).await.unwrap_err();
    assert!(refused.to_string().contains("`kmip`"), "{refused}");
    let made = home.make(home.encrypted_by("one", "kmip")).await;
    assert!(home.metadata_of(&made, SEALED_KEY).is_some());
    assert_eq!(server.requests("Encrypt"), 1);
    let copy = NewVolume {
        source: Some(ContentSource::Volume(made.handle.clone())),
        ..home.encrypted_by("copy", "kmip")
    };
    home.rbd.create_volume(copy).await.unwrap();
    // A rotation meanwhile shows in the second answer.
    assert_eq!(server.requests("Decrypt"), 2);
    assert_eq!(server.requests("Encrypt"), 2);
    let mut new = home.snapshot("moment", &made.handle);
    new.secrets = home.encrypted_by("one", "kmip").secrets;
    home.rbd.create_snapshot(new).await.unwrap();
    assert_eq!(server.requests("Decrypt"), 4);
}
