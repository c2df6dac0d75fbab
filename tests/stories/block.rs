//! Raw block volumes: content, growth, and how kubelet keeps their devices open.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use testkit::{
    Content, MIB, Mode, Node, NodeSetup, StuckFile, Volume, all_loops, eventually, files_below,
    loops_over, refused, run, run_err, story,
};
use tonic::Code;

/// The device number behind a published path.
fn device_at(path: &Path) -> u64 {
    let found = fs::metadata(path).unwrap();
    assert!(found.file_type().is_block_device(), "{}", path.display());
    found.rdev()
}

/// A writable raw volume that is published read-only: it stays so when all is called again,
/// also without records, and the next writer writes.
pub async fn read_only_for_a_while(node: &Node, volume: &Volume) {
    node.stage(volume).await.unwrap();
    let target = node.target(volume, "reader");
    for records_are_lost in [false, false, true] {
        if records_are_lost {
            node.restart_without_records().await;
        }
        node.stage(volume).await.unwrap();
        node.publish_read_only(volume, "reader").await.unwrap();
        let written = Content::new("x").write_at(&target, 0);
        assert!(written.is_err(), "a read-only device was written");
    }
    node.restart_without_records().await;
    node.unpublish(volume, "reader").await.unwrap();
    let target = node.up(volume, "writer").await;
    Content::new("y").write_at(&target, 0).unwrap();
    node.down(volume, "writer").await;
}

/// What kubelet does after a publish (pkg/volume/util/volumepathhandler): the
/// published node bind-mounted on the global map path, and a loop device over
/// it that keeps the device open.
fn kubelet_maps(node: &Node, volume: &Volume, pod: &str) -> Mapped {
    let dir = node
        .kubelet
        .join("plugins/kubernetes.io/csi/volumeDevices")
        .join(&volume.spec)
        .join("dev");
    fs::create_dir_all(&dir).unwrap();
    let map = dir.join(pod);
    fs::write(&map, "").unwrap();
    let published = node.target(volume, pod);
    let text = map.to_str().unwrap();
    run(&["mount", "--bind", published.to_str().unwrap(), text]);
    let lock = run(&["losetup", "-f", "--show", text]);
    let lock = PathBuf::from(lock.trim());
    Mapped {
        map,
        sequence: sequence_of(&lock).expect("sysfs"),
        lock,
    }
}

/// The sequence number of a disk, which each attach changes (`diskseq` of
/// Documentation/ABI/stable/sysfs-block).
fn sequence_of(device: &Path) -> Option<String> {
    let name = device.file_name()?;
    fs::read_to_string(Path::new("/sys/block").join(name).join("diskseq")).ok()
}

/// A file system that has shut down fails every sync, and while a loop device is over one of
/// its files it can be neither unmounted nor repaired.
#[test]
fn volumes_are_unstaged_though_their_pool_has_failed() {
    story(async |sandbox| {
        let pool = sandbox.reflink_pool("main");
        let setup = NodeSetup {
            pools: vec![format!("main={},shared", pool.display())],
            ..NodeSetup::new(sandbox)
        };
        let node = Node::start_with(sandbox, setup).await;
        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let raw = raw.with("directIO", "false");
        let mounted = sandbox.volume("mounted", "ext4");
        fs::write(node.up(&raw, "pod").await, [7; 4096]).unwrap();
        node.up(&mounted, "pod").await;
        let volumes = [&raw, &mounted].map(|volume| (volume, sandbox.image(volume)));
        run(&["xfs_io", "-x", "-c", "shutdown", pool.to_str().unwrap()]);
        for (volume, image) in volumes {
            node.down(volume, "pod").await;
            assert!(all_loops().iter().all(|(_, backing)| *backing != image));
        }
        node.wait_for_log("written to the volume without a sync may be lost")
            .await;
        run(&["umount", pool.to_str().unwrap()]);
    });
}

/// Kubelet's hold on a raw volume for one pod.
struct Mapped {
    map: PathBuf,
    lock: PathBuf,
    sequence: String,
}

impl Mapped {
    fn is_locked(&self) -> bool {
        let attached = all_loops().iter().any(|(device, _)| *device == self.lock);
        attached && sequence_of(&self.lock).as_deref() == Some(&self.sequence)
    }

    fn unmount(&self, options: &str) {
        run(&["umount", options, self.map.to_str().unwrap()]);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Only a story that failed leaves it.
        if self.is_locked() {
            let _ = run_err(&["losetup", "-d", self.lock.to_str().unwrap()]);
        }
    }
}

#[test]
fn a_raw_volume_is_the_device_itself() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let target = node.up(&volume, "one").await;
        let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
        assert_eq!(device_at(&target), device_at(&device));
        let content = Content::new("raw");
        content.write_at(&target, 8 * MIB).unwrap();

        node.publish(&volume, "two").await.unwrap();
        assert_eq!(device_at(&node.target(&volume, "two")), device_at(&device));
        node.unpublish(&volume, "two").await.unwrap();
        node.down(&volume, "one").await;
        assert!(!target.exists());
        content.assert_at(&sandbox.image(&volume), 8 * MIB);
        node.assert_clean().await;
    });
}

#[test]
fn read_only_means_that_the_device_cannot_be_written() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox
            .volume_in("main", "ro", "block", 64 * MIB)
            .mode(Mode::SingleNodeReaderOnly);
        let content = Content::new("precious");
        content.write_at(&sandbox.image(&volume), 0).unwrap();
        let target = node.up(&volume, "pod").await;
        content.assert_at(&target, 0);
        assert!(Content::new("other").write_at(&target, 0).is_err());
        node.down(&volume, "pod").await;
        content.assert_at(&sandbox.image(&volume), 0);
        node.assert_clean().await;
    });
}

#[test]
fn a_read_only_publish_is_read_only_or_refused() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "v", "block", 64 * MIB);
        read_only_for_a_while(&node, &volume).await;
        node.assert_clean().await;
    });
}

#[test]
fn a_lock_of_this_pods_map_is_released_with_it() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "locked", "block", 64 * MIB);
        node.up(&volume, "one").await;
        node.publish(&volume, "two").await.unwrap();
        let one = kubelet_maps(&node, &volume, "one");
        let two = kubelet_maps(&node, &volume, "two");

        // Kubelet ended before it unmapped the first pod: that lock is orphaned, the second
        // pod's is in use.
        node.unpublish(&volume, "one").await.unwrap();
        assert!(!one.is_locked() && two.is_locked());
        one.unmount("-n");

        // While the second pod is published the volume stays.
        node.unstage(&volume).await.expect_err("it is published");
        assert!(two.is_locked());

        // Without a target, any lock on the device is an orphan, also at another path.
        two.unmount("-l");
        node.unpublish(&volume, "two").await.unwrap();
        node.unstage(&volume).await.unwrap();
        assert!(!two.is_locked());
        node.assert_clean().await;
    });
}

#[test]
fn an_open_device_is_not_detached() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "held", "block", 64 * MIB);
        node.up(&volume, "pod").await;
        let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
        let content = Content::new("held");
        content.write_at(&device, 0).unwrap();
        let held = fs::File::open(&device).unwrap();
        node.unpublish(&volume, "pod").await.unwrap();
        // Unstaged only once it is detached; until then the error names the opener.
        node.timeout.set(Duration::from_secs(3));
        let refusal = node.unstage(&volume).await.unwrap_err();
        assert!(
            [Code::Aborted, Code::DeadlineExceeded].contains(&refusal.code()),
            "{refusal:?}"
        );
        let own = std::process::id().to_string();
        assert!(refusal.message().contains(&own), "{refusal:?}");
        content.assert_at(&device, 0);
        drop(held);
        node.retry_until_ok("unstaged once it is free", async || {
            node.unstage(&volume).await
        })
        .await;
        node.assert_clean().await;
    });
}

#[test]
fn with_block_lock_the_agent_holds_the_lock() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--block-lock");
        let node = Node::start_with(sandbox, setup).await;
        let volume = sandbox.volume_in("main", "own", "block", 64 * MIB);
        let target = node.up(&volume, "pod").await;
        let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
        let locks = || {
            let over = |backing: &Path| backing == target || backing == device;
            all_loops().iter().filter(|(_, on)| over(on)).count()
        };
        assert_eq!(locks(), 1);
        node.publish(&volume, "pod").await.unwrap();
        assert_eq!(locks(), 1, "a repeat takes no second one");
        node.down(&volume, "pod").await;
        assert_eq!(locks(), 0);
        node.assert_clean().await;
    });
}

#[test]
fn a_device_mounted_elsewhere_is_not_published() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let image = sandbox.image(&volume);
        run(&["mkfs.ext4", "-q", image.to_str().unwrap()]);
        let theirs = sandbox.dir().join("theirs");
        fs::create_dir(&theirs).unwrap();
        run(&[
            "mount",
            "-o",
            "loop",
            image.to_str().unwrap(),
            theirs.to_str().unwrap(),
        ]);
        let device = loops_over(&image);
        refused(
            node.stage(&volume).await,
            Code::Aborted,
            &[
                device[0].to_str().unwrap(),
                "ext4 is mounted at",
                theirs.to_str().unwrap(),
            ],
        );
        assert_eq!(loops_over(&image), device);
        // Another node may have it, once it is free.
        let claims = sandbox.pool("main").join(".uring-csi/claims");
        assert!(files_below(&claims).is_empty());
        run(&["umount", theirs.to_str().unwrap()]);
        // A device that a pod has open exclusively is the pod's own, also without records.
        let target = node.up(&volume, "pod").await;
        let used = fs::File::options()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(&target)
            .unwrap();
        node.stage(&volume).await.unwrap();
        node.restart_without_records().await;
        node.stage(&volume).await.unwrap();
        drop(used);
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// Detaches a volume's device behind the agent's back, and attaches `file` under its
/// number. If another process takes the number first, the volume is staged anew.
async fn number_taken(node: &Node, volume: &Volume, image: &Path, file: &Path) -> PathBuf {
    eventually("its number is taken", async || {
        node.stage(volume).await.unwrap();
        // The detach of the last attempt may have been deferred until now.
        let device = loops_over(image).pop()?;
        let name = device.to_str().unwrap();
        // If another process had it open, the detach was deferred to the last close.
        let _ = run_err(&["losetup", "-d", name]);
        run_err(&["losetup", name, file.to_str().unwrap()])
            .is_ok()
            .then_some(device)
    })
    .await
}

#[test]
fn a_device_that_reuses_a_raw_volumes_number_is_not_published() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let image = sandbox.image(&volume);
        let other = sandbox.volume_in("main", "other", "block", 64 * MIB);
        let (other, content) = (sandbox.image(&other), Content::new("another's"));
        content.write_at(&other, 0).unwrap();
        let theirs = number_taken(&node, &volume, &image, &other).await;
        let target = node.up(&volume, "pod").await;
        Content::new("ours").write_at(&target, 0).unwrap();
        Content::new("ours").assert_at(&image, 0);
        content.assert_at(&other, 0);
        assert_eq!(loops_over(&other), std::slice::from_ref(&theirs));
        node.down(&volume, "pod").await;
        run(&["losetup", "-d", theirs.to_str().unwrap()]);
        node.assert_clean().await;
    });
}

#[test]
fn a_recorded_number_publishes_no_device_mounted_elsewhere() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let image = sandbox.image(&volume);
        run(&["mkfs.ext4", "-q", image.to_str().unwrap()]);
        let theirs = sandbox.dir().join("theirs");
        fs::create_dir(&theirs).unwrap();
        // Of the same image, so that the backend finds it.
        let device = number_taken(&node, &volume, &image, &image).await;
        let [from, to] = [&device, &theirs].map(|path| path.to_str().unwrap());
        run(&["mount", from, to]);
        // Nor can the recorded stage be undone: that would detach the image.
        refused(
            node.stage(&volume).await,
            Code::Unavailable,
            &[from, "ext4 is mounted at", to],
        );
        assert_eq!(loops_over(&image), std::slice::from_ref(&device));
        run(&["umount", to]);
        run(&["losetup", "-d", from]);
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_device_mounted_at_its_staging_path_is_not_published_raw() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let (image, staging) = (sandbox.image(&volume), node.staging(&volume));
        run(&["mkfs.ext4", "-q", image.to_str().unwrap()]);
        fs::create_dir_all(&staging).unwrap();
        let device = run(&["losetup", "-f", "--show", image.to_str().unwrap()]);
        let [from, to] = [device.trim(), staging.to_str().unwrap()];
        run(&["mount", from, to]);
        refused(
            node.stage(&volume).await,
            Code::Aborted,
            &["ext4 is mounted at", to],
        );
        run(&["umount", to]);
        run(&["losetup", "-d", from]);
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_loop_device_over_a_dead_file_server_delays_no_raw_volume() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "block");
        node.up(&volume, "pod").await;
        // Another driver's, at a path with locks, too.
        let map = (node.kubelet).join("plugins/kubernetes.io/csi/volumeDevices/map");
        fs::create_dir_all(map.parent().unwrap()).unwrap();
        let file = StuckFile::new(&map, 16 * MIB);
        let device = run(&["losetup", "-f", "--show", map.to_str().unwrap()]);
        file.end();
        let answer = node.unpublish(&volume, "pod").await;
        run(&["losetup", "-d", device.trim()]);
        file.remove().await;
        answer.expect("unpublished");
        node.unstage(&volume).await.unwrap();
        node.assert_clean().await;
    });
}
