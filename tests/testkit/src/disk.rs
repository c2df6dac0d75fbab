//! Looking at devices, files and images from outside, with the system's own tools.

use std::{
    fmt::Write as _,
    fs,
    io::{self, Read as _},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};

use super::{MIB, Volume, cluster::output_despite_abort};

/// Runs a command that must succeed; its output.
#[track_caller]
pub fn run(command: &[&str]) -> String {
    run_err(command).unwrap_or_else(|said| panic!("{command:?}: {said}"))
}

/// Runs a command; its output, as an error if it failed.
pub fn run_err(command: &[&str]) -> Result<String, String> {
    let mut program = Command::new(command[0]);
    let output = match program.args(&command[1..]) {
        of_ceph if command[0] == "rbd" => output_despite_abort(of_ceph),
        other => other.output(),
    };
    let output = output.map_err(|error| error.to_string())?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    if output.status.success() {
        Ok(said)
    } else {
        Err(said)
    }
}

/// Unmaps an image's device. udevd, which reads each device that was open for writing, may
/// have it open for a moment.
#[track_caller]
pub fn unmap_by_rbd(device: &Path) {
    run_until_it_succeeds(&["rbd", "unmap", "-o", "noudev", device.to_str().unwrap()]);
}

/// Runs a command again until it succeeds: another process may have its device open.
#[track_caller]
pub fn run_until_it_succeeds(command: &[&str]) {
    let timeout = Instant::now() + Duration::from_secs(30);
    while let Err(said) = run_err(command) {
        assert!(Instant::now() < timeout, "{command:?}: {said}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A file or device's content in one line.
pub fn sha256(path: &Path) -> io::Result<String> {
    let mut file = fs::File::open(path)?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => digest.update(&buffer[..read]),
        }
    }
    Ok(hex(&digest.finalize()))
}

/// Two digits a byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Leaves data in the page cache that no open file writes back: of a mapping.
pub fn leave_unwritten(file: &Path) {
    let script = "import mmap, sys\n\
        file = open(sys.argv[1], 'w+b')\n\
        file.truncate(4096)\n\
        mapped = mmap.mmap(file.fileno(), 4096)\n\
        file.close()\n\
        mapped[:4] = b'late'\n\
        mapped.close()";
    run(&["python3", "-c", script, file.to_str().expect("UTF-8")]);
}

/// Bytes that a story writes, and checks later.
pub struct Content {
    bytes: Vec<u8>,
}

impl Content {
    /// 1 MiB that no other seed gives.
    pub fn new(seed: &str) -> Self {
        let mut bytes = Vec::new();
        let mut block = Sha256::digest(seed);
        while (bytes.len() as u64) < MIB {
            bytes.extend_from_slice(&block);
            block = Sha256::digest(block);
        }
        Self { bytes }
    }

    /// Into a file, on disk when this returns.
    pub fn write(&self, file: &Path) {
        let file = fs::File::create(file).expect("a new file");
        file.write_all_at(&self.bytes, 0).expect("a write");
        file.sync_all().expect("a sync");
    }

    /// Onto a device or an existing image at `offset`.
    pub fn write_at(&self, path: &Path, offset: u64) -> io::Result<()> {
        self.write_unsynced(path, offset)?.sync_all()
    }

    /// The same, into the kernel's memory alone.
    pub fn write_unsynced(&self, path: &Path, offset: u64) -> io::Result<fs::File> {
        let file = fs::OpenOptions::new().write(true).open(path)?;
        file.write_all_at(&self.bytes, offset)?;
        Ok(file)
    }

    /// Where a pod finds the volume.
    pub fn put(&self, volume: &Volume, target: &Path) {
        if volume.is_block() {
            self.write_at(target, MIB).expect("a write");
        } else {
            self.write(&target.join("file"));
        }
    }

    /// Asserts that the content of [`Content::put`] is there.
    #[track_caller]
    pub fn assert_kept(&self, volume: &Volume, target: &Path) {
        if volume.is_block() {
            self.assert_at(target, MIB);
        } else {
            self.assert_in(&target.join("file"));
        }
    }

    /// Asserts that the file holds just these bytes.
    #[track_caller]
    pub fn assert_in(&self, file: &Path) {
        let found = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert!(found == self.bytes, "{} has changed", file.display());
    }

    /// Asserts that the device or image holds these bytes at `offset`.
    #[track_caller]
    pub fn assert_at(&self, path: &Path, offset: u64) {
        let mut found = vec![0; self.bytes.len()];
        fs::File::open(path)
            .and_then(|file| file.read_exact_at(&mut found, offset))
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(found == self.bytes, "{} has changed", path.display());
    }
}

/// The loop devices (`/dev/loopN`) whose backing file is this very file.
pub fn loops_over(image: &Path) -> Vec<PathBuf> {
    let Ok(wanted) = fs::metadata(image) else {
        return Vec::new();
    };
    all_loops()
        .into_iter()
        .filter(|(_, backing)| {
            fs::metadata(backing)
                .is_ok_and(|found| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()))
        })
        .map(|(device, _)| device)
        .collect()
}

/// Every configured loop device with its backing path, as sysfs has it.
pub fn all_loops() -> Vec<(PathBuf, PathBuf)> {
    let mut loops: Vec<_> = fs::read_dir("/sys/block")
        .expect("sysfs")
        .flatten()
        .filter_map(|entry| {
            let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
            let device = Path::new("/dev").join(entry.file_name());
            Some((device, PathBuf::from(backing.trim_end())))
        })
        .collect();
    loops.sort();
    loops
}

/// Whether this process may resize a mounted ext4: the ioctl demands
/// CAP_SYS_RESOURCE (bit 24) in the initial user namespace.
pub fn can_resize_ext4() -> bool {
    fs::read_to_string("/proc/self/status")
        .expect("procfs")
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|effective| effective & (1 << 24) != 0)
}
