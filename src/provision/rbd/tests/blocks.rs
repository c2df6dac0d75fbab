//! The blocks of snapshots.

use std::{ops::Range as Bytes, slice};

use super::{groups::image_of, *};
use crate::{
    ceph::client::rbd::{Image, OpenMode},
    provision::{BlockRequest, SnapshotInfo},
};

impl Home {
    async fn taken(&self, name: &str, volume: &VolumeInfo) -> SnapshotInfo {
        let new = self.snapshot(name, &volume.handle);
        self.rbd.create_snapshot(new).await.unwrap()
    }

    /// All blocks, three a page.
    async fn blocks(
        &self,
        snapshot: &SnapshotInfo,
        base: Option<&SnapshotInfo>,
    ) -> Result<Vec<Bytes<u64>>, ProvisionError> {
        let (mut found, mut next) = (Vec::new(), Some(0));
        while let Some(from) = next {
            let what = BlockRequest {
                snapshot: snapshot.handle.clone(),
                base: base.map(|base| base.handle.clone()),
                from,
                max: 3,
                secrets: self.secrets(),
            };
            let page = self.rbd.snapshot_blocks(what).await?;
            assert_eq!(page.bytes, snapshot.bytes);
            assert!(page.blocks.len() <= 3);
            found.extend(page.blocks);
            next = page.next;
        }
        Ok(found)
    }
}

fn covers(blocks: &[Bytes<u64>], at: u64) -> bool {
    blocks.iter().any(|block| block.contains(&at))
}

#[tokio::test]
async fn blocks_with_data_and_changed_ones_are_told() {
    const OBJECT: u64 = 4 * MIB;
    let Some(home) = Home::new() else { return };
    let volume = home.make(home.volume("volume", GIB + OBJECT)).await;
    let io = home.io();
    let image = Image::open(&io, &volume.context["imageName"], OpenMode::ReadWrite).unwrap();
    let data = [1; 8192];
    for object in [0, 2, 4, 6, 256] {
        image.write(object * OBJECT, &data).unwrap();
    }
    let first = home.taken("first", &volume).await;
    image.write(2 * OBJECT, &[2]).unwrap();
    image.write_zeros(4 * OBJECT, 8192).unwrap();
    // The same data again is no change.
    image.write(6 * OBJECT, &data).unwrap();
    image.write(256 * OBJECT + 4096, &[3; 4096]).unwrap();
    let second = home.taken("second", &volume).await;

    let all = home.blocks(&first, None).await.unwrap();
    for object in 0..257 {
        let has_data = [0, 2, 4, 6, 256].contains(&object);
        assert_eq!(covers(&all, object * OBJECT), has_data, "{object}: {all:?}");
    }
    let block = |at: u64| at..at + 4096;
    let expected = [
        block(2 * OBJECT),
        4 * OBJECT..4 * OBJECT + 8192,
        block(256 * OBJECT + 4096),
    ];
    let changed = home.blocks(&second, Some(&first)).await.unwrap();
    assert_eq!(changed, expected);
    let backwards = home.blocks(&first, Some(&second)).await.unwrap();
    assert_eq!(backwards, expected);
    assert_eq!(home.blocks(&first, Some(&first)).await.unwrap(), []);

    // Neither the chain of clones nor its end makes a difference.
    let flat = Image::open(&io, &image_of(&second), OpenMode::ReadWrite).unwrap();
    flat.flatten().unwrap();
    let changed = home.blocks(&second, Some(&first)).await.unwrap();
    assert_eq!(changed, expected);

    let other = home.make(home.volume("other", MIB)).await;
    let other = home.taken("other", &other).await;
    let refused = home.blocks(&other, Some(&first)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    let beyond = BlockRequest {
        snapshot: other.handle,
        base: None,
        from: MIB + 1,
        max: 0,
        secrets: home.secrets(),
    };
    let refused = home.rbd.snapshot_blocks(beyond).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfRange, "{refused}");
}

/// Backup software reads the device, which lacks the header.
#[tokio::test]
async fn offsets_of_an_encrypted_volume_are_those_of_its_device() {
    const HEADER: u64 = 16 * MIB;
    let Some(home) = Home::new() else { return };
    let mut new = home.encrypted_by("secret", "");
    new.range.required = 32 * MIB;
    let volume = home.make(new).await;
    let snapshot = |name: &'static str| {
        let mut new = home.snapshot(name, &volume.handle);
        new.secrets = home.encrypted_by("secret", "").secrets;
        home.rbd.create_snapshot(new)
    };
    let blank = snapshot("blank").await.unwrap();
    let formatted = home.dir.path().join("formatted");
    let file = std::fs::File::create(&formatted).unwrap();
    file.set_len(32 * MIB).unwrap();
    let path = formatted.to_str().unwrap();
    std::fs::write(home.dir.path().join("pass"), "word").unwrap();
    let key = home.dir.path().join("pass");
    testkit::run(&[
        "cryptsetup",
        "luksFormat",
        "--batch-mode",
        "--type=luks2",
        "--pbkdf=pbkdf2",
        "--pbkdf-force-iterations=1000",
        path,
        key.to_str().unwrap(),
    ]);
    let io = home.io();
    let image = Image::open(&io, &volume.context["imageName"], OpenMode::ReadWrite).unwrap();
    let header = std::fs::read(&formatted).unwrap();
    image.write(0, &header[..64 << 10]).unwrap();
    image.write(HEADER + 8192, &[1; 4096]).unwrap();
    let first = snapshot("first").await.unwrap();
    image.write(HEADER, &[2; 4096]).unwrap();
    // As when the passphrase is replaced.
    image.write(32768, &[3; 512]).unwrap();
    let second = snapshot("second").await.unwrap();

    let page = async |snapshot: &SnapshotInfo, base: Option<&SnapshotInfo>| {
        let what = BlockRequest {
            snapshot: snapshot.handle.clone(),
            base: base.map(|base| base.handle.clone()),
            from: 0,
            max: 0,
            secrets: home.secrets(),
        };
        home.rbd.snapshot_blocks(what).await.unwrap()
    };
    let delta = page(&second, Some(&first)).await;
    assert_eq!(delta.bytes, 16 * MIB);
    assert_eq!(delta.blocks, slice::from_ref(&(0..4096)));
    let all = page(&second, None).await;
    assert_eq!(all.bytes, 16 * MIB);
    assert!(covers(&all.blocks, 0) && covers(&all.blocks, 8192));
    assert!(all.blocks.iter().all(|block| block.end <= 16 * MIB));
    let since = page(&first, Some(&blank)).await;
    assert_eq!(since.blocks, slice::from_ref(&(8192..12288)));
    assert_eq!(page(&blank, None).await.blocks, []);

    // Without a header of LUKS2 the offsets are unknown.
    image.write(0, b"none").unwrap();
    let foreign = snapshot("foreign").await.unwrap();
    let what = BlockRequest {
        snapshot: foreign.handle,
        base: None,
        from: 0,
        max: 0,
        secrets: home.secrets(),
    };
    let refused = home.rbd.snapshot_blocks(what).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
}
