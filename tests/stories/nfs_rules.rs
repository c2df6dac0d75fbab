//! The demands of the CSI specification on the controller, where its store are shares of
//! NFS servers.

use std::fs;

use testkit::{Mode, SHARE, Volume, from_snapshot, from_volume, range, refused, story};
use tonic::Code::{Aborted, AlreadyExists, InvalidArgument, NotFound, OutOfRange};
use uring_csi::proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerGetVolumeRequest,
    CreateSnapshotRequest, CreateVolumeRequest, ListSnapshotsRequest, ListVolumesRequest,
    ValidateVolumeCapabilitiesRequest,
};

use super::nfs_controller::{claim, names, over};

/// Handles in the forms of volumes and of snapshots, and others, that name nothing here.
const UNKNOWN: [&str; 4] = [
    "never-ours",
    "127.0.0.1#share#gone##",
    "127.0.0.1#share#gone#gone#pvc-1",
    "127.0.0.1#share#../gone##",
];

/// Puts one defect into a request.
type Spoil = fn(&mut CreateVolumeRequest);

#[test]
fn a_name_is_one_directory() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let wrong: &[(&str, Spoil)] = &[
            ("name", |r| r.name.clear()),
            ("volume_capabilities", |r| r.volume_capabilities.clear()),
            ("access_mode", |r| {
                r.volume_capabilities[0].access_mode = None;
            }),
            ("ext4", |r| {
                r.volume_capabilities = vec![Volume::filesystem("", "ext4").capability];
            }),
            ("required_bytes", |r| {
                r.capacity_range = Some(CapacityRange {
                    required_bytes: -1,
                    limit_bytes: 0,
                });
            }),
            ("limit_bytes", |r| {
                r.capacity_range = Some(CapacityRange {
                    required_bytes: 2,
                    limit_bytes: 1,
                });
            }),
        ];
        for (word, spoil) in wrong {
            let mut request = claim("wrong", &[]);
            spoil(&mut request);
            refused(controller.create(request).await, InvalidArgument, &[word]);
        }
        assert_eq!(names(&dir), [".uring-csi"; 0]);

        let make = async |name| controller.create(claim(name, &[])).await.expect("made");
        let (one, other) = (make("one").await, make("other").await);
        assert_eq!(make("one").await, one);
        let taken = controller.snapshot(&one.volume_id, "snap").await;
        let taken = taken.expect("a snapshot").snapshot_id;
        let again = controller.snapshot(&other.volume_id, "snap").await;
        refused(again, AlreadyExists, &["snap"]);
        let copy = async |source| {
            let request = CreateVolumeRequest {
                volume_content_source: Some(source),
                ..claim("copy", &[])
            };
            controller.create(request).await
        };
        copy(from_volume(&one.volume_id)).await.expect("a clone");
        for source in [from_volume(&other.volume_id), from_snapshot(&taken)] {
            refused(copy(source).await, AlreadyExists, &["copy"]);
        }
        let larger = CreateVolumeRequest {
            capacity_range: Some(range(2 << 30)),
            ..claim("one", &[])
        };
        refused(controller.create(larger).await, AlreadyExists, &["one"]);
    });
}

#[test]
fn unknown_directories_are_not_found_and_count_as_deleted() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let mut client = controller.client();
        for id in UNKNOWN {
            controller.delete(id).await.expect("deleted");
            controller.delete_snapshot(id).await.expect("deleted");
            refused(controller.expand(id, 1 << 30).await, NotFound, &[id]);
            refused(controller.snapshot(id, "snap").await, NotFound, &[id]);
            for source in [from_volume(id), from_snapshot(id)] {
                let request = CreateVolumeRequest {
                    volume_content_source: Some(source),
                    ..claim("copy", &[])
                };
                refused(controller.create(request).await, NotFound, &[id]);
            }
            let request = ControllerGetVolumeRequest {
                volume_id: id.to_owned(),
            };
            let answer = client.controller_get_volume(request).await;
            refused(answer, NotFound, &[id]);
            let request = ValidateVolumeCapabilitiesRequest {
                volume_id: id.to_owned(),
                volume_capabilities: claim("", &[]).volume_capabilities,
                ..Default::default()
            };
            let answer = client.validate_volume_capabilities(request).await;
            refused(answer, NotFound, &[id]);
        }
        let made = controller.create(claim("v", &[])).await.expect("made");
        for message in [
            ControllerExpandVolumeRequest {
                volume_id: made.volume_id.clone(),
                ..Default::default()
            },
            ControllerExpandVolumeRequest {
                capacity_range: Some(range(1)),
                ..Default::default()
            },
        ] {
            let answer = client.controller_expand_volume(message).await;
            refused(answer, InvalidArgument, &[]);
        }
        for message in [
            CreateSnapshotRequest {
                source_volume_id: made.volume_id.clone(),
                ..Default::default()
            },
            CreateSnapshotRequest {
                name: "snap".to_owned(),
                ..Default::default()
            },
        ] {
            let answer = client.create_snapshot(message).await;
            refused(answer, InvalidArgument, &[]);
        }
        let answer = controller
            .expand(&made.volume_id, i64::MAX.unsigned_abs())
            .await;
        assert!(answer.is_ok() || answer.is_err_and(|it| it.code() == OutOfRange));
        // Smaller is no error.
        controller
            .expand(&made.volume_id, 1)
            .await
            .expect("as it was");
        assert_eq!(names(&dir), [".uring-csi", "v"]);
    });
}

#[test]
fn capabilities_of_directories_are_confirmed_or_refused() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let made = controller.create(claim("v", &[])).await.expect("made");
        let block = Volume::block("");
        for (capability, is_good) in [
            (Volume::filesystem("", "").capability, true),
            (Volume::filesystem("", "nfs").capability, true),
            (
                Volume::filesystem("", "")
                    .mode(Mode::MultiNodeMultiWriter)
                    .capability,
                true,
            ),
            (Volume::filesystem("", "ext4").capability, false),
            (block.capability, false),
        ] {
            let message = ValidateVolumeCapabilitiesRequest {
                volume_id: made.volume_id.clone(),
                volume_context: made.volume_context.clone(),
                volume_capabilities: vec![capability.clone()],
                ..Default::default()
            };
            let mut client = controller.client();
            let answer = client.validate_volume_capabilities(message).await;
            let answer = answer.expect("an answer").into_inner();
            assert_eq!(answer.confirmed.is_some(), is_good, "{capability:?}");
            assert_eq!(answer.message.is_empty(), is_good, "{capability:?}");
        }
    });
}

#[test]
fn directories_and_snapshots_are_listed_in_pages() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let mut client = controller.client();
        let (mut made, mut taken) = (Vec::new(), Vec::new());
        for number in 0..3 {
            let volume = controller.create(claim(&format!("v{number}"), &[])).await;
            let volume = volume.expect("made").volume_id;
            let snapshot = controller.snapshot(&volume, &format!("s{number}")).await;
            taken.push(snapshot.expect("a snapshot"));
            made.push(volume);
        }
        let mut volumes = Vec::new();
        let mut starting_token = String::new();
        loop {
            let message = ListVolumesRequest {
                max_entries: 2,
                starting_token,
            };
            let page = client.list_volumes(message).await.expect("a page");
            let page = page.into_inner();
            assert!((1..=2).contains(&page.entries.len()));
            let ids = page.entries.into_iter().filter_map(|entry| entry.volume);
            volumes.extend(ids.map(|volume| volume.volume_id));
            starting_token = page.next_token;
            if starting_token.is_empty() {
                break;
            }
        }
        assert_eq!(volumes, made);

        let mut list = async |message: ListSnapshotsRequest| {
            let page = client.list_snapshots(message).await?.into_inner();
            let all = page.entries.into_iter().filter_map(|entry| entry.snapshot);
            Ok::<_, tonic::Status>((all.collect::<Vec<_>>(), page.next_token))
        };
        let message = ListSnapshotsRequest {
            max_entries: 2,
            ..Default::default()
        };
        let (first, starting_token) = list(message).await.expect("a page");
        let message = ListSnapshotsRequest {
            starting_token,
            ..Default::default()
        };
        let (rest, _) = list(message).await.expect("a page");
        assert_eq!([first, rest].concat(), taken);
        for id in UNKNOWN.into_iter().chain([&*made[0]]) {
            let message = ListSnapshotsRequest {
                snapshot_id: id.to_owned(),
                ..Default::default()
            };
            assert_eq!(list(message).await.expect("a list").0, [], "{id}");
        }
        for id in UNKNOWN {
            let message = ListSnapshotsRequest {
                source_volume_id: id.to_owned(),
                ..Default::default()
            };
            assert_eq!(list(message).await.expect("a list").0, [], "{id}");
        }
        for token in ["no such token", &format!("127.0.0.1#{SHARE}")] {
            let message = ListSnapshotsRequest {
                starting_token: token.to_owned(),
                ..Default::default()
            };
            refused(list(message).await, Aborted, &[]);
            let message = ListVolumesRequest {
                starting_token: token.to_owned(),
                ..Default::default()
            };
            let answer = controller.client().list_volumes(message).await;
            refused(answer, Aborted, &[]);
        }
    });
}
