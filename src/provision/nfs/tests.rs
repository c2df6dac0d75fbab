use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, OFlags, openat};
use tempfile::TempDir;
use testkit::report_not_tested;

use super::*;
use crate::{
    Kind,
    provision::{AccessibilityRequirements, images::RunningCopy},
};

/// A directory, as the modules below walk from it.
pub fn opened(dir: &Path) -> OwnedFd {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, dir, flags, Mode::empty()).expect("a directory")
}

/// A copy of so many bytes that is under way.
pub fn running(bytes: u64) -> RunningCopy {
    let target = CopyTarget {
        kind: CopyKind::Volume,
        name: "copy".to_owned(),
        handle: "handle".to_owned(),
        source: "source".to_owned(),
        pool: "share".to_owned(),
    };
    Copies::new(1, 1).begin(target, bytes).expect("begun")
}

/// The controller's store of these exports.
fn store_of(exports: Vec<NfsExport>) -> NfsStore {
    let copies = Copies::new(1, 1);
    NfsStore::new(exports, OnDelete::Delete, QuotaPolicy::Auto, copies).expect("a store")
}

/// A share and the controller's store over it.
struct Share {
    dir: TempDir,
    store: NfsStore,
}

impl Share {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let export = format!("srv:/share={}", dir.path().display());
        let exports = vec![export.parse().expect("an export")];
        let store = store_of(exports);
        Self { dir, store }
    }

    fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(path)
    }

    fn make(
        &self,
        name: &str,
        class: &[(&str, &str)],
        source: Option<ContentSource>,
    ) -> Result<String, ProvisionError> {
        self.make_of(Range::default(), name, class, source)
    }

    fn make_of(
        &self,
        range: Range,
        name: &str,
        class: &[(&str, &str)],
        source: Option<ContentSource>,
    ) -> Result<String, ProvisionError> {
        let base = [("server", "srv"), ("share", "/share")];
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let made = self.store.create_volume(&NewVolume {
            name: name.to_owned(),
            range,
            parameters: base.iter().chain(class).map(owned).collect(),
            mutable: HashMap::default(),
            uses: Vec::new(),
            source,
            elsewhere: None,
            accessibility: AccessibilityRequirements::default(),
            secrets: Secrets::default(),
        });
        Ok(made?.handle)
    }

    /// The handle of a new volume of that `subDir`.
    fn volume(&self, name: &str, sub_dir: &str) -> String {
        let made = self.make(name, &[("subDir", sub_dir)], None);
        made.expect("a volume")
    }

    /// A volume that an earlier release made, also in the directory of another.
    fn earlier(&self, name: &str, sub_dir: &str, on_delete: &str) -> String {
        let handle = format!("srv#share#{sub_dir}#{name}#{on_delete}");
        let record = DirectoryRecord {
            handle: handle.clone(),
            source: None,
            size: 0,
        };
        let path = records::of_volume(&handle.parse().expect("a handle"));
        records::write(&opened(self.dir.path()), &path, &record).expect("written");
        fs::create_dir_all(self.at(sub_dir)).expect("made");
        handle
    }

    fn delete(&self, handle: &str) {
        let deleted = self.store.delete_volume(handle, &Secrets::default());
        deleted.expect("deleted");
    }

    fn snapshot(&self, name: &str, volume: &str) -> Result<String, ProvisionError> {
        let taken = self.store.create_snapshot(&NewSnapshot {
            name: name.to_owned(),
            volume: volume.to_owned(),
            parameters: HashMap::default(),
            secrets: Secrets::default(),
        });
        Ok(taken?.handle)
    }

    /// Does what a deletion does that is killed after its rename.
    fn set_aside(&self, path: &str, handle: &str) {
        let aside = self.at(aside_of(handle));
        fs::rename(self.at(path), aside).expect("renamed");
    }
}

#[test]
fn the_room_of_all_shares_has_each_file_system_once() {
    let (disk, memory) = (tempfile::tempdir(), tempfile::tempdir_in("/dev/shm"));
    let (disk, memory) = (disk.expect("a directory"), memory.expect("a directory"));
    let room = |shares: &[&TempDir]| {
        let exports = shares.iter().enumerate().map(|(at, dir)| {
            let export = format!("srv:/share{at}={}", dir.path().display());
            export.parse().expect("an export")
        });
        let capacity = store_of(exports.collect()).capacity(&CapacityRequest::default());
        capacity.expect("the room").available
    };
    let device = |dir: &TempDir| fs::metadata(dir.path()).expect("there").dev();
    if device(&disk) == device(&memory) {
        report_not_tested("the room of two file systems: /tmp and /dev/shm are one");
        return;
    }
    // Others use both meanwhile, less than half of the smaller one.
    let [of_disk, of_memory] = [&disk, &memory].map(|dir| room(&[dir]));
    let least = of_disk.min(of_memory) / 2;
    assert!(room(&[&disk, &memory]).abs_diff(of_disk + of_memory) < least);
    let again = tempfile::tempdir().expect("a directory");
    assert!(room(&[&disk, &again]).abs_diff(of_disk) < of_disk / 2);
}

#[test]
fn what_is_made_anew_after_a_killed_deletion_is_deleted() {
    let share = Share::new();
    let source = share.volume("source", "source");
    fs::write(share.at("source/file"), "copied").expect("written");
    for (sub_dir, from) in [
        ("", None),
        ("team/v", None),
        ("team/v", Some(ContentSource::Volume(source.clone()))),
    ] {
        let class = [("subDir", sub_dir)];
        let path = if sub_dir.is_empty() { "v" } else { sub_dir };
        let make = || share.make("v", &class, from.clone()).expect("made");
        let handle = make();
        fs::write(share.at(path).join("old"), "old").expect("written");
        share.set_aside(path, &handle);
        assert_eq!(make(), handle);
        assert!(!share.at(path).join("old").exists());
        fs::write(share.at(path).join("new"), "new").expect("written");
        share.delete(&handle);
        assert!(!share.at(path).exists(), "{handle}");
        assert!(!share.at(aside_of(&handle)).exists(), "{handle}");
    }
    let take = || share.snapshot("snap", &source).expect("a snapshot");
    let handle = take();
    share.set_aside("snap", &handle);
    assert_eq!(take(), handle);
    let deleted = share.store.delete_snapshot(&handle, &Secrets::default());
    deleted.expect("deleted");
    assert!(!share.at("snap").exists());
}

#[test]
fn a_late_deletion_keeps_a_newer_volume_that_has_no_record() {
    let share = Share::new();
    let old = share.volume("pvc-1", "data");
    share.set_aside("data", &old);
    share.make("data", &[], None).expect("made");
    share.delete(&old);
    assert!(share.at("data").exists());
}

#[test]
fn a_source_in_a_share_that_is_away_is_not_missing() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir(dir.path().join("v")).expect("made");
    let kind_of = |option: &str, handle: &str| {
        let export = format!("srv:/share={}{option}", dir.path().display());
        let exports = vec![export.parse().expect("an export")];
        let store = store_of(exports);
        let opened = store.volume_tree(handle).map(drop);
        opened.map_err(|error| error.kind())
    };
    assert_eq!(kind_of("", "srv#share#v##"), Ok(()));
    assert_eq!(kind_of("", "srv#share#gone##"), Err(Kind::NotFound));
    for option in [",mounted", "-gone"] {
        assert_eq!(kind_of(option, "srv#share#v##"), Err(Kind::Transient));
    }
}

#[test]
fn a_volume_gets_no_directory_of_a_snapshot() {
    let share = Share::new();
    let source = share.volume("source", "source");
    fs::write(share.at("source/file"), "kept").expect("written");
    let snapshot = share.snapshot("snap", &source).expect("a snapshot");
    for sub_dir in ["snap", "snap/data", "snap/new"] {
        for from in [None, Some(ContentSource::Volume(source.clone()))] {
            let made = share.make("v", &[("subDir", sub_dir)], from);
            assert_eq!(made.expect_err(sub_dir).kind(), Kind::Conflict);
        }
        // Handles that no controller gave.
        share.delete(&format!("srv#share#{sub_dir}##"));
    }
    let made = share.make("snap", &[], None);
    assert_eq!(made.expect_err("a snapshot").kind(), Kind::Conflict);
    let left = fs::read_to_string(share.at("snap/data/file"));
    assert_eq!(left.expect("the snapshot"), "kept");
    assert!(!share.at("snap/new").exists());

    let deleted = share.store.delete_snapshot(&snapshot, &Secrets::default());
    deleted.expect("deleted");
    share.volume("v", "snap");
    assert!(share.at("snap").exists());
}

#[test]
fn a_deletion_leaves_the_directories_of_volumes_above_and_below() {
    let share = Share::new();
    for on_delete in ["", "archive"] {
        let volume = |name, sub_dir| share.earlier(name, sub_dir, on_delete);
        let [above, below] = [("pv-1", "team"), ("pv-2", "team/db")].map(|(n, d)| volume(n, d));
        let file = share.at("team/db/file");
        fs::write(&file, on_delete).expect("written");
        // Not below it.
        let other = volume("pv-3", "team-2/db");
        share.delete(&above);
        assert_eq!(fs::read_to_string(&file).expect("kept"), on_delete);
        assert_eq!(volume("pv-1", "team"), above);
        share.delete(&below);
        assert!(!file.exists() && share.at("team").exists());
        let _ = fs::remove_dir_all(share.at("archived-team"));
        share.delete(&above);
        assert!(!share.at("team").exists());
        share.delete(&other);
        assert!(!share.at("team-2/db").exists());
        for archived in ["archived-team", "archived-team-2"] {
            let _ = fs::remove_dir_all(share.at(archived));
        }
    }
    // One that another program has removed.
    let above = share.volume("pv-1", "team");
    share.earlier("pv-2", "team/db", "");
    fs::remove_dir(share.at("team/db")).expect("removed");
    share.delete(&above);
    assert!(!share.at("team").exists());
}

#[test]
fn no_volume_is_made_above_or_below_another() {
    let share = Share::new();
    let source = share.volume("source", "source");
    let copy = || Some(ContentSource::Volume(source.clone()));
    let refused = |name: &str, class: &[(&str, &str)], field: &str, other: &str| {
        for from in [None, copy()] {
            let error = share.make(name, class, from).expect_err("nested");
            assert_eq!(error.kind(), Kind::Precondition);
            let error = error.to_string();
            assert!(error.starts_with(field) && error.contains(other), "{error}");
        }
    };
    let inner = share.volume("pv-1", "team/a/db");
    for sub_dir in ["team/a/db/x", "team/a/db/x/y"] {
        refused("pv-2", &[("subDir", sub_dir)], "subDir: ", "\"team/a/db\"");
        assert!(!share.at("team/a/db/x").exists());
    }
    for sub_dir in ["team/a", "team"] {
        // A copy is refused because of the directory itself.
        let error = share.make("pv-2", &[("subDir", sub_dir)], None);
        let error = error.expect_err("nested").to_string();
        assert!(error.contains("\"team/a/db\""), "{error}");
    }
    let error = share.make("team", &[], None).expect_err("nested");
    assert!(error.to_string().starts_with("name: "), "{error}");
    // The same directory, and those beside it.
    assert_eq!(share.volume("pv-1", "team/a/db"), inner);
    share.volume("pv-2", "team/a/db");
    for beside in ["team/a/db-2", "team/b"] {
        share.volume("pv-3", beside);
    }
    // Those of an earlier release.
    let nested = share.earlier("pv-4", "team", "");
    assert_eq!(share.volume("pv-4", "team"), nested);
    assert_eq!(share.volume("pv-1", "team/a/db"), inner);
    refused("pv-5", &[("subDir", "team/c")], "subDir: ", "\"team\"");
}

#[test]
fn the_deletion_of_a_snapshot_leaves_the_directory_of_a_volume() {
    let share = Share::new();
    for sub_dir in ["snap", "snap/v"] {
        let volume = share.volume("v", sub_dir);
        // As csi-driver-nfs takes one.
        fs::write(share.at("snap/source.tar"), "packed").expect("written");
        let snapshot = "srv#share#snap#snap#source";
        let delete = || share.store.delete_snapshot(snapshot, &Secrets::default());
        let error = delete().expect_err("it has a volume");
        assert_eq!(error.kind(), Kind::Precondition);
        assert!(share.at(sub_dir).exists());
        if sub_dir == "snap" {
            fs::remove_file(share.at("snap/source.tar")).expect("removed");
        }
        share.delete(&volume);
        delete().expect("deleted");
        assert!(!share.at("snap").exists());
    }
}

#[test]
fn the_directories_of_the_driver_are_no_volumes() {
    let share = Share::new();
    let volume = share.volume("v", "team/v");
    for name in [".uring-csi", ".making-x", ".deleted-x"] {
        let made = share.make(name, &[], None);
        assert_eq!(made.expect_err(name).kind(), Kind::Invalid);
        fs::create_dir_all(share.at(name).join("volumes")).expect("made");
        for sub_dir in [name.to_owned(), format!("{name}/volumes")] {
            let made = share.make("v", &[("subDir", &sub_dir)], None);
            assert_eq!(made.expect_err(name).kind(), Kind::Invalid);
            let handle = format!("srv#share#{sub_dir}##");
            share.delete(&handle);
            assert!(share.at(sub_dir).exists());
            let taken = share.snapshot("snap", &handle);
            assert_eq!(taken.expect_err(name).kind(), Kind::NotFound);
            let cloned = share.make("clone", &[], Some(ContentSource::Volume(handle)));
            assert_eq!(cloned.expect_err(name).kind(), Kind::NotFound);
        }
    }
    let records = fs::read_dir(share.at(".uring-csi/volumes"));
    assert_eq!(records.expect("read").count(), 1);
    share.delete(&volume);
    assert!(!share.at("team").exists());
}

#[test]
fn an_archive_that_is_there_already_is_reported_to_the_operator() {
    let share = Share::new();
    for (name, sub_dir) in [("v", ""), ("pv-1", "team/v")] {
        let class = [("onDelete", "archive"), ("subDir", sub_dir)];
        let make = || share.make(name, &class, None).expect("made");
        share.delete(&make());
        let handle = make();
        let path = if sub_dir.is_empty() { name } else { sub_dir };
        let archived = format!("archived-{path}");
        let delete = || share.store.delete_volume(&handle, &Secrets::default());
        let error = delete().expect_err("the archive is there");
        assert_eq!(error.kind(), Kind::Precondition);
        assert!(error.to_string().contains(&archived), "{error}");
        assert!(share.at(path).exists());
        fs::remove_dir(share.at(&archived)).expect("removed");
        delete().expect("deleted");
        assert!(!share.at(path).exists() && share.at(archived).exists());
    }
}

#[test]
fn an_outer_volumes_own_files_are_deleted_and_inner_volumes_stay() {
    let share = Share::new();
    let outer = share.volume("pv-1", "team");
    let inner = share.earlier("pv-2", "team/a/db", "");
    for path in [
        "team/file",
        "team/a/file",
        "team/own/b/c/file",
        "team/a/db/kept",
    ] {
        fs::create_dir_all(share.at(path).parent().expect("below one")).expect("made");
        fs::write(share.at(path), path).expect("written");
    }
    // What a killed deletion has moved already.
    let moved = share.at(own_files_of(&outer));
    fs::create_dir_all(moved.join("0/sub")).expect("made");
    fs::write(moved.join("1"), "moved").expect("written");
    for _ in 0..2 {
        share.delete(&outer);
        let kept = fs::read_to_string(share.at("team/a/db/kept"));
        assert_eq!(kept.expect("kept"), "team/a/db/kept");
        for (dir, only) in [("team", "a"), ("team/a", "db")] {
            let left = fs::read_dir(share.at(dir)).expect("read");
            let left: Vec<_> = left.map(|one| one.expect("read").file_name()).collect();
            assert_eq!(left, [only]);
        }
        assert!(!moved.exists());
    }
    share.delete(&inner);
    assert!(!share.at("team").exists());

    // A symlink of a pod on the way to the inner volume.
    let outer = share.volume("pv-1", "team");
    share.earlier("pv-2", "team/a/db", "");
    fs::rename(share.at("team/a"), share.at("moved")).expect("renamed");
    std::os::unix::fs::symlink("../moved", share.at("team/a")).expect("linked");
    fs::write(share.at("team/file"), "own").expect("written");
    fs::write(share.at("moved/db/kept"), "kept").expect("written");
    share.delete(&outer);
    assert!(!share.at("team/file").exists() && share.at("moved/db/kept").exists());
}

#[test]
fn a_bad_record_keeps_its_own_directory_and_no_other() {
    let share = Share::new();
    let [outer, bad, other] = [("pv-1", "team"), ("pv-2", "team/a/db"), ("pv-3", "other")]
        .map(|(name, sub_dir)| share.earlier(name, sub_dir, ""));
    for path in ["team/file", "team/a/db/kept", "other/file"] {
        fs::write(share.at(path), path).expect("written");
    }
    let record = records::of_volume(&bad.parse().expect("a handle"));
    let record = share.at(".uring-csi").join(record);
    fs::write(&record, "{").expect("written");
    let what = ListRequest {
        max: 10,
        ..ListRequest::default()
    };
    let list = || share.store.list_volumes(&what, None);
    assert_eq!(list().expect("listed").len(), 2, "all but the bad one");
    share.delete(&other);
    assert!(!share.at("other").exists());
    share.delete(&outer);
    assert!(!share.at("team/file").exists() && share.at("team/a/db/kept").exists());
    share.delete(&bad);
    assert!(!share.at("team").exists() && !record.exists());
    assert_eq!(list().expect("listed").len(), 0);
}

#[test]
fn a_bad_record_hides_its_own_snapshot_and_no_other() {
    let share = Share::new();
    let volume = share.volume("v", "v");
    let take = |name| share.snapshot(name, &volume).expect("a snapshot");
    let [_, good] = ["bad", "good"].map(take);
    let record = format!(".uring-csi/snapshots/{}", digest::sha256_hex("bad"));
    assert!(share.at(&record).exists());
    fs::write(share.at(&record), "{").expect("written");
    let what = ListRequest {
        max: 10,
        ..ListRequest::default()
    };
    let none = Secrets::default();
    let listed = share.store.list_snapshots(&what, None, None, &none);
    let handles = listed.expect("listed").into_iter().map(|it| it.token);
    assert_eq!(handles.collect::<Vec<_>>(), [good]);
}

#[test]
fn recorded_volumes_are_listed() {
    let share = Share::new();
    let mut made = vec![
        share.make("pvc-1", &[], None).expect("made"),
        share.volume("pv-2", "team/db"),
        share.volume("pv-3", "team/db"),
    ];
    let copy = Some(ContentSource::Volume(made[0].clone()));
    made.push(share.make("copy", &[], copy).expect("made"));
    made.sort_unstable();
    // Of csi-driver-nfs.
    fs::create_dir(share.at("pvc-9")).expect("made");
    let list = |from: Option<&String>, max, pool: Option<&str>| {
        let what = ListRequest {
            from: from.cloned(),
            max,
            omitted: None,
        };
        let listed = share.store.list_volumes(&what, pool).expect("listed");
        let handles = listed.into_iter().map(|it| {
            assert_eq!(it.token, it.entry.handle);
            it.entry.handle
        });
        handles.collect::<Vec<_>>()
    };
    assert_eq!(list(None, 10, None), made);
    assert_eq!(list(None, 10, Some("srv:/share")), made);
    assert_eq!(list(None, 10, Some("srv:/other")), [""; 0]);
    assert_eq!(list(None, 1, None), made[..2]);
    assert_eq!(list(Some(&made[1]), 10, None), made[2..]);
    fs::remove_dir_all(share.at("copy")).expect("removed");
    assert_eq!(list(None, 10, None).len(), 3);
}

#[test]
fn a_volume_has_the_size_of_its_first_request_and_of_its_expansions() {
    let share = Share::new();
    let sized = |required, limit| Range { required, limit };
    let source = share.volume("source", "source");
    for (name, from) in [("v", None), ("copy", Some(ContentSource::Volume(source)))] {
        let make = |range| share.make_of(range, name, &[], from.clone());
        let handle = make(sized(1000, 1000)).expect("made");
        for same in [
            sized(1000, 1000),
            sized(1000, 0),
            sized(0, 2000),
            sized(0, 0),
        ] {
            assert_eq!(make(same).expect("found"), handle);
        }
        let refused = |other| {
            let error = make(other).expect_err("of another size");
            assert_eq!(error.kind(), Kind::Conflict);
            error.to_string()
        };
        let why = refused(sized(2000, 2000));
        assert!(why.contains("its size is 1000"), "{why}");
        refused(sized(0, 500));
        let expand = |bytes| {
            let (to, none) = (sized(bytes, 0), Secrets::default());
            share.store.expand_volume(&handle, to, &none)
        };
        for bytes in [3000, 2000] {
            assert_eq!(expand(bytes).expect("grown"), bytes);
        }
        make(sized(3000, 0)).expect("found");
        refused(sized(4000, 0));

        // Of an earlier release.
        let record = records::of_volume(&handle.parse().expect("a handle"));
        let record = share.at(".uring-csi").join(record);
        let text = fs::read_to_string(&record).expect("read");
        fs::write(&record, text.replace(r#","size":3000"#, "")).expect("written");
        make(sized(4000, 0)).expect("found");
        share.delete(&handle);
        make(sized(2000, 0)).expect("made");
    }
}

#[test]
fn what_a_live_controller_makes_is_in_use_and_each_share_is_swept_apart() {
    let share = Share::new();
    let root = opened(share.dir.path());
    let digest = "0123456789abcdef".repeat(4);
    let record = format!("volumes/{digest}.{digest}");
    let live = DirectoryDraft::begin(&root, &record).expect("begun");
    let live = live.expect("nobody else makes it");
    drop(live.make("v").expect("made"));
    let parts = share.store.swept_pools();
    assert_eq!(parts, ["srv:/share"]);
    let swept = |part: Option<&str>| -> Vec<Kind> {
        let errors = share.store.sweep(part);
        errors.iter().map(ProvisionError::kind).collect()
    };
    assert_eq!(swept(None), [Kind::InUse]);
    assert_eq!(swept(Some(&parts[0])), [Kind::InUse]);
    assert_eq!(swept(Some("srv:/other")), []);
    drop(live);
    assert_eq!(swept(None), []);
}
