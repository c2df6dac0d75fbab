//! Volumes that nodes encrypt, and their copies.

use super::*;

impl Home {
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
        source: Some(Source::Volume(made.handle.clone())),
        ..home.volume("copy", MIB)
    };
    let copy = home.rbd.create_volume(copy).await.map(drop);
    for refused in [snapshot, copy] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::FailedPrecondition, "{refused}");
        assert!(refused.to_string().contains("encryptionType"), "{refused}");
    }
    assert_eq!(home.images(), [made.context["imageName"].clone()]);
    home.delete(&made.handle).await.unwrap();
}
