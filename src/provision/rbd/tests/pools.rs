//! Volumes whose journal is in another pool than their images, and what is left of
//! them when one of the two is deleted.

use super::{encrypted::VaultHome, *};
use crate::ceph::client::rbd::create_namespace;

/// One that has its image in `pool`, and its name in the home's own.
fn apart(home: &Home, pool: &str, name: &str) -> NewVolume {
    moved_apart(home.volume(name, MIB), pool)
}

fn moved_apart(mut new: NewVolume, pool: &str) -> NewVolume {
    let journal = new.parameters.insert("pool".to_owned(), pool.to_owned());
    let journal = journal.expect("a pool");
    new.parameters.insert("journalPool".to_owned(), journal);
    new
}

#[tokio::test]
async fn a_missing_namespace_is_named_and_nothing_is_made() {
    let Some(home) = Home::new() else { return };
    let config = serde_json::json!([{
        "clusterID": "ceph",
        "monitors": &home.cluster.monitors,
        "rbd": {"radosNamespace": "tenant"},
    }]);
    std::fs::write(home.dir.path().join("config.json"), config.to_string()).unwrap();
    let refused = home.rbd.create_volume(home.volume("v", MIB)).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    let said = refused.to_string();
    assert!(said.contains("radosNamespace \"tenant\""), "{said}");
    assert!(said.contains(&home.pool), "{said}");
    let objects = home.cluster.rados(&home.pool, &["ls", "--all"]);
    assert!(!objects.contains("tenant"), "{objects}");
    create_namespace(&home.io(), "tenant").unwrap();
    let made = home.make(home.volume("v", MIB)).await;
    home.delete(&made.handle).await.unwrap();
}

fn remove_pool(home: &Home, pool: &str) {
    let ceph = |args: &[&str]| home.cluster.ceph(args);
    ceph(&["config", "set", "mon", "mon_allow_pool_delete", "true"]);
    let sure = "--yes-i-really-really-mean-it";
    ceph(&["osd", "pool", "rm", pool, pool, sure]);
}

#[tokio::test]
async fn a_name_whose_pool_is_gone_is_free_again() {
    let Some(home) = Home::new() else { return };
    let (removed, other) = (home.cluster.fresh_pool(), home.cluster.fresh_pool());
    let made = home.make(apart(&home, &removed, "again")).await;
    let kept = home.make(apart(&home, &other, "kept")).await;
    remove_pool(&home, &removed);
    let list = || async {
        let all = ListRequest::default();
        let page = home.rbd.list_volumes(all).await.unwrap();
        let handles = page.entries.into_iter().map(|volume| volume.handle);
        handles.collect::<Vec<_>>()
    };
    // Of the pool's end, every client hears in its time.
    while list().await.contains(&made.handle) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    home.delete(&made.handle).await.unwrap();
    let anew = home.make(apart(&home, &other, "again")).await;
    assert_ne!(anew.handle, made.handle);
    home.delete(&anew.handle).await.unwrap();
    home.delete(&kept.handle).await.unwrap();
}

#[tokio::test]
async fn an_image_without_a_journal_entry_is_found_by_its_uuid() {
    let Some(home) = Home::new() else { return };
    let images = home.cluster.fresh_pool();
    let mut new = apart(&home, &images, "ceph-csi");
    let prefix = ("volumeNamePrefix".to_owned(), "team-".to_owned());
    new.parameters.extend([prefix]);
    let made = home.make(new).await;
    let entry = format!("csi.volume.{}", &made.handle[made.handle.len() - 36..]);
    let pool = home.io().cluster().ioctx(&*images, "").unwrap();
    let keys = pool.omap_list(&entry, "").unwrap();
    let keys: Vec<_> = keys.keys().map(String::as_str).collect();
    pool.omap_remove(&entry, &keys).unwrap();
    let grown = home.rbd.expand_volume(
        made.handle.clone(),
        Range {
            required: GIB,
            limit: 0,
        },
        home.secrets(),
    );
    assert_eq!(grown.await.unwrap(), GIB);
    home.delete(&made.handle).await.unwrap();
    assert_eq!(home.cluster.rbd(&["ls", &images]), "");
}

/// As ceph-csi enters a volume of `topologyConstrainedPools`.
#[tokio::test]
async fn the_key_of_a_volume_is_known_by_its_entry_in_the_journal_s_pool() {
    let Some(there) = VaultHome::new() else {
        return;
    };
    let VaultHome { home, vault } = &there;
    let images = home.cluster.fresh_pool();
    let new = moved_apart(there.volume("apart", "vault"), &images);
    let made = home.make(new).await;
    let entry = format!("csi.volume.{}", &made.handle[made.handle.len() - 36..]);
    let journal = home.io();
    let pool = journal.cluster().ioctx(&*images, "").unwrap();
    let keys = pool.omap_list(&entry, "").unwrap();
    let keys: Vec<_> = keys.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    journal.omap_set(&entry, &keys).unwrap();
    let names: Vec<_> = keys.iter().map(|(name, _)| *name).collect();
    pool.omap_remove(&entry, &names).unwrap();

    let store = store_over(home.dir.path(), None, PurgeTimes::default());
    let list = |from| {
        let all = ListRequest {
            from,
            max: usize::MAX,
            omitted: None,
        };
        let mut entries = store.list_volumes(&all).unwrap().into_iter();
        entries.find(|one| one.entry.handle == made.handle)
    };
    let token = list(None).expect("it is listed").token;
    assert!(list(Some(token)).is_none(), "it is listed again");

    let mut new = home.snapshot("moment", &made.handle);
    new.secrets = there.secrets();
    let snapshot = home.rbd.create_snapshot(new).await.unwrap().handle;
    let key = vault.passphrase(&made.handle);
    assert!(key.is_some());
    assert_eq!(vault.passphrase(&snapshot), key);
    let deleted = home.rbd.delete_snapshot(snapshot, there.secrets());
    deleted.await.unwrap();
    let deleted = home.rbd.delete_volume(made.handle.clone(), there.secrets());
    deleted.await.unwrap();
    assert_eq!(vault.passphrase(&made.handle), None);
    assert!(!journal.exists(&entry).unwrap() && !pool.exists(&entry).unwrap());
    let names = journal.omap_list("csi.volumes.default", "").unwrap();
    assert!(names.is_empty(), "{names:?}");
}

#[tokio::test]
async fn a_volume_outlives_the_pool_of_its_name() {
    let Some(home) = Home::new() else { return };
    let images = home.cluster.fresh_pool();
    let made = home.make(apart(&home, &images, "nameless")).await;
    remove_pool(&home, &home.pool);
    let range = Range {
        required: GIB,
        limit: 0,
    };
    let (handle, secrets) = (made.handle.clone(), home.secrets());
    let grown = home.rbd.expand_volume(handle, range, secrets).await;
    assert_eq!(grown.unwrap(), GIB);
    home.delete(&made.handle).await.unwrap();
    assert_eq!(home.cluster.rbd(&["ls", &images]), "");
}

#[tokio::test]
async fn a_renamed_pool_keeps_its_volumes() {
    let Some(home) = Home::new() else { return };
    let source = home.make(home.volume("source", MIB)).await;
    let new = home.snapshot("snapshot", &source.handle);
    let snapshot = home.rbd.create_snapshot(new).await.unwrap();
    let renamed = format!("{}-renamed", home.pool);
    home.cluster
        .ceph(&["osd", "pool", "rename", &home.pool, &renamed]);
    let range = Range {
        required: GIB,
        limit: 0,
    };
    let (handle, secrets) = (|| source.handle.clone(), || home.secrets());
    let grown = home.rbd.expand_volume(handle(), range, secrets()).await;
    assert_eq!(grown.unwrap(), GIB);
    let snapshot = snapshot.handle;
    let deleted = home.rbd.delete_snapshot(snapshot, secrets()).await;
    deleted.unwrap();
    home.delete(&source.handle).await.unwrap();
    assert_eq!(home.cluster.rbd(&["ls", &renamed]), "");
}

/// Jerasure takes two data chunks and a coding one at least, and the cluster of the tests has
/// one OSD: so a replicated pool stands for an erasure-coded one.
#[tokio::test]
async fn copies_have_their_data_in_the_data_pool() {
    let Some(home) = Home::new() else { return };
    let data = home.cluster.fresh_pool();
    let of_class = |name: &str| {
        let mut new = home.volume(name, MIB);
        let pool = ("dataPool".to_owned(), data.clone());
        new.parameters.extend([pool]);
        new
    };
    let source = home.make(of_class("source")).await;
    let new = home.snapshot("snapshot", &source.handle);
    home.rbd.create_snapshot(new).await.unwrap();
    let mut copy = of_class("copy");
    copy.source = Some(ContentSource::Volume(source.handle));
    home.make(copy).await;
    let images = home.images();
    // One is between the volume and its copy.
    assert_eq!(images.len(), 4, "{images:?}");
    for image in images {
        let spec = format!("{}/{image}", home.pool);
        let info = home.cluster.rbd(&["info", "--format=json", &spec]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["data_pool"], *data, "{info}");
    }
}

#[tokio::test]
async fn a_repeat_that_prefers_another_topology_finds_the_volume() {
    let Some(home) = Home::new() else { return };
    let (east, west) = (home.cluster.fresh_pool(), home.cluster.fresh_pool());
    let segment = |zone: &str| BTreeMap::from([("t.x/zone".to_owned(), zone.to_owned())]);
    let domain = |zone| serde_json::json!([{"domainLabel": "zone", "value": zone}]);
    let constrained = serde_json::json!([
        {"poolName": east, "domainSegments": domain("e")},
        {"poolName": west, "domainSegments": domain("w")},
    ]);
    // The journal is in the pool of the image, or in one for all.
    for has_pool in [false, true] {
        let preferring = |zone: &str, requisite: &[&str]| {
            let mut new = home.volume("moved", MIB);
            if !has_pool {
                new.parameters.remove("pool");
            }
            let parameter = "topologyConstrainedPools".to_owned();
            new.parameters.insert(parameter, constrained.to_string());
            new.accessibility = AccessibilityRequirements {
                requisite: requisite.iter().map(|zone| segment(zone)).collect(),
                preferred: vec![segment(zone)],
            };
            new
        };
        let made = home.make(preferring("e", &["e", "w"])).await;
        assert_eq!(made.context["pool"], east);
        assert_eq!(made.topology, segment("e"));
        assert_eq!(home.make(preferring("w", &["w", "e"])).await, made);
        let elsewhere = home.rbd.create_volume(preferring("w", &["w"])).await;
        assert_eq!(elsewhere.unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(home.cluster.rbd(&["ls", &west]), "");
        home.delete(&made.handle).await.unwrap();
        let anew = home.make(preferring("w", &["w"])).await;
        assert_eq!(anew.context["pool"], west);
        home.delete(&anew.handle).await.unwrap();
    }
}
