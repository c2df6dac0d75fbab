//! What a name's volume is made of, as its repeats ask for it.

use super::*;
use crate::{ceph::csi_format::handle::Handle, provision::NewGroupSnapshot};

/// A volume that has a snapshot.
struct Origins {
    home: Home,
    volume: ContentSource,
    snapshot: ContentSource,
}

impl Origins {
    async fn new() -> Option<Self> {
        let home = Home::new()?;
        let volume = home.make(home.volume("origin", MIB)).await;
        let new = home.snapshot("moment", &volume.handle);
        let snapshot = home.rbd.create_snapshot(new).await.unwrap();
        Some(Self {
            home,
            volume: ContentSource::Volume(volume.handle),
            snapshot: ContentSource::Snapshot(snapshot.handle),
        })
    }

    async fn create(
        &self,
        name: &str,
        source: Option<&ContentSource>,
    ) -> Result<VolumeInfo, ProvisionError> {
        let new = NewVolume {
            source: source.cloned(),
            ..self.home.volume(name, MIB)
        };
        self.home.rbd.create_volume(new).await
    }

    fn sources(&self) -> [Option<&ContentSource>; 3] {
        [None, Some(&self.volume), Some(&self.snapshot)]
    }

    /// Has the journal say as little of a volume as ceph-csi has it say.
    fn forget_origin(&self, volume: &VolumeInfo) {
        let entry = format!("csi.volume.{}", &volume.handle[volume.handle.len() - 36..]);
        let io = self.home.io();
        io.omap_remove(&entry, &["uring-csi.origin"]).unwrap();
    }
}

#[tokio::test]
async fn a_repeat_asks_for_the_same_source() {
    let Some(origins) = Origins::new().await else {
        return;
    };
    for (n, source) in origins.sources().into_iter().enumerate() {
        let name = format!("copy-{n}");
        let made = origins.create(&name, source).await.unwrap();
        for requested in origins.sources() {
            let repeat = origins.create(&name, requested).await;
            if requested == source {
                assert_eq!(repeat.unwrap(), made);
            } else {
                let refused = repeat.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
            }
        }
    }
}

#[tokio::test]
async fn a_source_in_another_cluster_is_refused_without_its_user() {
    let Some(origins) = Origins::new().await else {
        return;
    };
    let home = &origins.home;
    // Nothing answers there.
    let config = serde_json::json!([
        {"clusterID": "ceph", "monitors": &home.cluster.monitors},
        {"clusterID": "away", "monitors": ["127.0.0.1:1"]},
    ]);
    std::fs::write(home.dir.path().join("config.json"), config.to_string()).unwrap();
    let away = |handle: &str| {
        let handle: Handle = handle.parse().unwrap();
        let away = Handle::new("away", handle.pool_id(), handle.uuid());
        away.unwrap().to_string()
    };
    let [
        _,
        Some(ContentSource::Volume(volume)),
        Some(ContentSource::Snapshot(snapshot)),
    ] = origins.sources()
    else {
        panic!("a volume and a snapshot");
    };
    for source in [
        ContentSource::Volume(away(volume)),
        ContentSource::Snapshot(away(snapshot)),
    ] {
        let refused = origins.create("copy", Some(&source)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        assert!(refused.to_string().contains("\"away\""), "{refused}");
    }
    for class in [HashMap::new(), home.volume("v", MIB).parameters] {
        let new = NewGroupSnapshot {
            name: "group".to_owned(),
            volumes: vec![volume.clone(), away(volume)],
            parameters: class,
            secrets: home.secrets(),
        };
        let refused = home.rbd.create_group_snapshot(new).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
    }
}

#[tokio::test]
async fn the_source_of_a_volume_of_ceph_csi_is_known_by_its_parent() {
    let Some(origins) = Origins::new().await else {
        return;
    };
    for (n, source) in origins.sources().into_iter().enumerate() {
        let name = format!("copy-{n}");
        let made = origins.create(&name, source).await.unwrap();
        origins.forget_origin(&made);
        for requested in origins.sources() {
            match origins.create(&name, requested).await {
                Ok(repeat) => assert_eq!((repeat, requested), (made.clone(), source)),
                Err(refused) => {
                    assert_ne!(requested, source, "{refused}");
                    assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_copy_that_ceph_csi_reserved_is_finished() {
    const RESERVED: &str = "36eaa70e-eb63-11ea-8e79-246e96907f74";
    let Some(origins) = Origins::new().await else {
        return;
    };
    let (io, entry) = (origins.home.io(), format!("csi.volume.{RESERVED}"));
    let image = format!("csi-vol-{RESERVED}");
    io.omap_set("csi.volumes.default", &[("csi.volume.begun", RESERVED)])
        .unwrap();
    io.omap_set(
        &entry,
        &[("csi.volname", "begun"), ("csi.imagename", &image)],
    )
    .unwrap();
    // ceph-csi may be at work on it.
    let mut store = store_over(origins.home.dir.path(), None, PurgeTimes::default());
    store.quiet_for = QUIET_FOR * 1000;
    let new = NewVolume {
        source: Some(origins.snapshot.clone()),
        ..origins.home.volume("begun", MIB)
    };
    let store = Stores::new(None, Some(store.into()), None, &Lanes::new(4));
    // By a clock that is ahead, too: the year 2100.
    for at in [None, Some("4102444800")] {
        if let Some(at) = at {
            origins.home.rados(&["touch", &entry, at]);
        }
        let left = store.create_volume(new.clone()).await.unwrap_err();
        assert_eq!(left.kind(), ErrorKind::InUse, "{left}");
        assert!(left.to_string().contains(&image), "{left}");
    }

    let made = origins.create("begun", Some(&origins.snapshot)).await;
    let made = made.unwrap();
    assert!(made.handle.ends_with(RESERVED), "{}", made.handle);
    assert_eq!(made.source.as_ref(), Some(&origins.snapshot));
    let spec = format!("{}/{image}", origins.home.pool);
    let info = origins.home.cluster.rbd(&["info", &spec]);
    assert!(info.contains("parent: "), "{info}");
    let repeat = origins.create("begun", Some(&origins.snapshot)).await;
    assert_eq!(repeat.unwrap(), made);
}
