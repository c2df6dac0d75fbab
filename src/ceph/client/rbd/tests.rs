use std::{
    ffi::c_void,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    time::{Duration, SystemTime},
};

use rustix::io::Errno;
use testkit::{ImageOpener, TestCluster};

use super::*;
use crate::ceph::{
    client::library::rados as abi_of_rados,
    testing::{TestPool, connect},
};

const MIB: u64 = 1 << 20;

/// An image that every kernel maps.
fn plain() -> ImageOptions {
    ImageOptions {
        features: Some(Features::LAYERING),
        ..ImageOptions::default()
    }
}

#[test]
fn an_image_is_made_as_it_is_asked_for() {
    let Some(place) = TestPool::new() else { return };
    let io = &place.io;
    let data_pool = place.cluster.fresh_pool();
    let options = ImageOptions {
        features: Some(Features::LAYERING | Features::EXCLUSIVE_LOCK),
        object_size: Some(8 * MIB),
        striping: Some((64 * 1024, 4)),
        data_pool: Some(data_pool.clone()),
    };
    create(io, "csi-vol-Ω", 64 * MIB, &options).unwrap();
    let error = create(io, "csi-vol-Ω", 64 * MIB, &options).unwrap_err();
    assert!(error.is_exists());
    assert_eq!(
        error.to_string(),
        format!("could not create image {io}/csi-vol-Ω")
    );
    let image = Image::open(io, "csi-vol-Ω", OpenMode::ReadOnly).unwrap();
    let more = Features::STRIPING | Features::DATA_POOL;
    assert_eq!(image.features().unwrap(), options.features.unwrap() | more);
    let spec = format!("{io}/csi-vol-Ω");
    let info = place.cluster.rbd(&["info", "--format=json", &spec]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let layout = ["size", "object_size", "stripe_unit", "stripe_count"];
    let layout = layout.map(|key| info[key].as_u64().unwrap());
    assert_eq!(layout, [64 * MIB, 8 * MIB, 64 * 1024, 4]);
    assert_eq!(info["data_pool"], *data_pool);
    assert!(image.created().unwrap() > SystemTime::UNIX_EPOCH);
    let named = ImageName {
        id: image.id().unwrap(),
        name: "csi-vol-Ω".into(),
    };
    assert_eq!(list(io).unwrap(), [named]);
    let odd = ImageOptions {
        object_size: Some(3 * MIB),
        ..plain()
    };
    assert!(create(io, "odd", MIB, &odd).is_err());
}

#[test]
fn an_image_grows_and_never_shrinks() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    create(io, "grows", MIB, &plain()).unwrap();
    let image = Image::open(io, "grows", OpenMode::ReadWrite).unwrap();
    for size in [2 * MIB, 2 * MIB, 3 * MIB] {
        image.grow(size).unwrap();
        assert_eq!(image.size().unwrap(), size);
    }
    assert!(image.grow(MIB).unwrap_err().is_invalid());
    let reader = Image::open(io, "grows", OpenMode::ReadOnly).unwrap();
    assert_eq!(reader.grow(4 * MIB).unwrap_err().errno(), Some(Errno::ROFS));
    let missing = Image::open(io, "missing", OpenMode::ReadOnly).unwrap_err();
    assert!(missing.is_not_found());
}

/// A callback of librados, which goes on until it is told to return.
struct Callback {
    begun: Sender<()>,
    told: Receiver<()>,
}

impl Callback {
    unsafe extern "C" fn run(_: abi_of_rados::Completion, argument: *mut c_void) {
        // SAFETY: made by `begin`, for this call alone.
        let callback = unsafe { Box::from_raw(argument.cast::<Self>()) };
        callback.begun.send(()).unwrap();
        // An error if the test has failed.
        let _ = callback.told.recv();
    }

    /// Returns once it has begun; it goes on until there is a message, or no sender.
    fn begin(io: &IoCtx) -> Sender<()> {
        let (begun, has_begun) = channel();
        let (tell, told) = channel();
        let argument = Box::into_raw(Box::new(Self { begun, told })).cast();
        let functions = &io.cluster().libraries().rados;
        let mut flushed = std::ptr::null_mut();
        // SAFETY: the handle is valid, and the callback frees its argument.
        unsafe {
            let create = functions.rados_aio_create_completion2;
            assert_eq!(create(argument, Some(Self::run), &raw mut flushed), 0);
            assert_eq!((functions.rados_aio_flush_async)(io.raw(), flushed), 0);
            (functions.rados_aio_release)(flushed);
        }
        has_begun.recv().unwrap();
        tell
    }
}

#[test]
fn an_image_is_closed_after_the_callbacks_that_have_begun() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    create(io, "image", MIB, &plain()).unwrap();
    let image = Image::open(io, "image", OpenMode::ReadOnly).unwrap();
    let tell = Callback::begin(io);
    let (closed, is_closed) = channel();
    let closing = std::thread::spawn(move || {
        drop(image);
        closed.send(()).unwrap();
    });
    let early = is_closed.recv_timeout(Duration::from_millis(300));
    assert_eq!(early, Err(RecvTimeoutError::Timeout));
    tell.send(()).unwrap();
    closing.join().unwrap();
}

#[test]
fn a_client_that_has_the_image_open_is_a_watcher() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let (io, cluster) = (&pool.io, &pool.cluster);
    create(io, "watched", MIB, &plain()).unwrap();
    let reader = Image::open(io, "watched", OpenMode::ReadOnly).unwrap();
    assert_eq!(reader.watchers().unwrap(), []);
    let other = crate::ceph::testing::connect(cluster);
    let other_io = other.ioctx(&cluster.pool, io.namespace()).unwrap();
    let image = Image::open(&other_io, "watched", OpenMode::ReadWrite).unwrap();
    let watchers = reader.watchers().unwrap();
    assert_eq!(watchers.len(), 1);
    assert!(!watchers[0].own);
    assert_eq!(u64::try_from(watchers[0].client), Ok(other.instance_id()));
    assert!(watchers[0].address.contains(":0/"), "{watchers:?}");
    let busy = trash::move_image(io, "watched", Duration::ZERO);
    drop(image);
    // Without the exclusive lock a watcher does not prevent the move.
    assert!(busy.is_ok());
}

#[test]
fn mirroring_of_an_image_is_reported() {
    let Some(cluster) = TestCluster::shared() else {
        return;
    };
    let pool = cluster.fresh_pool();
    cluster.rbd(&["mirror", "pool", "enable", &pool, "image"]);
    let io = crate::ceph::testing::connect(&cluster)
        .ioctx(&pool, "")
        .unwrap();
    create(&io, "mirrored", MIB, &plain()).unwrap();
    let mirroring = || {
        let image = Image::open(&io, "mirrored", OpenMode::ReadOnly);
        image.unwrap().mirroring().unwrap()
    };
    let header = Header::of(&io, "mirrored").unwrap();
    assert_eq!(mirroring(), Mirroring::None);
    assert!(!header.is_mirrored().unwrap());
    cluster.rbd(&[
        "mirror",
        "image",
        "enable",
        &format!("{pool}/mirrored"),
        "snapshot",
    ]);
    assert_eq!(mirroring(), Mirroring::Primary);
    assert!(header.is_mirrored().unwrap());
    cluster.rbd(&["mirror", "image", "demote", &format!("{pool}/mirrored")]);
    assert_eq!(mirroring(), Mirroring::Secondary);
    assert!(header.is_mirrored().unwrap());
}

#[test]
fn only_a_client_that_watches_the_mirrored_images_is_a_mirror_daemon() {
    let Some(cluster) = TestCluster::shared() else {
        return;
    };
    let pool = cluster.fresh_pool();
    cluster.rbd(&["mirror", "pool", "enable", &pool, "image"]);
    let io = connect(&cluster).ioctx(&pool, "").unwrap();
    create(&io, "mirrored", MIB, &plain()).unwrap();
    let spec = format!("{pool}/mirrored");
    cluster.rbd(&["mirror", "image", "enable", &spec, "snapshot"]);
    let reader = Image::open(&io, "mirrored", OpenMode::ReadOnly).unwrap();
    let others = || {
        let watchers = reader.watchers().unwrap();
        reader.without_mirror_daemons(watchers).unwrap()
    };
    let daemon = ImageOpener::mirroring(&cluster, &pool, "mirrored");
    assert_eq!(reader.watchers().unwrap().len(), 1);
    assert_eq!(others(), []);
    let other = connect(&cluster);
    let other_io = other.ioctx(&pool, "").unwrap();
    let writer = Image::open(&other_io, "mirrored", OpenMode::ReadWrite).unwrap();
    for _ in [Some(daemon), None] {
        let found: Vec<_> = others().into_iter().map(|other| other.client).collect();
        assert_eq!(found, [i64::try_from(other.instance_id()).unwrap()]);
    }
    drop(writer);
    assert_eq!(others(), []);
}

#[test]
fn clones_live_without_their_snapshot_and_parent() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    create(io, "parent", 8 * MIB, &plain()).unwrap();
    let parent = Image::open(io, "parent", OpenMode::ReadWrite).unwrap();
    parent.snapshot_create("snap").unwrap();
    assert!(parent.snapshot_create("snap").unwrap_err().is_exists());
    let made = parent.snapshots().unwrap();
    assert_eq!(made.len(), 1);
    assert_eq!((made[0].name.as_str(), made[0].size), ("snap", 8 * MIB));
    assert_eq!(made[0].kind, SnapshotKind::User);
    clone_snapshot(io, "parent", "snap", io, "child", &plain()).unwrap();
    let again = clone_snapshot(io, "parent", "snap", io, "child", &plain());
    assert!(again.unwrap_err().is_exists());
    let id = parent.id().unwrap();
    let child = Image::open(io, "child", OpenMode::ReadWrite).unwrap();
    let children = parent.children().unwrap();
    assert_eq!(children.len(), 1);
    assert_eq!(children[0].id, child.id().unwrap());
    assert_eq!(children[0].namespace, io.namespace());
    // The snapshot and the parent are removed, and stay in the trash.
    parent.snapshot_remove("snap").unwrap();
    assert_eq!(parent.snapshots().unwrap()[0].kind, SnapshotKind::Trash);
    drop(parent);
    trash::move_image(io, "parent", Duration::ZERO).unwrap();
    assert!(trash::remove(io, &id, false).is_err());
    drop(child);
    let child = Image::open(io, "child", OpenMode::ReadWrite).unwrap();
    let of = child.parent().unwrap().unwrap();
    assert_eq!(
        (of.image.id.as_str(), of.kind),
        (id.as_str(), SnapshotKind::Trash)
    );
    assert!(of.image.in_trash);
    child.flatten().unwrap();
    assert_eq!(child.parent().unwrap(), None);
    assert!(child.flatten().unwrap_err().is_invalid());
    trash::remove(io, &id, false).unwrap();
}

#[test]
fn an_image_in_the_trash_is_listed_until_removed() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    create(io, "a", MIB, &plain()).unwrap();
    let id = Image::open(io, "a", OpenMode::ReadOnly)
        .unwrap()
        .id()
        .unwrap();
    trash::move_image(io, "a", Duration::from_secs(3600)).unwrap();
    assert!(
        trash::move_image(io, "a", Duration::ZERO)
            .unwrap_err()
            .is_not_found()
    );
    assert_eq!(list(io).unwrap(), []);
    let found = trash::get(io, &id).unwrap();
    assert_eq!((found.id.as_str(), found.name.as_str()), (id.as_str(), "a"));
    assert!(found.deferred_until > found.deleted);
    assert_eq!(trash::list(io).unwrap(), [found]);
    assert!(trash::remove(io, &id, false).is_err());
    let open = Image::open_by_id(io, &id, OpenMode::ReadOnly).unwrap();
    assert_eq!(open.size().unwrap(), MIB);
    drop(open);
    trash::remove(io, &id, true).unwrap();
    assert!(trash::remove(io, &id, false).unwrap_err().is_not_found());
    assert!(trash::get(io, &id).unwrap_err().is_not_found());
}

#[test]
fn metadata_is_kept_with_the_image() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    create(io, "described", MIB, &plain()).unwrap();
    let image = Image::open(io, "described", OpenMode::ReadWrite).unwrap();
    assert!(image.metadata_list().unwrap().is_empty());
    let long = "x".repeat(9000);
    image.metadata_set("k", &long).unwrap();
    image.metadata_set("empty", "").unwrap();
    for nr in 0..70 {
        image.metadata_set(&format!("n{nr}"), "v").unwrap();
    }
    let all = image.metadata_list().unwrap();
    assert_eq!(all.len(), 72);
    assert_eq!((all["empty"].as_str(), all["n69"].as_str()), ("", "v"));
    assert_eq!(all["k"], long);
    image.metadata_remove("k").unwrap();
    image.metadata_remove("k").unwrap();
    assert_eq!(image.metadata_list().unwrap().len(), 71);
}

#[test]
fn lists_longer_than_their_first_buffer_are_whole() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    for nr in 0..20 {
        create(io, &format!("i{nr}"), MIB, &plain()).unwrap();
    }
    assert_eq!(list(io).unwrap().len(), 20);
    let image = Image::open(io, "i0", OpenMode::ReadWrite).unwrap();
    for nr in 0..20 {
        image.snapshot_create(&format!("s{nr}")).unwrap();
    }
    assert_eq!(image.snapshots().unwrap().len(), 20);
}

#[test]
fn namespaces_are_made_once() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    let pool = io.cluster().ioctx(io.pool_id(), "").unwrap();
    assert!(
        create_namespace(&pool, io.namespace())
            .unwrap_err()
            .is_exists()
    );
}

#[test]
fn a_header_reports_what_the_open_image_does() {
    let Some(place) = TestPool::new() else { return };
    let io = &place.io;
    assert!(Header::of(io, "a").unwrap_err().is_not_found());
    let options = ImageOptions {
        features: Some(Features::LAYERING | Features::EXCLUSIVE_LOCK),
        ..ImageOptions::default()
    };
    create(io, "a", MIB, &options).unwrap();
    let header = Header::of(io, "a").unwrap();
    let reader = Image::open(io, "a", OpenMode::ReadOnly).unwrap();
    let features = reader.features().unwrap();
    assert_eq!(header.features_and("k").unwrap(), (features, None));
    assert_eq!(header.id(), Some(&*reader.id().unwrap()));
    assert!(header.metadata().unwrap().is_empty());
    assert!(header.watching().unwrap().is_empty());

    let other = connect(&place.cluster);
    let there = other.ioctx(io.pool(), io.namespace()).unwrap();
    let writers = [
        Image::open(io, "a", OpenMode::ReadWrite).unwrap(),
        Image::open(&there, "a", OpenMode::ReadWrite).unwrap(),
    ];
    writers[0].metadata_set("rbd.csi.ceph.com/a", "Ω").unwrap();
    assert_eq!(header.metadata().unwrap(), reader.metadata_list().unwrap());
    assert_eq!(header.metadata().unwrap()["rbd.csi.ceph.com/a"], "Ω");
    header.metadata_set("k", "Ω").unwrap();
    let value = Some("Ω".to_owned());
    assert_eq!(reader.metadata_list().unwrap().get("k"), value.as_ref());
    assert_eq!(header.metadata_get("k").unwrap(), value);
    assert_eq!(header.features_and("k").unwrap(), (features, value));
    for _ in 0..2 {
        header.metadata_remove("k").unwrap();
        assert_eq!(header.metadata_get("k").unwrap(), None);
    }
    assert!(!reader.metadata_list().unwrap().contains_key("k"));
    let mut own = [io, &there].map(|io| io.cluster().instance_id().cast_signed());
    own.sort_unstable();
    let mut watching = header.watching().unwrap();
    watching.sort_unstable();
    assert_eq!(watching, own);
    drop(writers);
    assert!(header.watching().unwrap().is_empty());
    drop(reader);
    remove(io, "a").unwrap();
    assert!(header.metadata_set("k", "v").unwrap_err().is_not_found());
    assert!(header.features_and("k").unwrap_err().is_not_found());
}

#[test]
fn an_image_of_the_first_format_has_a_header_too() {
    let Some(place) = TestPool::new() else { return };
    // Ceph creates no such image any more; this is the part of one that is read.
    let create = crate::ceph::client::rados::WriteOp::new().create();
    place.io.operate("old.rbd", &create).unwrap();
    let header = Header::of(&place.io, "old").unwrap();
    let features = Features::default();
    assert_eq!(header.features_and("k").unwrap(), (features, None));
    assert_eq!(header.id(), None);
    assert!(header.metadata().unwrap().is_empty());
    assert!(header.watching().unwrap().is_empty());
}
