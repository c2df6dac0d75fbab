//! `uringctl bench`: load for a driver, by an operator who has other volumes there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Child,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::{Controller, Node, Sandbox, Volume, eventually, files_below, mounts_below, story};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use uring_csi::proto::csi::ListVolumesRequest;

use crate::{
    nfs_controller,
    operator::{Operator, machine},
};

/// The arguments of every run in a story.
fn bench<'a>(node: &'a Node, args: &[&'a str]) -> Vec<&'a str> {
    let dir = node.kubelet.to_str().expect("a path in UTF-8");
    [&["bench", "run", "--kubelet-dir", dir], args].concat()
}

/// A file for `--volumes-file`.
fn volumes_file(sandbox: &Sandbox, volumes: &[&Volume]) -> String {
    let path = sandbox.dir().join("volumes.json");
    let line = |volume: &&Volume| {
        json!({
            "handle": volume.handle,
            "volumeContext": volume.context,
            "fsType": (!volume.is_block()).then(|| volume.fs_type()),
            "block": volume.is_block(),
        })
    };
    let lines: Vec<String> = volumes
        .iter()
        .map(line)
        .map(|line| line.to_string())
        .collect();
    fs::write(&path, lines.join("\n")).expect("a file");
    path.display().to_string()
}

fn call<'a>(report: &'a Value, name: &str) -> &'a Value {
    let calls = report["calls"].as_array().expect("calls");
    let found = calls.iter().find(|call| call["call"] == name);
    found.unwrap_or_else(|| panic!("{name}: {report}"))
}

fn signal(uringctl: &Child, signal: Signal) {
    let pid = Pid::from_child(uringctl);
    kill_process(pid, signal).expect("a running uringctl");
}

/// Asserts that neither node nor controller nor kubelet's directory has anything of a run.
async fn assert_nothing_is_left(node: &Node, controller: &Controller) {
    node.assert_clean().await;
    let mut client = controller.client();
    let listed = client.list_volumes(ListVolumesRequest::default());
    let entries = listed.await.expect("a list").into_inner().entries;
    assert!(entries.is_empty(), "{entries:?}");
    let left = of_runs(node);
    assert!(left.is_empty(), "{left:?}");
}

/// What there is below kubelet's directory that runs have made.
fn of_runs(node: &Node) -> Vec<PathBuf> {
    let of_run = |path: &PathBuf| path.display().to_string().contains("uringctl-bench-");
    let dirs = fs::read_dir(node.kubelet.join("plugins/kubernetes.io/csi"));
    let dirs = dirs
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    dirs.chain(files_below(&node.kubelet))
        .filter(of_run)
        .collect()
}

async fn until_mounted(node: &Node) {
    eventually("a run has mounted something", async || {
        let mounts = mounts_below(&node.kubelet);
        (!mounts.is_empty()).then_some(())
    })
    .await;
}

#[test]
fn four_callers_are_measured_and_two_runs_compared() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let load = ["--create", "5", "--callers", "4", "--cycles", "3"];
        let report = operator.json(&bench(&node, &load));
        assert_eq!(report["cycles"], 12, "{report}");
        assert_eq!(report["failed_cycles"], 0, "{report}");
        assert_eq!(report["driver"]["name"], "block.uring-csi.dev");
        for (name, count) in [
            ("CreateVolume", 5),
            ("NodeGetCapabilities", 48),
            ("NodeStageVolume", 12),
            ("NodePublishVolume", 12),
            ("NodeGetVolumeStats", 12),
            ("NodeUnpublishVolume", 12),
            ("NodeUnstageVolume", 12),
            ("Cycle", 12),
            ("DeleteVolume", 5),
        ] {
            let call = call(&report, name);
            assert_eq!(call["succeeded"], count, "{call}");
            assert_eq!(call["errors"], json!([]), "{call}");
            let times = ["min", "p50", "p90", "p99", "p999", "max"]
                .map(|which| call["milliseconds"][which].as_f64().expect("a time"));
            assert!(times[0] > 0.0 && times.is_sorted(), "{call}");
        }
        let process = &report["process"];
        assert_eq!(process["pid"], node.pid(), "{report}");
        for which in ["before", "after"] {
            for what in ["resident_kib", "threads", "descriptors"] {
                assert!(process[which][what].as_u64() > Some(0), "{process}");
            }
        }
        assert_nothing_is_left(&node, &controller).await;

        let first = sandbox.dir().join("first.json");
        fs::write(&first, report.to_string()).unwrap();
        let kept = [&load[..], &["--kept-connection"]].concat();
        let second = sandbox.dir().join("second.json");
        fs::write(&second, operator.json(&bench(&node, &kept)).to_string()).unwrap();
        let files = [&first, &second].map(|path| path.to_str().unwrap());
        let compared = operator.json(&["bench", "compare", files[0], files[1]]);
        let rows = compared["rows"].as_array().unwrap();
        let published = rows
            .iter()
            .find(|row| row["what"] == "NodePublishVolume p50");
        assert!(
            published.unwrap()["ratio"].as_f64() > Some(0.0),
            "{compared}"
        );
        assert!(
            compared["differences"].to_string().contains("connections"),
            "{compared}"
        );
        let (code, table, _) = operator.run(&["bench", "compare", files[0], files[0]]);
        assert!(code == 0 && table.contains("1.00"), "{table}");
        let (code, _, err) = operator.run(&["bench", "compare", files[0], "/dev/null"]);
        assert_eq!(code, 2, "{err}");

        let (code, table, err) = operator.run(&bench(&node, &["--create", "1", "--block"]));
        assert_eq!(code, 0, "{err}");
        assert!(
            table.contains("NodeUnstageVolume") && table.contains("(block)"),
            "{table}"
        );
        assert_nothing_is_left(&node, &controller).await;
    });
}

#[test]
fn each_call_has_a_connection_unless_it_is_kept() {
    story(async |sandbox| {
        let (node, controller, _) = machine(sandbox).await;
        let socket = sandbox.dir().join("counted.sock");
        let connections = count_connections(&socket, node.socket());
        let operator = Operator::with_sockets(&socket, controller.socket());
        let load = ["--create", "1", "--cycles", "2"];
        let mut counts = Vec::new();
        for more in [&[][..], &["--kept-connection"]] {
            let before = connections.load(Relaxed);
            let uringctl = operator.start(&bench(&node, &[&load[..], more].concat()));
            let ended = tokio::task::spawn_blocking(|| Operator::end(uringctl));
            let (code, out, err) = ended.await.expect("an end");
            assert_eq!(code, 0, "{err}");
            // The process behind the socket is this one.
            let own = format!("process: {}", std::process::id());
            assert!(out.contains(&own), "{out}");
            counts.push(connections.load(Relaxed) - before);
        }
        // Five calls a cycle, and four before them for the capabilities.
        assert_eq!(counts[0] - counts[1], 2 * 9 - 1, "{counts:?}");
        assert_nothing_is_left(&node, &controller).await;
    });
}

/// Listens at `at`, passes each connection on to `to`, and counts them.
fn count_connections(at: &Path, to: &Path) -> Arc<AtomicUsize> {
    let listener = tokio::net::UnixListener::bind(at).expect("a socket");
    let to = to.to_owned();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::task::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.expect("a connection");
            counted.fetch_add(1, Relaxed);
            let to = to.clone();
            tokio::task::spawn(async move {
                let mut server = tokio::net::UnixStream::connect(to)
                    .await
                    .expect("the agent");
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    count
}

#[test]
fn listed_volumes_are_measured_and_stay() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let volumes = [sandbox.volume("a", "ext4"), sandbox.volume("b", "block")];
        let file = volumes_file(sandbox, &[&volumes[0], &volumes[1]]);
        let load = [
            "--volumes-file",
            &file,
            "--callers",
            "2",
            "--duration",
            "1s",
        ];
        let report = operator.json(&bench(&node, &load));
        let cycles = report["cycles"].as_u64().unwrap();
        assert!(cycles >= 2, "{report}");
        assert_eq!(call(&report, "NodeUnstageVolume")["succeeded"], cycles);
        assert!(!report.to_string().contains("DeleteVolume"), "{report}");
        assert!(volumes.iter().all(|volume| sandbox.image(volume).exists()));
        assert_nothing_is_left(&node, &controller).await;

        // By name, which only the controller knows; afterwards it still has the volume.
        operator.json(&["create", "data-1", "64Mi"]);
        let report = operator.json(&bench(&node, &["--volume", "data-1", "--cycles", "1"]));
        assert_eq!(report["cycles"], 1, "{report}");
        operator.json(&["delete", "data-1"]);
        assert_nothing_is_left(&node, &controller).await;
    });
}

#[test]
fn a_volume_that_another_uses_is_refused() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let volumes = [
            sandbox.volume("used", "ext4"),
            sandbox.volume("free", "ext4"),
        ];
        let file = volumes_file(sandbox, &[&volumes[0], &volumes[1]]);
        let load = ["--volumes-file", file.as_str()];
        let run = bench(&node, &load);
        let target = node.up(&volumes[0], "pod").await;
        let staged = node.staging(&volumes[0]);
        let refused = |place: &Path| {
            let (code, out, err) = operator.run(&run);
            assert_eq!(code, 5, "{out}{err}");
            let place = place.to_str().unwrap();
            assert!(err.contains("used is ") && err.contains(place), "{err}");
            assert!(!err.contains("free is"), "{err}");
        };
        refused(&target);
        fs::write(target.join("file"), "of the pod").expect("a mount of the pod's own");
        node.unpublish(&volumes[0], "pod")
            .await
            .expect("unpublished");
        refused(&staged);
        node.unstage(&volumes[0]).await.expect("unstaged");

        // Kubelet is about to stage it.
        let data = staged.with_file_name("vol_data.json");
        fs::create_dir_all(&staged).unwrap();
        fs::write(&data, json!({"volumeHandle": "used"}).to_string()).unwrap();
        refused(&data);
        fs::remove_file(&data).unwrap();
        assert_nothing_is_left(&node, &controller).await;
        let (code, _, err) = operator.run(&run);
        assert_eq!(code, 0, "{err}");
        assert_nothing_is_left(&node, &controller).await;
    });
}

#[test]
fn wrong_runs_make_nothing() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        for (args, why) in [
            (&["--create", "1", "--callers", "2"][..], "2 callers need"),
            (&["--create", "1", "--pool", "none"], "none"),
            (&["--create", "1", "--parameter", "x=y"], "x"),
            (&["--volumes-file", "/dev/null"], "no volume"),
        ] {
            let (code, _, err) = operator.run(&bench(&node, args));
            assert_eq!(code, 2, "{args:?}: {err}");
            assert!(err.contains(why), "{args:?}: {err}");
            assert_nothing_is_left(&node, &controller).await;
        }
        // Not below the driver's directories: every stage is refused.
        let other = sandbox.dir().join("elsewhere");
        fs::create_dir(&other).unwrap();
        let dir = other.to_str().unwrap();
        let args = [
            "bench",
            "run",
            "--create",
            "1",
            "--kubelet-dir",
            dir,
            "--json",
        ];
        let (code, out, err) = operator.run(&args);
        assert_eq!(code, 1, "{err}");
        assert!(err.contains("calls failed"), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let errors = &call(&report, "NodeStageVolume")["errors"];
        assert_eq!(errors[0]["count"], 3, "{report}");
        assert_eq!(fs::read_dir(&other).unwrap().count(), 0);
        assert_nothing_is_left(&node, &controller).await;
    });
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let load = [
            "--create",
            "4",
            "--callers",
            "4",
            "--duration",
            "1h",
            "--json",
        ];
        for interrupt in [Signal::INT, Signal::TERM] {
            let uringctl = operator.start(&bench(&node, &load));
            until_mounted(&node).await;
            signal(&uringctl, interrupt);
            let (code, out, err) = Operator::end(uringctl);
            assert_eq!(code, 1, "{err}");
            assert!(err.contains("nothing is left"), "{err}");
            let report: Value = serde_json::from_str(&out).unwrap();
            assert_eq!(report["interrupted"], true, "{report}");
            assert_nothing_is_left(&node, &controller).await;
        }
    });
}

#[test]
fn a_run_interrupted_amid_a_stage_undoes_it() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let volume = sandbox.volume("a", "ext4");
        let file = volumes_file(sandbox, &[&volume]);
        let held = node.hold("mount", "a");
        let uringctl = operator.start(&bench(&node, &["--volumes-file", &file]));
        until_in_step(&operator, "mount").await;
        signal(&uringctl, Signal::INT);
        drop(held);
        let (code, _, err) = Operator::end(uringctl);
        assert_eq!(code, 1, "{err}");
        assert!(err.contains("nothing is left"), "{err}");
        assert_nothing_is_left(&node, &controller).await;
    });
}

#[test]
fn what_a_killed_run_leaves_is_cleaned() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let dir = node.kubelet.to_str().unwrap();
        let clean = ["bench", "clean", "--kubelet-dir", dir];
        let load = ["--create", "2", "--callers", "2", "--duration", "1h"];
        let uringctl = operator.start(&bench(&node, &load));
        until_mounted(&node).await;
        // A run under way is left alone.
        let (code, out, err) = operator.run(&clean);
        assert!(code == 0 && out.contains("under way"), "{out}{err}");
        signal(&uringctl, Signal::KILL);
        uringctl.wait_with_output().expect("uringctl");
        let cleaned = operator.json(&clean);
        assert_eq!(cleaned["removed"].as_array().unwrap().len(), 1, "{cleaned}");
        assert_nothing_is_left(&node, &controller).await;

        // The second signal ends it amid a stage, and it says what may be left.
        let volume = sandbox.volume("a", "ext4");
        let file = volumes_file(sandbox, &[&volume]);
        let held = node.hold("mount", "a");
        let uringctl = operator.start(&bench(&node, &["--volumes-file", &file]));
        until_in_step(&operator, "mount").await;
        signal(&uringctl, Signal::INT);
        eventually("uringctl has seen the first signal, and ends", async || {
            // The same signal twice at once is one.
            signal(&uringctl, Signal::TERM);
            let ended = fs::read_to_string(format!("/proc/{}/stat", uringctl.id()));
            ended.expect("procfs").contains(") Z").then_some(())
        })
        .await;
        let (code, _, err) = Operator::end(uringctl);
        assert_eq!(code, 1, "{err}");
        for part in [
            "volume a may be staged at",
            "uringctl-bench-",
            "bench clean",
        ] {
            assert!(err.contains(part), "{part}: {err}");
        }
        drop(held);
        operator.json(&clean);
        assert_nothing_is_left(&node, &controller).await;
    });
}

#[test]
fn a_volume_whose_creation_was_never_answered_is_cleaned() {
    story(async |sandbox| {
        let share = sandbox.dir().join("export");
        fs::create_dir(&share).unwrap();
        let controller = nfs_controller::over(sandbox, &share).await;
        let node = Node::start(sandbox).await;
        let names = || {
            let entries = fs::read_dir(&share).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name());
            let names = names.map(|name| name.into_string().unwrap());
            let of_run = names.filter(|name| name.starts_with("uringctl-bench-"));
            of_run.collect::<Vec<_>>()
        };
        let socket = sandbox.dir().join("silent.sock");
        keep_answers_about_runs(&socket, controller.socket());
        let load = [
            "--create=1",
            "--parameter=server=127.0.0.1",
            "--parameter=share=/share",
            "--timeout=2s",
        ];
        let silent = Operator::with_sockets(node.socket(), &socket);
        let run = silent.start(&bench(&node, &load));
        let ended = tokio::task::spawn_blocking(|| Operator::end(run));
        let (code, _, err) = ended.await.expect("an end");
        assert_eq!(code, 1, "{err}");
        let [name] = names().try_into().expect("one volume");
        assert!(err.contains(&format!("volume {name}")), "{err}");

        let dir = node.kubelet.to_str().unwrap();
        let clean = ["bench", "clean", "--kubelet-dir", dir];
        // Another controller may know other volumes.
        let cleaned = Operator::new(&node, &controller).json(&clean);
        let others = cleaned["others"].as_array().unwrap();
        assert!(
            others[0].as_str().unwrap().contains("silent.sock"),
            "{cleaned}"
        );
        assert_eq!(names(), [name]);

        fs::remove_file(&socket).unwrap();
        std::os::unix::fs::symlink(controller.socket(), &socket).unwrap();
        silent.json(&clean);
        assert_eq!(names(), Vec::<String>::new());
        assert!(of_runs(&node).is_empty());
        node.assert_clean().await;
    });
}

/// Listens at `at` and passes requests on to `to`; answers as well, until a request has the
/// name of a run's volume.
fn keep_answers_about_runs(at: &Path, to: &Path) {
    let listener = tokio::net::UnixListener::bind(at).expect("a socket");
    let to = to.to_owned();
    tokio::task::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.expect("a connection");
            let server = tokio::net::UnixStream::connect(&to)
                .await
                .expect("the controller");
            let (mut requests, mut answers_to) = client.into_split();
            let (mut answers, mut requests_to) = server.into_split();
            let silent = Arc::new(AtomicBool::new(false));
            let is_silent = silent.clone();
            tokio::task::spawn(async move {
                let mut bytes = vec![0; 64 << 10];
                while let Ok(read @ 1..) = answers.read(&mut bytes).await {
                    if !is_silent.load(Relaxed) {
                        let _ = answers_to.write_all(&bytes[..read]).await;
                    }
                }
            });
            tokio::task::spawn(async move {
                let mut bytes = vec![0; 64 << 10];
                while let Ok(read @ 1..) = requests.read(&mut bytes).await {
                    let name = b"uringctl-bench-";
                    if bytes[..read].windows(name.len()).any(|part| part == name) {
                        silent.store(true, Relaxed);
                    }
                    let _ = requests_to.write_all(&bytes[..read]).await;
                }
            });
        }
    });
}

/// Until some volume of the node is in this step.
async fn until_in_step(operator: &Operator, step: &str) {
    eventually("a volume in the step", async || {
        let held = operator.json(&["volumes"]);
        let volumes = held["volumes"].as_array().expect("volumes");
        volumes
            .iter()
            .any(|volume| volume["step"] == step)
            .then_some(())
    })
    .await;
}
