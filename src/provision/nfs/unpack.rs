//! Unpacks snapshots of csi-driver-nfs, archives of tar(1), perhaps compressed by gzip.
//!
//! What an archive has was written by pods, and they may write in the share. So the entries
//! are made by descriptors of their parents, walked without symlinks, and an archive that
//! leads out of the directory or has a device is refused.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read},
    os::unix::{ffi::OsStrExt as _, fs::FileExt as _},
    path::{Component, Path, PathBuf},
};

use flate2::read::MultiGzDecoder;
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, chmod, chownat, fchmod,
        fchown, futimens, linkat, mkdirat, mknodat, openat, symlinkat, syncfs, unlinkat, utimensat,
    },
    io::Errno,
};
use tar::{Archive, Entry, EntryType, Header};

use super::{
    below::{self, open_dir},
    memory::{KeptMemory, MOST_MEMORY},
    tree::{TreeError, of_descriptor, refuse_longer_path},
};
use crate::{crash_point, provision::images::RunningCopy};

/// How much an archive may unpack to.
#[derive(Clone, Copy, Debug)]
pub struct UnpackBounds {
    /// The bytes that are written.
    written: u64,
    /// The sizes of all files, with their holes: a header may claim any.
    sizes: u64,
    /// What is kept in memory until all is unpacked.
    memory: KeptMemory,
}

impl UnpackBounds {
    /// A volume of so many bytes in a share of so many; 0: any number.
    pub fn new(volume: u64, share: u64) -> Self {
        let most = |bytes| if bytes == 0 { u64::MAX } else { bytes };
        Self {
            written: most(volume),
            sizes: most(share),
            memory: KeptMemory::new(MOST_MEMORY),
        }
    }
}

/// Unpacks an archive into an empty directory, which becomes durable.
pub fn unpack(
    archive: File,
    is_compressed: bool,
    to: &OwnedFd,
    bounds: UnpackBounds,
    running: &RunningCopy,
) -> Result<(), TreeError> {
    let unpacked = unpack_entries(archive, is_compressed, to, bounds, running);
    unpacked.map_err(|error| TreeError {
        source: damaged(error.source),
        ..error
    })
}

fn unpack_entries(
    archive: File,
    is_compressed: bool,
    to: &OwnedFd,
    bounds: UnpackBounds,
    running: &RunningCopy,
) -> Result<(), TreeError> {
    let read = ProgressReader {
        file: archive,
        running,
    };
    let content: Box<dyn Read> = if is_compressed {
        Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(
            BUFFER, read,
        )))
    } else {
        Box::new(io::BufReader::with_capacity(BUFFER, read))
    };
    let state = ReadState::default();
    let mut archive = Archive::new(ArchiveReader {
        content,
        state: &state,
    });
    let mut unpacked = UnpackedTree {
        root: to,
        left: bounds,
        directories: BTreeMap::new(),
    };
    let top = |source| TreeError {
        path: PathBuf::new(),
        source,
    };
    let mut entries = archive.entries().map_err(top)?;
    loop {
        crash_point();
        state.begin_headers();
        let Some(entry) = entries.next() else { break };
        state.end_headers();
        running.report();
        let mut entry = entry.map_err(top)?;
        let name = OsString::from(OsStr::from_bytes(&entry.path_bytes()));
        unpacked.entry(&mut entry).map_err(|source| TreeError {
            path: name.into(),
            source,
        })?;
    }
    state.end_headers();
    unpacked.finish().map_err(top)?;
    let mut rest = archive.into_inner();
    // To the checksum of gzip, which is behind the last entry.
    io::copy(&mut rest, &mut io::sink()).map_err(top)?;
    if state.zeros.get() < END {
        return Err(top(invalid(
            "the archive has no end: its packing was interrupted",
        )));
    }
    let synced = open_dir(to, c".").and_then(syncfs);
    synced.map_err(|errno| top(errno.into()))
}

/// What is read of the archive at once.
const BUFFER: usize = 1 << 17;
/// Blocks of zeros become holes.
const BLOCK: usize = 4096;
static ZEROS: [u8; BLOCK] = [0; BLOCK];
/// What an entry may have before its data: names, attributes and a map of its holes, which are
/// kept in memory.
const MOST_HEADERS: u64 = 8 << 20;
/// The zeros at the end of an archive.
const END: usize = 1024;

/// An archive, whose copy advances as it is read.
struct ProgressReader<'c> {
    file: File,
    running: &'c RunningCopy,
}

impl Read for ProgressReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.running.advance(read as u64);
        Ok(read)
    }
}

/// What is read of an archive.
#[derive(Default)]
struct ReadState {
    /// The last zeros since the data of the last entry.
    zeros: Cell<usize>,
    /// The bytes that may still be read.
    left: Cell<u64>,
}

impl ReadState {
    fn begin_headers(&self) {
        self.zeros.set(0);
        self.left.set(MOST_HEADERS);
    }

    fn end_headers(&self) {
        self.left.set(u64::MAX);
    }
}

/// The content of an archive.
struct ArchiveReader<'c> {
    content: Box<dyn Read + 'c>,
    state: &'c ReadState,
}

impl Read for ArchiveReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let ReadState { zeros, left } = self.state;
        if left.get() == 0 {
            return Err(invalid("its headers are too long"));
        }
        let most = usize::try_from(left.get()).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = self.content.read(&mut buffer[..most])?;
        left.set(left.get() - read as u64);
        let last = buffer[..read].iter().rev().take_while(|byte| **byte == 0);
        zeros.set(match last.count() {
            all if all == read => zeros.get().saturating_add(all),
            last => last,
        });
        Ok(read)
    }
}

/// A directory that is being filled.
struct UnpackedTree<'t> {
    root: &'t OwnedFd,
    /// What its files may still get.
    left: UnpackBounds,
    /// Those whose attributes the making of entries would change.
    directories: BTreeMap<PathBuf, Attributes>,
}

impl UnpackedTree<'_> {
    fn entry(&mut self, entry: &mut Entry<'_, impl Read>) -> io::Result<()> {
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        let path = inside(&entry.path_bytes())?;
        let attributes = Attributes::parse(entry.header())?;
        if kind.is_dir() {
            let _ = self.directory(&path)?;
            if !self.directories.contains_key(&path) {
                self.left.memory.take(&path)?;
            }
            self.directories.insert(path, attributes);
            return Ok(());
        }
        let name = path.file_name().ok_or_else(|| invalid("it has no name"))?;
        let at = self.directory(path.parent().unwrap_or(Path::new("")))?;
        let link = || {
            let link = entry.link_name_bytes();
            link.ok_or_else(|| invalid("it is a link without a target"))
        };
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                return attributes.set(self.file(entry, &at, name)?);
            }
            EntryType::Symlink => {
                let target = link()?;
                replace(&at, name, || {
                    symlinkat(OsStr::from_bytes(&target), &at, name)
                })?;
            }
            EntryType::Link => {
                let target = inside(&link()?)?;
                let last = target.file_name();
                let last = last.ok_or_else(|| invalid("it is a link to the directory itself"))?;
                let above = target.parent().unwrap_or(Path::new(""));
                let above = below::walk(self.root, above)?;
                // It has the attributes of the file.
                return replace(&at, name, || {
                    linkat(&above, last, &at, name, AtFlags::empty())
                });
            }
            EntryType::Fifo => replace(&at, name, || {
                mknodat(&at, name, FileType::Fifo, Mode::RUSR, 0)
            })?,
            EntryType::Char | EntryType::Block => return Err(invalid("it is a device")),
            _ => return Err(invalid("it is of a kind that no directory has")),
        }
        let (uid, gid) = (Some(attributes.uid), Some(attributes.gid));
        chownat(&at, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        if kind == EntryType::Fifo {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let made = openat(&at, name, flags, Mode::empty())?;
            chmod(of_descriptor(&made), attributes.mode)?;
        }
        let times = attributes.times();
        Ok(utimensat(&at, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn file(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        at: &OwnedFd,
        name: &OsStr,
    ) -> io::Result<File> {
        let size = entry.size();
        take(
            &mut self.left.sizes,
            size,
            "the snapshot's files are larger than the share",
        )?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = replace(at, name, || {
            openat(at, name, flags, Mode::RUSR | Mode::WUSR)
        })?;
        let made = File::from(made);
        if self.write(entry, &made)? != size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        made.set_len(size)?;
        Ok(made)
    }

    /// Writes an entry's data but for its zeros, and returns the length with them.
    fn write(&mut self, entry: &mut impl Read, made: &File) -> io::Result<u64> {
        let is_zero = |block: &[u8]| *block == ZEROS[..block.len()];
        let mut data = Vec::with_capacity(BUFFER);
        let mut end = 0;
        loop {
            data.clear();
            entry.take(BUFFER as u64).read_to_end(&mut data)?;
            if data.is_empty() {
                return Ok(end);
            }
            let blocks: Vec<&[u8]> = data.chunks(BLOCK).collect();
            let mut rest = &data[..];
            for run in blocks.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
                let (bytes, after) = rest.split_at(run.iter().map(|block| block.len()).sum());
                rest = after;
                if !is_zero(run[0]) {
                    let why = "the snapshot takes more than the volume's size";
                    take(&mut self.left.written, bytes.len() as u64, why)?;
                    made.write_all_at(bytes, end)?;
                }
                end += bytes.len() as u64;
            }
        }
    }

    /// The directory of that path, made if missing.
    fn directory(&self, path: &Path) -> io::Result<OwnedFd> {
        let mut at = below::walk(self.root, "")?;
        for name in path {
            match mkdirat(&at, name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
            at = below::walk(&at, name).map_err(|error| match Errno::from_io_error(&error) {
                Some(Errno::LOOP | Errno::NOTDIR) => invalid("it is below what is no directory"),
                _ => error,
            })?;
        }
        Ok(at)
    }

    /// Gives the directories their attributes, those of inner ones first.
    fn finish(&mut self) -> io::Result<()> {
        while let Some((path, attributes)) = self.directories.pop_last() {
            let dir = below::walk(self.root, path)?;
            attributes.set(open_dir(&dir, c".")?)?;
        }
        Ok(())
    }
}

/// Makes an entry, of several with its name the last.
fn replace<T>(
    at: &OwnedFd,
    name: &OsStr,
    make: impl Fn() -> rustix::io::Result<T>,
) -> io::Result<T> {
    match make() {
        Err(Errno::EXIST) => {
            unlinkat(at, name, AtFlags::empty())?;
            Ok(make()?)
        }
        done => Ok(done?),
    }
}

/// The path of an entry below the directory.
fn inside(path: &[u8]) -> io::Result<PathBuf> {
    let mut inside = PathBuf::new();
    for part in Path::new(OsStr::from_bytes(path)).components() {
        match part {
            Component::Normal(name) => inside.push(name),
            Component::CurDir => {}
            _ => return Err(invalid("it leads out of the directory")),
        }
    }
    refuse_longer_path(inside.as_os_str().len())?;
    Ok(inside)
}

/// Takes bytes of those that are left.
fn take(left: &mut u64, bytes: u64, why: &'static str) -> io::Result<()> {
    let rest = left.checked_sub(bytes);
    *left = rest.ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, why))?;
    Ok(())
}

/// The attributes of an entry.
struct Attributes {
    uid: Uid,
    gid: Gid,
    mode: Mode,
    /// Seconds, before 1970 negative.
    written: i64,
}

impl Attributes {
    fn parse(header: &Header) -> io::Result<Self> {
        let id = |id: u64| u32::try_from(id).map_err(|_| invalid("its owner has no such number"));
        Ok(Self {
            uid: Uid::from_raw(id(header.uid()?)?),
            gid: Gid::from_raw(id(header.gid()?)?),
            mode: Mode::from_raw_mode(header.mode()? & 0o7777),
            written: header.mtime()?.cast_signed(),
        })
    }

    /// Owner first: a change of it clears mode bits.
    fn set(&self, made: impl AsFd) -> io::Result<()> {
        fchown(&made, Some(self.uid), Some(self.gid))?;
        fchmod(&made, self.mode)?;
        Ok(futimens(made, &self.times())?)
    }

    fn times(&self) -> Timestamps {
        let written = Timespec {
            tv_sec: self.written,
            tv_nsec: 0,
        };
        Timestamps {
            last_access: written,
            last_modification: written,
        }
    }
}

/// The error of an archive that cannot be parsed; that of a system call stays.
fn damaged(error: io::Error) -> io::Error {
    use io::ErrorKind as E;
    let is_of_archive = [E::InvalidInput, E::UnexpectedEof, E::Other].contains(&error.kind());
    if error.raw_os_error().is_none() && is_of_archive {
        return invalid(&format!("the archive is damaged: {error}"));
    }
    error
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::Write as _,
        os::unix::fs::{MetadataExt as _, symlink},
    };

    use flate2::{Compression, write::GzEncoder};
    use rustix::fs::CWD;
    use tar::Builder;
    use tempfile::TempDir;

    use super::{
        super::tests::{opened, running},
        *,
    };

    /// The size of a share.
    const SHARE: u64 = 1 << 30;

    struct Unpacking {
        dir: TempDir,
    }

    impl Unpacking {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            for name in ["to", "outside"] {
                fs::create_dir(dir.path().join(name)).expect("made");
            }
            fs::write(dir.path().join("outside/file"), "kept").expect("written");
            Self { dir }
        }

        fn at(&self, path: &str) -> PathBuf {
            self.dir.path().join(path)
        }

        fn unpack(&self, archive: &[u8], is_compressed: bool, most: u64) -> io::Result<()> {
            let packed = self.at("archive");
            fs::write(&packed, archive).expect("written");
            let to = opened(&self.at("to"));
            let archive = File::open(packed).expect("opened");
            let bounds = UnpackBounds::new(most, SHARE);
            let done = unpack(archive, is_compressed, &to, bounds, &running(0));
            done.map_err(|error| error.source)
        }
    }

    type Packer = Builder<Vec<u8>>;

    fn packed(pack: impl FnOnce(&mut Packer)) -> Vec<u8> {
        let mut packer = Builder::new(Vec::new());
        pack(&mut packer);
        packer.into_inner().expect("packed")
    }

    /// An entry whose names are not checked, as those of a hostile packer.
    fn entry(packer: &mut Packer, kind: EntryType, name: &str, link: &str, data: &[u8]) {
        let mut header = Header::new_gnu();
        let raw = header.as_gnu_mut().expect("it is one");
        raw.name[..name.len()].copy_from_slice(name.as_bytes());
        raw.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o4751);
        header.set_uid(1234);
        header.set_gid(77);
        header.set_mtime(1_000_000_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        packer.append(&header, data).expect("packed");
    }

    #[test]
    fn what_tar_packs_is_unpacked() {
        let unpacking = Unpacking::new();
        let from = unpacking.at("from");
        fs::create_dir_all(from.join("a/b")).expect("made");
        let long = "n".repeat(200);
        fs::write(from.join("a/b").join(&long), "text").expect("written");
        fs::hard_link(from.join("a/b").join(&long), from.join("link")).expect("linked");
        symlink("/nowhere", from.join("symlink")).expect("linked");
        rustix::fs::mknodat(CWD, from.join("fifo"), FileType::Fifo, Mode::RUSR, 0).expect("made");
        // More than a umask leaves.
        chmod(from.join("fifo"), Mode::from_raw_mode(0o666)).expect("set");
        for path in ["a/b", "a", ""] {
            let path = from.join(path);
            std::os::unix::fs::chown(&path, Some(1234), Some(77)).expect("owned");
            let opened = File::open(&path).expect("opened");
            fchmod(&opened, Mode::from_raw_mode(0o2750)).expect("set");
            let past = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1 << 30);
            opened.set_modified(past).expect("set");
        }
        for (option, is_compressed) in [("-c", false), ("-cz", true)] {
            let mut tar = std::process::Command::new("tar");
            let tar = tar.arg("-C").arg(&from).args([option, "."]).output();
            let unpacking = Unpacking::new();
            let archive = tar.expect("tar").stdout;
            let unpacked = unpacking.unpack(&archive, is_compressed, 0);
            unpacked.expect("unpacked");
            for path in ["", "a", "a/b", "link", "symlink", "fifo"] {
                let [it, packed] = [unpacking.at("to"), from.clone()]
                    .map(|root| fs::symlink_metadata(root.join(path)).expect("there"));
                let of = |it: &fs::Metadata| (it.mode(), it.uid(), it.gid(), it.mtime());
                assert_eq!(of(&it), of(&packed), "{path}");
            }
            let it = unpacking.at("to/a/b").join(&long);
            assert_eq!(fs::read_to_string(&it).expect("read"), "text");
            let inode = |path: &Path| fs::metadata(path).expect("there").ino();
            assert_eq!(inode(&it), inode(&unpacking.at("to/link")));
            let target = fs::read_link(unpacking.at("to/symlink")).expect("a symlink");
            assert_eq!(target, Path::new("/nowhere"));

            // Cut anywhere, it is no snapshot.
            let last = archive
                .iter()
                .rposition(|byte| *byte != 0)
                .expect("not empty");
            let end = (last + 1).next_multiple_of(512) + END;
            for cut in [1, archive.len() / 4, archive.len() / 2, archive.len() - 1] {
                let cut = &archive[..archive.len() - cut];
                // Padding behind the end is none of it.
                let is_whole = !is_compressed && cut.len() >= end;
                let unpacked = Unpacking::new().unpack(cut, is_compressed, 0);
                assert_eq!(unpacked.is_ok(), is_whole);
            }
        }
    }

    #[test]
    fn zeros_are_holes_that_count_in_no_quota() {
        let unpacking = Unpacking::new();
        let mut data = vec![0; 1 << 20];
        data[300_000..308_000].fill(7);
        let archive = packed(|it| entry(it, EntryType::Regular, "file", "", &data));
        unpacking
            .unpack(&archive, false, 12 << 10)
            .expect("it fits");
        let file = unpacking.at("to/file");
        assert!(fs::read(&file).expect("read") == data);
        let blocks = fs::metadata(file).expect("there").blocks();
        assert!(blocks * 512 < 1 << 18, "{blocks}");

        // Cut before its end, though it ends with zeros.
        let cut = archive.len() - END;
        let unpacked = Unpacking::new().unpack(&archive[..cut], false, 0);
        let error = unpacked.expect_err("it has no end");
        assert!(error.to_string().contains("no end"), "{error}");
    }

    #[test]
    fn what_headers_claim_is_bounded() {
        let claim = |size: u64| {
            let mut header = Header::new_gnu();
            let raw = header.as_gnu_mut().expect("it is one");
            raw.name[..4].copy_from_slice(b"file");
            raw.sparse[0].set_offset(size);
            raw.sparse[0].set_length(0);
            raw.set_real_size(size);
            header.set_entry_type(EntryType::GNUSparse);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            // Before 1970.
            header.set_mtime((-5_i64).cast_unsigned());
            header.set_size(0);
            header.set_cksum();
            packed(|it| it.append(&header, &[][..]).expect("packed"))
        };
        let unpacking = Unpacking::new();
        unpacking.unpack(&claim(1 << 20), false, 1).expect("a hole");
        let made = fs::metadata(unpacking.at("to/file")).expect("there");
        assert_eq!((made.len(), made.blocks(), made.mtime()), (1 << 20, 0, -5));
        let error = Unpacking::new().unpack(&claim(SHARE + 1), false, 1);
        let error = error.expect_err("larger than the share");
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);

        let long = "n".repeat(9 << 20);
        let named = packed(|it| {
            entry(
                it,
                EntryType::GNULongName,
                "././@LongLink",
                "",
                long.as_bytes(),
            );
            entry(it, EntryType::Regular, "file", "", b"text");
        });
        let error = Unpacking::new().unpack(&named, false, 0);
        let error = error.expect_err("a name of 9 MiB").to_string();
        assert!(error.contains("headers are too long"), "{error}");
    }

    #[test]
    fn nothing_outside_of_the_directory_is_reached() {
        use EntryType as E;
        let packs: &[&dyn Fn(&mut Packer)] = &[
            &|it| entry(it, E::Regular, "../outside/file", "", b"evil"),
            &|it| entry(it, E::Regular, "a/../../outside/file", "", b"evil"),
            &|it| entry(it, E::Regular, "/tmp/evil", "", b"evil"),
            &|it| entry(it, E::Directory, "../outside", "", b""),
            &|it| {
                entry(it, E::Symlink, "link", "../outside", b"");
                entry(it, E::Regular, "link/file", "", b"evil");
            },
            &|it| {
                entry(it, E::Symlink, "link", "../outside", b"");
                entry(it, E::Directory, "link", "", b"");
            },
            &|it| entry(it, E::Link, "link", "../outside/file", b""),
            &|it| entry(it, E::Link, "link", "/etc/passwd", b""),
            &|it| {
                entry(it, E::Symlink, "link", "../outside", b"");
                entry(it, E::Link, "file", "link/file", b"");
            },
            &|it| entry(it, E::Char, "null", "", b""),
            &|it| entry(it, E::Block, "disk", "", b""),
            &|it| entry(it, E::Regular, ".", "", b"evil"),
            &|it| entry(it, E::new(b'Z'), "odd", "", b""),
        ];
        for (number, pack) in packs.iter().enumerate() {
            let unpacking = Unpacking::new();
            let refused = unpacking.unpack(&packed(pack), false, 0);
            refused.expect_err(&number.to_string());
            let outside = fs::metadata(unpacking.at("outside/file")).expect("there");
            assert_eq!((outside.nlink(), outside.len()), (1, 4), "{number}");
            let left = fs::read_dir(unpacking.at("outside")).expect("read").count();
            assert_eq!(left, 1, "{number}");
        }
        // A file that replaces a symlink is none of its target.
        let unpacking = Unpacking::new();
        let archive = packed(|it| {
            entry(it, E::Symlink, "link", "../outside/file", b"");
            entry(it, E::Regular, "link", "", b"new");
        });
        unpacking.unpack(&archive, false, 0).expect("unpacked");
        let read = |path| fs::read_to_string(unpacking.at(path)).expect("there");
        assert_eq!((&*read("to/link"), &*read("outside/file")), ("new", "kept"));
    }

    #[test]
    fn the_directories_of_an_archive_are_kept_in_memory_within_a_bound() {
        let archive = packed(|it| {
            for _ in 0..100 {
                entry(it, EntryType::Directory, "again", "", b"");
            }
            entry(it, EntryType::Directory, "again/other", "", b"");
        });
        let unpacked = |bytes| {
            let unpacking = Unpacking::new();
            fs::write(unpacking.at("archive"), &archive).expect("written");
            let opened_archive = File::open(unpacking.at("archive")).expect("opened");
            let bounds = UnpackBounds {
                memory: KeptMemory::new(bytes),
                ..UnpackBounds::new(0, SHARE)
            };
            let to = opened(&unpacking.at("to"));
            let done = unpack(opened_archive, false, &to, bounds, &running(0));
            done.map_err(|error| error.source.kind())
        };
        assert_eq!(unpacked(400), Ok(()));
        assert_eq!(unpacked(300), Err(io::ErrorKind::InvalidData));
    }

    #[test]
    fn a_damaged_or_too_large_archive_is_refused() {
        let archive = packed(|it| entry(it, EntryType::Regular, "file", "", &[7; 5000]));
        let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
        compressed.write_all(&archive).expect("compressed");
        let compressed = compressed.finish().expect("compressed");
        let kind_of = |archive: &[u8], is_compressed, most| {
            let unpacked = Unpacking::new().unpack(archive, is_compressed, most);
            unpacked.map_err(|error| error.kind())
        };
        assert_eq!(kind_of(&compressed, true, 5000), Ok(()));
        let too_large = kind_of(&compressed, true, 4999);
        assert_eq!(too_large, Err(io::ErrorKind::FileTooLarge));
        for at in [0, compressed.len() / 2, compressed.len() - 6] {
            let mut damaged = compressed.clone();
            damaged[at] ^= 0x55;
            assert_eq!(kind_of(&damaged, true, 0), Err(io::ErrorKind::InvalidData));
        }
        for damaged in [&archive[..1000], &compressed, b"", b"no archive"] {
            assert_eq!(kind_of(damaged, false, 0), Err(io::ErrorKind::InvalidData));
        }
    }
}
