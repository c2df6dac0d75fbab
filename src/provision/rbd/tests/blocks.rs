//! The blocks of snapshots.

use std::ops::Range as Bytes;

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
