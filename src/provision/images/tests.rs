//! The provisioner as its callers see it, over pools in temporary directories.

use std::{
    collections::HashMap,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

use futures_util::future::join_all;

use super::*;
use crate::{
    pool::{
        Pool, Scope,
        claim::{self, Access, Claim},
    },
    provision::{Kind, Places, Source},
};

const MIB: u64 = 1 << 20;
const BOOT: &str = "this boot";

fn images_over(pools: &[(&str, &Path, Scope)], node_id: Option<&str>) -> Images {
    let pools = pools.iter().map(|(name, dir, scope)| Pool {
        name: (*name).to_owned(),
        dir: (*dir).to_owned(),
        scope: *scope,
    });
    let pools = Pools::new(pools).unwrap();
    Images::new(
        pools,
        node_id.map(str::to_owned),
        BOOT.to_owned(),
        Lanes::new(2),
    )
}

fn new(name: &str, required: u64) -> NewVolume {
    NewVolume {
        name: name.to_owned(),
        range: Range { required, limit: 0 },
        parameters: HashMap::new(),
        usages: vec![Usage {
            fs_type: None,
            many_nodes_write: false,
        }],
        mutable: HashMap::new(),
        source: None,
        elsewhere: None,
        places: Places::default(),
        secrets: none(),
    }
}

fn none() -> Secrets {
    Secrets::default()
}

fn snapshot_of(name: String, volume: String) -> NewSnapshot {
    NewSnapshot {
        name,
        volume,
        parameters: HashMap::new(),
        secrets: none(),
    }
}

fn room(parameters: HashMap<String, String>, here_will_do: bool) -> RoomFor {
    RoomFor {
        parameters,
        here_will_do,
        ..RoomFor::default()
    }
}

fn with(mut new: NewVolume, parameters: &[(&str, &str)]) -> NewVolume {
    let owned = parameters
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    new.parameters = owned.collect();
    new
}

fn copy_of(name: &str, required: u64, source: Source) -> NewVolume {
    NewVolume {
        source: Some(source),
        ..new(name, required)
    }
}

struct Home {
    dir: tempfile::TempDir,
    images: Images,
}

fn home() -> Home {
    let dir = tempfile::tempdir().unwrap();
    let images = images_over(&[("main", dir.path(), Scope::Shared)], None);
    Home { dir, images }
}

impl Home {
    fn pool(&self) -> &Pool {
        self.images.turns.store().pools.get("main").unwrap()
    }

    fn file(&self, volume: &Volume) -> std::fs::File {
        self.pool()
            .open_image(&volume.context["image"], true)
            .unwrap()
    }

    /// What is in the pool, its metadata included, but for the pool's own.
    fn files(&self) -> Vec<String> {
        let mut files = files_below(self.dir.path());
        files.retain(|file| !file.ends_with("/.uring-csi/scope"));
        files
    }

    fn claim(&self, volume: &Volume, node: &str) {
        let claim = Claim {
            node_id: node.to_owned(),
            boot_id: BOOT.to_owned(),
            volume_id: String::new(),
            access: Access::Exclusive,
            read_only: false,
        };
        let _ = claim::claim(self.pool(), &volume.context["image"], &claim).unwrap();
    }

    fn release(&self, volume: &Volume, node: &str) {
        let _ = claim::release(self.pool(), &volume.context["image"], node).unwrap();
    }
}

fn files_below(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_below(&path));
        } else {
            found.push(path.display().to_string());
        }
    }
    found
}

fn kind<T: std::fmt::Debug>(result: Result<T, Error>) -> Kind {
    result.unwrap_err().kind()
}

#[tokio::test]
async fn many_equal_creates_make_one_image() {
    let home = home();
    let creates = (0..32).map(|_| home.images.create_volume(new("pvc-1", 8 * MIB)));
    let made = join_all(creates).await;
    let first = made[0].as_ref().unwrap();
    assert_eq!(first.bytes, 8 * MIB);
    assert!(made.iter().all(|other| other.as_ref().unwrap() == first));
    let images = home.files();
    // The image, its reservation, its record.
    assert_eq!(images.len(), 3, "{images:?}");
    assert_eq!(home.file(first).metadata().unwrap().blocks(), 0);
    assert_eq!(home.file(first).metadata().unwrap().mode() & 0o777, 0o600);

    // After a restart, too; and when it was grown since.
    let later = images_over(&[("main", home.dir.path(), Scope::Shared)], None);
    let range = Range {
        required: 16 * MIB,
        limit: 0,
    };
    assert_eq!(
        later
            .expand_volume(first.handle.clone(), range, none())
            .await
            .unwrap(),
        16 * MIB
    );
    let again = later.create_volume(new("pvc-1", 8 * MIB)).await.unwrap();
    assert_eq!((&again.handle, again.bytes), (&first.handle, 16 * MIB));
}

#[tokio::test]
async fn a_name_means_one_thing() {
    let home = home();
    let other = tempfile::tempdir().unwrap();
    let images = images_over(
        &[
            ("main", home.dir.path(), Scope::Shared),
            ("other", other.path(), Scope::Shared),
        ],
        None,
    );
    let made = images
        .create_volume(with(new("pvc", 8 * MIB), &[("pool", "main")]))
        .await
        .unwrap();
    let copy = copy_of("pvc", 8 * MIB, Source::Volume(made.handle));
    for different in [
        with(new("pvc", 9 * MIB), &[("pool", "main")]),
        with(new("pvc", 8 * MIB), &[("pool", "other")]),
        with(new("pvc", 8 * MIB), &[("pool", "main"), ("fsType", "xfs")]),
        with(copy, &[("pool", "main")]),
    ] {
        assert_eq!(
            kind(images.create_volume(different).await),
            Kind::AlreadyExists
        );
    }
    let unnamed = images.create_volume(new("pvc-2", MIB)).await;
    let error = unnamed.unwrap_err();
    assert!(error.to_string().contains("main, other"), "{error}");
}

#[tokio::test]
async fn a_deleted_volume_leaves_nothing() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    for _ in 0..2 {
        home.images
            .delete_volume(made.handle.clone(), none())
            .await
            .unwrap();
    }
    assert_eq!(home.files(), [""; 0]);
    for never_ours in ["x", "", "vol.shared.main.x"] {
        let handle = never_ours.to_owned();
        home.images
            .delete_volume(handle.clone(), none())
            .await
            .unwrap();
        home.images
            .delete_snapshot(handle.clone(), none())
            .await
            .unwrap();
        assert_eq!(kind(home.images.get_volume(handle).await), Kind::NotFound);
    }
    let again = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    assert_ne!(again.handle, made.handle);
}

#[tokio::test]
async fn what_a_node_holds_is_neither_deleted_nor_torn() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    home.claim(&made, "node-a");
    let published = home.images.get_volume(made.handle.clone()).await.unwrap();
    assert_eq!(published.nodes, ["node-a"]);
    let copy = copy_of("copy", MIB, Source::Volume(made.handle.clone()));
    for refused in [
        home.images
            .delete_volume(made.handle.clone(), none())
            .await
            .err(),
        home.images.create_volume(copy.clone()).await.err(),
        home.images
            .create_snapshot(snapshot_of("snap".to_owned(), made.handle.clone()))
            .await
            .err(),
    ] {
        let error = refused.unwrap();
        assert_eq!(error.kind(), Kind::FailedPrecondition);
        let text = crate::chain(&error);
        assert!(text.contains("node-a"), "{text}");
    }
    home.release(&made, "node-a");
    home.images.create_volume(copy).await.unwrap();
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
}

#[tokio::test]
async fn copies_hold_the_data_and_may_be_larger() {
    let home = home();
    let source = home
        .images
        .create_volume(new("source", 8 * MIB))
        .await
        .unwrap();
    home.file(&source).write_all_at(b"old", 4 * MIB).unwrap();
    let taken = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), source.handle.clone()))
        .await
        .unwrap();
    assert_eq!(taken.bytes, 8 * MIB);
    home.file(&source).write_all_at(b"new", 4 * MIB).unwrap();

    let from_snapshot = Source::Snapshot(taken.handle.clone());
    let restored = home
        .images
        .create_volume(copy_of("restored", 9 * MIB, from_snapshot.clone()))
        .await
        .unwrap();
    assert_eq!(restored.source.as_ref(), Some(&from_snapshot));
    let cloned = home
        .images
        .create_volume(copy_of("cloned", 0, Source::Volume(source.handle.clone())))
        .await
        .unwrap();
    assert_eq!((restored.bytes, cloned.bytes), (9 * MIB, 8 * MIB));
    for (volume, data) in [(&restored, b"old"), (&cloned, b"new")] {
        let mut read = [0; 3];
        home.file(volume).read_exact_at(&mut read, 4 * MIB).unwrap();
        assert_eq!(&read, data);
    }
    let smaller = copy_of("smaller", 7 * MIB, from_snapshot.clone());
    assert_eq!(
        kind(home.images.create_volume(smaller).await),
        Kind::OutOfRange
    );

    // The snapshot outlives its volume, and its name goes on meaning it.
    home.images
        .delete_volume(source.handle.clone(), none())
        .await
        .unwrap();
    let again = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), source.handle))
        .await
        .unwrap();
    assert_eq!(again, taken);
    let other = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), cloned.handle))
        .await;
    assert_eq!(kind(other), Kind::AlreadyExists);
    home.images
        .delete_snapshot(taken.handle, none())
        .await
        .unwrap();
    let late = copy_of("late", 9 * MIB, from_snapshot);
    assert_eq!(kind(home.images.create_volume(late).await), Kind::NotFound);
}

#[tokio::test]
async fn pages_go_on_behind_what_was_deleted() {
    let home = home();
    let mut handles = Vec::new();
    for n in 0..5 {
        let made = home
            .images
            .create_volume(new(&format!("pvc-{n}"), MIB))
            .await;
        handles.push(made.unwrap().handle);
    }
    let page = async |from: Option<String>| {
        let page = home
            .images
            .list_volumes(Listing { from, max: 2 })
            .await
            .unwrap();
        let ids: Vec<_> = page.entries.into_iter().map(|v| v.handle).collect();
        (ids, page.next)
    };
    let (ids, next) = page(None).await;
    assert_eq!(ids, handles[..2]);
    home.images
        .delete_volume(handles[1].clone(), none())
        .await
        .unwrap();
    let late = home.images.create_volume(new("late", MIB)).await.unwrap();
    let (ids, next) = page(next).await;
    assert_eq!(ids, handles[2..4]);
    let (ids, next) = page(next).await;
    assert_eq!((ids, next), (vec![handles[4].clone(), late.handle], None));
    let bad = Listing {
        from: Some("2".to_owned()),
        max: 0,
    };
    assert_eq!(kind(home.images.list_volumes(bad).await), Kind::Aborted);
}

#[tokio::test]
async fn a_page_has_an_end_and_a_bad_record_hides_no_other() {
    use catalogue::{Catalogue, Entry, State};
    let home = home();
    let catalogue = Catalogue::<volumes::VolumeDetail>::of(home.pool());
    let records = home.pool().meta_dir("volumes").unwrap();
    for n in 0..=listing::LARGEST_PAGE {
        let entry = Entry {
            id: uuid::Uuid::now_v7(),
            name: format!("pvc-{n}"),
            state: State::Ready,
            detail: volumes::VolumeDetail {
                parameters: crate::provision::Parameters::default(),
                source: None,
                many_nodes_write: false,
                made_bytes: None,
            },
        };
        let bytes = serde_json::to_vec(&entry).unwrap();
        std::fs::write(records.join(format!("{}.json", entry.id)), bytes).unwrap();
    }
    let bad = uuid::Uuid::now_v7();
    std::fs::write(records.join(format!("{bad}.json")), "{").unwrap();
    assert_eq!(catalogue.ids().unwrap().len(), listing::LARGEST_PAGE + 2);
    let mut what = Listing::default();
    for expected in [listing::LARGEST_PAGE, 1] {
        let page = home.images.list_volumes(what.clone()).await.unwrap();
        assert_eq!(page.entries.len(), expected);
        what.from = page.next;
    }
    assert_eq!(what.from, None);
}

#[tokio::test]
async fn no_more_is_promised_than_there_is_unless_the_class_says_so() {
    let home = home();
    let capacity = async |overcommit: &str| {
        let parameters = HashMap::from([("overcommit".to_owned(), overcommit.to_owned())]);
        let capacity = home.images.capacity(room(parameters, true)).await;
        capacity.unwrap()
    };
    let there = capacity("false").await;
    assert!(there.maximum.unwrap() <= there.available, "{there:?}");
    let too_much = there.available * 2;
    let refused = home.images.create_volume(new("pvc", too_much)).await;
    assert_eq!(kind(refused), Kind::ResourceExhausted);
    assert_eq!(home.files(), [""; 0]);

    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let range = Range {
        required: too_much,
        limit: 0,
    };
    let refused = home
        .images
        .expand_volume(made.handle.clone(), range, none())
        .await;
    assert_eq!(kind(refused), Kind::ResourceExhausted);
    let copy = copy_of("copy", too_much, Source::Volume(made.handle));
    assert_eq!(
        kind(home.images.create_volume(copy).await),
        Kind::ResourceExhausted
    );

    assert!(capacity("true").await.maximum.unwrap() > too_much);
    let thin = with(new("thin", too_much), &[("overcommit", "true")]);
    assert_eq!(
        home.images.create_volume(thin).await.unwrap().bytes,
        too_much
    );
}

#[tokio::test]
async fn local_volumes_stay_on_their_node() {
    let dir = tempfile::tempdir().unwrap();
    let here = images_over(&[("disk", dir.path(), Scope::Local)], Some("node-a"));
    let there = images_over(&[("disk", dir.path(), Scope::Local)], Some("node-b"));
    let unwanted = NewVolume {
        elsewhere: Some("node-b".to_owned()),
        ..new("pvc", MIB)
    };
    let error = here.create_volume(unwanted).await.unwrap_err();
    assert_eq!(error.kind(), Kind::ResourceExhausted);
    assert!(error.to_string().contains("node-b"), "{error}");

    let another = with(new("pvc", MIB), &[("pool", "of node-b")]);
    let parameters = another.parameters.clone();
    assert_eq!(
        kind(here.create_volume(another).await),
        Kind::ResourceExhausted
    );
    let empty = here.capacity(room(parameters, true)).await.unwrap();
    assert_eq!(empty.available, 0);

    let made = here.create_volume(new("pvc", MIB)).await.unwrap();
    assert!(made.local);
    let handle = || made.handle.clone();
    assert_eq!(
        kind(there.delete_volume(handle(), none()).await),
        Kind::FailedPrecondition
    );
    let copy = copy_of("copy", MIB, Source::Volume(handle()));
    assert_eq!(
        kind(there.create_volume(copy).await),
        Kind::ResourceExhausted
    );
    let range = Range {
        required: 2 * MIB,
        limit: 0,
    };
    assert_eq!(
        there.expand_volume(handle(), range, none()).await.unwrap(),
        2 * MIB
    );
    let none = HashMap::new();
    let capacity = here.capacity(room(none.clone(), false)).await.unwrap();
    assert_eq!(capacity.available, 0);
    assert!(here.capacity(room(none, true)).await.unwrap().available > 0);
}

#[tokio::test]
async fn several_nodes_write_only_where_nothing_caches() {
    let home = home();
    let shared = |fs_type: Option<&str>| Usage {
        fs_type: fs_type.map(str::to_owned),
        many_nodes_write: true,
    };
    let asking = |usage| NewVolume {
        usages: vec![usage],
        ..new("pvc", MIB)
    };
    let refused = [
        asking(shared(Some("ext4"))),
        with(asking(shared(None)), &[("directIO", "false")]),
    ];
    for new in refused {
        assert_eq!(
            kind(home.images.create_volume(new).await),
            Kind::InvalidArgument
        );
    }
    let made = home
        .images
        .create_volume(asking(shared(None)))
        .await
        .unwrap();
    assert_eq!(made.context["directIO"], "true");
    let check = async |handle: &str, usage| {
        home.images
            .check_usages(handle.to_owned(), vec![usage], HashMap::new(), none())
            .await
            .unwrap()
    };
    assert_eq!(check(&made.handle, shared(None)).await, None);
    assert!(check(&made.handle, shared(Some(""))).await.is_some());
    let plain = home.images.create_volume(new("plain", MIB)).await.unwrap();
    assert!(check(&plain.handle, shared(None)).await.is_some());
}

#[tokio::test]
async fn promised_space_counts_as_taken() {
    let home = home();
    let capacity = async || {
        let none = HashMap::new();
        home.images.capacity(room(none, true)).await.unwrap()
    };
    let before = capacity().await.available;
    home.images
        .create_volume(new("thin", before / 2))
        .await
        .unwrap();
    assert!(capacity().await.available < before * 6 / 10);
    let thick = with(new("thick", 3 * MIB), &[("preallocate", "true")]);
    let thick = home.images.create_volume(thick).await.unwrap();
    let found = home.file(&thick).metadata().unwrap();
    assert!(found.blocks() * 512 >= 3 * MIB);
}

#[tokio::test]
async fn a_lost_image_is_told_and_can_be_deleted() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let ailment = async || {
        home.images
            .volume_ailment(made.handle.clone(), none())
            .await
            .unwrap()
    };
    assert_eq!(ailment().await, None);
    std::fs::remove_file(home.pool().image_path(&made.context["image"])).unwrap();
    assert_eq!(ailment().await.unwrap().reason, "ImageMissing");
    let again = home.images.create_volume(new("pvc", MIB)).await;
    assert_eq!(kind(again), Kind::Internal);
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
    assert_eq!(home.files(), [""; 0]);
}

#[tokio::test]
async fn an_image_whose_record_is_lost_is_left_alone() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let taken = home
        .images
        .create_snapshot(snapshot_of("snap".to_owned(), made.handle.clone()))
        .await;
    let snapshot = taken.unwrap().handle;
    home.claim(&made, "node-a");
    home.file(&made).write_all_at(b"data", 0).unwrap();
    for area in ["volumes", "snapshots"] {
        let files = files_below(&home.pool().meta_path(area));
        let record = files.iter().find(|file| file.contains(".json"));
        std::fs::remove_file(record.unwrap()).unwrap();
    }
    let files = home.files();
    let image = &made.context["image"];
    let errors = home.images.sweep().await;
    let told: Vec<_> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].contains(image) && told[1].contains("snapshots/"));
    let again = home.images.create_volume(new("pvc", MIB)).await;
    assert!(again.unwrap_err().to_string().contains(image));
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
    home.images.delete_snapshot(snapshot, none()).await.unwrap();
    assert_eq!(home.files(), files);
}

#[tokio::test]
async fn a_deleted_volume_s_note_of_a_mkfs_goes_with_it() {
    let home = home();
    let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
    let image = &made.context["image"];
    crate::pool::making::begins(home.pool(), image, &made.handle).unwrap();
    home.images
        .delete_volume(made.handle, none())
        .await
        .unwrap();
    assert_eq!(home.files(), [""; 0]);
}

#[tokio::test]
async fn another_controller_s_work_is_left_alone() {
    let home = home();
    let held = catalogue::Catalogue::<volumes::VolumeDetail>::of(home.pool())
        .reserve("pvc")
        .unwrap();
    assert_eq!(
        kind(home.images.create_volume(new("pvc", MIB)).await),
        Kind::Aborted
    );
    assert!(home.images.sweep().await.is_empty());
    assert_eq!(home.files().len(), 1, "the reservation is still there");
    drop(held);
    assert!(home.images.sweep().await.is_empty());
    assert_eq!(home.files(), [""; 0]);
}

#[tokio::test]
async fn a_failed_create_leaves_nothing() {
    let home = home();
    let impossible = with(new("pvc", 1 << 50), &[("preallocate", "true")]);
    let kind = kind(home.images.create_volume(impossible).await);
    assert!(
        matches!(kind, Kind::ResourceExhausted | Kind::OutOfRange),
        "{kind:?}"
    );
    assert_eq!(home.files(), [""; 0]);
    home.images.create_volume(new("pvc", MIB)).await.unwrap();
}

mod crashes;
mod reflink;
mod served;

mod rubbish {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn in_the_catalogue_is_named_and_stays(
            bytes in proptest::collection::vec(any::<u8>(), 0..80), record: bool,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let home = home();
                let made = home.images.create_volume(new("pvc", MIB)).await.unwrap();
                let area = home.pool().meta_path(if record { "volumes" } else { "names" });
                let path = files_below(&area).remove(0);
                std::fs::write(&path, &bytes).unwrap();
                let count = home.files().len();

                let error = home.images.create_volume(new("pvc", MIB)).await.unwrap_err();
                assert!(error.to_string().contains(&path), "{error}");
                let errors = home.images.sweep().await;
                assert!(errors.iter().any(|e| e.to_string().contains(&path)));
                let error = home.images.delete_volume(made.handle, none()).await.unwrap_err();
                assert!(error.to_string().contains(&path), "{error}");
                assert_eq!(home.files().len(), count);
                assert_eq!(std::fs::read(&path).unwrap(), bytes);
            });
        }
    }
}
