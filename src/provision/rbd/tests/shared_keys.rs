//! The passphrase of a volume that two sites have: it is in the KMS once, under the handle.

use serde_json::json;
use testkit::{ImageOpener, VaultServer};

use super::{encrypted::VaultHome, mapping::Moved, *};
use crate::ceph::client::rbd::image_id;

/// A volume at two sites, whose passphrase is in Vault.
struct SharedKey {
    moved: Moved,
    vault: VaultServer,
    secrets: Secrets,
}

impl Home {
    /// The entry has another id than the image, as after rbd-mirror has copied that anew.
    pub fn enter_former_id(&self, handle: &str) {
        let id = [("csi.imageid", "former")];
        self.io().omap_set(&Self::entry(handle), &id).unwrap();
    }

    /// Of these cases, those in which rbd-mirror copies the image anew on a resync. The old one
    /// stays in the trash if it has clones.
    fn copy_anew(&self, case: &str, handle: &str, image: &str) {
        match case {
            "copied-anew" => self.enter_former_id(handle),
            "old-one-there" => {
                self.cluster.rbd(&["trash", "mv", image]);
                self.cluster.rbd(&["create", "--size", "1M", image]);
            }
            _ => {}
        }
    }
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

    /// Configures the KMS, with these settings of its own.
    fn configure(&self, settings: &[(&str, &str)]) {
        let vault = self.vault.section(settings);
        (self.moved.home).configure_kms(&json!({"vault": vault}));
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
async fn a_delete_at_another_site_goes_on_after_its_kms_failed() {
    let Some(shared) = SharedKey::new().await else {
        return;
    };
    let moved = &shared.moved;
    moved.lose();
    let entry = || moved.sites[1].exists(&moved.entry()).unwrap();
    shared.configure(&[("vaultAddress", "https://127.0.0.1:1")]);
    for _ in 0..2 {
        let refused = shared.delete().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Transient, "{refused}");
        assert_eq!(moved.is_there(), [false; 2]);
        assert!(shared.has_key() && entry());
    }
    shared.configure(&[]);
    shared.delete().await.unwrap();
    assert!(!shared.has_key() && !entry());
}

#[tokio::test]
async fn an_image_that_is_missing_at_another_site_is_not_deleted_for_that() {
    let Some(shared) = SharedKey::new().await else {
        return;
    };
    let moved = &shared.moved;
    moved.lose();
    // As while a mirror copies it anew, or after a refused delete.
    let user = ImageOpener::start(&moved.home.cluster, moved.sites[1].pool(), moved.image());
    shared.delete().await.unwrap_err();
    drop(user);
    moved.home.cluster.rbd(&["rm", &moved.at(1)]);
    shared.delete().await.unwrap();
    assert!(moved.sites[1].exists(&moved.entry()).unwrap());
    assert!(shared.has_key());
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

#[tokio::test]
async fn the_key_stays_of_an_image_that_a_user_moved_to_the_trash_to_restore_it() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    for (name, is_kept) in [
        ("expires", true),
        ("copied-anew", true),
        ("old-one-there", true),
        ("purged", false),
    ] {
        let made = home.make(there.volume(name, "vault")).await;
        let image = format!("{}/{}", home.pool, made.context["imageName"]);
        let own = vault.passphrase(&made.handle).unwrap();
        let mut to_trash = vec!["trash", "mv", &image];
        if name == "expires" {
            to_trash.extend(["--expires-at", "2099-01-01"]);
        }
        // A delete moves no other image than the journal has the id of.
        home.copy_anew(name, &made.handle, &image);
        home.cluster.rbd(&to_trash);
        let (handle, secrets) = (made.handle.clone(), there.secrets());
        home.rbd.delete_volume(handle, secrets).await.unwrap();
        assert_eq!(vault.passphrase(&made.handle), is_kept.then_some(own));
    }
}

#[tokio::test]
async fn the_key_stays_while_the_trash_keeps_the_image_for_a_user_s_snapshot() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    for (name, is_kept) in [
        ("kept", true),
        ("copied-anew", true),
        ("old-one-there", true),
        ("not-kept", false),
    ] {
        let made = home.make(there.volume(name, "vault")).await;
        let image = format!("{}/{}", home.pool, made.context["imageName"]);
        let own = vault.passphrase(&made.handle).unwrap();
        home.copy_anew(name, &made.handle, &image);
        // A user's, or what a copy has left.
        let snapshot = if is_kept {
            "backup".to_owned()
        } else {
            format!("csi-vol-{}-temp", uuid::Uuid::new_v4())
        };
        home.cluster
            .rbd(&["snap", "create", &format!("{image}@{snapshot}")]);
        let (io, object) = (home.io(), Home::entry(&made.handle));
        let entry = io.omap_list(&object, "").unwrap();
        for _ in 0..2 {
            let (handle, secrets) = (made.handle.clone(), there.secrets());
            home.rbd.delete_volume(handle, secrets).await.unwrap();
            let kept = is_kept.then(|| own.clone());
            assert_eq!(vault.passphrase(&made.handle), kept, "{name}");
            // As a delete that was killed before it removed the entry leaves it.
            let entry: Vec<_> = entry.iter().map(|(k, v)| (&**k, &**v)).collect();
            io.omap_set(&object, &entry).unwrap();
        }
    }
}
