//! StorageClass parameters and configuration, and the images that result.

use std::{fmt::Write as _, fs};

use serde_json::json;
use testkit::{Controller, MIB, TestCluster, eventually, from_volume, refused, story};
use tonic::Code::{Aborted, NotFound, ResourceExhausted};
use uring_csi::proto::csi::{CreateVolumeRequest, Topology, TopologyRequirement};

use super::{CEPH, Ceph, GIB};

fn with(mut request: CreateVolumeRequest, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    let own = parameters
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    request.parameters.extend(own);
    request
}

fn place(segments: &[(&str, &str)]) -> Topology {
    let own = |(key, value): &(&str, &str)| {
        let key = format!("topology.block.uring-csi.dev/{key}");
        (key, (*value).to_owned())
    };
    Topology {
        segments: segments.iter().map(own).collect(),
    }
}

/// The requirement of a node there.
fn at(zone: &str) -> TopologyRequirement {
    TopologyRequirement {
        requisite: vec![place(&[("node", "node-a"), ("zone", zone)])],
        preferred: Vec::new(),
    }
}

#[test]
fn an_image_has_the_properties_of_its_class() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let data = ceph.cluster.fresh_pool();
        let request = with(
            ceph.claim("v", 64 * MIB),
            &[
                ("dataPool", &data),
                ("imageFeatures", "layering,exclusive-lock"),
                ("objectSize", "8M"),
                ("stripeUnit", "64K"),
                ("stripeCount", "4"),
                ("volumeNamePrefix", "team-"),
            ],
        );
        let made = controller.create(request).await.unwrap();
        let image = &made.volume_context["imageName"];
        assert!(image.starts_with("team-"));
        assert_eq!(made.volume_context["dataPool"], data);
        let info = ceph.info(&format!("{}/{image}", ceph.pool));
        assert_eq!(info["data_pool"], data.as_str());
        assert_eq!(info["object_size"], 8 << 20);
        assert_eq!(
            (&info["stripe_unit"], &info["stripe_count"]),
            (&json!(65536), &json!(4))
        );
        controller.delete(&made.volume_id).await.unwrap();
    });
}

#[test]
fn an_unknown_parameter_is_ignored_and_named_once() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        for _ in 0..2 {
            let request = with(ceph.claim("v", MIB), &[("colour", "red")]);
            let made = controller.create(request).await.unwrap();
            assert_eq!(made.volume_context["colour"], "red");
        }
        controller.wait_for_log("colour").await;
        assert_eq!(controller.log().matches("colour").count(), 1);
    });
}

#[test]
fn images_and_journal_may_be_in_pools_apart() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let east = ceph.cluster.fresh_pool();
        let constrained = json!([{"poolName": east,
            "domainSegments": [{"domainLabel": "zone", "value": "east"}]}]);
        let request = |name: &str, zone: &str| CreateVolumeRequest {
            accessibility_requirements: Some(at(zone)),
            ..with(
                ceph.claim(name, MIB),
                &[("topologyConstrainedPools", &constrained.to_string())],
            )
        };
        let made = controller.create(request("v", "east")).await.unwrap();
        assert_eq!(made.accessible_topology, [place(&[("zone", "east")])]);
        let context = &made.volume_context;
        assert_eq!(
            (&context["pool"], &context["journalPool"]),
            (&east, &ceph.pool)
        );
        // The name is in the journal's pool, and leads to the image's.
        let keys = ceph.rados(&["listomapvals", "csi.volumes.default"]);
        assert!(keys.contains("csi.volume.v"), "{keys}");
        assert!(ceph.images().is_empty());
        refused(
            controller.create(request("w", "west")).await,
            ResourceExhausted,
            &["west"],
        );
        let snapshot = controller.snapshot(&made.volume_id, "s").await.unwrap();
        controller.expand(&made.volume_id, GIB).await.unwrap();
        controller
            .delete_snapshot(&snapshot.snapshot_id)
            .await
            .unwrap();
        controller.delete(&made.volume_id).await.unwrap();
        assert_eq!(ceph.cluster.rbd(&["ls", &east]), "");
        assert_eq!(ceph.rados(&["listomapkeys", "csi.volumes.default"]), "");
    });
}

#[test]
fn a_cluster_may_be_a_namespace_and_there_may_be_several() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let other = TestCluster::own().expect("where there is one, there is another");
        let namespace = format!("{}/tenant", ceph.pool);
        ceph.cluster.rbd(&["namespace", "create", &namespace]);
        let monitors = &ceph.cluster.monitors;
        let clusters = json!([
            {"clusterID": CEPH, "monitors": monitors},
            {"clusterID": "tenant", "monitors": monitors, "rbd": {"radosNamespace": "tenant"}},
            {"clusterID": "other", "monitors": other.monitors},
        ]);
        fs::write(&ceph.config, clusters.to_string()).unwrap();
        let mut controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        // One name in each, none of which hides another.
        let in_tenant = with(ceph.claim("v", MIB), &[("clusterID", "tenant")]);
        let tenant = controller.create(in_tenant).await.unwrap();
        assert_eq!(tenant.volume_context["radosNamespace"], "tenant");
        let plain = controller.create(ceph.claim("v", MIB)).await.unwrap();
        let image = &tenant.volume_context["imageName"];
        assert_eq!(ceph.cluster.rbd(&["ls", &namespace]).trim(), image);
        assert_eq!(ceph.images().len(), 1);

        let mut copy = with(ceph.claim("copy", MIB), &[("clusterID", "tenant")]);
        copy.volume_content_source = Some(from_volume(&plain.volume_id));
        let refusal = controller.create(copy).await.unwrap_err();
        assert!(refusal.message().contains("tenant"), "{refusal:?}");
        controller.delete(&plain.volume_id).await.unwrap();
        controller.delete(&tenant.volume_id).await.unwrap();
        assert_eq!(ceph.cluster.rbd(&["ls", &namespace]), "");

        controller
            .secrets
            .insert("userKey".to_owned(), other.key.clone());
        let there = with(
            ceph.claim("v", MIB),
            &[("clusterID", "other"), ("pool", &other.pool)],
        );
        let there = controller.create(there).await.unwrap();
        assert_eq!(other.rbd(&["ls"]).lines().count(), 1);
        controller.delete(&there.volume_id).await.unwrap();
    });
}

#[test]
fn names_may_be_any_text() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let mut made = std::collections::BTreeMap::new();
        for name in [
            "../../etc",
            "a/b",
            ".",
            "größe 日本",
            "-rf",
            "a",
            "A",
            " ",
            "ü\u{301}🦀",
        ] {
            let volume = controller.create(ceph.claim(name, MIB)).await.unwrap();
            let again = controller.create(ceph.claim(name, MIB)).await.unwrap();
            assert_eq!(again, volume, "{name}");
            assert_eq!(made.insert(volume.volume_id, name), None);
        }
        assert_eq!(ceph.images().len(), made.len());
        for id in made.keys() {
            controller.delete(id).await.unwrap();
        }
        assert!(ceph.images().is_empty());
    });
}

#[test]
fn an_in_tree_rbd_volume_grows_and_is_deleted() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let monitors = &ceph.cluster.monitors;
        let hash = "7982de6a23b77bce50b1ba9f2e879cce";
        ceph.configure(&[(CEPH, monitors), (hash, monitors)]);
        let uuid = "e0b45b52-7e09-47d3-8f1b-806995fa4412";
        // The pool's name is in the handle twice as long, and a handle has 128 bytes.
        let pool = &ceph.pool[..20];
        ceph.cluster.ceph(&["osd", "pool", "create", pool]);
        ceph.cluster.rbd(&["pool", "init", pool]);
        let image = format!("{pool}/kubernetes-dynamic-pvc-{uuid}");
        ceph.cluster.rbd(&["create", "-s", "64M", &image]);
        let mut handle = format!("mig_mons-{hash}_image-{uuid}_");
        for byte in pool.bytes() {
            write!(handle, "{byte:02x}").unwrap();
        }
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        controller.expand(&handle, GIB).await.unwrap();
        assert_eq!(ceph.info(&image)["size"], GIB);
        controller.delete(&handle).await.unwrap();
        controller.delete(&handle).await.unwrap();
        assert_eq!(ceph.cluster.rbd(&["ls", pool]), "");
        refused(controller.expand(&handle, GIB).await, NotFound, &[&handle]);
    });
}

#[test]
fn a_long_chain_of_clones_is_flattened_and_can_be_copied() {
    story(async |sandbox| {
        let Some(ceph) = Ceph::new(sandbox) else {
            return;
        };
        let controller = Controller::start_with(sandbox, ceph.setup(sandbox)).await;
        let first = controller.create(ceph.claim("v0", 8 * MIB)).await.unwrap();
        let mut all = vec![first.volume_id];
        for number in 1..=8 {
            let mut request = ceph.claim(&format!("v{number}"), 8 * MIB);
            request.volume_content_source = Some(from_volume(all.last().expect("a volume")));
            let copied = async || match controller.create(request.clone()).await {
                Ok(volume) => Some(volume),
                Err(status) => {
                    assert_eq!(status.code(), Aborted, "{status:?}");
                    assert!(status.message().contains("flattened"), "{status:?}");
                    None
                }
            };
            let copy = eventually("the chain has been cut", copied).await;
            all.push(copy.volume_id);
        }
        // Eight copies of copies would be sixteen links.
        let mut links = 0;
        let last = all.last().expect("a volume");
        let mut image = format!("{}/csi-vol-{}", ceph.pool, &last[last.len() - 36..]);
        while let Some(parent) = ceph.info(&image)["parent"]["image"].as_str() {
            links += 1;
            image = format!("{}/{parent}", ceph.pool);
        }
        assert!(links <= 8, "{links} links");
        for id in &all {
            controller.delete(id).await.unwrap();
        }
    });
}
