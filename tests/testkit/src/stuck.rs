//! A file, or a tree of directories, that can stop answering: a FUSE file system
//! (linux/fuse.h, protocol 7.31 and later), whose root is one regular file or an empty
//! directory.
//!
//! Requests that arrive while it is stuck wait in the kernel, and with them every thread
//! that needs them. Reads and writes alone can be stuck, as on a disk that died, or every
//! request, as on a file server that failed.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use super::{eventually, skip_test};

/// Bytes of one write request's data at most.
const MAX_WRITE: u32 = 128 << 10;
const HEADER: usize = 40;
const READ: u32 = 15;
const WRITE: u32 = 16;
const FALLOCATE: u32 = 43;

/// The mounted file; when it is dropped, all waiting requests continue.
pub struct StuckFile {
    path: PathBuf,
    gate: Arc<Gate>,
    server: Arc<Server<OneFile>>,
}

/// The mounted tree; when it is dropped, all waiting requests continue. The kernel caches
/// no name in it, and looks each up at every walk.
pub struct StuckTree(Arc<Gate>);

/// The requests that are answered.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Answers {
    #[default]
    All,
    /// All but writes: a device is probed, and not mounted.
    NoWrites,
    /// All but reads and writes.
    NoData,
    Nothing,
}

#[derive(Default)]
struct Gate {
    answers: Mutex<Answers>,
    changed: Condvar,
    /// While it delays requests.
    lock: Mutex<Option<File>>,
}

/// Until it is dropped, no other test has a file that hangs.
pub struct NoOthersHang(File);

/// Whether this process has [`NoOthersHang`].
static ALONE: AtomicBool = AtomicBool::new(false);

impl NoOthersHang {
    /// Waits for the files that hang now.
    pub fn wait() -> Self {
        let lock = Self::unlocked();
        lock.lock().expect("a lock");
        ALONE.store(true, SeqCst);
        Self(lock)
    }

    /// The file that tests lock, shared while they have a file that hangs.
    fn unlocked() -> File {
        File::open(env!("CARGO_MANIFEST_DIR")).expect("the directory of this crate")
    }
}

impl Drop for NoOthersHang {
    fn drop(&mut self) {
        ALONE.store(false, SeqCst);
        let _ = self.0.unlock();
    }
}

impl Gate {
    fn set(&self, answers: Answers) {
        let mut lock = self.lock.lock().expect("a gate");
        if answers != Answers::All && lock.is_none() && !ALONE.load(SeqCst) {
            let shared = NoOthersHang::unlocked();
            shared.lock_shared().expect("a lock");
            *lock = Some(shared);
        }
        *self.answers.lock().expect("a gate") = answers;
        self.changed.notify_all();
        if answers == Answers::All {
            *lock = None;
        }
    }

    fn holds_up(&self, opcode: u32) -> bool {
        match *self.answers.lock().expect("a gate") {
            Answers::All => false,
            Answers::NoWrites => [WRITE, FALLOCATE].contains(&opcode),
            Answers::NoData => [READ, WRITE, FALLOCATE].contains(&opcode),
            Answers::Nothing => true,
        }
    }

    fn wait(&self) {
        let answers = self.answers.lock().expect("a gate");
        let all = |answers: &mut Answers| *answers != Answers::All;
        drop(self.changed.wait_while(answers, all).expect("a gate"));
    }
}

impl StuckFile {
    /// Whether FUSE is there at all.
    pub fn possible() -> bool {
        let there = fs::exists("/dev/fuse").unwrap_or(false);
        if !there {
            skip_test("there is no /dev/fuse here");
        }
        there
    }

    /// Mounts over `path` (made if missing) a file of `bytes` zeros. It answers until it is
    /// stopped.
    pub fn new(path: &Path, bytes: u64) -> Self {
        File::create(path).expect("a mount point");
        let store = tempfile::tempfile().expect("a file");
        store.set_len(bytes).expect("a sparse file");
        let file = OneFile {
            store,
            bytes: AtomicU64::new(bytes),
        };
        let (gate, server) = Server::mount(path, 0o100_755, file);
        Self {
            path: path.to_owned(),
            gate,
            server,
        }
    }

    /// From now on it has `bytes`, and zeros where it had no data.
    pub fn grow(&self, bytes: u64) {
        self.server
            .files
            .store
            .set_len(bytes)
            .expect("a sparse file");
        self.server.files.bytes.store(bytes, SeqCst);
    }

    /// Writes wait from now on.
    pub fn stop_writes(&self) {
        self.gate.set(Answers::NoWrites);
    }

    /// Reads and writes wait from now on.
    pub fn stop_data(&self) {
        self.gate.set(Answers::NoData);
    }

    /// Everything waits from now on.
    pub fn stop_all(&self) {
        self.gate.set(Answers::Nothing);
    }

    /// All requests continue.
    pub fn resume(&self) {
        self.gate.set(Answers::All);
    }
}

impl StuckFile {
    /// Ends its server for good: every request fails (umount2(2), MNT_FORCE).
    pub fn end(&self) {
        // It is busy, but the connection has ended.
        let _ = unmount(&self.path, UnmountFlags::FORCE);
    }

    /// Unmounts it, once udevd has closed a loop device over it.
    pub async fn remove(self) {
        let unmounted = async || unmount(&self.path, UnmountFlags::empty()).ok();
        eventually("the file is not in use", unmounted).await;
    }
}

impl Drop for StuckFile {
    fn drop(&mut self) {
        self.resume();
    }
}

impl StuckTree {
    /// Mounts an empty directory over `path`. It answers until it is stopped.
    pub fn new(path: &Path) -> Self {
        Self(Server::mount(path, 0o040_755, Tree::default()).0)
    }

    /// Everything waits from now on.
    pub fn stop_all(&self) {
        self.0.set(Answers::Nothing);
    }

    /// All requests continue.
    pub fn resume(&self) {
        self.0.set(Answers::All);
    }
}

impl Drop for StuckTree {
    fn drop(&mut self) {
        self.resume();
    }
}

struct Server<F> {
    device: File,
    files: F,
}

/// The contents of a file system.
trait Files: Send + Sync + 'static {
    /// Answers a request about a node, the root being 1.
    fn answer(&self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno>;
}

impl<F: Files> Server<F> {
    fn mount(path: &Path, root_mode: u32, files: F) -> (Arc<Gate>, Arc<Self>) {
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .expect("/dev/fuse");
        let options = format!(
            "fd={},rootmode={root_mode:o},user_id=0,group_id=0,allow_other",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options).expect("no zero byte");
        mount(
            "stuck",
            path,
            "fuse",
            MountFlags::empty(),
            Some(options.as_c_str()),
        )
        .expect("a FUSE mount");
        let gate = Arc::new(Gate::default());
        let server = Arc::new(Self { device, files });
        let (doorman, serving) = (Arc::clone(&gate), Arc::clone(&server));
        thread::spawn(move || serving.serve(&doorman));
        (gate, server)
    }

    /// Until the file system is unmounted and its last user has closed it.
    fn serve(self: Arc<Self>, gate: &Arc<Gate>) {
        let mut buffer = vec![0; MAX_WRITE as usize + 4096];
        while let Ok(length) = (&self.device).read(&mut buffer) {
            let request = buffer[..length].to_vec();
            if gate.holds_up(u32_at(&request, 4)) {
                // On a thread of its own: others are answered meanwhile.
                let (server, gate) = (Arc::clone(&self), Arc::clone(gate));
                thread::spawn(move || {
                    gate.wait();
                    server.answer(&request);
                });
            } else {
                self.answer(&request);
            }
        }
    }

    fn answer(&self, request: &[u8]) {
        let opcode = u32_at(request, 4);
        let reply = match opcode {
            // FORGET, INTERRUPT and BATCH_FORGET take no answer.
            2 | 36 | 42 => return,
            // INIT: major, minor, max_readahead, flags, then limits.
            26 => {
                let mut reply = [7_u32, 31, MAX_WRITE, 0].map(u32::to_le_bytes).concat();
                reply.extend_from_slice(&(16_u32 << 16 | 16).to_le_bytes());
                reply.extend_from_slice(&MAX_WRITE.to_le_bytes());
                // time_gran, max_pages (unused), and padding.
                reply.extend_from_slice(&1_u32.to_le_bytes());
                reply.resize(64, 0);
                Ok(reply)
            }
            // OPEN and OPENDIR: handle and flags.
            14 | 27 => Ok(vec![0; 16]),
            // STATFS.
            17 => Ok(vec![0; 80]),
            // RELEASE, FSYNC, FLUSH, RELEASEDIR, FSYNCDIR and ACCESS.
            18 | 20 | 25 | 29 | 30 | 34 => Ok(Vec::new()),
            _ => self
                .files
                .answer(opcode, u64_at(request, 16), &request[HEADER..]),
        };
        let (error, payload) = match reply {
            Ok(payload) => (0, payload),
            Err(error) => (-error.raw_os_error(), Vec::new()),
        };
        let length = u32::try_from(16 + payload.len()).expect("a small answer");
        let mut answer = length.to_le_bytes().to_vec();
        answer.extend_from_slice(&error.to_le_bytes());
        answer.extend_from_slice(&request[8..16]);
        answer.extend_from_slice(&payload);
        // Fails if the kernel dropped the request meanwhile.
        let _ = (&self.device).write_all(&answer);
    }
}

struct OneFile {
    store: File,
    bytes: AtomicU64,
}

impl Files for OneFile {
    fn answer(&self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
        match opcode {
            // GETATTR and SETATTR: how long it is valid, then the attributes.
            3 | 4 => {
                let attributes = attributes(node, 0o100_755, self.bytes.load(SeqCst));
                Ok([vec![0; 16], attributes].concat())
            }
            READ | WRITE => self.transfer(opcode, body),
            FALLOCATE => self.fallocate(body),
            _ => Err(Errno::NOSYS),
        }
    }
}

impl OneFile {
    fn transfer(&self, opcode: u32, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let offset = u64_at(body, 8);
        let size = u32_at(body, 16);
        let done = if opcode == READ {
            let size = u64::from(size).min(self.bytes.load(SeqCst).saturating_sub(offset));
            let mut data = vec![0; usize::try_from(size).expect("a small read")];
            self.store.read_exact_at(&mut data, offset).map(|()| data)
        } else {
            let data = &body[40..40 + size as usize];
            let written = [size, 0].map(u32::to_le_bytes).concat();
            self.store.write_all_at(data, offset).map(|()| written)
        };
        done.map_err(|_| Errno::IO)
    }

    /// A server that has to write the zeros of mkfs takes longer for them than its
    /// clients wait for one request.
    fn fallocate(&self, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let [offset, length] = [8, 16].map(|at| u64_at(body, at));
        let mode = FallocateFlags::from_bits_retain(u32_at(body, 24));
        if mode.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
            // Of the two, tmpfs has this one.
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.store, hole, offset, length)?;
        }
        Ok(Vec::new())
    }
}

/// Directories in directories, by their numbers, which are never used again.
struct Tree(Mutex<Vec<BTreeMap<Vec<u8>, u64>>>);

impl Default for Tree {
    fn default() -> Self {
        // There is no node 0; 1 is the root.
        Self(Mutex::new(vec![BTreeMap::new(); 2]))
    }
}

impl Files for Tree {
    fn answer(&self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut directories = self.0.lock().expect("a tree");
        let at = |node: u64| usize::try_from(node).expect("a small number");
        match opcode {
            // LOOKUP.
            1 => {
                let found = directories[at(node)].get(name(body));
                found.map(|node| entry(*node)).ok_or(Errno::NOENT)
            }
            // GETATTR and SETATTR.
            3 | 4 => Ok([vec![0; 16], attributes(node, 0o040_755, 0)].concat()),
            // MKDIR: mode, umask, then the name.
            9 => {
                let new = directories.len() as u64;
                let name = name(&body[8..]).to_vec();
                if directories[at(node)].contains_key(&name) {
                    return Err(Errno::EXIST);
                }
                directories[at(node)].insert(name, new);
                directories.push(BTreeMap::new());
                Ok(entry(new))
            }
            // RMDIR.
            11 => {
                let removed = *directories[at(node)].get(name(body)).ok_or(Errno::NOENT)?;
                if !directories[at(removed)].is_empty() {
                    return Err(Errno::NOTEMPTY);
                }
                directories[at(node)].remove(name(body));
                Ok(Vec::new())
            }
            // READDIR: handle, then the offset; one answer has all entries.
            28 if u64_at(body, 8) == 0 => Ok((1..)
                .zip(&directories[at(node)])
                .flat_map(|(offset, (name, node))| listed(*node, offset, name))
                .collect()),
            28 => Ok(Vec::new()),
            _ => Err(Errno::NOSYS),
        }
    }
}

/// The name that a request ends with.
fn name(body: &[u8]) -> &[u8] {
    body.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// struct fuse_entry_out, which is valid for no time.
fn entry(node: u64) -> Vec<u8> {
    let mut entry = node.to_le_bytes().to_vec();
    // Generation, and for how long name and attributes are valid.
    entry.resize(40, 0);
    entry.extend(attributes(node, 0o040_755, 0));
    entry
}

/// struct fuse_dirent.
fn listed(node: u64, offset: u64, name: &[u8]) -> Vec<u8> {
    const DT_DIR: u32 = 4;
    let length = u32::try_from(name.len()).expect("a short name");
    let mut listed = [node, offset].map(u64::to_le_bytes).concat();
    listed.extend([length, DT_DIR].map(u32::to_le_bytes).concat());
    listed.extend_from_slice(name);
    listed.resize(listed.len().next_multiple_of(8), 0);
    listed
}

/// struct fuse_attr.
fn attributes(node: u64, mode: u32, bytes: u64) -> Vec<u8> {
    let mut attributes = [node, bytes, bytes / 512, 0, 0, 0]
        .map(u64::to_le_bytes)
        .concat();
    // Three times' nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags.
    let small = [0_u32, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    attributes.extend(small.map(u32::to_le_bytes).concat());
    attributes
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}
