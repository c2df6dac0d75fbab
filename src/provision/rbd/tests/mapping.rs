//! A fail-over to a mirror, played in one cluster that the configuration knows by
//! two names, between two pools of it.

use std::sync::Arc;

use testkit::Replayer;

use super::*;
use crate::{
    ceph::client::rbd::{self as images, Image, Mirroring, OpenMode},
    provision::VolumeToEnter,
};

/// A volume that was made at one site and is at another by now.
pub struct Moved {
    pub home: Home,
    /// The pools of the two sites.
    pub sites: [IoCtx; 2],
    pub volume: VolumeInfo,
}

impl Moved {
    async fn new() -> Option<Self> {
        let home = Home::new()?;
        let volume = home.volume("moved", MIB);
        Some(Self::of(home, volume).await)
    }

    pub async fn of(home: Home, volume: NewVolume) -> Self {
        home.configure(&["ceph", "other"]);
        let credentials = Credentials::from_secrets(&home.secrets()).unwrap();
        let monitors = &home.cluster.monitors;
        let cluster = Cluster::connect(monitors, &credentials, Timeouts::default()).unwrap();
        let pool = |name: &str| Arc::clone(&cluster).ioctx(name, "").unwrap();
        let sites = [pool(&home.pool), pool(&home.cluster.fresh_pool())];
        let mapping = serde_json::json!([{
            "clusterIDMapping": {"other": "ceph"},
            "RBDPoolIDMapping": [{sites[1].pool_id().to_string(): sites[0].pool_id().to_string()}],
        }]);
        let file = home.dir.path().join("cluster-mapping.json");
        std::fs::write(file, mapping.to_string()).unwrap();
        let volume = home.make(volume).await;
        let moved = Self {
            home,
            sites,
            volume,
        };
        moved.copy(moved.image(), &moved.entry(), "csi.volumes.default");
        moved
    }

    pub fn image(&self) -> &str {
        &self.volume.context["imageName"]
    }

    pub fn entry(&self) -> String {
        let uuid = self.volume.handle.len() - 36;
        format!("csi.volume.{}", &self.volume.handle[uuid..])
    }

    pub fn at(&self, site: usize) -> String {
        format!("{}/{}", self.sites[site], self.image())
    }

    /// What the mirror has, and what ceph-csi enters there.
    pub fn copy(&self, image: &str, entry: &str, directory: &str) {
        let [from, to] = &self.sites;
        let [source, copy] = [from, to].map(|io| format!("{io}/{image}"));
        self.home.cluster.rbd(&["cp", &source, &copy]);
        for object in [entry, directory] {
            let keys = from.omap_list(object, "").unwrap();
            let keys: Vec<_> = keys.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            to.omap_set(object, &keys).unwrap();
        }
        let id = images::image_id(to, image).unwrap().expect("a copy");
        to.omap_set(entry, &[("csi.imageid", &*id)]).unwrap();
    }

    /// All of it is gone from the first site.
    pub fn lose(&self) {
        self.home.cluster.rbd(&["rm", &self.at(0)]);
        self.sites[0].remove(&self.entry()).unwrap();
        self.sites[0].remove("csi.volumes.default").unwrap();
    }

    pub fn is_there(&self) -> [bool; 2] {
        let is_there = |io: &IoCtx| images::image_id(io, self.image()).unwrap().is_some();
        [is_there(&self.sites[0]), is_there(&self.sites[1])]
    }

    /// Has the image of the second site mirrored, and follow another.
    fn demote(&self) {
        let (cluster, image) = (&self.home.cluster, self.at(1));
        let pool = self.sites[1].pool();
        cluster.rbd(&["mirror", "pool", "enable", pool, "image"]);
        cluster.rbd(&["feature", "enable", &image, "journaling"]);
        cluster.rbd(&["mirror", "image", "enable", &image, "journal"]);
        cluster.rbd(&["mirror", "image", "demote", &image]);
        let opened = Image::open(&self.sites[1], self.image(), OpenMode::ReadOnly).unwrap();
        assert_eq!(opened.mirroring().unwrap(), Mirroring::Secondary);
    }

    fn promote(&self) {
        let promote = ["mirror", "image", "promote", &self.at(1)];
        self.home.cluster.rbd(&promote);
    }

    async fn grow(&self, to: u64) -> Result<u64, ProvisionError> {
        let (handle, secrets) = (self.volume.handle.clone(), self.home.secrets());
        let range = Range {
            required: to,
            limit: 0,
        };
        self.home.rbd.expand_volume(handle, range, secrets).await
    }

    async fn delete(&self) {
        self.home.delete(&self.volume.handle).await.unwrap();
    }

    fn size(&self, site: usize) -> u64 {
        let image = Image::open(&self.sites[site], self.image(), OpenMode::ReadOnly);
        image.unwrap().size().unwrap()
    }
}

#[tokio::test]
async fn a_volume_is_followed_to_the_site_that_has_it() {
    let Some(moved) = Moved::new().await else {
        return;
    };
    moved.grow(2 * MIB).await.unwrap();
    assert_eq!((moved.size(0), moved.size(1)), (2 * MIB, MIB));

    moved.lose();
    assert_eq!(moved.grow(4 * MIB).await.unwrap(), 4 * MIB);
    assert_eq!(moved.size(1), 4 * MIB);
    let handle = moved.volume.handle.clone();
    let got = moved.home.rbd.get_volume(handle.clone()).await.unwrap();
    assert_eq!((&got.volume.handle, got.volume.bytes), (&handle, 4 * MIB));
    assert_eq!(got.volume.context["clusterID"], "other");

    // A copy of it is made where it is.
    let taken = moved.home.snapshot("snap", &handle);
    let taken = moved.home.rbd.create_snapshot(taken).await.unwrap();
    assert_eq!(taken.source, handle);
    let mut copy = moved.home.volume("copy", 0);
    copy.source = Some(ContentSource::Volume(handle.clone()));
    copy.parameters
        .insert("clusterID".to_owned(), "other".to_owned());
    let pool = moved.sites[1].pool().to_owned();
    copy.parameters.insert("pool".to_owned(), pool);
    assert_eq!(moved.home.make(copy).await.bytes, 4 * MIB);

    // The second site does not even know the first.
    moved.home.configure(&["other"]);
    assert_eq!(moved.grow(5 * MIB).await.unwrap(), 5 * MIB);
    moved.delete().await;
    assert_eq!(moved.is_there(), [false; 2]);
    let file = moved.home.dir.path().join("cluster-mapping.json");
    std::fs::remove_file(file).unwrap();
    let unknown = moved.grow(MIB).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Invalid);
}

/// rbd-mirror copies images alone.
#[tokio::test]
async fn a_mirrored_volume_is_entered_by_its_persistent_volume() {
    let Some(home) = Home::new() else { return };
    home.configure_kms(&serde_json::json!({"own": {"encryptionKMSType": "metadata"}}));
    let mut new = home.encrypted_by("pvc-1", "own");
    let owner = "csi.storage.k8s.io/pvc/namespace".to_owned();
    new.parameters.insert(owner, "shop".to_owned());
    let moved = Moved::of(home, new).await;
    let (there, entry) = (&moved.sites[1], moved.entry());
    let keys = |object: &str| there.omap_list(object, "").unwrap();
    let (mut known, names) = (keys(&entry), keys("csi.volumes.default"));
    // This driver's own.
    known.retain(|key, _| key.starts_with("csi."));
    assert_eq!(known.len(), 6, "{known:?}");
    for object in [&*entry, "csi.volumes.default"] {
        there.remove(object).unwrap();
    }
    moved.lose();
    let lost = moved.grow(2 * MIB).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::NotFound, "{lost}");

    let volume = VolumeToEnter {
        handle: moved.volume.handle.clone(),
        name: "pvc-1".to_owned(),
        owner: "shop".to_owned(),
        context: moved.volume.context.clone().into_iter().collect(),
    };
    let enter = async |volume: &VolumeToEnter| {
        let secrets = moved.home.secrets();
        moved.home.rbd.enter_volume(volume.clone(), secrets).await
    };
    assert_eq!(enter(&volume).await.unwrap(), Done::Now);
    assert_eq!(keys(&entry), known);
    assert_eq!(keys("csi.volumes.default"), names);
    assert_eq!(enter(&volume).await.unwrap(), Done::Already);
    // As after rbd-mirror has copied the image anew.
    there
        .omap_set(&entry, &[("csi.imageid", "former")])
        .unwrap();
    assert_eq!(enter(&volume).await.unwrap(), Done::Now);
    assert_eq!(keys(&entry)["csi.imageid"], known["csi.imageid"]);
    assert_eq!(enter(&volume).await.unwrap(), Done::Already);
    // A name that was lost.
    there.remove("csi.volumes.default").unwrap();
    assert_eq!(enter(&volume).await.unwrap(), Done::Now);
    assert_eq!(moved.grow(2 * MIB).await.unwrap(), 2 * MIB);
    // The volume's own cluster is lost, with its monitors.
    for object in [&*entry, "csi.volumes.default"] {
        there.remove(object).unwrap();
    }
    let lost = serde_json::json!([
        {"clusterID": "ceph", "monitors": ["127.0.0.1:1"]},
        {"clusterID": "other", "monitors": moved.home.cluster.monitors},
    ]);
    let file = moved.home.dir.path().join("config.json");
    std::fs::write(&file, lost.to_string()).unwrap();
    assert_eq!(enter(&volume).await.unwrap(), Done::Now);
    assert_eq!(enter(&volume).await.unwrap(), Done::Already);
    moved.home.configure(&["ceph", "other"]);

    let other = VolumeToEnter {
        name: "pvc-2".to_owned(),
        ..volume.clone()
    };
    let refused = enter(&other).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
    moved.delete().await;
    let none = enter(&volume).await.unwrap_err();
    assert_eq!(none.kind(), ErrorKind::NotFound, "{none}");
    // It may have the image.
    std::fs::write(&file, lost.to_string()).unwrap();
    let silent = enter(&volume).await.unwrap_err();
    assert_eq!(silent.kind(), ErrorKind::Transient, "{silent}");
}

#[tokio::test]
async fn a_delete_follows_a_mapping_only_to_the_volumes_own_image() {
    let Some(moved) = Moved::new().await else {
        return;
    };
    // The first time it is there, and not followed.
    moved.delete().await;
    assert_eq!(moved.is_there(), [false, true]);

    let id = [("csi.imageid", "another")];
    let entry = moved.entry();
    let before = moved.sites[1].omap_list(&entry, "").unwrap();
    moved.sites[1].omap_set(&entry, &id).unwrap();
    moved.delete().await;
    assert_eq!(moved.is_there(), [false, true], "nothing proves it");

    let id = [("csi.imageid", before["csi.imageid"].as_str())];
    moved.sites[1].omap_set(&entry, &id).unwrap();
    moved.demote();
    let refused = moved.home.delete(&moved.volume.handle).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Precondition);
    assert_eq!(moved.is_there(), [false, true], "it follows another");
    assert!(moved.sites[1].exists(&entry).unwrap());

    moved.promote();
    moved.delete().await;
    assert_eq!(moved.is_there(), [false; 2]);
    assert!(!moved.sites[1].exists(&entry).unwrap());
}

#[tokio::test]
async fn deleting_a_mirror_leaves_it_and_its_primary() {
    let Some(moved) = Moved::new().await else {
        return;
    };
    moved.demote();
    let (pool, own) = (moved.sites[1].pool_id(), &moved.volume.handle);
    let uuid = own[own.len() - 36..].parse().unwrap();
    let handle = crate::ceph::csi_format::handle::Handle::new("other", pool, uuid).unwrap();
    let handle = handle.to_string();
    let delete = || moved.home.delete(&handle);
    let has_entry = || moved.sites[1].exists(&moved.entry()).unwrap();
    // The primary may be lost.
    let refused = delete().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    assert!(refused.to_string().contains("rbd-mirror"), "{refused}");
    assert!(has_entry());
    let _daemon = Replayer::of(&moved.home.cluster, &moved.at(1));
    for _ in 0..2 {
        delete().await.unwrap();
        assert_eq!(moved.is_there(), [true; 2]);
        assert!(!has_entry());
    }
}
