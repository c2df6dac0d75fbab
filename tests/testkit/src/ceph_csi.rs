//! The work of ceph-csi's node plugin with krbd and rbd-nbd, by the same programs, with
//! the same arguments, on the same files.
//!
//! Source: ceph-csi's `internal/rbd/nodeserver.go`, `rbd_attach.go`, and
//! `rbdImageMetadataStash` in `rbd_util.go`.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use serde_json::Value;

use super::{
    Ceph, Node, Volume,
    disk::run_until_it_succeeds,
    nbds_over,
    rbd::{mapping_of, spec_of},
    run, run_err,
};

/// The number of images that rbd-nbd was started for.
static SERVED: AtomicU32 = AtomicU32::new(0);

/// ceph-csi's stage file, beside the mount.
pub const STAGE_FILE: &str = "image-meta.json";

impl Ceph {
    /// Maps a volume's image by the program `rbd` and krbd; the device.
    pub fn map_by_rbd(&self, volume: &Volume, options: &str) -> PathBuf {
        self.map(volume, "krbd", &[options])
    }

    /// Serves it by rbd-nbd, which runs on by itself. It gets a device of its own: ceph-csi
    /// would take one that another story's export had (`kernel::nbd::ReservedIndex`).
    fn serve_by_rbd(&self, volume: &Volume) -> PathBuf {
        let given = volume.context.get("mapOptions");
        let given = given.and_then(|options| options.strip_prefix("nbd:"));
        let waits = given.unwrap_or("reattach-timeout=300");
        let cookie = format!("cookie={}", volume.handle);
        // Process ids 3000 apart have the same numbers.
        let own = (0..10)
            .map(|_| 1000 + process::id() % 3000 * 10 + SERVED.fetch_add(1, Relaxed) % 10)
            .find(|own| !Path::new(&format!("/sys/block/nbd{own}/pid")).exists())
            .expect("a device that is not attached");
        let device = format!("device=/dev/nbd{own}");
        self.map(
            volume,
            "nbd",
            &["try-netlink", waits, "io-timeout=0", &cookie, &device],
        )
    }

    fn map(&self, volume: &Volume, device_type: &str, options: &[&str]) -> PathBuf {
        let keyfile = self.root.join("keyfile");
        write_private(&keyfile, &self.cluster.key);
        let keyfile = keyfile.display().to_string();
        let monitors = self.cluster.monitors.join(",");
        let as_user = [
            "--id",
            &self.cluster.user,
            "-m",
            &monitors,
            "--keyfile",
            &keyfile,
        ];
        let map = ["map", &spec_of(volume), "--device-type", device_type];
        let options: Vec<_> = options
            .iter()
            .flat_map(|option| ["--options", option])
            .collect();
        let said = self.cluster.rbd(&[&as_user[..], &map, &options].concat());
        PathBuf::from(said.trim())
    }

    /// Stages a volume; the device. It leaves the image's file system as it is,
    /// and makes one on a blank image.
    pub fn stage_as_ceph_csi(&self, node: &Node, volume: &Volume) -> PathBuf {
        let staging = node.staging(volume);
        fs::create_dir_all(&staging).expect("kubelet's directory");
        write_private(&staging.join(STAGE_FILE), &ceph_csi_stage_file(volume));
        let mapped = if is_served(volume) {
            let device = self.serve_by_rbd(volume);
            write_private(&staging.join(STAGE_FILE), &ceph_csi_stage_file(volume));
            device
        } else {
            self.map_by_rbd(volume, "noudev")
        };
        let device = match volume.context.get("encrypted").map(String::as_str) {
            Some("true") => {
                let passphrase = &volume.secrets["encryptionPassphrase"];
                encrypt(&mapped, &volume.handle, passphrase)
            }
            _ => mapped.clone(),
        };
        let point = staging.join(&volume.handle);
        let [from, to] = [&device, &point].map(|path| path.to_str().expect("UTF-8"));
        if volume.is_block() {
            fs::File::create(&point).expect("a file");
            fs::set_permissions(&point, fs::Permissions::from_mode(0o600)).expect("a mode");
            run(&["mount", "-o", "bind,_netdev", from, to]);
        } else {
            fs::create_dir(&point).expect("a directory");
            fs::set_permissions(&point, fs::Permissions::from_mode(0o750)).expect("a mode");
            let fs = volume.fs_type();
            if run_err(&["blkid", "-p", from]).is_err() {
                let lazy = "-Enodiscard,lazy_itable_init=1,lazy_journal_init=1";
                match fs {
                    "xfs" => run(&["mkfs.xfs", "-q", "-K", "-m", "reflink=0", from]),
                    _ => run(&["mkfs.ext4", "-q", "-m0", lazy, from]),
                };
            }
            let options = match fs {
                "xfs" => "_netdev,nouuid,defaults",
                _ => "_netdev,defaults",
            };
            run(&["mount", "-t", fs, "-o", options, from, to]);
        }
        mapped
    }
}

/// Unstages a volume of either driver: by its stage file alone.
pub fn unstage_as_ceph_csi(node: &Node, volume: &Volume) {
    let staging = node.staging(volume);
    let point = staging.join(&volume.handle);
    run(&["umount", point.to_str().expect("UTF-8")]);
    if volume.is_block() {
        fs::remove_file(&point).expect("the file");
    } else {
        fs::remove_dir(&point).expect("the directory");
    }
    let text = fs::read(staging.join(STAGE_FILE)).expect("a stage file");
    let stash: Value = serde_json::from_slice(&text).expect("JSON");
    let part = |key: &str| stash[key].as_str().expect("a string").to_owned();
    let mut mapped = [part("pool"), part("radosNamespace"), part("image")]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("/");
    if stash["encrypted"] == true {
        let mapping = mapping_of(&volume.handle);
        let status = run(&["cryptsetup", "status", &mapping]);
        let device = status
            .lines()
            .find_map(|line| line.trim().strip_prefix("device:"));
        device.expect("a device").trim().clone_into(&mut mapped);
        run(&["cryptsetup", "luksClose", &mapping]);
    }
    // Kubelet repeats a failed call: udevd may have the device open.
    let unmap = ["rbd", "unmap", &mapped, "--device-type"];
    let how = if stash["accessType"] == true {
        &["nbd"][..]
    } else {
        &["krbd", "-o", "noudev"]
    };
    run_until_it_succeeds(&[&unmap, how].concat());
    fs::remove_file(staging.join(STAGE_FILE)).expect("the stage file");
}

/// Publishes a volume for a pod.
pub fn publish_as_ceph_csi(node: &Node, volume: &Volume, pod: &str) -> PathBuf {
    let target = node.target(volume, pod);
    if volume.is_block() {
        fs::create_dir_all(target.parent().expect("a parent")).expect("kubelet's directory");
        fs::File::create(&target).expect("a file");
    } else {
        fs::create_dir_all(&target).expect("a directory");
    }
    let point = node.staging(volume).join(&volume.handle);
    let [from, to] = [&point, &target].map(|path| path.to_str().expect("UTF-8"));
    run(&["mount", "-o", "bind,_netdev", from, to]);
    target
}

/// `rbdImageMetadataStash` of a volume, as Go writes it; of one that rbd-nbd serves,
/// once that does. A log of rbd-nbd is not configured.
pub fn ceph_csi_stage_file(volume: &Volume) -> String {
    let context = |key: &str| volume.context.get(key).cloned().unwrap_or_default();
    let image = match context("imageName") {
        name if name.is_empty() => volume.handle.clone(),
        name => name,
    };
    format!(
        r#"{{"Version":3,"pool":"{}","radosNamespace":"{}","image":"{image}","unmapOptions":"{}","accessType":{},"encrypted":{},"device":"{}","logDir":"","logFileStrategy":""}}"#,
        context("pool"),
        context("radosNamespace"),
        if is_served(volume) {
            String::new()
        } else {
            context("unmapOptions")
        },
        is_served(volume),
        context("encrypted") == "true",
        nbds_over(&volume.handle).pop().unwrap_or_default(),
    )
}

fn is_served(volume: &Volume) -> bool {
    volume
        .context
        .get("mounter")
        .is_some_and(|mounter| mounter == "rbd-nbd")
}

/// Formats a blank device, opens it, and names the mapping.
fn encrypt(under: &Path, handle: &str, passphrase: &str) -> PathBuf {
    let (under, name) = (under.to_str().expect("UTF-8"), mapping_of(handle));
    if run_err(&["cryptsetup", "isLuks", under]).is_err() {
        let format = [
            "luksFormat",
            "-q",
            "--type",
            "luks2",
            "--hash",
            "sha256",
            "--disable-keyring",
        ];
        // Cheap: the cost of a guess is not tested here.
        let cheap = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
        cryptsetup(
            &[&format[..], &cheap, &[under, "-d", "-"]].concat(),
            passphrase,
        );
    }
    cryptsetup(
        &["luksOpen", under, &name, "--disable-keyring", "-d", "-"],
        passphrase,
    );
    Path::new("/dev/mapper").join(name)
}

fn cryptsetup(args: &[&str], passphrase: &str) {
    let mut child = Command::new("cryptsetup")
        .args(args)
        .stdin(Stdio::piped())
        .spawn()
        .expect("cryptsetup");
    let mut input = child.stdin.take().expect("a pipe");
    input
        .write_all(passphrase.as_bytes())
        .expect("a passphrase");
    drop(input);
    assert!(
        child.wait().expect("its end").success(),
        "cryptsetup {args:?}"
    );
}

/// A file that its owner alone may read.
fn write_private(path: &Path, text: &str) {
    let mut file = fs::File::options();
    file.write(true).create(true).truncate(true).mode(0o600);
    let file = file.open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
