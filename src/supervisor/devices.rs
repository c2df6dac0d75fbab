//! What the kernel has: NBD devices by their cookies, and the processes that
//! serve them by their command lines. Nothing here waits for a device.

#[cfg(feature = "holder")]
use std::sync::Arc;
use std::{fs, io, path::PathBuf};

#[cfg(feature = "holder")]
use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
};

#[cfg(feature = "holder")]
use super::{SupervisorError, error::failed};
#[cfg(feature = "holder")]
use crate::kernel::{block, busy, nbd::netlink::Driver};
use crate::{
    ceph::fencing::Process,
    kernel::{Dev, sysfs},
};

/// A device that somebody attached under a cookie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its number.
    pub dev: Dev,
    /// `/dev/nbd7`.
    pub node: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// It refuses writes.
    pub read_only: bool,
}

impl Device {
    /// The device of that cookie. A cookie outlives its device by a moment, in
    /// which that has no size.
    pub fn of(cookie: &str) -> io::Result<Option<Self>> {
        let mut its = cookies()?.into_iter().filter(|(_, has)| has == cookie);
        let Some((name, _)) = its.next() else {
            return Ok(None);
        };
        let dev = sysfs::dev_of(&name)?;
        let bytes = sysfs::size_bytes(dev)?;
        let device = Self {
            dev,
            node: sysfs::node_of(dev)?,
            bytes,
            read_only: sysfs::is_read_only(dev)?,
        };
        Ok((bytes > 0).then_some(device))
    }

    /// Whether that device has that cookie, and a size.
    pub fn is_behind(dev: Dev, cookie: &str) -> bool {
        sysfs::nbd_backend(dev).is_ok_and(|has| has == cookie)
            && sysfs::size_bytes(dev).is_ok_and(|bytes| bytes > 0)
    }

    /// Opens it, to have it open. udevd reads its superblocks meanwhile, and no
    /// partitions, for which it wants the device's lock for itself: it would read them
    /// whenever somebody has written, and a daemon that dies right then could not
    /// close the device, nor therefore end. It may block: for a lane.
    #[cfg(feature = "holder")]
    pub fn open(&self) -> Result<Arc<fs::File>, SupervisorError> {
        let file = self.open_unlocked()?;
        self.lock(&file, FlockOperation::LockShared)?;
        Ok(file)
    }

    #[cfg(feature = "holder")]
    fn open_unlocked(&self) -> Result<Arc<fs::File>, SupervisorError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let opened = block::open(&self.node, self.dev, flags);
        let opened = opened.map_err(failed("open", self.node.display()))?;
        Ok(Arc::new(fs::File::from(opened)))
    }

    /// Waits until udevd is done with the device, and keeps it off for as long as the
    /// file is locked so: udevd looks into what it can lock, shared with others, and
    /// at nothing else (<https://systemd.io/BLOCK_DEVICE_LOCKING>). Uses the file that
    /// has the device open already, if there is one: its lock would be in the way. It
    /// blocks for as long as the device does: for a lane.
    #[cfg(feature = "holder")]
    pub fn without_udevd(
        &self,
        open: Option<Arc<fs::File>>,
    ) -> Result<Arc<fs::File>, SupervisorError> {
        // Not shared first: udevd could share it then, and wait for the device.
        let file = open.map_or_else(|| self.open_unlocked(), Ok)?;
        self.lock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    #[cfg(feature = "holder")]
    fn lock(&self, file: &fs::File, how: FlockOperation) -> Result<(), SupervisorError> {
        let locked = flock(file, how);
        locked.map_err(|errno| failed("lock", self.node.display())(errno.into()))
    }

    /// Takes the device down, unless somebody uses it: the driver itself does not
    /// look. It blocks for as long as the device does: for a lane.
    #[cfg(feature = "holder")]
    pub fn disconnect(&self, cookie: &str) -> Result<(), SupervisorError> {
        let node = || self.node.display();
        let opened = busy::outwait(
            || block::open(&self.node, self.dev, OFlags::RDONLY | OFlags::EXCL),
            |opened| opened.as_ref().is_err_and(is_busy),
        );
        // While it is open it stays what it is, which may be another's by now.
        let claimed = match opened {
            _ if !sysfs::nbd_backend(self.dev).is_ok_and(|has| has == cookie) => return Ok(()),
            Ok(file) => file,
            Err(error) if is_busy(&error) => {
                return Err(SupervisorError::Busy {
                    node: self.node.clone(),
                });
            }
            Err(error) => return Err(failed("open", node())(error)),
        };
        let name = self.node.to_string_lossy();
        let index = name.strip_prefix("/dev/nbd").and_then(|nr| nr.parse().ok());
        let index = index.ok_or_else(|| io::Error::other("it is no NBD device"));
        let down = index.and_then(|index| Driver::open()?.disconnect(index));
        drop(claimed);
        down.map_err(failed("take down", node()))
    }
}

/// Whether the driver was loaded to read partitions. Then whoever opens a device of a
/// new size first reads from it, and holds up everybody else who opens it: also the
/// daemon that takes the place of one that has just died.
#[cfg(feature = "holder")]
pub fn partitions_are_read() -> bool {
    let max_part = fs::read_to_string("/sys/module/nbd/parameters/max_part");
    max_part.is_ok_and(|max_part| max_part.trim_end() != "0")
}

/// The NBD devices that have cookies, by their names.
pub fn cookies() -> io::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for index in sysfs::numbers("nbd")? {
        let name = format!("nbd{index}");
        // Most have none.
        if let Ok(cookie) = fs::read_to_string(format!("/sys/block/{name}/backend")) {
            let cookie = cookie.strip_suffix('\n').unwrap_or(&cookie);
            found.push((name, cookie.to_owned()));
        }
    }
    Ok(found)
}

#[cfg(feature = "holder")]
fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

/// The process of that id, while there is one.
pub fn process(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // proc(5): the 22nd word, of which the second, in parentheses, may have any
    // characters.
    let (_, rest) = stat.rsplit_once(')')?;
    let began = rest.split_ascii_whitespace().nth(19)?.parse().ok()?;
    Some(Process { pid, began })
}

/// A process that serves a device, or is about to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its cookie.
    pub cookie: String,
    /// `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
    pub image: String,
    /// The monitors that it was told, as `mon_host` takes them.
    pub monitors: Option<String>,
}

impl Server {
    /// Reads `/proc/PID/cmdline` (proc(5)): ours, or that of ceph-csi, which calls
    /// `rbd` and that calls rbd-nbd with its own options first, values in the same
    /// word or in the next.
    pub fn parse(cmdline: &[u8]) -> Option<Self> {
        let mut words = cmdline.split(|byte| *byte == 0).map(str::from_utf8);
        let program = words.next()?.ok()?;
        if program.rsplit('/').next() != Some("rbd-nbd") {
            return None;
        }
        let words: Vec<_> = words.collect::<Result<_, _>>().ok()?;
        let at = words
            .iter()
            .position(|word| ["map", "attach"].contains(word))?;
        let value = |option: &str| {
            words.iter().enumerate().find_map(|(nr, word)| {
                let rest = word.strip_prefix(option)?;
                if rest.is_empty() {
                    return words.get(nr + 1).copied();
                }
                rest.strip_prefix('=')
            })
        };
        let cookie = value("--cookie")?;
        let monitors = value("--mon-host").or(value("--mon_host")).or(value("-m"));
        // Both name the image right after the verb.
        let image = words.get(at + 1).filter(|word| !word.starts_with('-'))?;
        Some(Self {
            cookie: cookie.to_owned(),
            image: (*image).to_owned(),
            monitors: monitors.map(str::to_owned),
        })
    }

    /// Every such process that is alive, with its id. It may block: for a lane.
    pub fn all() -> io::Result<Vec<(i32, Self)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            found.extend(Self::of(pid).map(|server| (pid, server)));
        }
        Ok(found)
    }

    /// What the process is, where it is such a one.
    pub fn of(pid: i32) -> Option<Self> {
        // Of one that has ended, or is reaped now, nothing is left to read. The name
        // is the kernel's own; the arguments are in the process's memory, for which
        // a reader may have to wait.
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        if read("comm") != b"rbd-nbd\n" {
            return None;
        }
        Self::parse(&read("cmdline"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(words: &[&str]) -> Option<(String, String, Option<String>)> {
        let server = Server::parse(words.join("\0").as_bytes())?;
        Some((server.cookie, server.image, server.monitors))
    }

    #[test]
    fn a_daemon_is_known_by_its_command_line() {
        let monitors = Some("h:6789".to_owned());
        let known = Some(("a handle".to_owned(), "pool/image".to_owned(), monitors));
        let ours = [
            "/usr/bin/rbd-nbd",
            "attach",
            "pool/image",
            "-f",
            "--mon-host=h:6789",
            "--cookie=a handle",
            "",
        ];
        assert_eq!(parsed(&ours), known);
        let of_ceph_csi = [
            "rbd-nbd",
            "--id",
            "csi",
            "-m",
            "h:6789",
            "--keyfile=/tmp/x",
            "map",
            "pool/image",
            "--log-file",
            "/x",
            "--try-netlink",
            "--cookie",
            "a handle",
            "--io-timeout=0",
            "",
        ];
        assert_eq!(parsed(&of_ceph_csi), known);
        for other in [
            &["rbd", "map", "pool/image", "--cookie=x"][..],
            &["rbd-nbd", "map", "pool/image"],
            &["rbd-nbd", "map", "--cookie=x"],
            &["rbd-nbd", "list-mapped", "--cookie=x"],
            &["rbd-nbd", "map", "pool/image", "--cookie"],
            &[""],
        ] {
            assert_eq!(parsed(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_process_is_known_by_when_it_began() {
        let own = process(rustix::process::getpid().as_raw_nonzero().get()).unwrap();
        assert!(own.began > process(1).unwrap().began);
        assert_eq!(process(own.pid), Some(own));
        assert_eq!(process(0), None);
    }

    proptest! {
        #[test]
        fn any_command_line_is_read_or_passed_over(mut bytes: Vec<u8>, ours: bool) {
            if ours {
                bytes.splice(0..0, *b"rbd-nbd\0map\0");
            }
            let _ = Server::parse(&bytes);
        }

        #[test]
        fn what_a_daemon_is_told_is_read_back(cookie in "[^\0]{1,128}", image in "[^-\0][^\0]{0,40}") {
            let line = format!("rbd-nbd\0map\0{image}\0-f\0--cookie={cookie}\0--read-only\0");
            let server = Server::parse(line.as_bytes()).unwrap();
            prop_assert_eq!((server.cookie, server.image), (cookie, image));
        }
    }
}
