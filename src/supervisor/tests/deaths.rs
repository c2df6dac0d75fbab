//! A daemon, the supervisor, or both die, and I/O continues.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, Signal, WaitId, WaitIdOptions, waitid},
};
use tokio::time::sleep;

use super::{MIB, Supervisor, Test, assert_holds, signal, write, wrong_key};
use crate::{
    Done,
    kernel::{
        block,
        nbd::{self, NbdDevice, netlink::Driver},
    },
    secret::Secret,
    supervisor::{Spec, SupervisorError},
};

fn kill(pid: Option<i32>) {
    signal(pid, Signal::KILL);
}

/// After this time the cluster drops a dead client by itself (`osd_client_watch_timeout`).
const DEAD_CLIENT_DROPPED_AFTER: Duration = Duration::from_secs(30);

#[test]
fn a_daemon_that_is_killed_under_io_comes_back_and_io_goes_on() {
    // Only the second's image has a lock, which the dead daemon keeps.
    for (name, features) in [
        ("killed", "layering"),
        ("locked", "layering,exclusive-lock"),
    ] {
        let Some(test) = Test::of(name, &["--image-feature", features]) else {
            return;
        };
        let supervisor = test.supervisor();
        let (node, _) = test.map(&supervisor).unwrap();
        write(&node, 0, 1, MIB).join().unwrap();
        // By which the kernel sends the requests of a dead daemon to the next.
        assert_eq!(test.request_timeout(), 500);
        let first = test.watchers();
        for byte in [2, 3] {
            let writing = write(&node, 0, byte, 32 * MIB);
            let dead = supervisor.status(&test).pid;
            let begun = Instant::now();
            kill(dead);
            let back = supervisor.until("another daemon", || {
                let status = supervisor.status(&test);
                status.pid.is_some() && status.pid != dead && status.trouble.is_none()
            });
            supervisor.until("the write", || writing.is_finished());
            let gone_on = begun.elapsed();
            eprintln!(
                "{features}: another daemon after {back:?}, the write was done after {gone_on:?}, in {:?}",
                writing.join().unwrap()
            );
            assert!(gone_on < DEAD_CLIENT_DROPPED_AFTER);
            supervisor.until("a short timeout", || test.request_timeout() == 500);
            assert_holds(&node, 0, byte, 32 * MIB);
        }
        // The dead alone are blocklisted.
        supervisor.until("the dead are dropped", || test.watchers().len() == 1);
        let blocklist = test.cluster.ceph(&["osd", "blocklist", "ls"]);
        assert!(blocklist.contains(&first[0]), "{blocklist} {first:?}");
        assert!(!blocklist.contains(&test.watchers()[0]), "{blocklist}");
    }
}

#[test]
fn daemons_outlive_their_supervisor_and_the_next_reports_missing_keys() {
    let Some(test) = Test::new("outlive") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let pid = supervisor.status(&test).pid;
    drop(supervisor);
    // I/O continues without a supervisor.
    write(&node, 0, 3, 4 * MIB).join().unwrap();
    test.resize("96M");

    let supervisor = test.supervisor();
    let status = supervisor.status(&test);
    assert_eq!((status.pid, status.has_key), (pid, false));
    assert!(status.trouble.unwrap().contains("uringctl reattach"));
    // A wrong key is reported, and the daemon runs on.
    let wrong = supervisor.map(&test.spec, wrong_key());
    assert_eq!(wrong.unwrap().1, Done::Already);
    let status = supervisor.status(&test);
    assert_eq!(status.pid, pid);
    assert!(status.trouble.unwrap().contains("client.csi"));
    // With the key, this supervisor starts a daemon whose log it reads, and applies the
    // resize that no supervisor has seen.
    let begun = Instant::now();
    assert_eq!(
        test.map(&supervisor).unwrap(),
        (node.clone(), Done::Already)
    );
    eprintln!("another daemon in {:?}", begun.elapsed());
    let status = supervisor.status(&test);
    assert!(status.has_key && status.trouble.is_none(), "{status:?}");
    assert_ne!(status.pid, pid);
    assert_eq!(test.bytes(), 96 << 20);
    supervisor.until("a short timeout", || test.request_timeout() == 500);
    test.resize("128M");
    supervisor.until("the size", || test.bytes() == 128 << 20);
    // Whoever opens a device of a new size reads nothing from it that the next daemon
    // would have to serve, and wait for (see `partitions_are_read`).
    let pid = supervisor.status(&test).pid;
    signal(pid, Signal::STOP);
    drop(File::open(&node).unwrap());
    kill(pid);
    supervisor.until("another daemon", || {
        supervisor
            .status(&test)
            .pid
            .is_some_and(|now| Some(now) != pid)
    });
    assert_holds(&node, 0, 3, 4 * MIB);
}

#[test]
fn a_daemon_that_dies_in_an_unmap_is_replaced_and_the_data_is_written() {
    let Some(test) = Test::without_lock("unmap") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let first = supervisor.status(&test).pid;
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).write(true).open(&node).unwrap();
    // The write then waits for no read, not even for one of udevd.
    file.read_exact_at(&mut vec![0; MIB], 0).unwrap();
    signal(first, Signal::STOP);
    // Into the kernel's memory alone.
    file.write_all_at(&vec![8; MIB], 0).unwrap();
    drop(file);
    let begun = Instant::now();
    let dying = async {
        while supervisor.status(&test).trouble.is_none() {
            sleep(Duration::from_millis(10)).await;
        }
        let trouble = supervisor.status(&test).trouble.unwrap();
        assert!(trouble.contains("before its data is written"), "{trouble}");
        kill(first);
    };
    let unmapped = supervisor.runtime.block_on(async {
        let unmap = supervisor.keeper.unmap(&test.spec.volume_id);
        tokio::join!(unmap, dying).0
    });
    assert_eq!(unmapped.unwrap(), Done::Now);
    eprintln!("unmapped in {:?}", begun.elapsed());
    assert!(supervisor.keeper.list().is_empty());
    test.assert_exported_holds(0, 8, MIB);
}

#[test]
fn a_read_only_device_is_unmapped_while_its_daemon_does_not_answer() {
    let Some(mut test) = Test::new("reader") else {
        return;
    };
    test.spec.read_only = true;
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let opened = File::open(&node).unwrap();
    assert!(block::is_read_only(&opened).unwrap());
    drop(opened);
    signal(supervisor.status(&test).pid, Signal::STOP);
    assert_eq!(test.unmap(&supervisor).unwrap(), Done::Now);
}

/// A raw volume that is published read-only.
#[test]
fn a_marked_device_stays_marked_when_its_daemon_is_restarted() {
    let Some(test) = Test::new("marked") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    block::set_read_only(File::open(&node).unwrap(), true).unwrap();
    assert_eq!(test.map(&supervisor).unwrap().1, Done::Already);
    let first = supervisor.status(&test).pid;
    kill(first);
    supervisor.until("another daemon", || {
        let status = supervisor.status(&test);
        status.pid.is_some() && status.pid != first && status.trouble.is_none()
    });
    assert!(block::is_read_only(File::open(&node).unwrap()).unwrap());
    block::set_read_only(File::open(&node).unwrap(), false).unwrap();
    write(&node, 0, 7, MIB).join().unwrap();
}

/// As udevd does before it looks into a device.
fn may_be_looked_at(node: &Path) -> bool {
    let file = File::open(node).unwrap();
    flock(&file, FlockOperation::NonBlockingLockShared).is_ok()
}

/// As udevd does before it has the partitions read.
fn may_be_scanned(node: &Path) -> bool {
    let file = File::open(node).unwrap();
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Whether a process waits to lock it exclusively (`/proc/locks`, proc(5)).
fn is_to_be_locked(file: &File) -> bool {
    let inode = format!(":{}", file.metadata().unwrap().ino());
    let locks = fs::read_to_string("/proc/locks").unwrap();
    let mut waiting = locks.lines().filter(|line| line.contains("-> FLOCK"));
    waiting.any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.any(|field| field == "WRITE") && fields.any(|field| field.ends_with(&inode))
    })
}

#[test]
fn a_key_that_worked_is_kept_until_another_has() {
    let Some(test) = Test::new("keys") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    assert!(may_be_looked_at(&node));
    // No daemon has used it yet.
    assert_eq!(
        supervisor.map(&test.spec, wrong_key()).unwrap().1,
        Done::Already
    );
    let first = supervisor.status(&test).pid;
    kill(first);
    supervisor.until("another daemon", || {
        let status = supervisor.status(&test);
        status.pid.is_some() && status.pid != first && status.trouble.is_none()
    });
    assert!(may_be_looked_at(&node));
}

/// A supervisor without the key of a device whose daemon is dead, and the device, which it
/// has locked.
fn without_daemon(test: &Test) -> (Supervisor, PathBuf) {
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let pid = supervisor.status(test).pid;
    drop(supervisor);
    // The death of the daemon makes udevd look, which would then wait for the device: it is
    // kept off until the supervisor is next to lock it.
    let lock = File::open(&node).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    kill(pid);
    let ended = WaitId::Pid(Pid::from_raw(pid.unwrap()).unwrap());
    waitid(ended, WaitIdOptions::EXITED).unwrap();
    let supervisor = test.supervisor();
    supervisor.until("it waits for the lock", || is_to_be_locked(&lock));
    drop(lock);
    supervisor.until("udevd is kept off", || !may_be_looked_at(&node));
    (supervisor, node)
}

#[test]
fn a_failed_restart_is_reported_and_retried_with_udevd_locked_out() {
    let Some(test) = Test::new("again") else {
        return;
    };
    let (supervisor, node) = without_daemon(&test);
    // A stage by a user that does not exist yet.
    let user = format!("late-{}", uuid::Uuid::new_v4().simple());
    let entity = format!("client.{user}");
    let caps = ["mon", "profile rbd", "osd", "profile rbd"];
    let ceph = |args: &[&str]| test.cluster.ceph(args);
    let keyring = ceph(&[&["auth", "get-or-create", &entity], &caps[..]].concat());
    let key = ceph(&["auth", "print-key", &entity]);
    ceph(&["auth", "rm", &entity]);
    let late = Spec {
        user,
        ..test.spec.clone()
    };
    let error = supervisor.map(&late, Secret::new(key)).unwrap_err();
    assert!(matches!(error, SupervisorError::Denied { .. }), "{error}");
    let trouble = supervisor.status(&test).trouble.unwrap();
    assert!(trouble.contains(&entity), "{trouble}");
    assert!(!may_be_looked_at(&node));
    let grown = supervisor
        .runtime
        .block_on(supervisor.keeper.grow(&test.spec.volume_id, 128 << 20));
    grown.unwrap_err();
    assert!(supervisor.status(&test).trouble.is_some());
    assert!(!may_be_looked_at(&node));

    let file = test.dir.path().join("keyring");
    fs::write(&file, keyring).unwrap();
    ceph(
        &[
            &["auth", "add", &entity, "-i", file.to_str().unwrap()],
            &caps[..],
        ]
        .concat(),
    );
    fs::remove_file(file).unwrap();
    supervisor.until("it is tried again", || {
        let status = supervisor.status(&test);
        status.pid.is_some() && status.trouble.is_none()
    });
    assert_eq!(test.map(&supervisor).unwrap().0, node);
    supervisor.until("udevd may look again", || may_be_looked_at(&node));
    supervisor.until("but not at partitions", || !may_be_scanned(&node));
}

#[test]
fn a_device_that_others_disconnect_between_restarts_is_given_up() {
    let Some(test) = Test::new("gone") else {
        return;
    };
    let (supervisor, node) = without_daemon(&test);
    let error = supervisor.map(&test.spec, wrong_key()).unwrap_err();
    assert!(matches!(error, SupervisorError::Denied { .. }), "{error}");
    assert!(!may_be_looked_at(&node));
    let device = NbdDevice::attached_as(&test.spec.volume_id).unwrap();
    let index = nbd::index_of(device.unwrap().block.dev).unwrap();
    Driver::open().unwrap().disconnect(index).unwrap();
    supervisor.until("it is given up", || supervisor.keeper.list().is_empty());
    assert_eq!(NbdDevice::attached_as(&test.spec.volume_id).unwrap(), None);
}

#[test]
fn a_key_restores_a_daemon_that_died_with_its_supervisor() {
    let Some(test) = Test::new("both") else {
        return;
    };
    let supervisor = test.supervisor();
    let (node, _) = test.map(&supervisor).unwrap();
    let pid = supervisor.status(&test).pid;
    drop(supervisor);
    let writing = write(&node, 0, 4, 8 * MIB);
    kill(pid);

    let supervisor = test.supervisor();
    supervisor.until("trouble", || supervisor.status(&test).pid.is_none());
    let status = supervisor.status(&test);
    assert!(status.trouble.unwrap().contains("I/O waits") && !status.has_key);
    let grown = supervisor
        .runtime
        .block_on(supervisor.keeper.grow(&test.spec.volume_id, 1 << 40));
    assert!(matches!(grown, Err(SupervisorError::NoKey(_))), "{grown:?}");

    // A wrong key is reported, and prevents no other try.
    let reattach = |key| {
        supervisor
            .runtime
            .block_on(supervisor.keeper.reattach(&test.spec.volume_id, None, key))
    };
    let error = reattach(wrong_key()).unwrap_err();
    assert!(matches!(error, SupervisorError::Denied { .. }), "{error}");
    assert_eq!(reattach(test.key()).unwrap().block.node, node);
    let done = supervisor.until("the write", || writing.is_finished());
    eprintln!("the write was done {done:?} after the key had come");
    writing.join().unwrap();
    assert_holds(&node, 0, 4, 8 * MIB);
    assert_eq!(supervisor.status(&test).trouble, None);
}
