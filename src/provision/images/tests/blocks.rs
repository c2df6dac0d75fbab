//! The blocks of snapshots.

use super::*;
use crate::provision::BlockRequest;

#[tokio::test]
async fn blocks_with_data_and_changed_ones_are_told() {
    let home = home();
    let volume = home.images.create_volume(new("volume", 8 * MIB)).await;
    let volume = volume.unwrap();
    let other = home.images.create_volume(new("other", MIB)).await.unwrap();
    let take = async |name: &str, of: &VolumeInfo| {
        let new = snapshot_of(name.to_owned(), of.handle.clone());
        home.images.create_snapshot(new).await.unwrap().handle
    };
    let file = home.file(&volume);
    file.write_all_at(&[1; 8192], MIB).unwrap();
    file.write_all_at(&[1; 4096], 6 * MIB).unwrap();
    let first = take("first", &volume).await;
    file.write_all_at(&[2], MIB + 4096).unwrap();
    file.write_all_at(&[3; 4096], 4 * MIB).unwrap();
    let second = take("second", &volume).await;
    let blocks = async |snapshot: &str, base: Option<&str>, from: u64| {
        let what = BlockRequest {
            snapshot: snapshot.to_owned(),
            base: base.map(str::to_owned),
            from,
            max: 0,
            secrets: none(),
        };
        home.images.snapshot_blocks(what).await
    };

    let all = blocks(&second, None, 0).await.unwrap();
    assert_eq!((all.bytes, all.next), (8 * MIB, None));
    for at in 0..8 {
        let is_told = all.blocks.iter().any(|block| block.contains(&(at * MIB)));
        assert_eq!(is_told, [1, 4, 6].contains(&at), "{at} MiB: {all:?}");
    }
    let block = |at: u64| at..at + 4096;
    let changed = blocks(&second, Some(&first), 0).await.unwrap();
    assert_eq!(changed.blocks, [block(MIB + 4096), block(4 * MIB)]);
    let rest = blocks(&second, Some(&first), 2 * MIB).await.unwrap();
    assert_eq!(rest.blocks, [block(4 * MIB)]);

    let other = take("other", &other).await;
    assert_eq!(kind(blocks(&other, Some(&first), 0).await), Kind::Invalid);
    assert_eq!(kind(blocks(&other, None, MIB + 1).await), Kind::OutOfRange);
    let missing = other.replace("snap.", "vol.");
    assert_eq!(kind(blocks(&missing, None, 0).await), Kind::NotFound);
}
