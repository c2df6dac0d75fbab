//! A file whose reads never end: a FUSE mount (kernel document
//! filesystems/fuse, structures of <linux/fuse.h>) whose server answers all but
//! READ. A loop device over it is a dead device.

use std::{
    ffi::CString,
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::kernel::mounts::private_namespace;

const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const INIT: u32 = 26;
/// FORGET, INTERRUPT and BATCH_FORGET have no answer.
const SILENT: [u32; 3] = [2, 36, 42];

/// Bytes before a request's own structure.
const HEADER: usize = 40;

pub(super) struct Image {
    path: PathBuf,
    reads: Receiver<()>,
    server: Option<JoinHandle<()>>,
}

impl Image {
    /// Mounts an image of `size` bytes at `path`, visible to this thread and the
    /// processes that it starts.
    pub(super) fn mount(path: &Path, size: u64) -> Self {
        private_namespace();
        File::create(path).unwrap();
        let fuse = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .unwrap();
        let options = format!(
            "fd={},rootmode=100000,user_id=0,group_id=0",
            fuse.as_raw_fd()
        );
        let options = CString::new(options).unwrap();
        mount(
            "stuck",
            path,
            "fuse",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .unwrap();
        let (told, reads) = channel();
        let server = std::thread::spawn(move || serve(fuse, size, &told));
        Self {
            path: path.to_owned(),
            reads,
            server: Some(server),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until one more read is stuck.
    pub(super) fn wait_for_reads(&self, at_most: Duration) {
        self.reads.recv_timeout(at_most).unwrap();
    }

    /// Ends the connection: the reads that are stuck fail (umount2(2), MNT_FORCE).
    pub(super) fn abort(&self) {
        // The mount is still busy, as loop devices over it are open.
        let _ = unmount(&self.path, UnmountFlags::FORCE);
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.abort();
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Answers until the connection ends.
fn serve(mut fuse: File, size: u64, reads: &Sender<()>) {
    let mut request = vec![0; 1 << 17];
    while let Ok(len @ HEADER..) = fuse.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        assert_eq!(usize::try_from(word(0)).unwrap(), len);
        let opcode = word(4);
        let unique = &request[8..16];
        let answer = match opcode {
            INIT => words(&[7, 31, 0, 0, 0, 4096, 1], 64),
            GETATTR => attributes(size),
            // fuse_open_out with FOPEN_KEEP_CACHE: without it the next open of the file
            // would wait for the reads in flight, to drop the cached pages.
            OPEN => words(&[0, 0, 2], 16),
            READ => {
                let _ = reads.send(());
                continue;
            }
            opcode if SILENT.contains(&opcode) => continue,
            _ => Vec::new(),
        };
        let error = if answer.is_empty() { -libc::ENOSYS } else { 0 };
        let len = u32::try_from(16 + answer.len()).unwrap();
        let mut reply = len.to_ne_bytes().to_vec();
        reply.extend(error.to_ne_bytes());
        reply.extend(unique);
        reply.extend(answer);
        // Fails if the caller was interrupted before the answer.
        let _ = fuse.write(&reply);
    }
}

/// A `fuse_attr_out`, the attributes valid for an hour.
fn attributes(size: u64) -> Vec<u8> {
    let mut out = words(&[3600], 16);
    for value in [1, size, size / 512, 0, 0, 0] {
        out.extend(value.to_ne_bytes());
    }
    // The nanoseconds of three times; mode and number of links.
    out.extend(words(&[0, 0, 0, libc::S_IFREG | 0o600, 1], 40));
    out
}

/// `values`, and zeros up to `len` bytes.
fn words(values: &[u32], len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    bytes.resize(len, 0);
    bytes
}
