//! Limits and other metadata of images that grow and are copied.

use super::*;
use crate::ceph::client::rbd::{Image, OpenMode};

impl Home {
    /// The metadata of a volume's image.
    fn metadata(&self, volume: &VolumeInfo) -> BTreeMap<String, String> {
        self.image(volume).metadata_list().unwrap()
    }

    fn image(&self, volume: &VolumeInfo) -> Image {
        let name = &volume.context["imageName"];
        Image::open(&self.io(), name, OpenMode::ReadWrite).unwrap()
    }

    async fn limited(&self, name: &str) -> VolumeInfo {
        let mut new = self.volume(name, GIB);
        for (key, value) in [
            ("BaseIops", "100"),
            ("IopsPerGiB", "10"),
            ("BaseReadIops", "50"),
            ("BaseVolSizeBytes", "1073741824"),
        ] {
            new.parameters.insert(key.to_owned(), value.to_owned());
        }
        self.make(new).await
    }

    async fn grow(&self, volume: &VolumeInfo, bytes: u64) {
        let range = Range {
            required: bytes,
            limit: 0,
        };
        let (handle, secrets) = (volume.handle.clone(), self.secrets());
        let grown = self.rbd.expand_volume(handle, range, secrets).await;
        assert_eq!(grown.unwrap(), bytes);
    }
}

const IOPS: &str = "conf_rbd_qos_iops_limit";
const READ_IOPS: &str = "conf_rbd_qos_read_iops_limit";

#[tokio::test]
async fn growth_leaves_a_limit_that_was_changed() {
    let Some(home) = Home::new() else { return };
    let made = home.limited("limited").await;
    assert_eq!(home.metadata(&made)[IOPS], "100");
    home.grow(&made, 3 * GIB).await;
    assert_eq!(home.metadata(&made)[IOPS], "120");
    let changed = [("rbd_qos_read_iops_limit".to_owned(), "7".to_owned())];
    let (handle, secrets) = (made.handle.clone(), home.secrets());
    let modify = home.rbd.modify_volume(handle, changed.into(), secrets);
    modify.await.unwrap();
    home.grow(&made, 4 * GIB).await;
    let metadata = home.metadata(&made);
    assert_eq!((&*metadata[IOPS], &*metadata[READ_IOPS]), ("130", "7"));
}

#[tokio::test]
async fn an_interrupted_growth_is_finished_by_a_repeat() {
    let Some(home) = Home::new() else { return };
    let made = home.limited("half-way").await;
    home.image(&made).grow(2 * GIB).unwrap();
    assert_eq!(home.metadata(&made)[IOPS], "100");
    home.grow(&made, 2 * GIB).await;
    assert_eq!(home.metadata(&made)[IOPS], "110");
}

#[tokio::test]
async fn copies_have_metadata_of_their_own() {
    const NAME: &str = "csi.storage.k8s.io/pvc/name";
    let Some(home) = Home::new() else { return };
    let source = home.limited("source").await;
    let image = home.image(&source);
    image.metadata_set(NAME, "claim").unwrap();
    image.metadata_set("kept", "by copies").unwrap();
    drop(image);
    let taken = home.snapshot("moment", &source.handle);
    let taken = home.rbd.create_snapshot(taken).await.unwrap();
    let uuid = &taken.handle[taken.handle.len() - 36..];
    let image = format!("csi-snap-{uuid}");
    let image = Image::open(&home.io(), &image, OpenMode::ReadOnly).unwrap();
    let kept: Vec<_> = image.metadata_list().unwrap().into_keys().collect();
    assert_eq!(kept, ["kept"]);
    let sources = [
        ContentSource::Snapshot(taken.handle),
        ContentSource::Volume(source.handle.clone()),
    ];
    for (n, from) in sources.into_iter().enumerate() {
        let mut copy = home.volume(&format!("copy-{n}"), 2 * GIB);
        copy.source = Some(from);
        let plain = home.make(copy.clone()).await;
        let kept: Vec<_> = home.metadata(&plain).into_keys().collect();
        assert_eq!(kept, ["kept"]);
        copy.name.push_str("-limited");
        copy.parameters
            .insert("BaseIops".to_owned(), "3".to_owned());
        let limited = home.make(copy).await;
        let metadata = home.metadata(&limited);
        assert_eq!(
            (metadata[IOPS].as_str(), metadata.get(READ_IOPS)),
            ("3", None)
        );
    }
    assert_eq!(home.metadata(&source)[NAME], "claim");
}
