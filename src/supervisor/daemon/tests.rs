//! The log of a daemon, and programs that misbehave in place of rbd-nbd.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use proptest::prelude::*;

use super::{log_parser::KEPT, *};
use crate::supervisor::tests::spec;

/// A program of a few lines of shell.
fn program(dir: &Path, lines: &str) -> String {
    let path = dir.join("rbd-nbd");
    fs::write(&path, format!("#!/bin/sh\n{lines}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn key() -> Secret {
    Secret::new("a key".to_owned())
}

async fn started(lines: &str, within: Duration) -> (Daemon, StartOutcome) {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), lines);
    let spec = spec("fault", "pool", "image");
    let mut daemon = Daemon::start(&program, &spec, &Verb::Map("/dev/nbd0"), &key(), None).unwrap();
    let started = daemon.ready(&spec, within).await;
    (daemon, started)
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_daemon_reads_its_key_once_and_has_it_nowhere_else() {
    // Prints the key that it read, and waits until the file is empty.
    let lines = "key=$(cat /proc/self/fd/0); echo /dev/nbd7; echo \"read $key\" >&2; \
                 while [ -n \"$(cat /proc/self/fd/0)\" ]; do :; done; echo empty >&2; \
                 tr '\\0' ' ' </proc/$$/cmdline >&2; env >&2";
    let (daemon, started) = started(lines, LONG).await;
    assert!(matches!(started, StartOutcome::Ready), "{started:?}");
    daemon.ended().await;
    let mut log = daemon.log.clone().unwrap();
    let log = log.wait_for(|log| log.ended).await.unwrap();
    let (read, rest) = log.tail.split_once('\n').unwrap();
    assert_eq!(read, "read a key");
    assert!(
        rest.starts_with("empty\n") && rest.contains("--cookie=fault"),
        "{rest}"
    );
    assert!(!rest.contains("a key"), "{rest}");
}

#[tokio::test]
async fn a_daemons_failure_is_reported_with_its_last_line() {
    let (_, ended) = started("echo 'rbd-nbd: no way' >&2; exit 1", LONG).await;
    let StartOutcome::Ended(SupervisorError::Failed { message, .. }) = ended else {
        panic!("{ended:?}");
    };
    assert_eq!(message, "rbd-nbd: no way");
    // Killed, with a line cut short.
    let (_, ended) = started("printf 'half a li'; kill -9 $$", LONG).await;
    assert!(
        matches!(&ended, StartOutcome::Ended(SupervisorError::Failed { message, .. }) if message == "half a li"),
        "{ended:?}"
    );
    // Killed before it logged anything: only its own exit says that the image is missing.
    let (_, ended) = started("kill -9 $$", LONG).await;
    assert!(
        matches!(&ended, StartOutcome::Ended(SupervisorError::Failed { message, .. }) if message.contains("signal 9")),
        "{ended:?}"
    );
    let (_, ended) = started("exit 1", LONG).await;
    assert!(
        matches!(ended, StartOutcome::Ended(SupervisorError::Missing { .. })),
        "{ended:?}"
    );
    let (_, ended) = started("exit 0", LONG).await;
    assert!(
        matches!(ended, StartOutcome::Ended(SupervisorError::Failed { .. })),
        "{ended:?}"
    );
    // Not that node, and then nothing.
    let (_, ended) = started("echo ' /dev/nbd7'", LONG).await;
    assert!(
        matches!(ended, StartOutcome::Ended(SupervisorError::Failed { .. })),
        "{ended:?}"
    );
    let missing = Daemon::start(
        "/no/such",
        &spec("x", "p", "i"),
        &Verb::Map("/dev/nbd0"),
        &key(),
        None,
    )
    .unwrap_err();
    assert!(
        matches!(missing, SupervisorError::NoProgram { .. }),
        "{missing}"
    );
}

#[tokio::test]
async fn a_daemon_that_floods_its_log_runs_on() {
    let flood = "head -c 300000 /dev/zero; echo; echo /dev/nbd7; exec sleep 60";
    let (daemon, started) = started(flood, LONG).await;
    assert!(matches!(started, StartOutcome::Ready), "{started:?}");
    assert!(daemon.log.as_ref().unwrap().borrow().tail.len() <= KEPT);
    assert_eq!(daemon.end().await, EndOutcome::Asked);
}

#[tokio::test]
async fn a_daemon_that_does_not_start_in_time_can_be_ended() {
    let (daemon, started) = started("exec sleep 60", Duration::from_millis(50)).await;
    assert!(matches!(started, StartOutcome::Late), "{started:?}");
    assert_eq!(daemon.end().await, EndOutcome::Asked);
    assert_eq!(daemon.end().await, EndOutcome::Asked);
}

#[tokio::test]
async fn a_daemon_that_has_just_begun_to_serve_does_not_miss_the_signal_to_end() {
    // As rbd-nbd between its line and the wait for its end.
    let lines = "trap '' TERM; echo /dev/nbd7; i=0; \
                 while [ $i -lt 30000 ]; do i=$((i + 1)); done; trap - TERM; exec sleep 60";
    let (daemon, started) = started(lines, LONG).await;
    assert!(matches!(started, StartOutcome::Ready), "{started:?}");
    let ended = daemon.end_by(Signal::TERM).await;
    daemon.kill().await;
    assert!(ended);
}

#[tokio::test]
async fn a_daemon_started_by_others_is_found_by_its_cookie() {
    let cookie = format!("found-{}", uuid::Uuid::new_v4());
    let lanes = Lanes::new(1);
    assert!(Daemon::find(&lanes, &cookie).await.unwrap().is_none());
    // A shell by another name; the words after its script are its arguments.
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("rbd-nbd");
    std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
    let script = "echo up; read -r line";
    let args = [
        "-c",
        script,
        "map",
        "pool/image",
        &format!("--cookie={cookie}"),
    ];
    let mut child = exec::command(program.to_str().unwrap(), &args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
    let (daemon, server) = Daemon::find(&lanes, &cookie).await.unwrap().unwrap();
    assert_eq!(
        (daemon.pid().unsigned_abs(), &*server.image),
        (child.id(), "pool/image")
    );
    assert_eq!(daemon.end().await, EndOutcome::Asked);
    child.wait().unwrap_err();
    assert!(Daemon::find(&lanes, &cookie).await.unwrap().is_none());
}

/// How a shell ends.
fn exit_of(script: &str) -> WaitIdStatus {
    let mut shell = exec::command("sh", &["-c", script]).spawn().unwrap();
    let id = WaitId::Pid(Pid::from_child(&shell));
    let exit = waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    shell.wait().unwrap();
    exit.unwrap().unwrap()
}

#[test]
fn a_daemons_exit_is_explained_by_its_log() {
    let spec = spec("v", "pool", "image");
    let failed = exit_of("exit 1");
    let failed = Some(&failed);
    let usual = "2026-11-21T12:35:30.076+0000 4a684a40  0 ceph version 16.2.15 (618f) pacific (stable), process rbd-nbd, pid 7\n\
                 2026-11-21T12:35:30.076+0000 4a684a40  0 pidfile_write: ignore empty --pid-file\n";
    let joins = format!(
        "2026-11-21T22:09:12.714+0000 7f3b  1 monclient: found mon.a\n{usual}\
         2026-11-21T22:09:12.722+0000 7f3b  5 monclient: authenticate success, global_id 4106"
    );
    for usual in [usual, &joins] {
        assert!(matches!(
            explain(usual, failed, &spec),
            SupervisorError::Missing { .. }
        ));
    }
    let mut log = DaemonLog::default();
    joins.lines().for_each(|line| log.take(line));
    assert_eq!((log.clients, log.release), (vec![4106], Some(16)));
    let denied = "failed to fetch mon config (--no-mon-config to skip)";
    assert!(matches!(
        explain(denied, failed, &spec),
        SupervisorError::Denied { .. }
    ));
    let silent = format!(
        "2026-11-21T12:35:30.076+0000 4a684a40  0 monclient(hunting): authenticate timed out after 5\n{denied}"
    );
    assert!(
        matches!(explain(&silent, failed, &spec), SupervisorError::Silent { message, .. } if message.starts_with("monclient"))
    );
    let busy =
        "rbd-nbd: netlink connect failed: Object busy\nrbd-nbd: reader_entry: terminate received";
    assert!(matches!(
        explain(busy, failed, &spec),
        SupervisorError::Taken { .. }
    ));
    let other = format!("{usual}2026-11-21T12:35:31.076+0000 4a684a40 -1 rbd-nbd: cookie mismatch");
    assert!(
        matches!(explain(&other, failed, &spec), SupervisorError::Failed { message, .. } if message == "rbd-nbd: cookie mismatch")
    );
}

proptest! {
    #[test]
    fn any_log_of_a_daemon_is_explained_without_a_panic(lines in proptest::collection::vec("(20[0-9T:.+-]{0,30} )?[\\PC]{0,80}", 0..6)) {
        let mut log = DaemonLog::default();
        for line in &lines {
            log.take(line);
        }
        prop_assert!(log.tail.len() <= KEPT);
        let _ = explain(&log.tail, None, &spec("v", "p", "i"));
    }
}
