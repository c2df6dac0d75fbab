//! cryptsetup: on which device it runs, and how many run at once.

use std::{fs, io::Write as _};

use futures_util::future::join_all;
use rustix::fs::{CWD, Mode, mkfifoat};
use testkit::{Ceph, Node, ProgramStub, ceph_story, eventually, free_port, rbds_over, spec_of};

use super::{encrypted, lifecycle};
use crate::observability::get;

/// Before the program has the device: detaches it, and attaches a foreign image under its
/// number.
const TAKES_OVER: &str = r#"
for word; do case "$word" in /dev/rbd*) device=$word;; esac; done
case "$1" in luksFormat|luksOpen)
  echo "$1" >> "$reached"
  if rbd unmap -o noudev "$device"; then
    rbd -c CONF map -o noudev OTHER > /dev/null
  fi
esac
exec cryptsetup "$@""#;

#[test]
fn another_image_that_gets_the_device_is_left_alone() {
    ceph_story(async |sandbox, ceph| {
        let other = ceph.volume("block");
        let conf = ceph.cluster.dir().join("ceph.conf");
        let script = TAKES_OVER
            .replace("CONF", conf.to_str().unwrap())
            .replace("OTHER", &spec_of(&other));
        let stub = ProgramStub::new("cryptsetup", &script);
        let node = ceph.node(sandbox).await;
        let volume = encrypted::volume(ceph, "ext4");
        let _ = node.stage(&volume).await;
        assert_eq!(
            ceph.cluster
                .rbd(&["diff", "--format=json", &spec_of(&other)])
                .trim(),
            "[]",
            "nothing was written to it"
        );
        assert!(rbds_over(&other).is_empty());
        lifecycle(&node, &volume).await;
        let tried = fs::read_to_string(&stub.reached).unwrap();
        for what in ["luksFormat", "luksOpen"] {
            assert!(tried.contains(what), "{tried}");
        }
        node.assert_clean().await;
    });
}

/// Reports that it runs; hangs until a write to a FIFO, unless a file lets it pass.
const HANGS: &str = r#"
fifo=${reached%/*}/fifo
: > "$reached.$$"
[ -e "$reached.pass" ] || read line < "$fifo"
exec cryptsetup "$@""#;

#[test]
fn concurrent_cryptsetup_of_a_cluster_is_limited_also_where_it_hangs() {
    ceph_story(async |sandbox, ceph| {
        let stub = ProgramStub::new("cryptsetup", HANGS);
        let programs = stub.reached.parent().unwrap();
        let fifo = programs.join("fifo");
        mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
        let begun = || {
            let names = fs::read_dir(programs).unwrap().flatten();
            let names = names.map(|entry| entry.file_name().into_string().unwrap());
            names.filter(|name| name.starts_with("reached.")).count()
        };
        let another = Ceph::shared(sandbox).unwrap();
        let port = free_port();
        let setup = ceph.setup(sandbox).arg("--max-cryptsetup=4");
        let setup = setup.arg(&format!("--metrics-listen=127.0.0.1:{port}"));
        let node = Node::start_with(sandbox, setup).await;
        let volumes: Vec<_> = (0..5).map(|_| encrypted::volume(ceph, "ext4")).collect();
        let calls = join_all(volumes.iter().map(|volume| node.stage(volume)));
        let story = async {
            eventually("three are stuck, and two wait", async || {
                let metrics = get(port, "/metrics").ok()?;
                let says = |what, count| {
                    let line =
                        format!("uring_csi_admission_{what}{{step=\"cryptsetup\"}} {count}\n");
                    metrics.contains(&line)
                };
                (says("stuck", 3) && says("waiting", 2)).then_some(())
            })
            .await;
            assert_eq!(begun(), 3);
            // Volumes of another cluster get permits.
            fs::write(stub.reached.with_extension("pass"), "").unwrap();
            lifecycle(&node, &encrypted::volume(&another, "ext4")).await;
            let metrics = get(port, "/metrics").unwrap();
            assert!(metrics.contains("uring_csi_admission_waiting{step=\"cryptsetup\"} 2\n"));
            let mut end = fs::File::options()
                .read(true)
                .write(true)
                .open(&fifo)
                .unwrap();
            end.write_all(&[b'\n'; 64]).unwrap();
            end
        };
        let (staged, _end) = tokio::join!(calls, story);
        for (volume, staged) in volumes.iter().zip(staged) {
            if staged.is_err() {
                // The deadline of its caller was earlier.
                node.retry_until_ok("staged", async || node.stage(volume).await)
                    .await;
            }
            node.unstage(volume).await.unwrap();
        }
        node.assert_clean().await;
    });
}
