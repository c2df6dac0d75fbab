//! The mapped images that a stage file of ceph-csi may describe.

use std::{collections::HashMap, fs};

use serde_json::json;

use super::*;
use crate::{
    ceph::{
        client::{rados::Timeouts, rbd},
        testing::{self, TestPool},
    },
    supervisor::client::{ClientError, Refusal},
};

const KNOWN: [&str; 3] = ["ours", "theirs", "mirror"];
const HANDLE: &str = "0001-0004-ours-0000000000000004-36eaa70e-eb63-11ea-8e79-246e96907f74";

/// A node that knows three clusters.
struct Home {
    dir: tempfile::TempDir,
    images: CephImages,
}

impl Home {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let entries = KNOWN.map(|id| json!({"clusterID": id, "monitors": [monitor_of(id)]}));
        fs::write(at("config.json"), json!(entries).to_string()).unwrap();
        let images = CephImages {
            clusters: Some(Arc::new(Clusters::new(at("config.json")))),
            mappings: Arc::new(Mappings::new(at("cluster-mapping.json"))),
            kms: KmsConfig {
                config: at("kms.json"),
                secrets: at("kms-secrets"),
                token: at("kms-token"),
            },
            connections: Connections::new(Timeouts::default()).unwrap(),
            mapper: Mapper::open(at("map")).unwrap(),
            supervisor: None,
            location: CrushLocation::default(),
            format_markers: NodeFormatMarkers::open(at("mkfs")).unwrap(),
            this_node: ThisNode {
                id: "node".to_owned(),
                boot_id: "boot".to_owned(),
            },
        };
        Self { dir, images }
    }

    /// The clusters fail over to each other.
    fn fail_over(&self) {
        let mapping = json!([{
            "clusterIDMapping": {"ours": "mirror"},
            "RBDPoolIDMapping": [{"4": "7"}],
        }]);
        let file = self.dir.path().join("cluster-mapping.json");
        fs::write(file, mapping.to_string()).unwrap();
    }

    fn belongs_to_other_volume(&self, mapped: &Mapped) -> bool {
        let stage_file = br#"{"Version": 3, "pool": "pool", "image": "image"}"#;
        let source = CephSource::from_stage_file(stage_file, HANDLE).unwrap();
        self.images.belongs_to_other_volume(mapped, HANDLE, &source)
    }
}

fn monitor_of(cluster: &str) -> String {
    let host = KNOWN.iter().position(|known| *known == cluster);
    format!("192.0.2.{}:6789", host.unwrap_or(9))
}

/// An image with the names of the stage file, mapped in a cluster.
fn mapped(cluster: &str, pool_id: i64) -> Mapped {
    Mapped {
        id: 0,
        image: ImageSpec {
            cluster_id: String::new(),
            pool: "pool".to_owned(),
            namespace: String::new(),
            name: "image".to_owned(),
            snapshot: None,
        },
        identity: krbd::MappedIds {
            fsid: cluster.to_owned(),
            pool_id,
            image_id: "1".to_owned(),
            snapshot: None,
        },
        config: krbd::mapped::MapConfig {
            monitors: vec![monitor_of(cluster).parse().unwrap()],
            ..krbd::mapped::MapConfig::default()
        },
    }
}

#[test]
fn an_image_of_another_pool_or_cluster_belongs_to_another_volume() {
    let home = Home::new();
    assert!(!home.belongs_to_other_volume(&mapped("ours", 4)));
    assert!(home.belongs_to_other_volume(&mapped("ours", 7)));
    assert!(home.belongs_to_other_volume(&mapped("theirs", 4)));
    // Monitors that the configuration does not name may have been the cluster's.
    assert!(!home.belongs_to_other_volume(&mapped("unknown", 4)));
    assert!(home.belongs_to_other_volume(&mapped("unknown", 7)));
}

#[test]
fn after_a_fail_over_the_mirror_belongs_to_the_volume() {
    let home = Home::new();
    assert!(home.belongs_to_other_volume(&mapped("mirror", 7)));
    home.fail_over();
    for (cluster, pool_id, is_its) in [
        ("mirror", 7, true),
        ("ours", 4, true),
        ("mirror", 4, false),
        ("ours", 7, false),
        ("theirs", 4, false),
        ("theirs", 7, false),
    ] {
        let belongs_to_other_volume = home.belongs_to_other_volume(&mapped(cluster, pool_id));
        assert_eq!(belongs_to_other_volume, !is_its, "{cluster} {pool_id}");
    }
}

#[test]
fn a_device_of_the_other_cluster_is_looked_for_there() {
    let home = Home::new();
    home.fail_over();
    let stage_file = br#"{"Version": 3, "pool": "pool", "image": "image"}"#;
    let source = CephSource::from_stage_file(stage_file, HANDLE).unwrap();
    let key = "AQD9jwFrAAAAABAAuX/tNCvFFjDZjYv/o18bHA==";
    let secrets = [("userID", "csi"), ("userKey", key)];
    let secrets = secrets.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let secrets: Secrets = HashMap::from(secrets).into();
    let refused = |refusal| {
        let error = ClientError::Refused(refusal, "why".to_owned());
        Err(CephImageError::Supervisor(error))
    };
    let unmapped = || {
        let image = "image".to_owned();
        Err(CephImageError::Unmapped { image })
    };
    for (by_krbd, is_mirrored) in [(true, true), (true, false), (false, true), (false, false)] {
        let work = |known: &Known<'_>| match &*known.cluster.cluster_id {
            "ours" if by_krbd => unmapped(),
            "ours" => refused(Refusal::Elsewhere),
            _ if is_mirrored => Ok(()),
            _ => refused(Refusal::NotFound),
        };
        match home
            .images
            .bind(&source)
            .where_it_is(HANDLE, &secrets, work)
        {
            Ok((known, ())) => assert_eq!(known.cluster.cluster_id, "mirror"),
            // What became of the device says more than a cluster without the image.
            Err(error) => assert!(error.has_other_device() && !is_mirrored, "{error}"),
        }
    }
}

#[test]
fn a_mark_names_the_volume_of_a_mapped_image() {
    let home = Home::new();
    for (volume_id, is_its) in [(HANDLE, true), ("another", false)] {
        let mut mapped = mapped("theirs", 7);
        mapped.config.mark = Some(krbd::mapped::Mark::new("theirs", volume_id));
        assert_eq!(home.belongs_to_other_volume(&mapped), !is_its);
    }
}

/// The cluster of the other site has the same id, and its pool another.
#[test]
fn an_image_is_mapped_under_the_pool_s_id_in_the_cluster_that_has_it() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let (io, cluster) = (&pool.io, &pool.cluster);
    rbd::create(io, "image", 1 << 20, &rbd::ImageOptions::default()).unwrap();
    let home = Home::new();
    let at = |name: &str| home.dir.path().join(name);
    let entry = json!({
        "clusterID": "ours",
        "monitors": cluster.monitors,
        "rbd": {"radosNamespace": io.namespace()},
    });
    fs::write(at("config.json"), json!([entry]).to_string()).unwrap();
    let here = io.pool_id();
    let there = here + 1000;
    let stage_file = json!({"Version": 3, "pool": io.pool(), "image": "image"}).to_string();
    let handle = format!("0001-0004-ours-{there:016x}-36eaa70e-eb63-11ea-8e79-246e96907f74");
    let source = CephSource::from_stage_file(stage_file.as_bytes(), &handle).unwrap();
    let bound = home.images.bind(&source);
    let user = testing::credentials(cluster);
    let secrets = [
        ("userID", user.user.as_str()),
        ("userKey", user.key.reveal()),
    ];
    let secrets = secrets.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let secrets: Secrets = HashMap::from(secrets).into();
    // Without a mapping for this pool, its image is taken as the handle names it.
    for (mapped, taken) in [(there, here), (there + 1, there)] {
        let mapping = json!([{
            "clusterIDMapping": {"ours": "ours"},
            "RBDPoolIDMapping": [{mapped.to_string(): here.to_string()}],
        }]);
        fs::write(at("draft"), mapping.to_string()).unwrap();
        fs::rename(at("draft"), at("cluster-mapping.json")).unwrap();
        let work = |known: &Known<'_>| bound.refuse_other_pool(known);
        let (known, ()) = bound.where_it_is(&handle, &secrets, work).unwrap();
        assert_eq!(known.pool_id, Some(taken));
    }
}
