//! Copies of data: their limit, their progress, and what a failed one leaves.

use super::*;

pub fn over(dir: &Path, copies: &Copies) -> Stores {
    let pools = Pools::new([pool("main", dir, Scope::Shared)]).unwrap();
    let images = ImageStore::new(pools, None, BOOT.to_owned(), copies.clone(), &Lanes::new(2));
    Stores::new(Some(images.into()), None, None, &Lanes::new(2))
}

/// A source with 6 MiB of data in 8 MiB, and a clone of it to be made.
async fn source(home: &Home, images: &Stores) -> NewVolume {
    let thin = [("overcommit", "true")];
    let made = images.create_volume(with(new("source", 8 * MIB), &thin));
    let made = made.await.unwrap();
    let data = vec![7; 6 << 20];
    home.file(&made).write_all_at(&data, MIB).unwrap();
    with(
        copy_of("clone", 8 * MIB, ContentSource::Volume(made.handle)),
        &thin,
    )
}

/// Another copy, for as long as the others have to wait.
pub fn hold_permit(copies: &Copies) -> copies::RunningCopy {
    let other = copies::CopyTarget {
        kind: CopyKind::Volume,
        name: "other".to_owned(),
        handle: String::new(),
        source: String::new(),
        pool: "main".to_owned(),
    };
    copies.begin(other, 1).unwrap()
}

#[tokio::test]
async fn a_copy_that_waits_is_in_no_list_of_what_is_complete() {
    let home = home();
    let copies = Copies::new(1, 1);
    let images = over(home.dir.path(), &copies);
    let clone = source(&home, &images).await;
    let volume = clone.source.clone().unwrap().handle().to_owned();
    let other = hold_permit(&copies);
    let (copying, snapshot) = (
        images.clone(),
        snapshot_of("snap".to_owned(), volume.clone()),
    );
    let taken = tokio::spawn(async move { copying.create_snapshot(snapshot).await });
    while copies.gate().load().waiting == 0 {
        tokio::task::yield_now().await;
    }
    let listed = || images.list_snapshots(ListRequest::default(), None, none());
    assert!(listed().await.unwrap().entries.is_empty());
    let waiting = copies.list().pop().unwrap();
    assert_eq!(
        (
            waiting.target.kind,
            &*waiting.target.name,
            waiting.target.source
        ),
        (CopyKind::Snapshot, "snap", volume)
    );
    assert_eq!(
        (waiting.copied, waiting.bytes, waiting.age),
        (0, 8 * MIB, None)
    );
    let handle = waiting.target.handle;
    assert_eq!(
        kind(images.get_snapshot(handle.clone(), none()).await),
        Kind::NotFound
    );

    drop(other);
    assert_eq!(taken.await.unwrap().unwrap().handle, handle);
    assert_eq!(listed().await.unwrap().entries[0].handle, handle);
    assert_eq!((copies.list(), copies.copied()), (Vec::new(), 8 * MIB));
}

#[tokio::test]
async fn a_source_that_grew_while_its_copy_waited_is_not_copied_in_part() {
    let home = home();
    let copies = Copies::new(1, 1);
    let images = over(home.dir.path(), &copies);
    let clone = source(&home, &images).await;
    let volume = clone.source.clone().unwrap().handle().to_owned();
    let before = home.files();
    let snapshot = snapshot_of("snap".to_owned(), volume.clone());
    let other = hold_permit(&copies);
    let (for_snapshot, for_clone) = (images.clone(), images.clone());
    let (snapshot_again, clone_again) = (snapshot.clone(), clone.clone());
    let taken = tokio::spawn(async move { for_snapshot.create_snapshot(snapshot).await });
    let made = tokio::spawn(async move { for_clone.create_volume(clone).await });
    while copies.gate().load().waiting < 2 {
        tokio::task::yield_now().await;
    }
    let range = Range {
        required: 12 * MIB,
        limit: 0,
    };
    images.expand_volume(volume, range, none()).await.unwrap();
    drop(other);
    assert_eq!(kind(taken.await.unwrap()), Kind::InUse);
    assert_eq!(kind(made.await.unwrap()), Kind::InUse);
    assert_eq!(home.files(), before);

    let taken = images.create_snapshot(snapshot_again).await.unwrap();
    assert_eq!(taken.bytes, 12 * MIB);
    // It is smaller than its source now.
    assert_eq!(
        kind(images.create_volume(clone_again).await),
        Kind::OutOfRange
    );
}

#[tokio::test]
async fn a_copy_without_room_is_refused_before_it_takes_any() {
    let home = home();
    let copies = Copies::new(1, 1);
    let images = over(home.dir.path(), &copies);
    let clone = source(&home, &images).await;
    let too_large = NewVolume {
        range: Range {
            required: 1 << 50,
            limit: 0,
        },
        ..with(clone, &[])
    };
    assert_eq!(kind(images.create_volume(too_large).await), Kind::Exhausted);
    assert_eq!((copies.list(), copies.copied()), (Vec::new(), 0));
    assert_eq!(home.files().len(), 3, "only the source is there");
}

#[tokio::test]
async fn a_copy_of_a_preallocated_class_has_all_its_blocks() {
    let home = home();
    let clone = source(&home, &home.images).await;
    let thick = with(clone, &[("preallocate", "true")]);
    let made = home.images.create_volume(thick).await.unwrap();
    let metadata = home.file(&made).metadata().unwrap();
    assert!(metadata.blocks() * 512 >= metadata.len());
    let mut data = vec![0; 6 << 20];
    home.file(&made).read_exact_at(&mut data, MIB).unwrap();
    assert!(data.iter().all(|byte| *byte == 7));
}

/// Runs on a tmpfs of 10 MiB.
fn in_small_memory(inside: impl AsyncFnOnce(Home) + Send + 'static) {
    let run = || {
        let sandbox = testkit::Sandbox::new();
        let dir = sandbox.dir().join("small");
        std::fs::create_dir(&dir).unwrap();
        let at = dir.to_str().unwrap();
        testkit::run(&["mount", "-t", "tmpfs", "-o", "size=10m", "none", at]);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(inside(home_in(tempfile::tempdir_in(&dir).unwrap())));
        drop(runtime);
        testkit::run(&["umount", at]);
    };
    std::thread::spawn(run).join().unwrap();
}

#[test]
fn a_copy_that_fills_the_pool_leaves_nothing_of_itself() {
    in_small_memory(async |home| {
        let copies = Copies::new(1, 1);
        let images = over(home.dir.path(), &copies);
        let clone = source(&home, &images).await;
        let before = home.files();
        for _ in 0..2 {
            let refused = images.create_volume(clone.clone()).await;
            assert_eq!(kind(refused), Kind::Exhausted);
            assert_eq!((copies.list(), home.files()), (Vec::new(), before.clone()));
        }
        let source = clone.source.unwrap().handle().to_owned();
        let snapshot = snapshot_of("snap".to_owned(), source.clone());
        let refused = images.create_snapshot(snapshot).await;
        assert_eq!(kind(refused), Kind::Exhausted);
        assert_eq!(home.files(), before);
        // Nothing claims it any more.
        images.delete_volume(source, none()).await.unwrap();
    });
}

#[test]
fn copies_under_way_are_not_promised_the_same_room() {
    in_small_memory(async |home| {
        let copies = Copies::new(2, 1);
        let images = over(home.dir.path(), &copies);
        let made = images.create_volume(new("source", 3 * MIB)).await.unwrap();
        let data = vec![7; 3 << 20];
        home.file(&made).write_all_at(&data, 0).unwrap();
        let others = [hold_permit(&copies), hold_permit(&copies)];
        // Each has room for itself.
        let clones = ["one", "two"].map(|name| {
            let clone = copy_of(name, 4 * MIB, ContentSource::Volume(made.handle.clone()));
            let images = images.clone();
            tokio::spawn(async move { images.create_volume(clone).await })
        });
        while copies.gate().load().waiting < 2 {
            tokio::task::yield_now().await;
        }
        drop(others);
        let mut refused = 0;
        for clone in clones {
            if let Err(error) = clone.await.unwrap() {
                assert!(matches!(error, ProvisionError::NoRoom { .. }), "{error}");
                refused += 1;
            }
        }
        // Before it has copied anything.
        assert_eq!((refused, copies.copied()), (1, 3 * MIB));
        let images = home.files();
        assert_eq!(images.len(), 6, "source and one clone: {images:?}");
    });
}

#[test]
fn a_snapshot_takes_no_space_that_others_were_promised() {
    in_small_memory(async |home| {
        let images = &home.images;
        let made = images.create_volume(new("source", 4 * MIB)).await.unwrap();
        let data = vec![7; 3 << 20];
        home.file(&made).write_all_at(&data, 0).unwrap();
        let other = images.create_volume(new("other", 5 * MIB)).await.unwrap();
        let before = home.files();
        let take = || images.create_snapshot(snapshot_of("snap".to_owned(), made.handle.clone()));
        let group = || NewGroupSnapshot {
            name: "group".to_owned(),
            volumes: vec![made.handle.clone()],
            parameters: HashMap::new(),
            secrets: none(),
        };
        assert_eq!(kind(take().await), Kind::Exhausted);
        let refused = images.create_group_snapshot(group()).await;
        assert_eq!(kind(refused), Kind::Exhausted);
        assert_eq!(home.files(), before);

        images.delete_volume(other.handle, none()).await.unwrap();
        images
            .delete_snapshot(take().await.unwrap().handle, none())
            .await
            .unwrap();
        images.create_group_snapshot(group()).await.unwrap();
    });
}
