use controller_server::Controller as _;
use tonic::{Code, Request};
use wire::{
    VolumeCapability, controller_server,
    volume_capability::{AccessMode, AccessType, BlockVolume, access_mode::Mode},
};

use super::*;
use crate::{
    lane::Lanes,
    pool::{Pool, Pools, Scope},
    provision::images::{Copies, ImageStore},
};

const KEY: &str = "topology.test.dev/node";

/// A controller beside node-a, over one local pool.
fn beside_a_node(alpha: bool) -> (tempfile::TempDir, Controller) {
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool {
        name: "disk".to_owned(),
        dir: dir.path().to_owned(),
        scope: Scope::Local,
        mounted: false,
    };
    let pools = Pools::new([pool]).unwrap();
    let node_id = Some("node-a".to_owned());
    let images = ImageStore::new(
        pools,
        node_id,
        "boot".to_owned(),
        Copies::new(4, 1),
        &Lanes::new(2),
    );
    let stores = Stores::new(Some(images.into()), None, None, &Lanes::new(1));
    let controller = Controller::new(stores, "test.dev", Some("node-a"), alpha);
    (dir, controller)
}

fn topology(segments: &[(&str, &str)]) -> Topology {
    let owned = segments
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    Topology {
        segments: owned.collect(),
    }
}

fn block(name: &str, requisite: Vec<Topology>) -> wire::CreateVolumeRequest {
    wire::CreateVolumeRequest {
        name: name.to_owned(),
        volume_capabilities: vec![VolumeCapability {
            access_type: Some(AccessType::Block(BlockVolume {})),
            access_mode: Some(AccessMode {
                mode: Mode::SingleNodeWriter.into(),
            }),
        }],
        accessibility_requirements: Some(TopologyRequirement {
            requisite,
            preferred: Vec::new(),
        }),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_local_volume_satisfies_the_requested_topology() {
    let (_dir, controller) = beside_a_node(false);
    let upper = KEY.to_uppercase();
    let fits = [
        vec![],
        vec![topology(&[])],
        vec![
            topology(&[(KEY, "node-b")]),
            topology(&[(&upper, "node-a")]),
        ],
        vec![topology(&[
            (KEY, "node-a"),
            ("topology.test.dev/zone", "z"),
        ])],
    ];
    for (n, requisite) in fits.into_iter().enumerate() {
        let request = Request::new(block(&format!("v{n}"), requisite));
        let made = controller.create_volume(request).await.unwrap();
        let volume = made.into_inner().volume.unwrap();
        assert_eq!(volume.accessible_topology, [topology(&[(KEY, "node-a")])]);
    }
    let unfit = [
        topology(&[(KEY, "node-b")]),
        topology(&[(KEY, "node-b"), ("topology.test.dev/zone", "z")]),
        topology(&[("topology.test.dev/zone", "z")]),
        topology(&[(KEY, "node-a"), ("zone", "z")]),
    ];
    for requisite in unfit {
        let request = Request::new(block("unfit", vec![requisite.clone()]));
        let status = controller.create_volume(request).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let request = wire::GetCapacityRequest {
            accessible_topology: Some(requisite),
            ..Default::default()
        };
        let answer = controller
            .get_capacity(Request::new(request))
            .await
            .unwrap();
        assert_eq!(answer.into_inner().available_capacity, 0);
    }
}

#[tokio::test]
async fn growth_of_another_node_s_volume_is_left_to_that_node() {
    let (_dir, controller) = beside_a_node(false);
    let node_b = crate::pool::handle::NodeHash::of("node-b");
    let handle = format!("vol.local-{node_b}.disk.{}", uuid::Uuid::nil());
    let request = |required_bytes| wire::ControllerExpandVolumeRequest {
        volume_id: handle.clone(),
        capacity_range: Some(CapacityRange {
            required_bytes,
            limit_bytes: 0,
        }),
        ..Default::default()
    };
    let answer = controller
        .controller_expand_volume(Request::new(request(1 << 21)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (answer.capacity_bytes, answer.node_expansion_required),
        (1 << 21, true)
    );
    let nothing = controller
        .controller_expand_volume(Request::new(request(0)))
        .await;
    assert_eq!(nothing.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_lost_image_shows_in_the_health() {
    let (dir, controller) = beside_a_node(false);
    for name in ["well", "lost"] {
        let made = controller
            .create_volume(Request::new(block(name, vec![])))
            .await;
        let volume = made.unwrap().into_inner().volume.unwrap();
        if name == "lost" {
            std::fs::remove_file(dir.path().join(&volume.volume_context["image"])).unwrap();
        }
    }
    let request = Request::new(wire::ControllerListVolumeHealthRequest::default());
    let list = controller.controller_list_volume_health(request).await;
    let entries = list.unwrap().into_inner().entries;
    let counts: Vec<_> = entries.iter().map(|e| e.health_statuses.len()).collect();
    assert_eq!(counts, [0, 1]);
}

#[tokio::test]
async fn alpha_capabilities_are_announced_on_request() {
    for (alpha, count) in [(false, 9), (true, 12)] {
        let (_dir, controller) = beside_a_node(alpha);
        let request = Request::new(wire::ControllerGetCapabilitiesRequest {});
        let answer = controller.controller_get_capabilities(request).await;
        assert_eq!(answer.unwrap().into_inner().capabilities.len(), count);
    }
}

#[test]
fn the_metrics_announce_every_measured_call() {
    let source = concat!(
        include_str!("service.rs"),
        include_str!("groups.rs"),
        include_str!("blocks.rs")
    );
    let calls = source.split("answered(").skip(1);
    let named: Vec<_> = calls
        .filter_map(|after| after.trim_start().strip_prefix('"')?.split('"').next())
        .collect();
    assert_eq!(named, METHODS);
}
