//! A device number that goes to another image while a volume is staged: between two steps,
//! another process detaches the volume's device and attaches another image.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use testkit::{
    Ceph, Content, MIB, NbdServer, Node, Rng, Sandbox, Volume, all_loops, ceph_story, eventually,
    files_below, loops_over, nbds_over, rbds_over, run_err, sha256, spec_of, story,
};

use crate::nbd::{blank, nbd_story, own};

/// Detaches a volume's device and attaches another image under its number.
trait DeviceSwapper {
    /// A volume over a blank source.
    fn volume(&self, number: usize) -> Volume;

    /// The devices that it has.
    fn attached(&self, volume: &Volume) -> Vec<PathBuf>;

    /// Detaches the volume's device, and attaches a foreign image under its number.
    fn swap_device(&mut self, volume: &Volume);

    /// Detaches the foreign image; whether it is still blank.
    fn is_blank(&mut self) -> bool;
}

/// Stages a volume once for each step of the agent, which stops there while the
/// device is swapped: at every `of`-th step, or with `EVERY_STEP` set at each.
async fn assert_left_alone(node: &Node, of: usize, mut swapper: impl DeviceSwapper) {
    let of = env::var_os("EVERY_STEP").map_or(of, |_| 1);
    let mut at = Rng::new().below(of);
    loop {
        let volume = swapper.volume(at);
        node.kill9().await;
        node.start_stopping_at(at).await;
        if node.is_stopped() {
            // It had not begun to serve.
            node.resume();
        }
        let mut was_detached = false;
        let stopped = eventually("it is staged, or the agent has stopped", async || {
            node.is_stopped().then_some(())
        });
        tokio::select! {
            biased;
            () = stopped => {
                swapper.swap_device(&volume);
                was_detached = true;
                node.resume();
            }
            staged = node.stage(&volume) => staged.unwrap(),
        }
        if !was_detached {
            // It would stop at a later step.
            node.kill9().await;
            node.restart().await;
        }
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        assert!(swapper.is_blank(), "after step {at}");
        // Mounted before it was detached, it is unusable.
        node.retry_until_ok("unstaged", async || node.unstage(&volume).await)
            .await;
        let target = node.up(&volume, "pod").await;
        Content::new("ours").put(&volume, &target);
        assert_eq!(swapper.attached(&volume).len(), 1);
        node.down(&volume, "pod").await;
        assert!(swapper.attached(&volume).is_empty());
        if !was_detached {
            break;
        }
        at += of;
    }
    assert!(at > 10, "a stage has more than {at} steps");
    node.assert_clean().await;
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A blank file, and its sum.
fn blank_file(file: PathBuf) -> (PathBuf, String) {
    fs::File::create(&file).unwrap().set_len(64 * MIB).unwrap();
    let sum = sha256(&file).unwrap();
    (file, sum)
}

#[test]
fn another_image_that_gets_the_device_is_left_alone() {
    story(async |sandbox| {
        struct Images<'a>(&'a Sandbox, PathBuf, String);

        impl DeviceSwapper for Images<'_> {
            fn volume(&self, number: usize) -> Volume {
                self.0.volume(&format!("v{number}"), "ext4")
            }

            fn attached(&self, volume: &Volume) -> Vec<PathBuf> {
                loops_over(&self.0.image(volume))
            }

            fn swap_device(&mut self, volume: &Volume) {
                for device in self.attached(volume) {
                    let _ = run_err(&["losetup", "-d", text(&device)]);
                    if !all_loops().iter().any(|(taken, _)| *taken == device) {
                        let _ = run_err(&["losetup", text(&device), text(&self.1)]);
                    }
                }
            }

            fn is_blank(&mut self) -> bool {
                for device in loops_over(&self.1) {
                    let _ = run_err(&["losetup", "-d", text(&device)]);
                }
                sha256(&self.1).unwrap() == self.2
            }
        }

        let node = Node::start(sandbox).await;
        let (other, sum) = blank_file(sandbox.dir().join("other.img"));
        assert_left_alone(&node, 3, Images(sandbox, other, sum)).await;
    });
}

#[test]
fn another_export_that_gets_the_device_is_left_alone() {
    nbd_story(async |sandbox| {
        struct Exports<'a> {
            sandbox: &'a Sandbox,
            server: &'a NbdServer,
            other: (PathBuf, String),
            taken: Vec<PathBuf>,
        }

        impl DeviceSwapper for Exports<'_> {
            fn volume(&self, number: usize) -> Volume {
                let volume = blank(self.sandbox, self.server, &format!("v{number}"), "ext4");
                // A request to a device that was disconnected by hand soon fails.
                volume.with("deadConnectionTimeout", "1")
            }

            fn attached(&self, volume: &Volume) -> Vec<PathBuf> {
                let devices = nbds_over(&format!(" {}", volume.handle));
                devices.into_iter().map(PathBuf::from).collect()
            }

            fn swap_device(&mut self, volume: &Volume) {
                let name = text(Path::new(self.other.0.file_name().unwrap())).to_owned();
                let uri = self.server.uri();
                let (_, socket) = uri.split_once("socket=").expect("a unix socket");
                for device in self.attached(volume) {
                    let node = text(&device);
                    let _ = run_err(&["nbd-client", "-d", node]);
                    // Fails while the device is open.
                    let attach = ["nbd-client", "-unix", socket, node, "-N", &name];
                    if run_err(&attach).is_ok() {
                        self.taken.push(device);
                    }
                }
            }

            fn is_blank(&mut self) -> bool {
                for device in self.taken.drain(..) {
                    let _ = run_err(&["nbd-client", "-d", text(&device)]);
                }
                sha256(&self.other.0).unwrap() == self.other.1
            }
        }

        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        let other = NbdServer::image(sandbox, &own(sandbox, "other"), 64 * MIB);
        let swapper = Exports {
            sandbox,
            server: &server,
            other: blank_file(other),
            taken: Vec::new(),
        };
        assert_left_alone(&node, 4, swapper).await;
    });
}

#[test]
fn another_rbd_image_that_gets_the_device_is_left_alone() {
    ceph_story(async |sandbox, ceph| {
        struct Images<'a> {
            ceph: &'a Ceph,
            other: Volume,
            copy: PathBuf,
            sum: String,
        }

        impl DeviceSwapper for Images<'_> {
            fn volume(&self, _: usize) -> Volume {
                self.ceph.volume("ext4")
            }

            fn attached(&self, volume: &Volume) -> Vec<PathBuf> {
                rbds_over(volume)
            }

            fn swap_device(&mut self, volume: &Volume) {
                for device in self.attached(volume) {
                    let _ = run_err(&["rbd", "unmap", "-o", "noudev,force", text(&device)]);
                    // It gets the lowest number that is free.
                    let other = spec_of(&self.other);
                    self.ceph.cluster.rbd(&["map", "-o", "noudev", &other]);
                }
            }

            fn is_blank(&mut self) -> bool {
                for device in rbds_over(&self.other) {
                    let _ = run_err(&["rbd", "unmap", "-o", "noudev", text(&device)]);
                }
                let _ = fs::remove_file(&self.copy);
                let (other, copy) = (spec_of(&self.other), text(&self.copy));
                let export = ["export", "--no-progress", &other, copy];
                self.ceph.cluster.rbd(&export);
                sha256(&self.copy).unwrap() == self.sum
            }
        }

        let node = ceph.node(sandbox).await;
        let (copy, sum) = blank_file(sandbox.dir().join("other.img"));
        let other = ceph.volume("ext4");
        let swapper = Images {
            ceph,
            other,
            copy,
            sum,
        };
        assert_left_alone(&node, 6, swapper).await;
    });
}

/// What a kill between the detach and the end of an unstage leaves: the record of a device
/// that is detached, whose number the next volume then gets.
async fn assert_left_record_claims_nothing(
    node: &Node,
    kind: &str,
    volume: impl Fn(&str, &str) -> Volume,
    devices: impl Fn(&Volume) -> Vec<PathBuf>,
) {
    let first = volume(&format!("first-{kind}"), kind);
    let second = volume(&format!("second-{kind}"), kind);
    loop {
        node.stage(&first).await.unwrap();
        let device = devices(&first);
        let records = Vec::from_iter(files_below(&node.run_dir.join("volumes")));
        let [record] = &records[..] else {
            panic!("one volume has one record: {records:?}")
        };
        let text = fs::read(record).unwrap();
        node.unstage(&first).await.unwrap();
        node.kill9().await;
        fs::write(record, text).unwrap();
        node.restart().await;
        node.stage(&second).await.unwrap();
        if devices(&second) == device {
            break;
        }
        // Another story has the number.
        node.unstage(&second).await.unwrap();
        node.unstage(&first).await.unwrap();
    }
    node.publish(&second, "pod").await.unwrap();
    let target = node.target(&second, "pod");
    let content = Content::new("second");
    content.put(&second, &target);
    node.kill9().await;
    node.restart().await;

    node.stage(&second).await.expect("as before");
    node.publish(&second, "another").await.expect("published");
    node.unstage(&first)
        .await
        .expect("as it is published nowhere");
    node.unpublish(&second, "another").await.unwrap();
    content.assert_kept(&second, &target);
    node.down(&second, "pod").await;
}

#[test]
fn a_record_that_a_kill_left_claims_no_mount_of_the_next_volume() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = |name: &str, kind: &str| sandbox.volume_in("main", name, kind, 64 * MIB);
            let devices = |volume: &Volume| loops_over(&sandbox.image(volume));
            assert_left_record_claims_nothing(&node, kind, volume, devices).await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_record_that_a_kill_left_claims_no_mount_of_the_next_export() {
    nbd_story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let server = NbdServer::start(sandbox).await;
        for kind in ["ext4", "block"] {
            let volume = |name: &str, kind: &str| blank(sandbox, &server, name, kind);
            let devices = |volume: &Volume| {
                let devices = nbds_over(&format!(" {}", volume.handle));
                devices.into_iter().map(PathBuf::from).collect()
            };
            assert_left_record_claims_nothing(&node, kind, volume, devices).await;
        }
        node.assert_clean().await;
    });
}
