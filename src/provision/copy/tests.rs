use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// What an extent of a source has.
#[derive(Clone, Copy, Debug)]
enum Extent {
    Hole,
    Zeros,
    Data(u8),
}

fn extents() -> impl Strategy<Value = Vec<(Extent, u64)>> {
    let extent = prop_oneof![
        Just(Extent::Hole),
        Just(Extent::Zeros),
        (1..=u8::MAX).prop_map(Extent::Data),
    ];
    let len = prop_oneof![
        1..3 * BLOCK as u64,
        1..3 * MIB,
        Just(PIECE),
        Just(2 * BLOCK as u64)
    ];
    prop::collection::vec((extent, len), 0..12)
}

/// An empty file in `dir`, in which its name is gone already.
fn empty(dir: &Path) -> File {
    tempfile::tempfile_in(dir).unwrap()
}

/// A file that can be opened once more, as those of a pool.
fn source(dir: &Path, extents: &[(Extent, u64)]) -> File {
    let path = dir.join("from");
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(true);
    let file = options.open(path).unwrap();
    let mut at = 0;
    for (extent, len) in extents {
        let data = match extent {
            Extent::Hole => None,
            Extent::Zeros => Some(0),
            Extent::Data(byte) => Some(*byte),
        };
        if let Some(byte) = data {
            let data = vec![byte; usize::try_from(*len).unwrap()];
            file.write_all_at(&data, at).unwrap();
        }
        at += len;
    }
    file.set_len(at).unwrap();
    file
}

fn content(file: &File) -> Vec<u8> {
    let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let mut content = vec![0; len];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

fn allocated(file: &File) -> u64 {
    file.sync_all().unwrap();
    file.metadata().unwrap().blocks() * 512
}

/// Copies all of a file; the bytes that the copy reported.
fn copy(from: &File, to: &File) -> io::Result<u64> {
    let advanced = AtomicU64::new(0);
    let count = |bytes| {
        advanced.fetch_add(bytes, Relaxed);
    };
    let len = from.metadata()?.len();
    assert!(sparse(from, to, len, &count, || Ok(true))?);
    Ok(advanced.into_inner())
}

/// Copies within and between the file systems of two directories.
fn check(from: &Path, to: &Path, extents: &[(Extent, u64)], drops_cache: bool) {
    let from = source(from, extents);
    if drops_cache {
        from.sync_all().unwrap();
        let _ = fadvise(&from, 0, None, Advice::DontNeed);
    }
    let to = empty(to);
    let len = from.metadata().unwrap().len();
    assert_eq!(copy(&from, &to).unwrap(), len);
    assert_eq!(to.metadata().unwrap().len(), len);
    assert!(content(&from) == content(&to), "{extents:?}");
    let data = extents
        .iter()
        .filter(|(extent, _)| matches!(extent, Extent::Data(_)));
    // Each extent touches two blocks in part at most; ext4 and xfs take blocks of their own
    // for many extents.
    let rounding = BLOCK as u64 * (2 * extents.len() as u64 + 8);
    let data: u64 = data.map(|(_, len)| len).sum();
    assert!(allocated(&to) <= data + rounding, "{extents:?}");
    assert!(allocated(&to) <= allocated(&from) + rounding, "{extents:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_copy_is_the_source_without_its_zeros(extents in extents(), drops_cache: bool) {
        let disk = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (disk, memory) = (disk.path(), memory.path());
        for (from, to) in [(disk, disk), (disk, memory), (memory, disk), (memory, memory)] {
            check(from, to, &extents, drops_cache);
        }
    }
}

#[test]
fn a_copy_gives_up_when_told_and_keeps_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path(), &[(Extent::Data(7), 16 * PIECE)]);
    let len = from.metadata().unwrap().len();
    let asked = AtomicU64::new(0);
    let done = sparse(&from, &empty(dir.path()), len, &|_| {}, || {
        Ok(asked.fetch_add(1, Relaxed) == 0)
    });
    // The other threads may have taken all pieces behind the first one.
    assert!(matches!(
        (done, asked.into_inner()),
        (Ok(false), 2) | (Ok(true), 1)
    ));
    let failed = sparse(&from, &empty(dir.path()), len, &|_| {}, || {
        Err(io::ErrorKind::Other.into())
    });
    assert!(failed.is_err());
}

#[test]
fn another_file_system_has_no_reflink() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path(), &[(Extent::Data(7), MIB)]);
    assert!(!reflink(&from, &empty(Path::new("/dev/shm"))).unwrap());
}

#[test]
fn a_source_that_became_shorter_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path(), &[(Extent::Data(7), MIB)]);
    let cut = || {
        from.set_len(MIB / 2)?;
        Ok(true)
    };
    let error = sparse(&from, &empty(dir.path()), MIB, &|_| {}, cut).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_copy_leaves_nothing_in_the_page_cache_and_evicts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let from = source(dir.path(), &[(Extent::Data(7), 16 * MIB)]);
    from.sync_all().unwrap();
    let _ = fadvise(&from, 0, None, Advice::DontNeed);
    let cached_mib = |file: &File| {
        let has = |n: &u64| page_cache::has(file, &(n * MIB..(n + 1) * MIB));
        (0..16).filter(has).collect::<Vec<_>>()
    };
    if open_directly(&from).is_none() || !cached_mib(&from).is_empty() {
        // A tmpfs has nothing but the cache.
        return;
    }
    let _ = fadvise(&from, 0, None, Advice::Random);
    let cached = 5 * MIB..6 * MIB;
    let mut data = vec![0; length(&cached)];
    from.read_exact_at(&mut data, cached.start).unwrap();
    assert_eq!(cached_mib(&from), [5]);
    let to = empty(dir.path());
    copy(&from, &to).unwrap();
    assert_eq!(cached_mib(&from), [5]);
    let kept = cached_mib(&to).len();
    assert!(kept < 8, "{kept} of 16 MiB stayed cached");
}

/// A file system of its own at `at`, until it is dropped.
struct Mounted<'d>(&'d Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::empty()).unwrap();
    }
}

/// Runs a test on a thread with a mount namespace of its own.
fn isolated(test: impl FnOnce(&Path) + Send) {
    thread::scope(|scope| {
        let isolated = scope.spawn(|| {
            let sandbox = testkit::Sandbox::new();
            test(sandbox.dir());
        });
        isolated.join().unwrap();
    });
}

#[test]
fn a_full_file_system_fails_the_copy_and_no_thread_hides_it() {
    isolated(|dir| {
        let from = source(dir, &[(Extent::Data(7), 24 * MIB)]);
        let small = dir.join("small");
        fs::create_dir(&small).unwrap();
        testkit::run(&[
            "mount",
            "-t",
            "tmpfs",
            "-o",
            "size=10m",
            "none",
            small.to_str().unwrap(),
        ]);
        let small = Mounted(&small);
        let error = copy(&from, &empty(small.0)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    });
}

/// Btrfs verifies the checksums of data: changed on the disk, it cannot be read.
#[test]
fn a_source_that_cannot_be_read_in_one_place_fails_the_copy() {
    isolated(|dir| {
        let (disk, at) = (dir.join("disk"), dir.join("at"));
        fs::create_dir(&at).unwrap();
        let image = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&disk)
            .unwrap();
        image.set_len(256 * MIB).unwrap();
        let [disk, at_text] = [&disk, &at].map(|path| path.to_str().unwrap());
        testkit::run(&["mkfs.btrfs", "-q", disk]);
        testkit::run(&["mount", "-o", "loop", disk, at_text]);
        let mounted = Mounted(&at);
        let from = source(&at, &[(Extent::Data(7), 20 * MIB)]);
        let bad = 13 * MIB + 4096;
        from.write_all_at(b"to be damaged on the disk", bad)
            .unwrap();
        from.sync_all().unwrap();
        copy(&from, &empty(dir)).unwrap();
        drop((from, mounted));

        let all = content(&image);
        let found = all
            .windows(25)
            .position(|text| text == b"to be damaged on the disk");
        image.write_all_at(b"To", found.unwrap() as u64).unwrap();
        image.sync_all().unwrap();
        testkit::run(&["mount", "-o", "loop", disk, at_text]);
        let _mounted = Mounted(&at);
        let from = File::open(at.join("from")).unwrap();
        let error = copy(&from, &empty(dir)).unwrap_err();
        assert_eq!(
            error.raw_os_error(),
            Some(Errno::IO.raw_os_error()),
            "{error}"
        );
    });
}
