//! The passphrase of a volume that two sites have: it is in the KMS once, under the handle.

use testkit::{ImageOpener, VaultServer};

use super::{encrypted::VaultHome, mapping::Moved, *};
use crate::ceph::client::rbd::image_id;

/// A volume at two sites, whose passphrase is in Vault.
struct SharedKey {
    moved: Moved,
    vault: VaultServer,
    secrets: Secrets,
}

impl SharedKey {
    async fn new() -> Option<Self> {
        let there = VaultHome::new()?;
        let (volume, secrets) = (there.volume("moved", "vault"), there.secrets());
        let VaultHome { home, vault } = there;
        let moved = Moved::of(home, volume).await;
        Some(Self {
            moved,
            vault,
            secrets,
        })
    }

    async fn delete(&self) -> Result<(), ProvisionError> {
        let (handle, secrets) = (self.moved.volume.handle.clone(), self.secrets.clone());
        self.moved.home.rbd.delete_volume(handle, secrets).await
    }

    fn has_key(&self) -> bool {
        let handle = &self.moved.volume.handle;
        self.vault.passphrase(handle).is_some()
    }
}

#[tokio::test]
async fn a_refused_delete_keeps_the_key_and_every_entry() {
    let Some(shared) = SharedKey::new().await else {
        return;
    };
    let moved = &shared.moved;
    moved.home.cluster.rbd(&["rm", &moved.at(0)]);
    let cluster = &moved.home.cluster;
    let user = ImageOpener::start(cluster, moved.sites[1].pool(), moved.image());
    let refused = shared.delete().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    assert!(shared.has_key());
    let entries = || [0, 1].map(|site: usize| moved.sites[site].exists(&moved.entry()).unwrap());
    assert_eq!(entries(), [true; 2]);

    drop(user);
    shared.delete().await.unwrap();
    assert_eq!(moved.is_there(), [false; 2]);
    assert_eq!(entries(), [false; 2]);
    assert!(!shared.has_key());
}

#[tokio::test]
async fn the_key_stays_as_long_as_a_site_has_an_image() {
    let Some(shared) = SharedKey::new().await else {
        return;
    };
    let moved = &shared.moved;
    // Both sites may count as primary, as after a promotion by force.
    shared.delete().await.unwrap();
    assert_eq!(moved.is_there(), [false, true]);
    assert!(shared.has_key());

    let entry = moved.entry();
    let id = image_id(&moved.sites[1], moved.image()).unwrap().unwrap();
    let enter = |id: &str| moved.sites[1].omap_set(&entry, &[("csi.imageid", id)]);
    enter("another").unwrap();
    shared.delete().await.unwrap();
    assert_eq!(moved.is_there(), [false, true], "nothing proves it");
    assert!(shared.has_key());

    enter(&id).unwrap();
    shared.delete().await.unwrap();
    assert_eq!(moved.is_there(), [false; 2]);
    assert!(!shared.has_key());
}

#[tokio::test]
async fn a_snapshot_s_key_stays_as_long_as_a_site_has_its_image() {
    let Some(shared) = SharedKey::new().await else {
        return;
    };
    let moved = &shared.moved;
    let mut new = moved.home.snapshot("moment", &moved.volume.handle);
    new.secrets = shared.secrets.clone();
    let handle = moved.home.rbd.create_snapshot(new).await.unwrap().handle;
    let uuid = &handle[handle.len() - 36..];
    let (image, entry) = (format!("csi-snap-{uuid}"), format!("csi.snap.{uuid}"));
    moved.copy(&image, &entry, "csi.snaps.default");

    let delete = || {
        let (handle, secrets) = (handle.clone(), shared.secrets.clone());
        moved.home.rbd.delete_snapshot(handle, secrets)
    };
    let has_image = |site: usize| image_id(&moved.sites[site], &image).unwrap().is_some();
    delete().await.unwrap();
    assert_eq!([has_image(0), has_image(1)], [false, true]);
    assert!(shared.vault.passphrase(&handle).is_some());
    delete().await.unwrap();
    assert!(!has_image(1));
    assert_eq!(shared.vault.passphrase(&handle), None);
}
