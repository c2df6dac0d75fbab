//! A file that stops answering when told to: a FUSE file system whose root is
//! one regular file (linux/fuse.h, protocol 7.31 and later).
//!
//! What comes while it is stuck waits in the kernel, and with it every thread
//! that needs it. Reads and writes alone can be stuck, as on a disk that died, or
//! every request, as on a file server that went away.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::{eventually, left_out};

/// Bytes of one write request's data at most.
const MAX_WRITE: u32 = 128 << 10;
const HEADER: usize = 40;
const READ: u32 = 15;
const WRITE: u32 = 16;

/// The mounted file; dropped, everything that waits for it goes on.
pub struct StuckFile {
    path: PathBuf,
    gate: Arc<Gate>,
    server: Arc<Server>,
}

/// What is answered.
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
}

impl Gate {
    fn set(&self, answers: Answers) {
        *self.answers.lock().expect("a gate") = answers;
        self.changed.notify_all();
    }

    fn holds_up(&self, opcode: u32) -> bool {
        match *self.answers.lock().expect("a gate") {
            Answers::All => false,
            Answers::NoWrites => opcode == WRITE,
            Answers::NoData => [READ, WRITE].contains(&opcode),
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
            left_out("there is no /dev/fuse here");
        }
        there
    }

    /// Mounts over `path` (made if missing) a file of `bytes` zeros. It answers
    /// until told to stop.
    pub fn new(path: &Path, bytes: u64) -> Self {
        File::create(path).expect("a mount point");
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .expect("/dev/fuse");
        let options = format!(
            "fd={},rootmode=100755,user_id=0,group_id=0,allow_other",
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
        let store = tempfile::tempfile().expect("a file");
        store.set_len(bytes).expect("a sparse file");
        let gate = Arc::new(Gate::default());
        let server = Arc::new(Server {
            device,
            store,
            bytes: AtomicU64::new(bytes),
        });
        let (doorman, serving) = (Arc::clone(&gate), Arc::clone(&server));
        thread::spawn(move || serving.serve(&doorman));
        Self {
            path: path.to_owned(),
            gate,
            server,
        }
    }

    /// From now on it has `bytes`, and zeros where it had no data.
    pub fn grow(&self, bytes: u64) {
        self.server.store.set_len(bytes).expect("a sparse file");
        self.server.bytes.store(bytes, SeqCst);
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

    /// Everything goes on.
    pub fn go_on(&self) {
        self.gate.set(Answers::All);
    }
}

impl StuckFile {
    /// Its server is gone for good: whatever is asked fails (umount2(2), MNT_FORCE).
    pub fn end(&self) {
        // It is busy, but the connection has ended.
        let _ = unmount(&self.path, UnmountFlags::FORCE);
    }

    /// Unmounts it, once udevd has closed a loop device over it.
    pub async fn remove(self) {
        let unmounted = async || unmount(&self.path, UnmountFlags::empty()).ok();
        eventually("nobody uses the file", unmounted).await;
    }
}

impl Drop for StuckFile {
    fn drop(&mut self) {
        self.go_on();
    }
}

struct Server {
    device: File,
    store: File,
    bytes: AtomicU64,
}

impl Server {
    /// Until the file system is unmounted and its last user gone.
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
        let body = &request[HEADER..];
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
            // GETATTR and SETATTR: how long it is valid, then the attributes.
            3 | 4 => Ok([vec![0; 16], self.attributes()].concat()),
            // OPEN: handle and flags.
            14 => Ok(vec![0; 16]),
            READ | WRITE => self.transfer(opcode, body),
            // STATFS.
            17 => Ok(vec![0; 80]),
            // RELEASE, FSYNC, FLUSH and ACCESS.
            18 | 20 | 25 | 34 => Ok(Vec::new()),
            _ => Err(rustix::io::Errno::NOSYS),
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
        // Fails when the request was given up meanwhile.
        let _ = (&self.device).write_all(&answer);
    }

    fn transfer(&self, opcode: u32, body: &[u8]) -> Result<Vec<u8>, rustix::io::Errno> {
        let offset = u64::from_le_bytes(body[8..16].try_into().expect("eight bytes"));
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
        done.map_err(|_| rustix::io::Errno::IO)
    }

    /// struct fuse_attr of a regular file.
    fn attributes(&self) -> Vec<u8> {
        let bytes = self.bytes.load(SeqCst);
        let mut attributes = [1, bytes, bytes / 512, 0, 0, 0]
            .map(u64::to_le_bytes)
            .concat();
        // Three times' nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags.
        let small = [0_u32, 0, 0, 0o100_755, 1, 0, 0, 0, 4096, 0];
        attributes.extend(small.map(u32::to_le_bytes).concat());
        attributes
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}
