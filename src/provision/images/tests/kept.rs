//! Listings and capacity, as they are kept in memory, beside what is in the pool.

use proptest::prelude::*;

use super::*;
use crate::pool::PoolError;

/// On a file system whose directories have stamps, wherever the tests run.
fn kept_home() -> (tempfile::TempDir, Pool) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = pool("main", dir.path(), Scope::Shared);
    pool.initialize().unwrap();
    (dir, pool)
}

/// A controller of its own over the pool, as on another machine.
fn controller(pool: &Pool) -> ImageStore {
    let pools = Pools::new([pool.clone()]).unwrap();
    ImageStore::new(
        pools,
        None,
        BOOT.to_owned(),
        Copies::new(4, 1),
        &Lanes::new(2),
    )
}

/// Waits until what is read of the pool can be kept.
fn settle(pool: &Pool) {
    for dir in [
        pool.dir.clone(),
        pool.meta_dir("volumes").unwrap(),
        pool.meta_dir("snapshots").unwrap(),
    ] {
        while stamp::DirectoryStamp::of(&dir).is_none() {
            std::thread::yield_now();
        }
    }
}

#[derive(Debug, PartialEq)]
struct Answers {
    volumes: Vec<(String, VolumeInfo)>,
    snapshots: Vec<(String, SnapshotInfo)>,
    promised: u64,
}

/// In pages of two.
fn all<T>(
    list: impl Fn(&ListRequest) -> Result<Vec<ListEntry<T>>, ProvisionError>,
) -> Vec<(String, T)> {
    let mut what = ListRequest {
        max: 2,
        ..ListRequest::default()
    };
    let mut found = Vec::new();
    loop {
        let page = list(&what).unwrap();
        let is_last = page.len() <= what.max;
        let shown = page.into_iter().take(what.max);
        found.extend(shown.map(|listed| (listed.token, listed.entry)));
        if is_last {
            return found;
        }
        what.from = found.last().map(|(token, _)| token.clone());
    }
}

fn answers(images: &ImageStore, pool: &Pool) -> Answers {
    Answers {
        volumes: all(|what| images.list_volumes(what, None)),
        snapshots: all(|what| images.list_snapshots(what, None, None)),
        promised: images.room_counts.room(pool).unwrap().promised,
    }
}

/// By one of two controllers, a node or an operator; on one of the volumes that are there.
#[derive(Clone, Debug)]
enum Step {
    Create { by: usize },
    Delete { by: usize, which: usize },
    Grow { by: usize, which: usize },
    Snapshot { by: usize, which: usize },
    DeleteSnapshot { by: usize, which: usize },
    GrowOnNode { which: usize },
    Inline { id: usize },
    DeleteInline { id: usize },
    Static { id: usize, mib: u64 },
    RemoveStatic { id: usize },
    Settle,
}

fn step() -> impl Strategy<Value = Step> {
    let (by, which, id) = (0..2_usize, 0..8_usize, 0..3_usize);
    let of_one = || (by.clone(), which.clone());
    prop_oneof![
        3 => by.clone().prop_map(|by| Step::Create { by }),
        2 => of_one().prop_map(|(by, which)| Step::Delete { by, which }),
        2 => of_one().prop_map(|(by, which)| Step::Grow { by, which }),
        1 => of_one().prop_map(|(by, which)| Step::Snapshot { by, which }),
        1 => of_one().prop_map(|(by, which)| Step::DeleteSnapshot { by, which }),
        1 => which.clone().prop_map(|which| Step::GrowOnNode { which }),
        1 => id.clone().prop_map(|id| Step::Inline { id }),
        1 => id.clone().prop_map(|id| Step::DeleteInline { id }),
        1 => (id.clone(), 1..9_u64).prop_map(|(id, mib)| Step::Static { id, mib }),
        1 => id.clone().prop_map(|id| Step::RemoveStatic { id }),
        6 => Just(Step::Settle),
    ]
}

fn run(step: &Step, name: &str, controllers: &[ImageStore; 2], pool: &Pool, there: &Answers) {
    let volume = |which: usize| {
        let at = which.checked_rem(there.volumes.len())?;
        Some(&there.volumes[at].1)
    };
    let grown = |which: usize| volume(which).map(|it| (it, it.bytes + MIB));
    let fixed = |id: usize| pool.image_path(&format!("static-{id}"));
    match *step {
        Step::Create { by } => {
            controllers[by].create_volume(&new(name, MIB)).unwrap();
        }
        Step::Delete { by, which } => {
            if let Some(it) = volume(which) {
                controllers[by].delete_volume(&it.handle).unwrap();
            }
        }
        Step::Grow { by, which } => {
            if let Some((it, required)) = grown(which) {
                let range = Range { required, limit: 0 };
                controllers[by].expand_volume(&it.handle, range).unwrap();
            }
        }
        Step::Snapshot { by, which } => {
            if let Some(it) = volume(which) {
                controllers[by].create_snapshot(name, &it.handle).unwrap();
            }
        }
        Step::DeleteSnapshot { by, which } => {
            if let Some(at) = which.checked_rem(there.snapshots.len()) {
                let handle = &there.snapshots[at].1.handle;
                controllers[by].delete_snapshot(handle).unwrap();
            }
        }
        // As the node agent does.
        Step::GrowOnNode { which } => {
            if let Some((it, bytes)) = grown(which) {
                let file = pool.open_image(&it.context["image"], true).unwrap();
                file.set_len(bytes).unwrap();
                pool.mark_grown();
            }
        }
        Step::Inline { id } => {
            let _ = pool.create_inline(&id.to_string(), MIB).unwrap();
        }
        Step::DeleteInline { id } => {
            let _ = pool.delete_inline(&id.to_string()).unwrap();
        }
        Step::Static { id, mib } => {
            let (at, draft) = (fixed(id), pool.meta_dir("tmp").unwrap().join("static"));
            std::fs::File::create(&draft)
                .unwrap()
                .set_len(mib * MIB)
                .unwrap();
            std::fs::rename(draft, at).unwrap();
        }
        Step::RemoveStatic { id } => drop(std::fs::remove_file(fixed(id))),
        Step::Settle => settle(pool),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn kept_answers_equal_those_of_a_new_controller(
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let (_dir, pool) = kept_home();
        let controllers = [controller(&pool), controller(&pool)];
        let mut there = answers(&controllers[0], &pool);
        for (n, step) in steps.iter().enumerate() {
            run(step, &format!("name-{n}"), &controllers, &pool, &there);
            there = answers(&controller(&pool), &pool);
            prop_assert_eq!(pool.room().unwrap().promised, there.promised);
            for controller in &controllers {
                prop_assert_eq!(&answers(controller, &pool), &there, "after {:?}", step);
            }
        }
    }
}

#[test]
fn an_unchanged_directory_is_read_once() {
    let (_dir, pool) = kept_home();
    let images = controller(&pool);
    let ids = || {
        let lists = &images.id_lists;
        lists.ids::<volumes::VolumeDetail>(&pool).unwrap()
    };
    images.create_volume(&new("a", MIB)).unwrap();
    settle(&pool);
    let before = ids();
    assert!(std::sync::Arc::ptr_eq(&before, &ids()));
    controller(&pool).create_volume(&new("b", MIB)).unwrap();
    assert_eq!((before.len(), ids().len()), (1, 2));
}

#[test]
fn a_count_of_the_room_is_kept_for_the_capacity_alone() {
    let (_dir, pool) = kept_home();
    let images = controller(&pool);
    let image = std::fs::File::create(pool.image_path("static")).unwrap();
    let promised = || images.room_counts.room(&pool).unwrap().promised;
    settle(&pool);
    assert_eq!(promised(), 0);

    // Nothing shows that an operator enlarges an image.
    let room = pool.room().unwrap().available();
    let taken = room - room / 8;
    image.set_len(taken).unwrap();
    assert_eq!((promised(), pool.room().unwrap().promised), (0, taken));
    let volume = new("pvc", room / 4);
    let refused = images.create_volume(&volume).unwrap_err();
    assert!(
        matches!(refused, ProvisionError::NoRoom { .. }),
        "{refused}"
    );
    settle(&pool);
    let made = images.create_volume(&new("small", MIB)).unwrap();
    settle(&pool);
    let _ = promised();
    let range = Range {
        required: room / 4,
        limit: 0,
    };
    let refused = images.expand_volume(&made.handle, range).unwrap_err();
    assert!(
        matches!(refused, ProvisionError::NoRoom { .. }),
        "{refused}"
    );
}

#[test]
fn a_count_of_the_room_ends_with_its_time_and_with_the_free_bytes() {
    let (_dir, pool) = kept_home();
    let images = controller(&pool);
    let image = std::fs::File::create(pool.image_path("static")).unwrap();
    let counts = &images.room_counts;
    let promised = || counts.room(&pool).unwrap().promised;
    settle(&pool);
    for (bytes, changed) in [
        (MIB, &(|| counts.age(&pool)) as &dyn Fn()),
        (2 * MIB, &|| counts.drift(&pool)),
        (3 * MIB, &|| pool.mark_grown()),
    ] {
        let before = promised();
        image.set_len(bytes).unwrap();
        assert_eq!(promised(), before);
        changed();
        assert_eq!(promised(), bytes);
        settle(&pool);
    }
}

/// The mount point after the pool's file system was unmounted, and another pool there.
#[test]
fn nothing_kept_is_told_of_another_directory() {
    let (dir, mut pool) = kept_home();
    let [other, away] = ["other", "away"].map(|name| dir.path().join(name));
    pool.dir = dir.path().join("pool");
    std::fs::create_dir(&pool.dir).unwrap();
    pool.initialize().unwrap();
    let images = controller(&pool);
    images.create_volume(&new("pvc", MIB)).unwrap();
    settle(&pool);
    let there = answers(&images, &pool);
    assert_eq!(there.volumes.len(), 1);

    std::fs::rename(&pool.dir, &away).unwrap();
    std::fs::create_dir(&pool.dir).unwrap();
    let what = ListRequest::default();
    let unmounted = [
        images.list_volumes(&what, None).err(),
        images.list_snapshots(&what, None, None).err(),
        images.capacity(&HashMap::new(), &[], true).err(),
    ];
    for error in unmounted {
        assert!(
            matches!(
                error,
                Some(ProvisionError::Pool(PoolError::Uninitialized { .. }))
            ),
            "{error:?}"
        );
    }

    std::fs::rename(&pool.dir, &other).unwrap();
    std::fs::create_dir_all(pool.meta_path("volumes")).unwrap();
    std::fs::copy(away.join(".uring-csi/scope"), pool.meta_path("scope")).unwrap();
    settle(&pool);
    let empty = answers(&images, &pool);
    assert_eq!((empty.volumes.len(), empty.promised), (0, 0));

    std::fs::remove_dir_all(&pool.dir).unwrap();
    std::fs::rename(&away, &pool.dir).unwrap();
    assert_eq!(answers(&images, &pool), there);
}

#[test]
fn a_volume_that_is_completed_while_its_pool_is_swept_stays() {
    let home = home();
    let pool = home.pool();
    let images = controller(pool);
    let made = images.create_volume(&new("pvc", MIB)).unwrap();
    let catalogue = catalogue::Catalogue::<volumes::VolumeDetail>::of(pool);
    let id = catalogue.ids().unwrap()[0];
    // As the sweep read it, before the create ended.
    let mut seen = catalogue.get(id).unwrap().expect("its entry");
    seen.state = catalogue::EntryState::Making;
    images.finish(pool, &seen).unwrap();
    assert!(pool.image_path(&made.context["image"]).exists());
    let entry = catalogue.get(id).unwrap().expect("its entry");
    assert_eq!(entry.state, catalogue::EntryState::Ready);
    // What is still being made is deleted.
    catalogue.record_as(&seen).unwrap();
    images.finish(pool, &seen).unwrap();
    assert!(!pool.image_path(&made.context["image"]).exists());
    assert!(catalogue.get(id).unwrap().is_none());
}
