//! The processes of rbd-nbd, by their command lines. Nothing here waits for a device.

use std::{fs, io};

use crate::ceph::fencing::Process;

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
pub struct DaemonProcess {
    pub cookie: String,
    /// `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
    pub image: String,
    /// Its monitors, as `mon_host` takes them.
    pub monitors: Option<String>,
    pub read_only: bool,
}

impl DaemonProcess {
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
            read_only: words.contains(&"--read-only"),
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

    /// The process, if it is one of rbd-nbd.
    pub fn of(pid: i32) -> Option<Self> {
        // A process that has ended has neither file any more. The name is in the kernel; the
        // arguments are in the process's memory, for which a reader may have to wait.
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
        let server = DaemonProcess::parse(words.join("\0").as_bytes())?;
        Some((server.cookie, server.image, server.monitors))
    }

    #[test]
    fn a_daemon_is_recognised_by_its_command_line() {
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
    fn a_process_is_identified_by_its_start_time() {
        let own = process(rustix::process::getpid().as_raw_nonzero().get()).unwrap();
        assert!(own.began > process(1).unwrap().began);
        assert_eq!(process(own.pid), Some(own));
        assert_eq!(process(0), None);
    }

    proptest! {
        #[test]
        fn any_command_line_is_parsed_or_ignored(mut bytes: Vec<u8>, ours: bool) {
            if ours {
                bytes.splice(0..0, *b"rbd-nbd\0map\0");
            }
            let _ = DaemonProcess::parse(&bytes);
        }

        #[test]
        fn a_daemons_command_line_parses_back(cookie in "[^\0]{1,128}", image in "[^-\0][^\0]{0,40}") {
            let line = format!("rbd-nbd\0map\0{image}\0-f\0--cookie={cookie}\0--read-only\0");
            let server = DaemonProcess::parse(line.as_bytes()).unwrap();
            prop_assert!(server.read_only);
            prop_assert_eq!((server.cookie, server.image), (cookie, image));
        }
    }
}
