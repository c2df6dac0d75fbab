use super::*;
use crate::ring;

async fn shell(script: &str) -> Child {
    Child::spawn("sh", &["-c", script]).await.unwrap()
}

fn state_of(pid: i32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().next().map(str::to_owned)
}

#[test]
fn the_code_the_signal_and_both_outputs_are_reported() {
    ring::start(async {
        let exit = shell("echo out; echo err >&2; exit 3")
            .await
            .wait()
            .await
            .unwrap();
        assert_eq!(exit.code, Some(3));
        assert_eq!(exit.output, "out\nerr\n");
        assert!(!exit.success());

        let exit = shell("kill -9 $$").await.wait().await.unwrap();
        assert_eq!((exit.code, exit.signal), (None, Some(9)));

        let missing = Child::spawn::<&str>("no-such-program", &[])
            .await
            .unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    })
    .unwrap();
}

#[test]
fn a_child_sees_our_environment_no_more_than_our_descriptors() {
    ring::start(async {
        let exit = shell("exec /usr/bin/env").await.wait().await.unwrap();
        let mut lines: Vec<_> = exit
            .output
            .lines()
            // The shell sets these itself.
            .filter(|line| {
                !["PWD=", "SHLVL=", "OLDPWD=", "_="]
                    .iter()
                    .any(|own| line.starts_with(own))
            })
            .collect();
        lines.sort_unstable();
        assert_eq!(lines, ["LC_ALL=C", &format!("PATH={}", exec::PATH)]);

        let exit = Child::spawn("ls", &["/proc/self/fd"])
            .await
            .unwrap()
            .wait()
            .await
            .unwrap();
        assert_eq!(exit.output, "0\n1\n2\n3\n", "3 is the listing itself");
    })
    .unwrap();
}

#[test]
fn the_end_of_long_output_is_kept() {
    ring::start(async {
        let exit = shell("seq 1 200000; echo last").await.wait().await.unwrap();
        assert!(exit.success());
        assert_eq!(exit.output.len(), OUTPUT_KEPT);
        assert!(exit.output.ends_with("200000\nlast\n"));
    })
    .unwrap();
}

#[test]
fn a_grandchild_with_the_pipe_open_delays_nobody() {
    ring::start(async {
        let mut exit = shell("sleep 1000 & echo $!").await.wait().await.unwrap();
        let grandchild: i32 = exit.output.split_off(0).trim().parse().unwrap();
        assert!(state_of(grandchild).is_some(), "it outlived the child");
        rustix::process::kill_process(Pid::from_raw(grandchild).unwrap(), Signal::KILL).unwrap();
    })
    .unwrap();
}

#[test]
fn a_child_whose_waiter_gave_up_is_reaped() {
    ring::start(async {
        let child = shell("exec sleep 1000").await;
        let pid = child.pid();
        let waited = tokio::time::timeout(Duration::ZERO, child.wait()).await;
        waited.unwrap_err();
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        while state_of(pid).is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .unwrap();
}

#[test]
fn a_child_that_cannot_be_kept_is_killed_and_reaped() {
    ring::start(async {
        let (Launched { pid, .. }, _parent) = launch("sleep".to_owned(), vec!["1000".into()])
            .await
            .unwrap();
        kill_and_reap(pid);
        while state_of(pid.as_raw_nonzero().get()).is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .unwrap();
}

#[test]
fn many_children_at_once() {
    ring::start(async {
        let scripts: Vec<_> = (0..40).map(|n| format!("exit {n}")).collect();
        let children = futures_util::future::join_all(scripts.iter().map(|script| shell(script)));
        for (n, child) in (0..).zip(children.await) {
            assert_eq!(child.wait().await.unwrap().code, Some(n));
        }
    })
    .unwrap();
}

#[test]
fn a_child_is_killed_with_the_runtime_thread() {
    let pid =
        std::thread::spawn(|| ring::start(async { shell("exec sleep 1000").await.pid() }).unwrap())
            .join()
            .unwrap();
    ring::start(async {
        while !matches!(state_of(pid).as_deref(), None | Some("Z")) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .unwrap();
    // Its reaper ended with that runtime, so the test reaps it.
    let pid = Pid::from_raw(pid).unwrap();
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED).unwrap();
}
