//! The controller's directories: made, deleted, archived, and taken over from
//! csi-driver-nfs.

use std::{
    cell::Cell,
    collections::HashMap,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::XattrFlags;
use testkit::{
    Content, Controller, ControllerSetup, MIB, Machine, Mode, NfsServer, Node, SHARE, Sandbox,
    Volume, can_use_nfs, eventually, from_snapshot, from_volume, provisioned, range, refused, run,
    story,
};
use tonic::Code;
use uring_csi::proto::csi::{
    CreateSnapshotRequest, CreateVolumeRequest, DeleteVolumeRequest, GetCapacityRequest,
    ListSnapshotsRequest, ListVolumesRequest,
};

use super::operator::Operator;

/// A share, and the machine of its controller.
struct Share {
    /// Where the controller has it.
    dir: PathBuf,
    /// If it is another machine's.
    server: Option<NfsServer>,
    machine: Machine,
}

impl Share {
    /// A directory of the machine, made if missing.
    fn local(dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).expect("made");
        Self {
            dir,
            server: None,
            machine: Machine::Host,
        }
    }

    /// A mounted one, with a controller as in `deploy/nfs`.
    async fn mounted(sandbox: &Sandbox) -> Self {
        let export = sandbox.reflink_pool("exported");
        let server = NfsServer::start_over(sandbox, "server", export).await;
        let dir = sandbox.dir().join("mounted");
        server.mount(&dir);
        Self {
            dir,
            server: Some(server),
            machine: Machine::WithoutCapabilities,
        }
    }

    async fn controller(&self, sandbox: &Sandbox) -> Controller {
        let mounted = self.server.as_ref().map_or("", |_| ",mounted");
        let dir = self.dir.display();
        let setup = ControllerSetup {
            pools: Vec::new(),
            args: vec![format!("--nfs-export=127.0.0.1:{SHARE}={dir}{mounted}")],
            machine: self.machine,
            ..ControllerSetup::new(sandbox)
        };
        Controller::start_with(sandbox, setup).await
    }

    /// What is in it, for its server.
    fn names(&self) -> Vec<String> {
        let server = self.server.as_ref();
        names(&server.map_or_else(|| self.dir.clone(), NfsServer::export))
    }
}

/// A controller that has this directory as a share, and no pool.
pub(super) async fn over(sandbox: &Sandbox, dir: &Path) -> Controller {
    over_with(sandbox, dir, "--nfs-quota=auto").await
}

/// The same with one more argument.
pub(super) async fn over_with(sandbox: &Sandbox, dir: &Path, arg: &str) -> Controller {
    let export = format!("--nfs-export=127.0.0.1:{SHARE}={}", dir.display());
    let setup = ControllerSetup {
        pools: Vec::new(),
        args: vec![export, arg.to_owned()],
        ..ControllerSetup::new(sandbox)
    };
    Controller::start_with(sandbox, setup).await
}

fn class(more: &[(&str, &str)]) -> HashMap<String, String> {
    let base = [("server", "127.0.0.1"), ("share", SHARE)];
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    base.iter().chain(more).map(owned).collect()
}

pub(super) fn claim(name: &str, more: &[(&str, &str)]) -> CreateVolumeRequest {
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
        let share = Share::local(sandbox.dir().join("export"));
        directories_live_and_die(sandbox, &share).await;
    });
}

#[test]
fn directories_of_a_mounted_share_live_and_die_as_their_class_says() {
    if can_use_nfs() {
        story(async |sandbox| {
            let share = Share::mounted(sandbox).await;
            directories_live_and_die(sandbox, &share).await;
        });
    }
}

async fn directories_live_and_die(sandbox: &Sandbox, share: &Share) {
    let dir = &*share.dir;
    let controller = share.controller(sandbox).await;
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
    // Without parameters it is that of all shares.
    for parameters in [class(&[]), HashMap::new()] {
        let request = GetCapacityRequest {
            parameters,
            ..Default::default()
        };
        let mut client = controller.client();
        let room = client.get_capacity(request).await.expect("room");
        assert!(room.into_inner().available_capacity > 0);
    }
    assert_eq!(share.names(), [".uring-csi", "archived-pvc-2", "pvc-3"]);
}

#[test]
fn volumes_of_a_pool_beside_a_share_have_names() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let export = format!("127.0.0.1:{SHARE}={}", dir.display());
        let setup = ControllerSetup {
            args: vec!["--nfs-export".to_owned(), export],
            ..ControllerSetup::new(sandbox)
        };
        let controller = Controller::start_with(sandbox, setup).await;
        let of_pool = CreateVolumeRequest {
            name: "named".to_owned(),
            capacity_range: Some(range(MIB)),
            volume_capabilities: vec![Volume::filesystem("", "").capability],
            ..Default::default()
        };
        let of_pool = controller.create(of_pool).await.expect("made").volume_id;
        let of_share = claim("pvc-1", &[]);
        let of_share = controller.create(of_share).await.expect("made").volume_id;
        let operator = Operator::with_sockets(controller.socket(), controller.socket());
        // Of csi-driver-nfs.
        fs::create_dir(dir.join("pvc-9")).expect("made");
        let unlisted = "127.0.0.1#share#pvc-9##".to_owned();
        for (wanted, id) in [
            ("named", &of_pool),
            (&of_pool, &of_pool),
            (&of_share, &of_share),
            (&unlisted, &unlisted),
        ] {
            assert_eq!(operator.json(&["expand", wanted, "2Mi"])["volume_id"], **id);
        }
        let list = ListVolumesRequest {
            max_entries: 1,
            ..Default::default()
        };
        let first = controller
            .client()
            .list_volumes(list)
            .await
            .expect("listed");
        let first = first.into_inner();
        let rest = ListVolumesRequest {
            starting_token: first.next_token,
            ..Default::default()
        };
        let rest = controller
            .client()
            .list_volumes(rest)
            .await
            .expect("listed");
        let all = first.entries.into_iter().chain(rest.into_inner().entries);
        let listed = all.map(|entry| entry.volume.expect("a volume").volume_id);
        assert_eq!(listed.collect::<Vec<_>>(), [&*of_pool, &*of_share]);
        let (code, _, error) = operator.run(&["expand", "pvc-2", "2Mi"]);
        assert_eq!(code, 3, "{error}");
    });
}

#[test]
fn a_deletion_leaves_the_directory_to_a_volume_that_has_it() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let data = dir.join("team/data/file");
        for policy in ["delete", "archive", "retain"] {
            let class = [&TEMPLATE[..], &[("onDelete", policy)]].concat();
            let create = async |name: &str| {
                let made = controller.create(claim(name, &class)).await;
                made.expect("made").volume_id
            };
            let old = create("pvc-old").await;
            let new = create("pvc-new").await;
            fs::write(&data, policy).expect("written");
            // Also one that begins when the old volume is long gone.
            for _ in 0..2 {
                controller.delete(&old).await.expect("deleted");
                assert_eq!(fs::read_to_string(&data).expect("kept"), policy);
            }
            controller.delete(&new).await.expect("deleted");
            assert_eq!(data.exists(), policy == "retain");
            let _ = fs::remove_dir_all(dir.join("archived-team"));
            // Of csi-driver-nfs, which records nothing.
            fs::create_dir_all(dir.join("team/data")).expect("made");
            controller.delete(&old).await.expect("deleted");
            assert_eq!(dir.join("team/data").exists(), policy == "retain");
        }
        let records = fs::read_dir(dir.join(".uring-csi/volumes")).expect("read");
        assert_eq!(records.count(), 0);
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
        copy.volume_content_source = Some(from_volume("127.0.0.1#share#gone##"));
        let mut elsewhere = claim("pvc-2", &[]);
        elsewhere
            .parameters
            .insert("share".to_owned(), "/other".to_owned());
        for (request, code, word) in [
            (raw, Code::InvalidArgument, "block"),
            (copy, Code::NotFound, "gone"),
            (elsewhere, Code::FailedPrecondition, "--nfs-export"),
            (
                claim("pvc-2", &[("subDir", "../x")]),
                Code::InvalidArgument,
                "subDir",
            ),
            (
                claim("pvc-2", &[("subDir", "archived-team/data")]),
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
        for name in [".hidden", "a/b", "a#b"] {
            let status = controller.snapshot(&made.volume_id, name).await;
            refused(status, Code::InvalidArgument, &["name"]);
        }
        assert_eq!(names(&dir), [".uring-csi", "pvc-1"]);
    });
}

/// A file system for a share, which copies by reference or does not.
fn share(sandbox: &Sandbox, name: &str) -> PathBuf {
    if name == "reflink" {
        sandbox.reflink_pool(name)
    } else {
        sandbox.pool(name)
    }
}

pub(super) fn names(dir: &Path) -> Vec<String> {
    let all = fs::read_dir(dir).expect("a directory");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.to_str().expect("UTF-8").to_owned()
    };
    let mut all: Vec<_> = all.map(name).collect();
    all.sort_unstable();
    all
}

#[test]
fn snapshots_and_clones_are_copies_of_directories() {
    story(async |sandbox| {
        for kind in ["reflink", "main"] {
            let share = Share::local(share(sandbox, kind));
            snapshots_and_clones(sandbox, &share, kind == "reflink").await;
        }
    });
}

#[test]
fn snapshots_and_clones_in_a_mounted_share_are_copies_of_directories() {
    if can_use_nfs() {
        story(async |sandbox| {
            let share = Share::mounted(sandbox).await;
            snapshots_and_clones(sandbox, &share, false).await;
        });
    }
}

async fn snapshots_and_clones(sandbox: &Sandbox, share: &Share, has_references: bool) {
    let dir = &*share.dir;
    let controller = share.controller(sandbox).await;
    let source = controller.create(claim("pvc-1", &[])).await.expect("made");
    let content = Content::new("snapshots");
    make_files_of_pods(&dir.join("pvc-1"));
    content.write(&dir.join("pvc-1/file"));
    let room = || {
        let free = rustix::fs::statvfs(dir).expect("statistics");
        free.f_bfree * free.f_frsize
    };
    let before = room();
    let taken = controller.snapshot(&source.volume_id, "snap").await;
    let taken = taken.expect("a snapshot");
    let id = "127.0.0.1#share#snap#snap#pvc-1";
    assert_eq!(
        (
            &*taken.snapshot_id,
            taken.ready_to_use,
            taken.size_bytes > 0
        ),
        (id, true, true)
    );
    let again = controller.snapshot(&source.volume_id, "snap").await;
    assert_eq!(again.expect("the snapshot"), taken);
    fs::write(dir.join("pvc-1/file"), "new").expect("written");

    let mut copies = Vec::new();
    for (name, from) in [
        ("restored", from_snapshot(id)),
        ("cloned", from_volume(&source.volume_id)),
    ] {
        let mut request = claim(name, &[("mountPermissions", "0751")]);
        request.volume_content_source = Some(from.clone());
        for _ in 0..2 {
            let made = controller.create(request.clone()).await.expect("made");
            assert_eq!(made.content_source.as_ref(), Some(&from));
            assert_eq!(made.volume_context["subDir"], name);
        }
        let mode = fs::metadata(dir.join(name)).expect("there").permissions();
        assert_eq!(mode.mode() & 0o7777, 0o751);
        copies.push(request);
    }
    content.assert_in(&dir.join("restored/file"));
    let read = |path: &str| fs::read_to_string(dir.join(path)).expect("there");
    assert_eq!(read("cloned/file"), "new");
    if has_references {
        assert!(before < room() + MIB, "they share blocks");
    }

    // One name is one copy of one source.
    copies[0].volume_content_source = Some(from_volume(&source.volume_id));
    let other = controller.create(copies[0].clone()).await;
    refused(other, Code::AlreadyExists, &["not a copy of that source"]);
    copies[0].volume_content_source = None;
    let other = controller.create(copies[0].clone()).await;
    refused(other, Code::AlreadyExists, &["it is a copy"]);
    let cloned = "127.0.0.1#share#cloned##";
    let other = controller.snapshot(cloned, "snap").await;
    refused(other, Code::AlreadyExists, &["it is a snapshot of"]);
    let other = controller.snapshot(cloned, "pvc-1").await;
    refused(other, Code::AlreadyExists, &["a directory of that name"]);
    "pvc-1".clone_into(&mut copies[1].name);
    let other = controller.create(copies[1].clone()).await;
    refused(other, Code::AlreadyExists, &["not a copy of that source"]);

    let list = ListSnapshotsRequest::default();
    let listed = controller.client().list_snapshots(list).await;
    let listed = listed.expect("listed").into_inner().entries;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].snapshot, Some(taken));
    controller.delete(&source.volume_id).await.expect("deleted");
    content.assert_in(&dir.join("snap/data/file"));
    for _ in 0..2 {
        controller.delete_snapshot(id).await.expect("deleted");
    }
    "late".clone_into(&mut copies[1].name);
    for from in [from_snapshot(id), from_volume(&source.volume_id)] {
        copies[1].volume_content_source = Some(from);
        refused(
            controller.create(copies[1].clone()).await,
            Code::NotFound,
            &["there is no"],
        );
    }
    content.assert_in(&dir.join("restored/file"));
    for name in ["cloned", "restored"] {
        assert_files_of_pods(&dir.join(name));
    }
    assert_eq!(share.names(), [".uring-csi", "cloned", "restored"]);
    for name in ["cloned", "restored"] {
        let handle = format!("127.0.0.1#share#{name}##");
        controller.delete(&handle).await.expect("deleted");
    }
    assert_eq!(share.names(), [".uring-csi"]);
}

#[test]
fn a_service_on_the_nfs_server_has_the_capabilities_for_files_of_pods() {
    story(async |sandbox| {
        let warning = "cannot keep owners and modes";
        let mut share = Share::local(sandbox.pool("main"));
        share.machine = Machine::NfsServer;
        snapshots_and_clones(sandbox, &share, false).await;
        let controller = share.controller(sandbox).await;
        let class = [("mountPermissions", "2770")];
        controller
            .create(claim("pvc-2", &class))
            .await
            .expect("made");
        let made = fs::metadata(share.dir.join("pvc-2")).expect("made");
        assert_eq!(made.mode() & 0o7777, 0o2770);
        assert!(!controller.log().contains(warning));
        let (from, to) = (share.dir.join("pvc-2"), share.dir.join("copy"));
        let privileged = from.join("privileged");
        fs::write(&privileged, "").expect("written");
        // CAP_NET_RAW, effective: vfs_cap_data of linux/capability.h.
        let capability: Vec<_> = [0x0200_0001_u32, 1 << 13, 0, 0, 0]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        let name = "security.capability";
        rustix::fs::setxattr(&privileged, name, &capability, XattrFlags::empty()).expect("set");
        run(&[
            "mknod",
            from.join("null").to_str().expect("UTF-8"),
            "c",
            "1",
            "3",
        ]);
        let mut copy = claim("copy", &[]);
        copy.volume_content_source = Some(from_volume("127.0.0.1#share#pvc-2##"));
        let copy = controller.create(copy).await.expect("copied");
        let mut copied = [0; 20];
        rustix::fs::getxattr(to.join("privileged"), name, &mut copied).expect("copied");
        assert_eq!(copied, *capability);
        assert_eq!(fs::metadata(to.join("null")).expect("copied").rdev(), 0x103);
        controller.delete(&copy.volume_id).await.expect("deleted");
        drop(controller);

        // The unit without the file.
        share.machine = Machine::WithoutCapabilities;
        let controller = share.controller(sandbox).await;
        controller.wait_for_log(warning).await;
        assert_eq!(share.names(), [".uring-csi", "pvc-2"]);
    });
}

/// The user of a pod.
const USER: u32 = 1000;

/// Makes what the controller must copy and remove without being its owner.
fn make_files_of_pods(dir: &Path) {
    let (sticky, private) = (dir.join("sticky"), dir.join("private"));
    for at in [&sticky, &private, &sticky.join("sub")] {
        fs::create_dir(at).expect("made");
    }
    for at in [&sticky, &sticky.join("sub"), &private] {
        fs::write(at.join("file"), "of a pod").expect("written");
    }
    fs::hard_link(private.join("file"), private.join("link")).expect("linked");
    std::os::unix::fs::symlink("file", private.join("symlink")).expect("linked");
    run(&["mkfifo", private.join("fifo").to_str().expect("UTF-8")]);
    for (at, mode) in [
        (private.join("file"), 0o4711),
        (private, 0o700),
        (sticky.join("sub"), 0o500),
        (sticky, 0o1777),
    ] {
        fs::set_permissions(at, fs::Permissions::from_mode(mode)).expect("set");
    }
    let path = dir.to_str().expect("UTF-8");
    run(&["chown", "-R", "-h", &format!("{USER}:{USER}"), path]);
    // chown(2) ends it.
    let file = dir.join("private/file");
    fs::set_permissions(file, fs::Permissions::from_mode(0o4711)).expect("set");
}

fn assert_files_of_pods(dir: &Path) {
    for (name, mode) in [
        ("sticky", 0o1777),
        ("sticky/sub", 0o500),
        ("sticky/file", 0o644),
        ("private", 0o700),
        ("private/file", 0o4711),
        ("private/symlink", 0o777),
        ("private/fifo", 0o644),
    ] {
        let found = fs::symlink_metadata(dir.join(name)).expect("copied");
        let found = (found.mode() & 0o7777, found.uid(), found.gid());
        assert_eq!(found, (mode, USER, USER), "{name}");
    }
    let links = fs::metadata(dir.join("private/link"))
        .expect("copied")
        .nlink();
    assert_eq!(links, 2);
}

#[test]
fn snapshots_of_csi_driver_nfs_are_restored_and_deleted_and_nothing_else_is() {
    story(async |sandbox| {
        let dir = sandbox.pool("main");
        let controller = over(sandbox, &dir).await;
        let id = "127.0.0.1#share#snap#snap#pvc-1";
        fs::create_dir(dir.join("snap")).expect("made");
        fs::write(dir.join("snap/other.tar.gz"), "x").expect("written");
        refused(
            controller.delete_snapshot(id).await,
            Code::FailedPrecondition,
            &["is no snapshot"],
        );
        let mut restore = claim("restored", &[]);
        restore.volume_content_source = Some(from_snapshot(id));
        let archive = dir.join("snap/pvc-1.tar.gz");
        fs::write(&archive, "x").expect("written");
        let damaged = controller.create(restore.clone()).await;
        refused(damaged, Code::FailedPrecondition, &["is damaged"]);
        assert_eq!(names(&dir), ["snap"]);
        let content = Content::new("packed");
        let packed = sandbox.dir().join("packed");
        fs::create_dir_all(packed.join("sub")).expect("made");
        content.write(&packed.join("sub/file"));
        let [packed, archive] = [&packed, &archive].map(|it| it.to_str().expect("UTF-8"));
        run(&["tar", "-C", packed, "-czf", archive, "."]);
        for _ in 0..2 {
            controller.create(restore.clone()).await.expect("restored");
            content.assert_in(&dir.join("restored/sub/file"));
        }
        let list = ListSnapshotsRequest {
            snapshot_id: id.to_owned(),
            ..Default::default()
        };
        let found = controller.client().list_snapshots(list).await;
        let found = found.expect("listed").into_inner().entries;
        let found = found[0].snapshot.as_ref().expect("a snapshot");
        assert_eq!(
            (&*found.snapshot_id, &*found.source_volume_id),
            (id, "pvc-1")
        );
        assert!(found.ready_to_use && found.size_bytes > 0);
        // No snapshot's handle.
        let volume = "127.0.0.1#share#snap##";
        controller.delete_snapshot(volume).await.expect("nothing");
        assert!(dir.join("snap").exists());
        for _ in 0..2 {
            controller.delete_snapshot(id).await.expect("deleted");
            assert_eq!(names(&dir), [".uring-csi", "restored"]);
        }
    });
}

#[test]
fn a_killed_controller_leaves_whole_copies_or_none() {
    story(async |sandbox| {
        let share = Share::local(sandbox.pool("main"));
        killed_at_each_step(sandbox, &share, 2).await;
    });
}

#[test]
fn a_killed_controller_leaves_whole_copies_or_none_in_a_mounted_share() {
    if can_use_nfs() {
        story(async |sandbox| {
            let share = Share::mounted(sandbox).await;
            killed_at_each_step(sandbox, &share, 9).await;
        });
    }
}

/// Kills a controller at every so manieth step.
async fn killed_at_each_step(sandbox: &Sandbox, share: &Share, every: usize) {
    let dir = &*share.dir;
    for sub in ["a", "b/c"] {
        fs::create_dir_all(dir.join("source").join(sub)).expect("made");
        Content::new(sub).write(&dir.join("source").join(sub).join("file"));
    }
    let controller = share.controller(sandbox).await;
    let source = "127.0.0.1#share#source##";
    let mut copy = claim("copy", &TEMPLATE);
    copy.volume_content_source = Some(from_volume(source));
    let snap = "127.0.0.1#share#snap#snap#source";
    let volume = "127.0.0.1#share#team/data#copy#";
    // Complete, or not there.
    let assert_whole = || {
        for copy in ["snap/data", "team/data"].map(|path| dir.join(path)) {
            for sub in ["a", "b/c"].into_iter().filter(|_| copy.exists()) {
                Content::new(sub).assert_in(&copy.join(sub).join("file"));
            }
        }
    };
    for at in (0..).step_by(every) {
        controller.kill9().await;
        controller.start_crashing_at(at).await;
        let crashes = Cell::new(0);
        for step in 0..4 {
            eventually("the step is done", async || {
                let done = match step {
                    0 => controller.snapshot(source, "snap").await.map(drop),
                    1 => controller.create(copy.clone()).await.map(drop),
                    2 => controller.delete_snapshot(snap).await,
                    _ => controller.delete(volume).await,
                };
                if step < 2 {
                    assert_whole();
                }
                if controller.has_exited() {
                    crashes.set(crashes.get() + 1);
                    controller.start().await;
                }
                done.ok()
            })
            .await;
        }
        eventually("nothing is left", async || {
            (share.names() == [".uring-csi", "source"]).then_some(())
        })
        .await;
        for records in ["snapshots", "volumes"] {
            assert_eq!(names(&dir.join(".uring-csi").join(records)), [""; 0]);
        }
        assert!(crashes.get() < 2);
        if crashes.get() == 0 {
            assert!(at > 20, "the story has more steps");
            break;
        }
    }
}

#[test]
fn ids_of_long_names_are_those_of_later_calls() {
    story(async |sandbox| {
        let dir = sandbox.dir().join("export");
        fs::create_dir(&dir).expect("made");
        let controller = over(sandbox, &dir).await;
        let name = "v".repeat(128);
        let long = format!("{}/{}", "n".repeat(63), "d".repeat(100));
        for more in [&[][..], &[("subDir", &*long), ("onDelete", "Archive")]] {
            let made = controller.create(claim(&name, more)).await.expect("made");
            let id = &made.volume_id;
            assert!(id.len() > 128);
            let (size, _) = controller.expand(id, 2 << 30).await.expect("grown");
            assert_eq!(size, 2 << 30);
            let snap = "snapshot-0c8d7f4e-5d7e-4a52-9a3c-2f0f3a6f9f11";
            let taken = controller.snapshot(id, snap).await.expect("a snapshot");
            let mut restore = claim("restored", &[]);
            restore.volume_content_source = Some(from_snapshot(&taken.snapshot_id));
            let restored = controller.create(restore).await.expect("restored");
            let listed = ListSnapshotsRequest {
                source_volume_id: id.clone(),
                ..Default::default()
            };
            let listed = controller.client().list_snapshots(listed).await;
            let listed = listed.expect("listed").into_inner().entries;
            assert_eq!(listed[0].snapshot.as_ref(), Some(&taken));
            for volume in [&restored.volume_id, id] {
                controller.delete(volume).await.expect("deleted");
            }
            let delete = controller.delete_snapshot(&taken.snapshot_id).await;
            delete.expect("deleted");
        }
        let above = "n".repeat(63);
        let left = [".uring-csi", &format!("archived-{above}"), &above];
        assert_eq!(names(&dir), left);
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

/// The metadata that external-provisioner and external-snapshotter add to a class' parameters
/// with `--extra-create-metadata`.
fn metadata(kind: &str, name: &str, content: &str) -> HashMap<String, String> {
    let (claim, bound) = match kind {
        "claim" => ("pvc", "pv"),
        _ => ("volumesnapshot", "volumesnapshotcontent"),
    };
    let pairs = [
        (format!("{claim}/name"), name),
        (format!("{claim}/namespace"), "default"),
        (format!("{bound}/name"), content),
    ];
    let pairs = pairs.into_iter();
    let full = pairs.map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.to_owned()));
    full.collect()
}

/// Its `deploy/example`, but for the servers and inline volumes, with the names that the
/// sidecars give.
#[test]
fn the_examples_of_csi_driver_nfs_work() {
    const PVC: &str = "pvc-4c0ff0b7-6d26-4c6d-a7a7-6f8f42d5e8a1";
    const CLONE: &str = "pvc-c3b3c5c1-9a0f-4a7e-8f53-4c6c0d0d7c52";
    const RESTORED: &str = "pvc-f1e2a9f4-05f6-4f0c-9c8e-15f0e1a1b7d3";
    const TEMPLATED: &str = "pvc-0d9e6c57-2b1c-47a6-8f0a-9f5b8f7f2c64";
    const SNAPSHOT: &str = "snapshot-9a159fca-4824-4053-8d90-a92c25fb860f";
    if !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let share = Share::mounted(sandbox).await;
        let server = share.server.as_ref().expect("mounted");
        let controller = share.controller(sandbox).await;
        let node = Node::start(sandbox).await;
        let port = format!("port={}", server.port());
        let flags = ["hard", "nfsvers=4.1", &port];
        // The class may have a provisioner-secret.
        let secrets = || HashMap::from([("mountOptions".to_owned(), "nfsvers=4.1".to_owned())]);
        let create = async |name: &str, claim_name: &str, more: &[(&str, &str)], from| {
            let mut request = claim(name, more);
            request.secrets = secrets();
            let metadata = metadata("claim", claim_name, name);
            request.parameters.extend(metadata);
            request.capacity_range = Some(range(10 << 30));
            let capability = Volume::filesystem("", "")
                .mode(Mode::MultiNodeMultiWriter)
                .flags(&flags)
                .capability;
            request.volume_capabilities = vec![capability.clone()];
            request.volume_content_source = from;
            let made = controller.create(request).await.expect("made");
            assert_eq!(made.capacity_bytes, 0, "the provisioner takes the claim's");
            let mut volume = provisioned(&made, &capability);
            name.clone_into(&mut volume.spec);
            volume
        };
        let content = Content::new("outfile");
        let source = create(PVC, "pvc-nfs-dynamic", &[], None).await;
        content.write(&node.up(&source, "nginx-nfs").await.join("outfile"));

        let message = CreateSnapshotRequest {
            source_volume_id: source.handle.clone(),
            name: SNAPSHOT.to_owned(),
            parameters: metadata("snapshot", "test-nfs-snapshot", "snapcontent-9a159fca"),
            ..Default::default()
        };
        let taken = controller.client().create_snapshot(message).await;
        let taken = taken.expect("taken").into_inner().snapshot.expect("one");
        assert!(taken.ready_to_use && taken.size_bytes > 0);
        let from = Some(from_snapshot(&taken.snapshot_id));
        let restored = create(RESTORED, "pvc-nfs-snapshot-restored", &[], from).await;
        let from = Some(from_volume(&source.handle));
        let clone = create(CLONE, "pvc-nfs-cloning", &[], from).await;
        let template = [
            ("subDir", "${pvc.metadata.namespace}/${pvc.metadata.name}"),
            ("mountPermissions", "0755"),
            ("onDelete", "archive"),
        ];
        let templated = create(TEMPLATED, "pvc-statefulset", &template, None).await;
        for (volume, has_content) in [(&restored, true), (&clone, true), (&templated, false)] {
            let target = node.up(volume, "nginx").await;
            if has_content {
                content.assert_in(&target.join("outfile"));
            }
            assert_eq!(
                fs::read_dir(&target).expect("read").count(),
                usize::from(has_content)
            );
            node.down(volume, "nginx").await;
        }

        // Static ones, of the whole share. A deletion of the last one, which has the policy
        // Delete, removes nothing.
        for handle in ["unique-volumeid", "127.0.0.1#share#", "127.0.0.1/share##"] {
            let volume = Volume::filesystem(handle, "")
                .mode(Mode::MultiNodeMultiWriter)
                .flags(&["nfsvers=4.1", &port])
                .with("server", "127.0.0.1")
                .with("share", SHARE);
            let target = node.up(&volume, "static").await;
            content.assert_in(&target.join(PVC).join("outfile"));
            node.down(&volume, "static").await;
            controller.delete(handle).await.expect("nothing to delete");
            content.assert_in(&server.export().join(PVC).join("outfile"));
        }

        node.down(&source, "nginx-nfs").await;
        let (size, on_node) = controller
            .expand(&source.handle, 20 << 30)
            .await
            .expect("grown");
        assert_eq!((size, on_node), (20 << 30, false));
        let deleted = controller.delete_snapshot(&taken.snapshot_id).await;
        deleted.expect("deleted");
        for volume in [&source, &restored, &clone, &templated] {
            let message = DeleteVolumeRequest {
                volume_id: volume.handle.clone(),
                secrets: secrets(),
            };
            let deleted = controller.client().delete_volume(message).await;
            deleted.expect("deleted");
        }
        let left = [".uring-csi", "archived-default", "default"];
        assert_eq!(share.names(), left);
        node.assert_clean().await;
    });
}
