//! Volumes in the controller's pool that nbdkit exports to nodes without the pool: created,
//! grown, copied and deleted by the controller, attached by the node. Stories that attach
//! nothing run on any kernel.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use futures_util::future::join_all;
use testkit::{
    Content, Controller, ControllerSetup, KINDS, MIB, NbdServer, Node, NodeSetup, Sandbox, Volume,
    claim, eventually, files_below, from_snapshot, from_volume, kernel_has_nbd, nbds_over,
    provisioned, refused, run, run_err, story,
};
use tonic::Code::{AlreadyExists, FailedPrecondition, InvalidArgument};
use uring_csi::proto::csi::{
    ControllerGetVolumeRequest, CreateVolumeRequest, ListVolumesRequest, VolumeCapability,
};

use crate::operator::Operator;

fn capability(kind: &str) -> VolumeCapability {
    match kind {
        "block" => Volume::block("any").capability,
        kind => Volume::filesystem("any", kind).capability,
    }
}

/// A CreateVolume for a class whose pool this server serves.
fn served(
    server: &NbdServer,
    name: &str,
    pool: &str,
    kind: &str,
    bytes: u64,
) -> CreateVolumeRequest {
    let mut request = claim(name, pool, &capability(kind), bytes);
    // A test kernel's pools are small, and their images empty.
    let overcommit = ("overcommit", "true");
    for (key, value) in [("backend", "nbd"), ("nbdServer", &server.uri()), overcommit] {
        request.parameters.insert(key.to_owned(), value.to_owned());
    }
    request
}

/// A node that has none of the controller's pools.
async fn far_node(sandbox: &Sandbox, node_id: &'static str) -> Node {
    let setup = NodeSetup {
        node_id,
        pools: Vec::new(),
        ..NodeSetup::new(sandbox)
    };
    Node::start_with(sandbox, setup).await
}

/// The images of a pool, by name.
fn images(sandbox: &Sandbox, pool: &str) -> Vec<String> {
    let dir = fs::read_dir(sandbox.pool(pool)).expect("a pool");
    let mut names: Vec<_> = dir
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != ".uring-csi")
        .collect();
    names.sort();
    names
}

/// From creation to deletion, with a snapshot, a clone, and growth in use.
/// `reflink`: the pool's file system copies by reference, so also while in use.
async fn lifecycle(
    controller: &Controller,
    [near, far]: [&Node; 2],
    request: &CreateVolumeRequest,
    reflink: bool,
) {
    let capability = &request.volume_capabilities[0];
    let bytes = request
        .capacity_range
        .unwrap()
        .required_bytes
        .unsigned_abs();
    let [old, new] = ["old", "new"].map(|age| Content::new(&format!("{age} {}", request.name)));
    let made = controller.create(request.clone()).await.unwrap();
    assert!(made.accessible_topology.is_empty());
    let source = provisioned(&made, capability);
    let target = near.up(&source, "pod").await;
    old.put(&source, &target);

    // In use: a copy shows one point in time, or fails.
    let taken = controller.snapshot(&source.handle, &request.name).await;
    let snapshot = if reflink {
        taken.unwrap()
    } else {
        refused(taken, FailedPrecondition, &["NBD server", "unstage"]);
        near.down(&source, "pod").await;
        let snapshot = controller.snapshot(&source.handle, &request.name).await;
        near.up(&source, "pod").await;
        snapshot.unwrap()
    };
    refused(
        controller.delete(&source.handle).await,
        FailedPrecondition,
        &["NBD server"],
    );
    new.put(&source, &target);

    let (grown, node_too) = controller.expand(&source.handle, 2 * bytes).await.unwrap();
    assert_eq!((grown.unsigned_abs(), node_too), (2 * bytes, true));
    let grown = near.expand(&source, &target, 2 * bytes).await.unwrap();
    assert_eq!(grown.unsigned_abs(), 2 * bytes);
    new.assert_kept(&source, &target);
    near.down(&source, "pod").await;

    // Another node sees the same.
    new.assert_kept(&source, &far.up(&source, "pod").await);
    far.down(&source, "pod").await;

    let copy = async |name: &str, of, bytes, content: &Content| {
        let request = CreateVolumeRequest {
            name: format!("{} {name}", request.name),
            volume_content_source: Some(of),
            capacity_range: Some(testkit::range(bytes)),
            ..request.clone()
        };
        let copy = provisioned(&controller.create(request).await.unwrap(), capability);
        content.assert_kept(&copy, &far.up(&copy, "pod").await);
        copy
    };
    let restored = copy(
        "restored",
        from_snapshot(&snapshot.snapshot_id),
        bytes,
        &old,
    )
    .await;
    let cloned = copy("cloned", from_volume(&source.handle), 2 * bytes, &new).await;
    controller.delete(&source.handle).await.unwrap();
    controller
        .delete_snapshot(&snapshot.snapshot_id)
        .await
        .unwrap();
    for copy in [restored, cloned] {
        far.down(&copy, "pod").await;
        controller.delete(&copy.handle).await.unwrap();
    }
}

#[test]
fn lifecycle_on_nodes_without_the_pool() {
    if !kernel_has_nbd() {
        return;
    }
    story(async |sandbox| {
        let reflink = sandbox.reflink_pool("reflink");
        let setup = ControllerSetup::new(sandbox).pool("reflink", &reflink);
        let controller = Controller::start_with(sandbox, setup).await;
        // Each counts the mounts that it finds.
        for node_id in ["node-a", "node-b"] {
            sandbox.kubelet(node_id);
        }
        let near = far_node(sandbox, "node-a").await;
        let far = far_node(sandbox, "node-b").await;
        for pool in ["main", "reflink"] {
            let tcp = pool == "reflink";
            let server = NbdServer::of_pool(sandbox, &sandbox.pool(pool), tcp).await;
            for (kind, bytes) in KINDS {
                let request = served(&server, &format!("{kind} {pool}"), pool, kind, bytes);
                lifecycle(&controller, [&near, &far], &request, tcp).await;
            }
            assert_eq!(images(sandbox, pool), Vec::<String>::new());
        }
        assert_eq!(
            nbds_over(sandbox.dir().to_str().unwrap()),
            Vec::<String>::new()
        );
        near.assert_clean().await;
        far.assert_clean().await;
    });
}

#[test]
fn a_truncated_image_is_not_attached() {
    if !kernel_has_nbd() {
        return;
    }
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let node = far_node(sandbox, "node-a").await;
        let server = NbdServer::of_pool(sandbox, &sandbox.pool("main"), false).await;
        for (kind, bytes) in KINDS {
            let request = served(&server, kind, "main", kind, bytes);
            let made = controller.create(request.clone()).await.unwrap();
            let image = sandbox.pool("main").join(&images(sandbox, "main")[0]);
            // Before it has any content that could identify it.
            let file = fs::File::options().write(true).open(&image).unwrap();
            file.set_len(bytes - MIB).unwrap();
            let volume = provisioned(&made, &request.volume_capabilities[0]);
            refused(
                node.stage(&volume).await,
                FailedPrecondition,
                &["minSize", &(bytes - MIB).to_string(), &bytes.to_string()],
            );
            file.set_len(bytes).unwrap();
            drop(file);
            node.up(&volume, "pod").await;
            node.down(&volume, "pod").await;
            controller.delete(&made.volume_id).await.unwrap();
        }
        node.assert_clean().await;
    });
}

#[test]
fn uringctl_takes_the_nbd_server_as_a_flag() {
    if !kernel_has_nbd() {
        return;
    }
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let node = far_node(sandbox, "node-a").await;
        let server = NbdServer::of_pool(sandbox, &sandbox.pool("main"), true).await;
        let operator = Operator::new(&node, &controller);
        let [path, copy] = ["data", "copy"].map(|name| node.kubelet.join(name));
        let [path_text, copy_text] = [&path, &copy].map(|path| path.to_str().unwrap());
        let address = server.uri();
        let up = ["up", "data-1", "64Mi", path_text, "--nbd-server", &address];
        operator.json(&up);
        let content = Content::new("operator");
        content.write(&path.join("file"));
        let held = operator.json(&["volumes"]);
        assert!(held.to_string().contains("/dev/nbd"), "{held}");

        let (code, _, err) = operator.run(&["clone", "data-1", "data-2"]);
        assert!(code == 5 && err.contains("NBD server"), "{code}: {err}");
        let grown = operator.json(&["expand", "data-1", "128Mi"]);
        assert_eq!(grown["grown_on_node"], true, "{grown}");
        operator.json(&["down", "data-1"]);
        operator.json(&["clone", "data-1", "data-2"]);
        operator.json(&["down", "data-1", "--delete"]);

        operator.json(&["stage", "data-2"]);
        operator.json(&["publish", "data-2", copy_text]);
        content.assert_in(&copy.join("file"));
        operator.json(&["down", "data-2", "--delete"]);
        assert_eq!(images(sandbox, "main"), Vec::<String>::new());
        node.assert_clean().await;
    });
}

#[test]
fn an_export_in_use_is_neither_deleted_nor_copied_torn() {
    story(async |sandbox| {
        let reflink = sandbox.reflink_pool("reflink");
        let setup = ControllerSetup::new(sandbox).pool("reflink", &reflink);
        let controller = Controller::start_with(sandbox, setup).await;
        for pool in ["main", "reflink"] {
            let server = NbdServer::of_pool(sandbox, &sandbox.pool(pool), false).await;
            let request = served(&server, pool, pool, "block", 8 * MIB);
            let made = controller.create(request.clone()).await.unwrap();
            let client = NbdServer::client_of(sandbox, &made.volume_context["uri"]).await;
            let snapshot = controller.snapshot(&made.volume_id, pool).await;
            let clone = CreateVolumeRequest {
                name: format!("{pool} clone"),
                volume_content_source: Some(from_volume(&made.volume_id)),
                ..request
            };
            let cloned = controller.create(clone.clone()).await;
            if pool == "main" {
                for refusal in [snapshot.map(drop), cloned.map(drop)] {
                    refused(refusal, FailedPrecondition, &["NBD server", "xfs or btrfs"]);
                }
            } else {
                snapshot.unwrap();
                cloned.unwrap();
            }
            let delete = async || controller.delete(&made.volume_id).await;
            refused(
                delete().await,
                FailedPrecondition,
                &["NBD server", "unstage"],
            );
            drop(client);
            controller.snapshot(&made.volume_id, pool).await.unwrap();
            let cloned = controller.create(clone).await.unwrap();
            delete().await.unwrap();
            controller.delete(&cloned.volume_id).await.unwrap();
            assert_eq!(images(sandbox, pool), Vec::<String>::new());
        }
    });
}

#[test]
fn exports_are_complete_images_and_nothing_else() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let server = NbdServer::of_pool(sandbox, &sandbox.pool("main"), false).await;
        let server = Arc::new(server);
        let request = |name: &str| served(&server, name, "main", "block", 8 * MIB);
        let source = controller.create(request("source")).await.unwrap();
        let snapshot = controller
            .snapshot(&source.volume_id, "snapshot")
            .await
            .unwrap();

        // While images are made and deleted.
        let done = Arc::new(AtomicBool::new(false));
        let watching = std::thread::spawn({
            let (done, server) = (Arc::clone(&done), Arc::clone(&server));
            move || {
                let mut seen = Vec::new();
                while !done.load(Relaxed) {
                    seen.extend(server.exports().into_iter().flatten());
                }
                seen
            }
        });
        for round in 0..4 {
            let copies = (0..8).map(|n| CreateVolumeRequest {
                volume_content_source: Some(from_snapshot(&snapshot.snapshot_id)),
                ..request(&format!("copy {round} {n}"))
            });
            let made = join_all(copies.map(|copy| controller.create(copy))).await;
            for copy in made {
                controller.delete(&copy.unwrap().volume_id).await.unwrap();
            }
        }
        done.store(true, Relaxed);
        for (name, bytes) in watching.join().unwrap() {
            assert_eq!(bytes, 8 * MIB, "{name}");
            let stem = name.strip_suffix(".img");
            assert!(
                stem.is_some_and(|stem| uuid::Uuid::try_parse(stem).is_ok()),
                "{name}"
            );
        }

        // A file that is no image cannot be named either.
        let pool = sandbox.pool("main");
        let hidden = files_below(&pool.join(".uring-csi"));
        assert!(
            hidden
                .iter()
                .any(|path| path.extension().is_some_and(|end| end == "img"))
        );
        for path in hidden {
            let name = path.strip_prefix(&pool).unwrap().display().to_string();
            let uri = server.uri().replace('?', &format!("{name}?"));
            let said = run_err(&["qemu-img", "info", &uri]).unwrap_err();
            assert!(said.contains("not available"), "{name}: {said}");
        }
        run(&["qemu-img", "info", &source.volume_context["uri"]]);
        let exports = server.exports().unwrap();
        let names: Vec<_> = exports.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, images(sandbox, "main"));
    });
}

#[test]
fn the_servers_address_is_part_of_the_volume() {
    story(async |sandbox| {
        let controller = Controller::start(sandbox).await;
        let request = |parameters: &[(&str, &str)]| {
            let mut request = claim("v", "main", &capability("ext4"), 64 * MIB);
            for (key, value) in parameters {
                request
                    .parameters
                    .insert((*key).to_owned(), (*value).to_owned());
            }
            request
        };
        for (parameters, word) in [
            (&[("backend", "nbd")][..], "nbdServer"),
            (&[("nbdServer", "h")], "nbdServer"),
            (
                &[("backend", "nbd"), ("nbdServer", "nbds://h")],
                "nbdkit -U",
            ),
            (
                &[("backend", "nbd"), ("nbdServer", "nbd://h/x")],
                "nbdServer",
            ),
            (
                &[("backend", "nbd"), ("nbdServer", "h"), ("connections", "0")],
                "connections",
            ),
            (
                &[
                    ("backend", "nbd"),
                    ("nbdServer", "h"),
                    ("sectorSize", "512"),
                ],
                "sectorSize",
            ),
            (&[("backend", "tape")], "backend"),
        ] {
            let create = controller.create(request(parameters)).await;
            refused(create, InvalidArgument, &[word]);
        }
        let class = [
            ("backend", "nbd"),
            ("nbdServer", "Storage"),
            ("connections", "4"),
        ];
        let made = controller.create(request(&class)).await.unwrap();
        let image = &images(sandbox, "main")[0];
        let uri = format!("nbd://storage:10809/{image}");
        for (key, value) in [
            ("backend", "nbd"),
            ("uri", &uri),
            ("connections", "4"),
            ("minSize", &(64 * MIB).to_string()),
        ] {
            assert_eq!(made.volume_context[key], value);
        }
        for other in [&class[..2], &[("backend", "loop")], &[]] {
            let create = controller.create(request(other)).await;
            refused(create, AlreadyExists, &["parameters"]);
        }

        controller.kill9().await;
        controller.start().await;
        // It examines the pool first, and locks the volume meanwhile.
        let again = async || controller.create(request(&class)).await.ok();
        assert_eq!(eventually("the same", again).await, made);
        let get = ControllerGetVolumeRequest {
            volume_id: made.volume_id.clone(),
        };
        let found = controller
            .client()
            .controller_get_volume(get)
            .await
            .unwrap();
        assert_eq!(found.into_inner().volume.as_ref(), Some(&made));
        let list = ListVolumesRequest::default();
        let listed = controller.client().list_volumes(list).await.unwrap();
        let listed = listed.into_inner().entries;
        assert_eq!(listed[0].volume.as_ref(), Some(&made));
        let grown = controller.expand(&made.volume_id, 128 * MIB).await.unwrap();
        assert_eq!(grown, (128 << 20, true));
        let again = controller.create(request(&class)).await.unwrap();
        assert_eq!(again.volume_context, made.volume_context);
        controller.delete(&made.volume_id).await.unwrap();
    });
}
