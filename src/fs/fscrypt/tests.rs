use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use testkit::{report_not_tested, skip_uninstalled};

use super::*;
use crate::{
    device::scratch::Scratch,
    kernel::{busy::retry_while_busy, mounts::private_namespace},
};

const NAMES: EncryptedDirectory = EncryptedDirectory {
    name: "ceph-csi-encrypted",
    protector: "ceph-csi",
};
/// As ceph-csi makes them: 64 bytes in base64.
const LONG: &str =
    "TG9uZyBlbm91Z2ggdG8gYmUgYSBrZXksIGFuZCBsb25nZXIgdGhhbiB0aGUga2V5IGlzLCB3aGljaCBpcyBjdXQ=";
const SHORT: &str = "test_passphrase";

fn secret(text: &str) -> Secret {
    Secret::new(text.to_owned())
}

/// An ext4 that is mounted from a loop device of its own.
struct Ext4 {
    scratch: Scratch,
    directory: tempfile::TempDir,
}

impl Ext4 {
    /// None where the kernel has no encryption.
    fn new(features: &[&str]) -> Option<Self> {
        if !Path::new("/sys/fs/ext4/features/encryption").exists() {
            report_not_tested("encryption of files: this kernel has none (CONFIG_FS_ENCRYPTION)");
            return None;
        }
        private_namespace();
        let image = Scratch::image(16 << 20);
        let mut mkfs = Command::new("mkfs.ext4");
        let made = mkfs.args(features).arg("-q").arg(image.path()).output();
        assert!(made.unwrap().status.success());
        let mounted = Self {
            scratch: Scratch::over(image),
            directory: tempfile::tempdir().unwrap(),
        };
        mounted.mount();
        Some(mounted)
    }

    fn mount(&self) {
        let (node, at) = (&self.scratch.device.node, self.directory.path());
        mount(node, at, "ext4", MountFlags::empty(), None).unwrap();
    }

    /// Unmounts it, by which the kernel forgets its keys, and mounts it again.
    fn remount(&self) {
        self.unmount();
        self.mount();
    }

    /// A child of another test has all descriptors of the process until its exec.
    fn unmount(&self) {
        let unmount = || unmount(self.directory.path(), UnmountFlags::empty());
        retry_while_busy(unmount, |done| *done == Err(Errno::BUSY)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn encrypted(&self) -> FileEncryption {
        let root = rustix::fs::open(self.directory.path(), OFlags::PATH, Mode::empty()).unwrap();
        FileEncryption::below(root.as_fd(), NAMES).unwrap()
    }

    fn state(&self) -> DirectoryState {
        self.encrypted().state().unwrap()
    }

    fn data(&self) -> PathBuf {
        self.path(NAMES.name).join("data")
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let _ = unmount(self.directory.path(), UnmountFlags::empty());
    }
}

fn encrypting() -> Option<Ext4> {
    Ext4::new(&["-O", "encrypt"])
}

/// Runs the program fscrypt.
fn fscrypt(args: &[&str], input: &str) {
    let mut child = Command::new("fscrypt")
        .args(args)
        .arg("--quiet")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "fscrypt {args:?}: {done:?}");
}

/// An ext4 that can encrypt, and an `/etc` of this thread's own, with the configuration of
/// the program fscrypt.
fn beside_fscrypt() -> Option<Ext4> {
    if Command::new("fscrypt").arg("--version").output().is_err() {
        skip_uninstalled("the program fscrypt is not installed");
        return None;
    }
    let ext4 = encrypting()?;
    let passwd = fs::read("/etc/passwd").unwrap();
    mount("tmpfs", "/etc", "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write("/etc/passwd", passwd).unwrap();
    let conf = r#"{"source":"custom_passphrase","hash_costs":{"time":"2","memory":"1024","parallelism":"2"},"options":{"padding":"32","contents":"AES_256_XTS","filenames":"AES_256_CTS","policy_version":"2"},"use_fs_keyring_for_v1_policies":false,"allow_cross_user_metadata":false}"#;
    fs::write("/etc/fscrypt.conf", conf).unwrap();
    Some(ext4)
}

#[test]
fn a_directory_is_locked_until_its_secret_opens_it() {
    for (text, source) in [
        (LONG, KeySource::RawKey),
        (SHORT, KeySource::CustomPassphrase),
    ] {
        let Some(ext4) = encrypting() else { return };
        assert_eq!(ext4.state(), DirectoryState::Absent);
        ext4.encrypted().set_up(&secret(text), source).unwrap();
        assert_eq!(ext4.state(), DirectoryState::Unlocked);
        fs::write(ext4.data(), "plain").unwrap();

        ext4.remount();
        assert_eq!(ext4.state(), DirectoryState::Locked);
        assert!(fs::read(ext4.data()).is_err());
        let other = ext4.encrypted().unlock(&secret(&LONG.replace('T', "U")));
        assert!(
            matches!(other, Err(FscryptError::Wrong { .. })),
            "{other:?}"
        );
        assert_eq!(ext4.state(), DirectoryState::Locked);
        for _ in 0..2 {
            ext4.encrypted().unlock(&secret(text)).unwrap();
            assert_eq!(ext4.state(), DirectoryState::Unlocked);
        }
        assert_eq!(fs::read(ext4.data()).unwrap(), b"plain");
        ext4.encrypted().directory().unwrap();
    }
}

#[test]
fn the_program_fscrypt_unlocks_what_this_module_made() {
    for (text, source) in [
        (LONG, KeySource::RawKey),
        (SHORT, KeySource::CustomPassphrase),
    ] {
        let Some(ext4) = beside_fscrypt() else { return };
        ext4.encrypted().set_up(&secret(text), source).unwrap();
        fs::write(ext4.data(), "plain").unwrap();
        ext4.remount();
        let directory = ext4.path(NAMES.name);
        let mut args = vec!["unlock", directory.to_str().unwrap()];
        let key = format!("--key={}", ext4.path("key").display());
        if source == KeySource::RawKey {
            fs::write(ext4.path("key"), &text[..32]).unwrap();
            args.push(&key);
        }
        fscrypt(&args, text);
        assert_eq!(fs::read(ext4.data()).unwrap(), b"plain");
    }
}

#[test]
fn a_directory_that_the_program_fscrypt_made_is_unlocked() {
    for source in ["raw_key", "custom_passphrase"] {
        let Some(ext4) = beside_fscrypt() else { return };
        fscrypt(&["setup", ext4.path("").to_str().unwrap()], "n\n");
        let directory = ext4.path(NAMES.name);
        fs::create_dir(&directory).unwrap();
        let (named, how) = (
            format!("--name={}", NAMES.protector),
            format!("--source={source}"),
        );
        let mut args = vec!["encrypt", directory.to_str().unwrap(), &*named, &*how];
        let key = format!("--key={}", ext4.path("key").display());
        if source == "raw_key" {
            fs::write(ext4.path("key"), &LONG[..32]).unwrap();
            args.push(&key);
        }
        fscrypt(&args, LONG);
        fs::write(ext4.data(), "plain").unwrap();
        ext4.remount();
        assert_eq!(ext4.state(), DirectoryState::Locked);
        ext4.encrypted().unlock(&secret(LONG)).unwrap();
        assert_eq!(fs::read(ext4.data()).unwrap(), b"plain");
    }
}

#[test]
fn a_passphrase_that_ceph_csi_cut_opens() {
    let Some(ext4) = encrypting() else { return };
    // 32 bytes, of which the last are zeros; ceph-csi made protectors by them until 3.11.
    let padded = format!("{SHORT:\0<32}");
    let source = KeySource::CustomPassphrase;
    ext4.encrypted().set_up(&secret(&padded), source).unwrap();
    ext4.remount();
    ext4.encrypted().unlock(&secret(SHORT)).unwrap();
    assert_eq!(ext4.state(), DirectoryState::Unlocked);
}

#[test]
#[ignore = "the victim of the test below"]
fn victim() {
    let variable = |name| std::env::var(name).expect("run by the test below");
    let (node, at) = (variable("VICTIM_DEVICE"), variable("VICTIM_DIRECTORY"));
    private_namespace();
    mount(&*node, &*at, "ext4", MountFlags::empty(), None).unwrap();
    let root = rustix::fs::open(&*at, OFlags::PATH, Mode::empty()).unwrap();
    let encrypted = FileEncryption::below(root.as_fd(), NAMES).unwrap();
    drop(root);
    encrypted.set_up(&secret(LONG), KeySource::RawKey).unwrap();
    drop(encrypted);
    unmount(&*at, UnmountFlags::empty()).unwrap();
}

/// Whether it was ended before it was done.
fn crashes(ext4: &Ext4, at: usize) -> bool {
    let victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--test-threads=1"])
        .arg("fs::fscrypt::tests::victim")
        .env("CRASH_AT", at.to_string())
        .env("VICTIM_DEVICE", &ext4.scratch.device.node)
        .env("VICTIM_DIRECTORY", ext4.directory.path())
        .output()
        .unwrap();
    let crashed = std::os::unix::process::ExitStatusExt::signal(&victim.status).is_some();
    assert!(crashed || victim.status.success(), "{victim:?}");
    crashed
}

#[test]
fn a_set_up_may_be_killed_at_each_step() {
    let mut at = 0;
    loop {
        let Some(ext4) = encrypting() else { return };
        ext4.unmount();
        let crashed = crashes(&ext4, at);
        ext4.mount();
        match ext4.state() {
            DirectoryState::Absent => {
                assert!(crashed);
                ext4.encrypted()
                    .set_up(&secret(LONG), KeySource::RawKey)
                    .unwrap();
            }
            DirectoryState::Locked => ext4.encrypted().unlock(&secret(LONG)).unwrap(),
            DirectoryState::Unlocked => panic!("a new mount has no keys"),
        }
        fs::write(ext4.data(), "plain").unwrap();
        if !crashed {
            break;
        }
        at += 1;
    }
    assert!(at > 8, "a set-up has more than {at} steps");
}

#[test]
fn only_a_file_system_without_data_is_encrypted() {
    let Some(ext4) = encrypting() else { return };
    let refused = |name: &str| {
        let in_use = |result| {
            assert!(
                matches!(&result, Err(FscryptError::NotEmpty { name: found }) if found == name),
                "{result:?}"
            );
        };
        in_use(ext4.encrypted().state().map(drop));
        in_use(ext4.encrypted().set_up(&secret(LONG), KeySource::RawKey));
    };
    fs::write(ext4.path("data"), "plain").unwrap();
    refused("data");
    fs::remove_file(ext4.path("data")).unwrap();
    fs::create_dir(ext4.path(NAMES.name)).unwrap();
    fs::write(ext4.data(), "plain").unwrap();
    refused("ceph-csi-encrypted/data");
    ext4.encrypted().directory().unwrap_err();
    fs::remove_dir_all(ext4.path(NAMES.name)).unwrap();

    let short = ext4.encrypted().set_up(&secret(SHORT), KeySource::RawKey);
    assert!(matches!(short, Err(FscryptError::Short)), "{short:?}");
    assert!(!ext4.path(METADATA).exists());

    // What a killed agent leaves.
    fs::create_dir_all(ext4.path(PROTECTORS)).unwrap();
    fs::create_dir(ext4.path(NAMES.name)).unwrap();
    fs::write(ext4.path(PROTECTORS).join(".tmp0123456789abcdef"), "part").unwrap();
    assert_eq!(ext4.state(), DirectoryState::Absent);
    ext4.encrypted()
        .set_up(&secret(LONG), KeySource::RawKey)
        .unwrap();
    assert_eq!(ext4.state(), DirectoryState::Unlocked);
}

#[test]
fn a_file_system_that_cannot_encrypt_stays_as_it_is() {
    let Some(ext4) = Ext4::new(&["-O", "^encrypt"]) else {
        return;
    };
    let state = ext4.encrypted().state();
    assert!(matches!(state, Err(FscryptError::Unsupported)), "{state:?}");
    let names: Vec<_> = fs::read_dir(ext4.path("")).unwrap().collect();
    assert_eq!(names.len(), 1, "lost+found alone: {names:?}");
}

#[test]
fn metadata_of_another_origin_is_refused() {
    let Some(ext4) = encrypting() else { return };
    ext4.encrypted()
        .set_up(&secret(LONG), KeySource::RawKey)
        .unwrap();
    ext4.remount();
    let policies = fs::read_dir(ext4.path(POLICIES)).unwrap();
    let policy = policies.map(|entry| entry.unwrap().path()).next().unwrap();
    let whole = fs::read(&policy).unwrap();
    let refused = |why: &str| {
        let error = ext4.encrypted().unlock(&secret(LONG)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    };
    fs::write(&policy, b"\xff\xff").unwrap();
    refused("it is not fscrypt's");
    fs::write(&policy, b"").unwrap();
    refused("no protector");
    fs::remove_file(&policy).unwrap();
    refused("it is missing");
    // Nothing outside of the file system is read.
    std::os::unix::fs::symlink("/etc/passwd", &policy).unwrap();
    assert!(matches!(
        ext4.encrypted().unlock(&secret(LONG)),
        Err(FscryptError::Io { .. })
    ));
    fs::remove_file(&policy).unwrap();
    fs::write(&policy, whole).unwrap();
    ext4.encrypted().unlock(&secret(LONG)).unwrap();
}

#[test]
fn costs_that_would_stop_the_agent_are_refused() {
    let protector = |time, memory| Protector {
        source: KeySource::CustomPassphrase.into(),
        salt: vec![0; 16],
        costs: Some(metadata::HashingCosts {
            time,
            memory,
            parallelism: 1,
        }),
        ..Protector::default()
    };
    for (time, memory) in [(1, 1 << 30), (i64::MAX, 8), (0, 64), (1, -1), (1 << 30, 64)] {
        let refused = keys::wrapping_key(&protector(time, memory), &secret(SHORT));
        assert!(
            matches!(refused, Err(ProtectorError::Invalid(_))),
            "{time} {memory}"
        );
    }
    keys::wrapping_key(&protector(1, 64), &secret(SHORT)).unwrap();
}

#[test]
fn a_passphrase_opens_with_its_newline_and_what_was_made_without_it() {
    let protector = |made_with: &str| {
        let mut protector = Protector {
            source: KeySource::CustomPassphrase.into(),
            salt: vec![0; 16],
            costs: Some(metadata::HashingCosts {
                time: 1,
                memory: 64,
                parallelism: 1,
            }),
            ..Protector::default()
        };
        let with = keys::wrapping_key(&protector, &secret(made_with)).unwrap();
        protector.wrapped_key = Some(keys::wrap(&with, &[7; 32]));
        protector
    };
    let echoed = secret(&format!("{SHORT}\n"));
    for made_with in [echoed.reveal(), SHORT] {
        let opened = keys::open(&protector(made_with), &echoed).unwrap();
        assert_eq!(*opened, [7; 32]);
    }
    let other = keys::open(&protector(LONG), &echoed);
    assert!(matches!(other, Err(ProtectorError::Wrong)));
    let made_by_echo = keys::open(&protector(echoed.reveal()), &secret(SHORT));
    assert!(matches!(made_by_echo, Err(ProtectorError::Wrong)));
}
