use std::{
    fs,
    os::{
        fd::AsRawFd as _,
        unix::fs::{PermissionsExt, symlink},
    },
};

use proptest::prelude::*;
use rustix::mount::{MountFlags, mount};

use super::*;
use crate::mount::testing::MountScratch;

fn tmpfs(at: &SafePath) {
    mount("none", at.path(), "tmpfs", MountFlags::empty(), None).expect("tmpfs");
}

#[test]
fn only_absolute_paths_strictly_below_a_root_are_places() {
    let directory = tempfile::tempdir().expect("a directory");
    let roots = Roots::new(&[directory.path().to_owned()]).expect("roots");
    let root = directory.path().to_str().expect("utf-8");
    let refused = |path: &str| roots.resolve(path).expect_err(path);

    assert!(matches!(refused("pods/x"), PathError::NotAbsolute(_)));
    assert!(matches!(
        refused(&format!("{root}/a\0b")),
        PathError::NotAbsolute(_)
    ));
    assert!(matches!(
        refused(&format!("{root}/a/../b")),
        PathError::DotDot(_)
    ));
    assert!(matches!(refused(root), PathError::Outside { .. }));
    assert!(matches!(
        refused(&format!("{root}x/a")),
        PathError::Outside { .. }
    ));
    assert!(matches!(
        refused(&format!("{root}/a/b")),
        PathError::MissingParent { .. }
    ));
    let long = "x".repeat(256);
    for path in [format!("{root}/{long}"), format!("{root}/{long}/a")] {
        assert!(matches!(refused(&path), PathError::TooLong { .. }));
    }
    let deep = "a/".repeat(2100);
    assert!(matches!(
        refused(&format!("{root}/{deep}")),
        PathError::TooLong { .. }
    ));
    let place = roots.resolve(&format!("{root}//./a/")).expect("a place");
    assert_eq!(
        place.path(),
        directory.path().canonicalize().expect("real").join("a")
    );
}

#[test]
fn a_root_may_be_a_symlink_and_is_taken_in_both_spellings() {
    let directory = tempfile::tempdir().expect("a directory");
    let real = directory.path().join("real");
    let link = directory.path().join("link");
    fs::create_dir(&real).expect("created");
    symlink(&real, &link).expect("linked");

    let roots = Roots::new(std::slice::from_ref(&link)).expect("roots");
    for spelling in [&real, &link] {
        let path = spelling.join("a");
        let place = roots
            .resolve(path.to_str().expect("utf-8"))
            .expect("a place");
        assert_eq!(place.path(), real.canonicalize().expect("real").join("a"));
    }
}

#[test]
fn the_innermost_root_is_taken() {
    let directory = tempfile::tempdir().expect("a directory");
    let real = tempfile::tempdir().expect("a directory");
    let link = directory.path().join("link");
    symlink(real.path(), &link).expect("linked");

    let roots = Roots::new(&[directory.path().to_owned(), link.clone()]).expect("roots");
    let path = link.join("a");
    assert!(roots.resolve(path.to_str().expect("utf-8")).is_ok());
}

#[test]
fn an_allowed_directory_is_not_for_volumes_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let real = directory.path().canonicalize().expect("real");
    let [kubelet, inner, link] = ["kubelet", "kubelet/inner", "link"].map(|it| real.join(it));
    fs::create_dir_all(&inner).expect("created");
    symlink(&kubelet, &link).expect("linked");
    let roots = Roots::new(std::slice::from_ref(&link)).expect("roots");
    let roots = roots
        .with_allowed(&[real.clone(), inner.clone()])
        .expect("roots");
    for path in [&link, &kubelet, &inner] {
        assert!(roots.is_for_volumes(&path.join("a")), "{path:?}");
    }
    let allowed = real.join("data");
    assert!(roots.has(&allowed) && !roots.is_for_volumes(&allowed));
}

#[test]
fn symlinks_below_a_root_are_never_followed() {
    let directory = tempfile::tempdir().expect("a directory");
    let roots = Roots::new(&[directory.path().to_owned()]).expect("roots");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let link = directory.path().join("link");
    symlink(elsewhere.path(), &link).expect("linked");

    let path = link.join("target");
    let error = roots
        .resolve(path.to_str().expect("utf-8"))
        .expect_err("refused");
    assert!(matches!(error, PathError::Symlink { .. }), "{error}");

    let place = roots
        .resolve(link.to_str().expect("utf-8"))
        .expect("a place");
    assert_eq!(place.kind().expect("looks"), PathKind::Other("a symlink"));
    for result in [
        place.make_dir(0o750),
        place.make_file(0o640),
        place.remove(),
    ] {
        assert!(
            matches!(result, Err(PathError::WrongKind { .. })),
            "{result:?}"
        );
    }
}

#[test]
fn directories_and_files_are_made_once_and_removed_once() {
    let scratch = MountScratch::new();
    let directory = scratch.place("dir");
    assert_eq!(directory.kind().expect("looks"), PathKind::Absent);
    assert_eq!(directory.make_dir(0o750).expect("made"), Done::Now);
    assert_eq!(directory.make_dir(0o750).expect("made"), Done::Already);
    assert_eq!(directory.kind().expect("looks"), PathKind::Dir);
    let mode = fs::metadata(directory.path())
        .expect("there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o750);
    assert!(matches!(
        directory.make_file(0o640),
        Err(PathError::WrongKind { .. })
    ));

    let file = scratch.place("dir/file");
    assert_eq!(file.make_file(0o640).expect("made"), Done::Now);
    assert_eq!(file.make_file(0o640).expect("made"), Done::Already);
    assert_eq!(file.kind().expect("looks"), PathKind::File);
    assert!(matches!(
        file.make_dir(0o750),
        Err(PathError::WrongKind { .. })
    ));

    assert!(matches!(
        directory.remove(),
        Err(PathError::NotEmpty { .. })
    ));
    assert_eq!(file.remove().expect("removed"), Done::Now);
    assert_eq!(file.remove().expect("removed"), Done::Already);
    assert_eq!(directory.remove().expect("removed"), Done::Now);
    assert_eq!(directory.remove().expect("removed"), Done::Already);
}

#[test]
fn files_with_data_and_mounts_are_not_removed() {
    let scratch = MountScratch::new();
    let file = scratch.place("file");
    fs::write(file.path(), "data").expect("written");
    assert!(matches!(file.remove(), Err(PathError::NotEmpty { .. })));

    let mounted = scratch.directory("mounted");
    tmpfs(&mounted);
    assert!(matches!(mounted.kind().expect("looks"), PathKind::Mount(_)));
    assert_eq!(mounted.make_dir(0o750).expect("there"), Done::Already);
    assert!(matches!(
        mounted.make_file(0o640),
        Err(PathError::WrongKind { .. })
    ));
    assert!(matches!(mounted.remove(), Err(PathError::Mounted { .. })));
}

#[test]
fn a_parent_that_vanishes_leaves_a_place_where_nothing_is() {
    let scratch = MountScratch::new();
    let parent = scratch.directory("parent");
    let place = scratch.place("parent/target");
    assert_eq!(parent.remove().expect("removed"), Done::Now);

    assert_eq!(place.kind().expect("looks"), PathKind::Absent);
    assert_eq!(place.remove().expect("nothing"), Done::Already);
    assert!(matches!(place.make_dir(0o750), Err(PathError::Io { .. })));
}

#[test]
fn below_a_file_there_is_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let roots = Roots::new(&[directory.path().to_owned()]).expect("a root");
    let file = directory.path().join("file");
    fs::write(&file, "").expect("a file");
    let below = roots.resolve(file.join("a").to_str().expect("utf-8"));
    assert!(
        matches!(below, Err(PathError::MissingParent { .. })),
        "{below:?}"
    );
}

#[test]
fn a_small_file_is_replaced_read_and_removed() {
    let scratch = MountScratch::new();
    let file = scratch.place("file.json");
    assert_eq!(file.read().expect("reads"), None);
    for text in ["long enough", "short"] {
        file.replace(text.as_bytes()).expect("written");
        assert_eq!(file.read().expect("reads"), Some(text.into()));
    }
    let names = fs::read_dir(file.path().parent().expect("a parent")).expect("listed");
    assert_eq!(names.count(), 1);
    // A killed replacement left its draft.
    let draft = scratch.place(".file.json");
    draft.replace(b"part").expect("written");
    assert_eq!(file.unlink().expect("removed"), Done::Now);
    assert_eq!(draft.read().expect("reads"), None);
    assert_eq!(file.unlink().expect("removed"), Done::Already);
}

fn hostile_path(root: &str) -> impl Strategy<Value = String> + use<> {
    let name = prop_oneof![
        8 => prop::sample::select(vec![
            "..", ".", "", "dir", "file", "link", "loop", "pipe", "a\0b", "a\nb", "\u{85}", "\u{fffd}", " ",
        ])
        .prop_map(str::to_owned),
        1 => (250usize..300).prop_map(|length| "x".repeat(length)),
        1 => "[^/]{0,8}",
    ];
    let beginning = prop::sample::select(vec![
        root.to_owned(),
        root.to_owned(),
        root.to_owned(),
        format!("{root}x"),
        String::new(),
        "relative".to_owned(),
        "/proc/self/root".to_owned(),
        format!("/proc/self/root{root}"),
    ]);
    let names = prop_oneof![
        20 => prop::collection::vec(name, 0..5),
        1 => Just(vec!["dir".to_owned(); 1100]),
    ];
    (beginning, names).prop_map(|(beginning, names)| {
        let names = names.into_iter().map(|name| format!("/{name}"));
        names.fold(beginning, |path, name| path + &name)
    })
}

#[test]
fn any_path_is_refused_or_a_name_in_a_directory_below_a_root() {
    let directory = tempfile::tempdir().expect("a directory");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let real = directory.path().canonicalize().expect("real");
    fs::create_dir_all(real.join("dir/dir")).expect("created");
    fs::write(real.join("file"), "").expect("written");
    fs::write(real.join("dir/file"), "").expect("written");
    for link in ["link", "dir/link"] {
        symlink(elsewhere.path(), real.join(link)).expect("linked");
    }
    symlink("loop", real.join("loop")).expect("linked");
    let owner = rustix::fs::Mode::RUSR;
    rustix::fs::mkfifoat(CWD, real.join("pipe"), owner).expect("made");
    let roots = Roots::new(std::slice::from_ref(&real)).expect("roots");
    let root = real.to_str().expect("utf-8");
    proptest!(|(path in hostile_path(root))| {
        match roots.resolve(&path) {
            Ok(place) => {
                let parent = format!("/proc/self/fd/{}", place.parent.as_raw_fd());
                let parent = fs::read_link(parent).expect("open");
                prop_assert!(parent.starts_with(&real), "{}", parent.display());
                prop_assert_eq!(parent.join(&place.name), place.path());
                let is_name = place.name != "." && place.name != ".." && place.name.len() <= 255;
                prop_assert!(is_name && !path.contains('\0'), "{:?}", place.name);
                prop_assert!(place.kind().is_ok(), "{:?}", place.kind());
            }
            // An error of this kind would be reported as transient.
            Err(PathError::Io { path, source, .. }) => {
                prop_assert!(false, "{}: {}", path.display(), source);
            }
            Err(_) => {}
        }
    });
}

#[test]
fn a_full_directory_is_not_read_to_its_end() {
    let own = [c".", c".."].map(|name| Ok(name.to_owned()));
    assert_eq!(any_name::<()>(own.clone().into_iter()), Ok(false));
    let names = own.clone().into_iter().chain([Ok(c"a".to_owned())]);
    let names = names.chain(std::iter::once_with(|| panic!("read on")));
    assert_eq!(any_name::<()>(names), Ok(true));
    let failing = own.into_iter().chain([Err(())]);
    assert_eq!(any_name(failing), Err(()));
}

#[test]
fn cached_paths_are_opened_without_a_symlink_or_not_at_all() {
    let scratch = MountScratch::new();
    let roots = Roots::new(&[scratch.path().to_owned()]).expect("roots");
    let inner = scratch.directory("outer/inner");
    symlink("outer", scratch.path().join("link")).expect("linked");
    assert_eq!(inner.kind().expect("looks"), PathKind::Dir);
    let opened = |path: &str| roots.open_cached(&scratch.path().join(path));
    let found = opened("outer/inner").expect("it was just looked up");
    assert_eq!(PathKind::of(found.as_fd()).expect("looks"), PathKind::Dir);
    for refused in ["link/inner", "outer/../outer/inner", "outer/absent"] {
        assert!(opened(refused).is_none(), "{refused}");
    }
    assert!(roots.open_cached(Path::new("/etc/passwd")).is_none());
}
