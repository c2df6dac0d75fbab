use super::*;

/// A machine of these files.
fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
    let dir = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let machine = Machine::new(dir.path());
    (dir, machine)
}

const RELEASE: (&str, &str) = ("proc/sys/kernel/osrelease", "6.12.1-amd64\n");

#[test]
fn an_old_kernel_is_bad() {
    for (release, state) in [
        ("5.14.0-1", CheckState::Good),
        ("6.1.0", CheckState::Good),
        ("10.0", CheckState::Good),
        ("5.13.19", CheckState::Bad),
        ("4.19", CheckState::Bad),
        ("", CheckState::Bad),
        ("linux", CheckState::Bad),
    ] {
        let (_dir, machine) = machine(&[("proc/sys/kernel/osrelease", release)]);
        assert_eq!(machine.kernel().state, state, "{release}");
    }
}

#[test]
fn io_uring_is_bad_only_if_root_may_not_use_it() {
    let sysctl = "proc/sys/kernel/io_uring_disabled";
    for (value, state) in [
        (None, CheckState::Good),
        (Some("0\n"), CheckState::Good),
        (Some("1\n"), CheckState::Good),
        (Some("2\n"), CheckState::Bad),
    ] {
        let files: Vec<_> = value.map(|value| (sysctl, value)).into_iter().collect();
        let (_dir, machine) = machine(&files);
        assert_eq!(machine.io_uring(Ok(())).state, state, "{value:?}");
    }
}

#[test]
fn each_refusal_of_io_uring_has_its_remedy() {
    let sysctl = "proc/sys/kernel/io_uring_disabled";
    for (value, errno, remedies) in [
        // Docker's profile answers EPERM, podman's ENOSYS, as a kernel without io_uring does.
        (None, libc::EPERM, &["seccomp profile"][..]),
        (None, libc::ENOSYS, &["CONFIG_IO_URING", "seccomp profile"]),
        (Some("0\n"), libc::EPERM, &["seccomp profile"]),
        (Some("0\n"), libc::ENOSYS, &["seccomp profile"]),
        (Some("1\n"), libc::ENOSYS, &["seccomp profile"]),
        (
            Some("1\n"),
            libc::EPERM,
            &[
                "CAP_SYS_ADMIN",
                "kernel.io_uring_disabled=0",
                "seccomp profile",
            ],
        ),
        (Some("2\n"), libc::EPERM, &["kernel.io_uring_disabled=0"]),
        (Some("0\n"), libc::EMFILE, &["descriptors"]),
    ] {
        let files: Vec<_> = value.map(|value| (sysctl, value)).into_iter().collect();
        let (_dir, machine) = machine(&files);
        let check = machine.io_uring(Err(io::Error::from_raw_os_error(errno)));
        assert_eq!(check.state, CheckState::Bad, "{check:?}");
        let every = [
            "CAP_SYS_ADMIN",
            "CONFIG_IO_URING",
            "descriptors",
            "kernel.io_uring_disabled=0",
            "seccomp profile",
        ];
        let said: Vec<_> = every
            .into_iter()
            .filter(|remedy| check.advice.contains(remedy))
            .collect();
        assert_eq!(said, remedies, "{value:?}: {check:?}");
    }
}

#[test]
fn a_driver_is_loaded_built_in_or_a_module() {
    let (_dir, machine) = machine(&[
        RELEASE,
        ("sys/module/loop/refcnt", ""),
        (
            "lib/modules/6.12.1-amd64/modules.builtin",
            "kernel/drivers/block/nbd.ko\n",
        ),
        (
            "lib/modules/6.12.1-amd64/modules.dep",
            "kernel/drivers/md/dm-crypt.ko.xz: kernel/drivers/md/dm-mod.ko.xz\nkernel/net/rbdx.ko:\n",
        ),
    ]);
    let check = |driver: &str| machine.driver(driver, "volumes");
    assert_eq!(check("loop"), Check::good("driver loop", "loaded"));
    assert_eq!(check("nbd"), Check::good("driver nbd", "built in"));
    let crypt = check("dm_crypt");
    assert_eq!(crypt.state, CheckState::Lacks);
    assert!(crypt.advice.contains("modprobe dm_crypt"), "{crypt:?}");
    assert_eq!(check("rbd").found, "not there");
}

#[test]
fn without_the_nodes_modules_nothing_is_said_of_a_driver_that_is_not_loaded() {
    let (_dir, machine) = machine(&[RELEASE, ("sys/module/loop/refcnt", "")]);
    assert_eq!(machine.driver("loop", "").state, CheckState::Good);
    for check in [machine.driver("nbd", ""), machine.file_system("xfs")] {
        assert_eq!(check.state, CheckState::Unknown, "{check:?}");
        assert!(check.advice.contains("on the node"), "{check:?}");
    }
}

#[test]
fn a_missing_capability_is_named() {
    let check = |effective: &str, bounding: &str| {
        let status = format!("CapPrm:\t0\nCapEff:\t{effective}\nCapBnd:\t{bounding}\n");
        let (_dir, machine) = machine(&[("proc/self/status", &status)]);
        machine.capabilities()
    };
    let all = "000001ffffffffff";
    assert_eq!(check(all, all).state, CheckState::Good);
    // CAP_MKNOD is 27, CAP_SYS_ADMIN 21 (linux/capability.h).
    for (effective, bounding) in [(all, "000001fff7ffffff"), ("000001fff7ffffff", all)] {
        let lacks = check(effective, bounding);
        assert_eq!(lacks.state, CheckState::Lacks);
        assert_eq!(lacks.found, "without CAP_MKNOD");
    }
    let container = check("00000000a80425fb", "00000000a80425fb");
    assert_eq!(container.state, CheckState::Bad);
    assert!(container.found.contains("CAP_SYS_ADMIN"), "{container:?}");
    let (_dir, machine) = machine(&[]);
    assert_eq!(machine.capabilities().state, CheckState::Unknown);
}

#[test]
fn a_file_system_may_be_a_module() {
    let (_dir, machine) = machine(&[
        RELEASE,
        ("proc/filesystems", "nodev\ttmpfs\n\text4\n"),
        (
            "lib/modules/6.12.1-amd64/modules.dep",
            "kernel/fs/nfs/nfsv4.ko.xz:\n",
        ),
    ]);
    let state = |fs: &str| machine.file_system(fs).state;
    assert_eq!(state("ext4"), CheckState::Good);
    assert_eq!(state("nfs4"), CheckState::Good);
    assert_eq!(state("xfs"), CheckState::Lacks);
}

#[test]
fn a_missing_program_names_its_package() {
    let (_dir, machine) = machine(&[("usr/sbin/mkfs.xfs", "")]);
    assert_eq!(machine.program(&PROGRAMS[2]).found, "/usr/sbin");
    let missing = machine.program(&PROGRAMS[0]);
    assert!(missing.advice.contains("e2fsprogs"), "{missing:?}");
    assert_eq!(machine.librbd().state, CheckState::Lacks);
}

#[test]
fn the_nearest_mount_decides_on_propagation() {
    let kubelet = Path::new("/var/lib/kubelet");
    let root = "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n";
    let own = "30 21 8:2 / /var/lib/kubelet rw,noatime - ext4 /dev/sdb rw\n";
    let beside = "31 21 8:3 / /var/lib/kubelet2 rw - ext4 /dev/sdc rw\n";
    let check = |mounts: &[&str]| {
        let mounts = mounts.concat();
        let (_dir, machine) = machine(&[
            ("proc/self/mountinfo", &mounts),
            ("var/lib/kubelet/pods/x", ""),
        ]);
        machine.propagation(kubelet)
    };
    assert_eq!(check(&[root]).state, CheckState::Good);
    assert_eq!(check(&[root, beside]).state, CheckState::Good);
    let private = check(&[root, own]);
    assert_eq!(private.state, CheckState::Bad);
    assert_eq!(private.advice, "mount --make-rshared /var/lib/kubelet");
    assert_eq!(check(&[]).state, CheckState::Lacks);
    let (_dir, machine) = machine(&[]);
    assert_eq!(machine.propagation(kubelet).state, CheckState::Lacks);
}

#[test]
fn few_descriptors_and_a_user_without_rights_are_told() {
    assert_eq!(descriptors(Some(1024)).state, CheckState::Lacks);
    assert_eq!(descriptors(Some(1 << 20)).state, CheckState::Good);
    assert_eq!(descriptors(None).state, CheckState::Good);
    assert_eq!(user(false).state, CheckState::Bad);
    assert_eq!(user(true).state, CheckState::Good);
}

#[test]
fn only_what_keeps_the_agent_from_starting_is_an_error() {
    let lacks = Check::lacks("driver nbd", "not there", "boot another kernel");
    let bad = Check::bad("kernel", "Linux 4.19", "boot another kernel");
    let answer = |checks| DoctorAnswer { checks };
    answer(vec![lacks]).require_success().unwrap();
    let failed = answer(vec![bad]);
    assert!(failed.text().contains("bad"), "{}", failed.text());
    let error = failed.require_success().unwrap_err();
    assert!(error.to_string().contains("kernel"), "{error}");
}
