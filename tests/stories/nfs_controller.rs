//! The controller's directories: made, deleted, archived, and taken over from
//! csi-driver-nfs.

use std::{collections::HashMap, fs, path::Path};

use testkit::{
    Content, Controller, ControllerSetup, Mode, NfsServer, Node, SHARE, Sandbox, Volume,
    can_use_nfs, from_volume, provisioned, range, refused, story,
};
use tonic::Code;
use uring_csi::proto::csi::{CreateVolumeRequest, GetCapacityRequest};

/// A controller that has this directory as a share, and no pool.
async fn over(sandbox: &Sandbox, dir: &Path) -> Controller {
    let export = format!("127.0.0.1:{SHARE}={}", dir.display());
    let setup = ControllerSetup {
        pools: Vec::new(),
        args: vec!["--nfs-export".to_owned(), export],
        ..ControllerSetup::new(sandbox)
    };
    Controller::start_with(sandbox, setup).await
}

fn class(more: &[(&str, &str)]) -> HashMap<String, String> {
    let base = [("server", "127.0.0.1"), ("share", SHARE)];
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    base.iter().chain(more).map(owned).collect()
}

fn claim(name: &str, more: &[(&str, &str)]) -> CreateVolumeRequest {
    let shared = Volume::filesystem("", "").mode(Mode::MultiNodeMultiWriter);
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(range(1 << 30)),
        volume_capabilities: vec![shared.capability],
        parameters: class(more),
        ..Default::default()
    }
}

const TEMPLATE: [(&str, &str); 3] = [
    ("subDir", "${pvc.metadata.namespace}/${pvc.metadata.name}"),
    ("csi.storage.k8s.io/pvc/namespace", "team"),
    ("csi.storage.k8s.io/pvc/name", "data"),
];

#[test]
fn directories_live_and_die_as_their_class_says() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        for (name, more, sub_dir, handle) in [
            ("pvc-1", &[][..], "pvc-1", "127.0.0.1#share#pvc-1##"),
            (
                "pvc-2",
                &[("onDelete", "archive")],
                "pvc-2",
                "127.0.0.1#share#pvc-2##archive",
            ),
            (
                "pvc-3",
                &[("onDelete", "Retain"), ("mountPermissions", "0777")],
                "pvc-3",
                "127.0.0.1#share#pvc-3##Retain",
            ),
            (
                "pvc-4",
                &TEMPLATE,
                "team/data",
                "127.0.0.1#share#team/data#pvc-4#",
            ),
        ] {
            for _ in 0..2 {
                let made = controller.create(claim(name, more)).await.expect("made");
                assert_eq!(made.volume_id, handle);
                assert_eq!(made.capacity_bytes, 0);
                assert_eq!(made.volume_context["subDir"], sub_dir);
            }
            let (size, on_node) = controller.expand(handle, 1 << 40).await.expect("grown");
            assert_eq!((size, on_node), (1 << 40, false));
            fs::write(dir.join(sub_dir).join("file"), "kept").expect("written");
            for _ in 0..2 {
                controller.delete(handle).await.expect("deleted");
            }
            assert_eq!(dir.join(sub_dir).exists(), name == "pvc-3");
        }
        let read = |path: &str| fs::read_to_string(dir.join(path)).expect("kept");
        assert_eq!(read("archived-pvc-2/file"), "kept");
        assert_eq!(read("pvc-3/file"), "kept");
        assert!(!dir.join("team").exists());

        // Of earlier releases of csi-driver-nfs.
        for handle in [
            "127.0.0.1/share/old",
            "127.0.0.1#share#old",
            "127.0.0.1#share#old#",
        ] {
            fs::create_dir_all(dir.join("old/sub")).expect("made");
            controller.delete(handle).await.expect("deleted");
            assert!(!dir.join("old").exists(), "{handle}");
        }
        controller.delete("never made").await.expect("deleted");
        let request = GetCapacityRequest {
            parameters: class(&[]),
            ..Default::default()
        };
        let room = controller
            .client()
            .get_capacity(request)
            .await
            .expect("room");
        assert!(room.into_inner().available_capacity > 0);
    });
}

#[test]
fn what_cannot_be_a_directory_is_refused() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let made = controller.create(claim("pvc-1", &[])).await.expect("made");
        let mut raw = claim("pvc-2", &[]);
        raw.volume_capabilities = vec![Volume::block("").capability];
        let mut copy = claim("pvc-2", &[]);
        copy.volume_content_source = Some(from_volume(&made.volume_id));
        let mut elsewhere = claim("pvc-2", &[]);
        elsewhere
            .parameters
            .insert("share".to_owned(), "/other".to_owned());
        for (request, code, word) in [
            (raw, Code::InvalidArgument, "block"),
            (copy, Code::Unimplemented, "not copied"),
            (elsewhere, Code::FailedPrecondition, "--nfs-export"),
            (
                claim("pvc-2", &[("subDir", "../x")]),
                Code::InvalidArgument,
                "subDir",
            ),
            (
                claim("pvc-2", &[("subDir", "/")]),
                Code::InvalidArgument,
                "subDir",
            ),
            (
                claim("pvc-2", &[("subDir", "${pvc.metadata.name}")]),
                Code::InvalidArgument,
                "--extra-create-metadata",
            ),
            (
                claim("pvc-2", &[("pool", "x")]),
                Code::InvalidArgument,
                "pool",
            ),
        ] {
            refused(controller.create(request).await, code, &[word]);
        }
        let handle = "127.0.0.1#other#pvc-1##";
        let status = controller.delete(handle).await;
        refused(status, Code::FailedPrecondition, &["--nfs-export"]);
        let status = controller.snapshot(&made.volume_id, "snap").await;
        refused(status, Code::Unimplemented, &["no snapshots"]);
        let left: Vec<_> = fs::read_dir(&dir).expect("read").flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    });
}

#[test]
fn a_claims_directory_is_mounted_and_deleted_on_an_nfs_server() {
    if !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let server = NfsServer::start(sandbox, "server").await;
        let controller = over(sandbox, &server.export()).await;
        let node = Node::start(sandbox).await;
        let made = controller
            .create(claim("pvc-1", &TEMPLATE))
            .await
            .expect("made");
        let port = format!("port={}", server.port());
        let class = Volume::filesystem("", "")
            .mode(Mode::MultiNodeMultiWriter)
            .flags(&[&port, "nfsvers=4.1"]);
        let mut volume = provisioned(&made, &class.capability);
        "pv-1".clone_into(&mut volume.spec);
        let target = node.up(&volume, "pod").await;
        let content = Content::new("pvc-1");
        content.write(&target.join("file"));
        content.assert_in(&server.export().join("team/data/file"));
        node.down(&volume, "pod").await;
        controller.delete(&volume.handle).await.expect("deleted");
        assert!(!server.export().join("team").exists());
        node.assert_clean().await;
    });
}
