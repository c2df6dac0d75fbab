//! Volumes that nodes encrypt, and their copies.

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
        let config = serde_json::json!({"own": {"encryptionKMSType": "metadata"}});
        std::fs::write(self.dir.path().join("kms.json"), config.to_string()).unwrap();
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
    fn entry(handle: &str) -> String {
        format!("csi.volume.{}", &handle[handle.len() - 36..])
    }
}

#[tokio::test]
async fn files_that_are_encrypted_are_not_copied_without_their_keys() {
    let Some(home) = Home::new() else { return };
    let made = home.make(home.volume("files", MIB)).await;
    let keys = [
        ("csi.volume.encryptKMS", "a-kms"),
        ("csi.volume.encryptionType", "file"),
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
