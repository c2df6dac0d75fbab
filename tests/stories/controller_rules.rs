//! The demands of the CSI specification on each call of the Controller service.

use std::{collections::HashMap, time::Duration};

use testkit::{
    Controller, ControllerSetup, MIB, Mode, Sandbox, Volume, claim, from_snapshot, from_volume,
    refused, skip_test, story,
};
use tonic::{
    Code::{
        Aborted, AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, OutOfRange,
        Unavailable,
    },
    Request,
};
use uring_csi::proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest,
    DeleteSnapshotRequest, DeleteVolumeRequest, GetCapacityRequest, ListSnapshotsRequest,
    ListVolumesRequest, ValidateVolumeCapabilitiesRequest,
};

/// Puts one defect into a request.
type Spoil = fn(&mut CreateVolumeRequest);

fn request(name: &str) -> CreateVolumeRequest {
    claim(
        name,
        "main",
        &Volume::filesystem("any", "ext4").capability,
        64 * MIB,
    )
}

/// The images in pool `main`.
fn images(sandbox: &Sandbox) -> usize {
    testkit::files_below(&sandbox.pool("main"))
        .iter()
        .filter(|file| std::fs::metadata(file).is_ok_and(|found| found.len() >= MIB))
        .count()
}

#[test]
fn create_refuses_missing_and_oversized_fields() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let wrong: &[(&str, Spoil)] = &[
            ("name", |r| r.name.clear()),
            ("name", |r| r.name = "x".repeat(129)),
            ("name", |r| r.name = "a\u{7}b".to_owned()),
            ("volume_capabilities", |r| r.volume_capabilities.clear()),
            ("access_mode", |r| {
                r.volume_capabilities[0].access_mode = None;
            }),
            ("access_type", |r| {
                r.volume_capabilities[0].access_type = None;
            }),
            ("parameters", |r| {
                r.parameters.insert("k".to_owned(), "v".repeat(4096));
            }),
            ("secrets", |r| {
                r.secrets.insert("k".to_owned(), "v".repeat(4096));
            }),
            ("colour", |r| {
                r.parameters.insert("colour".to_owned(), "red".to_owned());
            }),
            ("none", |r| {
                r.parameters.insert("pool".to_owned(), "none".to_owned());
            }),
            ("zfs", |r| {
                r.volume_capabilities = vec![Volume::filesystem("any", "zfs").capability];
            }),
        ];
        for (word, spoil) in wrong {
            let mut request = request("wrong");
            spoil(&mut request);
            refused(controller.create(request).await, InvalidArgument, &[word]);
        }
        for (required_bytes, limit_bytes, code) in [
            (-1, 0, InvalidArgument),
            (2 << 20, 1 << 20, InvalidArgument),
            (i64::MAX, 0, OutOfRange),
            (0, 1, OutOfRange),
        ] {
            let request = CreateVolumeRequest {
                capacity_range: Some(CapacityRange {
                    required_bytes,
                    limit_bytes,
                }),
                ..request("range")
            };
            refused(controller.create(request).await, code, &[]);
        }
        assert_eq!(images(sandbox), 0);
    });
}

#[test]
fn a_name_is_one_volume() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let made = controller.create(request("name")).await.unwrap();
        assert!(made.volume_id.len() <= 128);
        assert_eq!(u64::try_from(made.capacity_bytes).unwrap(), 64 * MIB);
        // Kubernetes' own parameters never make it another request.
        let mut again = request("name");
        again
            .parameters
            .insert("csi.storage.k8s.io/pvc/name".to_owned(), "claim".to_owned());
        assert_eq!(controller.create(again).await.unwrap(), made);

        let larger = claim(
            "name",
            "main",
            &request("").volume_capabilities[0],
            128 * MIB,
        );
        refused(controller.create(larger).await, AlreadyExists, &["name"]);
        let source = controller.create(request("source")).await.unwrap();
        let copy = CreateVolumeRequest {
            volume_content_source: Some(from_volume(&source.volume_id)),
            ..request("name")
        };
        refused(controller.create(copy).await, AlreadyExists, &["name"]);
        assert_eq!(images(sandbox), 2);

        // The same name may be used again for a new volume.
        controller.delete(&made.volume_id).await.unwrap();
        let new = controller.create(request("name")).await.unwrap();
        assert_ne!(new.volume_id, made.volume_id);
    });
}

#[test]
fn names_may_be_any_text() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let mut ids = std::collections::HashSet::new();
        for name in ["../../etc", "a/b", ".", "größe 日本", "-rf", "a", "A", " "] {
            let made = controller.create(request(name)).await.unwrap();
            assert!(ids.insert(made.volume_id), "{name}");
        }
        assert_eq!(images(sandbox), ids.len());
        for id in ids {
            controller.delete(&id).await.unwrap();
        }
        assert_eq!(images(sandbox), 0);
    });
}

#[test]
fn unknown_volumes_are_not_found_and_count_as_deleted() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        for id in ["never-ours", "csi-vol-1", "../main"] {
            controller.delete(id).await.unwrap();
            controller.delete_snapshot(id).await.unwrap();
            refused(controller.expand(id, 64 * MIB).await, NotFound, &[id]);
            refused(controller.snapshot(id, "snap").await, NotFound, &[id]);
            for source in [from_volume(id), from_snapshot(id)] {
                let request = CreateVolumeRequest {
                    volume_content_source: Some(source),
                    ..request("copy")
                };
                refused(controller.create(request).await, NotFound, &[id]);
            }
        }
        let mut client = controller.client();
        let answer = client.delete_volume(DeleteVolumeRequest::default()).await;
        refused(answer, InvalidArgument, &["volume_id"]);
        let answer = client
            .delete_snapshot(DeleteSnapshotRequest::default())
            .await;
        refused(answer, InvalidArgument, &["snapshot_id"]);
        let answer = client
            .create_snapshot(CreateSnapshotRequest::default())
            .await;
        refused(answer, InvalidArgument, &["source_volume_id"]);
        let answer = client
            .controller_expand_volume(ControllerExpandVolumeRequest::default())
            .await;
        refused(answer, InvalidArgument, &["volume_id"]);
    });
}

#[test]
fn capabilities_are_confirmed_or_refused_with_the_reason() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let made = controller.create(request("v")).await.unwrap();
        let ask = async |capability, volume_id: &str| {
            let message = ValidateVolumeCapabilitiesRequest {
                volume_id: volume_id.to_owned(),
                volume_context: made.volume_context.clone(),
                volume_capabilities: vec![capability],
                ..Default::default()
            };
            controller
                .client()
                .validate_volume_capabilities(message)
                .await
        };
        let good = Volume::filesystem("any", "ext4").capability;
        let answer = ask(good.clone(), &made.volume_id)
            .await
            .unwrap()
            .into_inner();
        let confirmed = answer.confirmed.expect("confirmed");
        assert_eq!(confirmed.volume_capabilities, std::slice::from_ref(&good));

        let bad = Volume::filesystem("any", "ext4").mode(Mode::MultiNodeMultiWriter);
        let answer = ask(bad.capability, &made.volume_id)
            .await
            .unwrap()
            .into_inner();
        assert!(
            answer.confirmed.is_none() && !answer.message.is_empty(),
            "{answer:?}"
        );
        refused(ask(good, "never-ours").await, NotFound, &["never-ours"]);

        let bad = Volume::filesystem("any", "ext4").mode(Mode::MultiNodeMultiWriter);
        let shared = claim("shared", "main", &bad.capability, 64 * MIB);
        refused(controller.create(shared).await, InvalidArgument, &[]);
    });
}

#[test]
fn lists_come_in_pages() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let mut made = Vec::new();
        for number in 0..5 {
            let volume = controller
                .create(request(&format!("v{number}")))
                .await
                .unwrap();
            controller
                .snapshot(&volume.volume_id, &format!("s{number}"))
                .await
                .unwrap();
            made.push(volume.volume_id);
        }
        let mut listed = Vec::new();
        let mut token = String::new();
        loop {
            let message = ListVolumesRequest {
                max_entries: 2,
                starting_token: token,
            };
            let page = controller
                .client()
                .list_volumes(message)
                .await
                .unwrap()
                .into_inner();
            assert!(page.entries.len() <= 2);
            listed.extend(
                page.entries
                    .into_iter()
                    .filter_map(|entry| Some(entry.volume?.volume_id)),
            );
            token = page.next_token;
            if token.is_empty() {
                break;
            }
        }
        made.sort();
        listed.sort();
        assert_eq!(listed, made);

        let snapshots = async |message: ListSnapshotsRequest| {
            controller
                .client()
                .list_snapshots(message)
                .await
                .map(|answer| {
                    let page = answer.into_inner();
                    page.entries
                        .into_iter()
                        .filter_map(|entry| entry.snapshot)
                        .collect::<Vec<_>>()
                })
        };
        let all = snapshots(ListSnapshotsRequest::default()).await.unwrap();
        assert_eq!(all.len(), 5);
        let of_source = snapshots(ListSnapshotsRequest {
            source_volume_id: made[0].clone(),
            ..Default::default()
        });
        assert_eq!(of_source.await.unwrap().len(), 1);
        let by_id = snapshots(ListSnapshotsRequest {
            snapshot_id: all[0].snapshot_id.clone(),
            ..Default::default()
        });
        assert_eq!(by_id.await.unwrap(), [all[0].clone()]);
        for unknown in ["never-ours", &made[0]] {
            let none = snapshots(ListSnapshotsRequest {
                snapshot_id: unknown.to_owned(),
                ..Default::default()
            });
            assert!(none.await.unwrap().is_empty());
        }
        let bad = "no such token".to_owned();
        let message = ListVolumesRequest {
            max_entries: 0,
            starting_token: bad.clone(),
        };
        refused(
            controller.client().list_volumes(message).await,
            Aborted,
            &[],
        );
        let message = ListSnapshotsRequest {
            starting_token: bad,
            ..Default::default()
        };
        refused(snapshots(message).await, Aborted, &[]);
        let message = ListVolumesRequest {
            max_entries: -1,
            ..Default::default()
        };
        refused(
            controller.client().list_volumes(message).await,
            InvalidArgument,
            &["max_entries"],
        );
    });
}

#[test]
fn capacity_is_that_of_the_pool() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let message = GetCapacityRequest {
            parameters: HashMap::from([("pool".to_owned(), "main".to_owned())]),
            ..Default::default()
        };
        let answer = controller
            .client()
            .get_capacity(message)
            .await
            .unwrap()
            .into_inner();
        let pool = rustix::fs::statvfs(sandbox.pool("main")).unwrap();
        let free = i64::try_from(pool.f_bavail * pool.f_frsize).unwrap();
        assert!(answer.available_capacity > 0 && answer.available_capacity <= free);
    });
}

#[test]
fn growth_is_idempotent_and_never_shrinks() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let made = controller.create(request("v")).await.unwrap();
        for _ in 0..2 {
            let (bytes, node_has_a_part) =
                controller.expand(&made.volume_id, 128 * MIB).await.unwrap();
            assert_eq!(u64::try_from(bytes).unwrap(), 128 * MIB);
            assert!(node_has_a_part, "the file system grows on the node");
        }
        // Never smaller, and that is no error.
        let (bytes, _) = controller.expand(&made.volume_id, MIB).await.unwrap();
        assert_eq!(u64::try_from(bytes).unwrap(), 128 * MIB);
        let answer = controller
            .expand(&made.volume_id, i64::MAX.unsigned_abs())
            .await;
        refused(answer, OutOfRange, &[]);
    });
}

/// The provisioner waits for 10 s by default, the controller for a dead cluster's
/// monitors as long.
#[test]
fn the_reason_reaches_a_caller_before_its_deadline() {
    if uring_csi::internals::Libraries::load().is_err() {
        return skip_test("librados and librbd are not installed here");
    }
    story(async |sandbox| {
        // It accepts connections and sends no greeting.
        let monitor = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = monitor.local_addr().unwrap().to_string();
        let clusters = sandbox.dir().join("clusters.json");
        let text = format!(r#"[{{"clusterID": "dead-cluster", "monitors": ["{address}"]}}]"#);
        std::fs::write(&clusters, text).unwrap();
        let mut setup = ControllerSetup::new(sandbox);
        setup
            .args
            .push(format!("--ceph-config={}", clusters.display()));
        let controller = Controller::start_with(sandbox, setup).await;
        let create = async |timeout| {
            let mut message = claim("one", "rbd", &Volume::block("any").capability, 64 * MIB);
            let of_class = ("clusterID".to_owned(), "dead-cluster".to_owned());
            message.parameters.extend([of_class]);
            let key = "AQDeFvVfAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==";
            for (name, value) in [("userID", "user"), ("userKey", key)] {
                message.secrets.insert(name.to_owned(), value.to_owned());
            }
            let mut message = Request::new(message);
            message.set_timeout(timeout);
            controller.client().create_volume(message).await
        };
        let words = ["dead-cluster", &address];
        // Its own attempt, and the one that it waits for.
        for _ in 0..2 {
            let answer = create(Duration::from_secs(2)).await;
            refused(answer, DeadlineExceeded, &words);
        }
        let at_last = create(Duration::from_secs(120)).await;
        refused(at_last, Unavailable, &words);
        // Other calls continue meanwhile.
        let made = claim("two", "main", &Volume::block("any").capability, 64 * MIB);
        controller.create(made).await.unwrap();
    });
}
