//! Many calls, volumes and clients at once, and their limits.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::Duration,
};

use testkit::{
    Content, MIB, Machine, Node, NodeSetup, ProgramStub, ResourceUsage, Sandbox, StuckFile,
    StuckTree, Volume, free_port, idle_clients, loops_over, run, story,
};
use tonic::{Code, Status};

/// Volumes over files that can hang, in a pool of their own.
fn stuck_volumes(sandbox: &Sandbox, count: usize) -> Vec<(StuckFile, Volume)> {
    (0..count)
        .map(|number| {
            let image = format!("stuck{number}.img");
            let file = StuckFile::new(&sandbox.pool("hung").join(&image), 64 * MIB);
            let volume = Volume::filesystem(&format!("stuck{number}"), "ext4").over("hung", &image);
            (file, volume)
        })
        .collect()
}

/// A node that has the pool `hung`, too.
fn setup(sandbox: &Sandbox) -> NodeSetup {
    let mut setup = NodeSetup::new(sandbox);
    let hung = sandbox.pool("hung");
    setup.pools.push(format!("hung={},shared", hung.display()));
    setup
}

/// All calls at once; their answers.
async fn at_once<F: Future>(calls: impl Iterator<Item = F>) -> Vec<F::Output> {
    futures_util::future::join_all(calls).await
}

/// The files answer again, and all volumes are removed.
async fn ends(node: &Node, stuck: Vec<(StuckFile, Volume)>) {
    for (file, _) in &stuck {
        file.resume();
    }
    node.timeout.set(Duration::from_secs(60));
    for (file, volume) in stuck {
        node.retry_until_ok("staged", async || node.stage(&volume).await)
            .await;
        node.retry_until_ok("unstaged", async || node.unstage(&volume).await)
            .await;
        file.remove().await;
    }
    node.assert_clean().await;
}

#[test]
fn hung_devices_use_up_no_permits() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let setup = (setup(sandbox).arg("--max-attaches=2"))
            .arg("--max-probes=2")
            .arg("--max-mounts=1");
        let node = Node::start_with(sandbox, setup).await;
        let stuck = stuck_volumes(sandbox, 6);
        for (file, _) in &stuck {
            file.stop_data();
        }
        node.timeout.set(Duration::from_secs(4));
        let answers = at_once(stuck.iter().map(|(_, volume)| node.stage(volume))).await;
        for answer in answers {
            assert_deadline_exceeded(answer);
        }
        node.timeout.set(Duration::from_secs(60));
        // Of the same pool, too.
        for pool in ["main", "hung"] {
            let image = format!("{pool}-alive.img");
            let file = fs::File::create(sandbox.pool(pool).join(&image)).unwrap();
            file.set_len(64 * MIB).unwrap();
            let alive = Volume::filesystem(&format!("{pool}-alive"), "ext4").over(pool, &image);
            let target = node.up(&alive, "pod").await;
            Content::new(pool).write(&target.join("file"));
            node.down(&alive, "pod").await;
        }
        ends(&node, stuck).await;
    });
}

#[test]
fn a_full_queue_refuses_and_the_call_may_be_repeated() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let setup = (setup(sandbox).arg("--max-attaches=1")).arg("--max-waiting=1");
        let node = Node::start_with(sandbox, setup).await;
        let stuck = stuck_volumes(sandbox, 8);
        for (file, _) in &stuck {
            file.stop_all();
        }
        node.timeout.set(Duration::from_secs(5));
        let answers = at_once(stuck.iter().map(|(_, volume)| node.stage(volume))).await;
        let refused: Vec<Status> = answers
            .into_iter()
            .filter_map(Result::err)
            .filter(|status| status.code() == Code::ResourceExhausted)
            .collect();
        assert!(!refused.is_empty(), "one permit, one that may wait, and 8");
        for status in refused {
            let message = status.message();
            let steps = ["step look", "step attach"];
            let names_step = steps.iter().any(|step| message.contains(step));
            assert!(names_step, "{status:?}");
            assert!(message.contains("--max-waiting"), "{status:?}");
        }
        ends(&node, stuck).await;
    });
}

#[test]
fn nothing_is_attached_while_the_queue_for_a_later_step_is_full() {
    story(async |sandbox| {
        let setup = (setup(sandbox).arg("--max-mkfs=1")).arg("--max-waiting=4");
        let node = Node::start_with(sandbox, setup).await;
        let wait = "while [ ! -e \"$reached\" ]; do sleep 0.1; done\nexec mkfs.ext4 \"$@\"";
        let mkfs = ProgramStub::new("mkfs.ext4", wait);
        let mut volumes = Vec::new();
        node.timeout.set(Duration::from_secs(1));
        // Where one loses its permit, the next takes that.
        for number in 0..60 {
            let volume = sandbox.volume(&format!("v{number}"), "ext4");
            let status = node.stage(&volume).await.expect_err("its mkfs waits");
            let image = sandbox.image(&volume);
            volumes.push(volume);
            if status.code() == Code::ResourceExhausted {
                let message = status.message();
                assert!(message.contains("step mkfs"), "{status:?}");
                assert!(message.contains("--max-waiting"), "{status:?}");
                assert!(loops_over(&image).is_empty());
                break;
            }
        }
        assert!((5..60).contains(&volumes.len()), "{}", volumes.len());
        // A pool has three quarters of the queue.
        let other = sandbox.volume_in("hung", "other", "ext4", 64 * MIB);
        let status = node.stage(&other).await.expect_err("its mkfs waits");
        assert_ne!(status.code(), Code::ResourceExhausted, "{status:?}");

        fs::write(&mkfs.reached, "").unwrap();
        node.timeout.set(Duration::from_secs(60));
        for volume in volumes.iter().chain([&other]) {
            node.retry_until_ok("staged", async || node.stage(volume).await)
                .await;
            node.unstage(volume).await.unwrap();
        }
        drop(mkfs);
        node.assert_clean().await;
    });
}

/// A port that answers no attempt to connect, as a server that has lost its power.
struct SilentPort {
    port: u16,
    _listener: TcpListener,
    _clients: Vec<TcpStream>,
}

impl SilentPort {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        // The kernel drops what exceeds the queue of a listener that accepts nobody.
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(500)).ok();
        Self {
            port: address.port(),
            _clients: std::iter::from_fn(connect).collect(),
            _listener: listener,
        }
    }
}

#[test]
fn a_flood_of_volumes_of_a_silent_nfs_server_is_refused_and_delays_no_other() {
    story(async |sandbox| {
        let server = SilentPort::new();
        let setup = (NodeSetup::new(sandbox).arg("--max-attaches=4")).arg("--max-waiting=8");
        let node = Node::start_with(sandbox, setup).await;
        let volumes: Vec<_> = (0..24)
            .map(|number| {
                Volume::filesystem(&format!("v{number}"), "")
                    .with("server", "127.0.0.1")
                    .with("share", "/share")
                    .with("mountOptions", &format!("port={}", server.port))
            })
            .collect();
        let stage = async |volume| loop {
            let stage = node.with_timeout(Duration::from_secs(5), node.stage(volume));
            let status = stage.await.expect_err("the server is silent");
            if !status.message().contains("step look") {
                break status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let other = async {
            let alive = sandbox.volume("alive", "ext4");
            let target = node.up(&alive, "pod").await;
            Content::new("alive").write(&target.join("file"));
            node.down(&alive, "pod").await;
        };
        let (answers, ()) = tokio::join!(at_once(volumes.iter().map(stage)), other);
        // Three have permits, six may wait, and three have these once the first are stuck.
        let refused: Vec<_> = (answers.iter())
            .filter(|status| status.code() == Code::ResourceExhausted)
            .collect();
        assert!(!refused.is_empty(), "{answers:?}");
        for status in refused {
            for words in ["step attach", "--max-waiting", "retry later"] {
                assert!(status.message().contains(words), "{status:?}");
            }
        }
        drop(server);
        for volume in &volumes {
            node.retry_until_ok("unstaged", async || node.unstage(volume).await)
                .await;
        }
        node.assert_clean().await;
    });
}

#[track_caller]
fn assert_deadline_exceeded<T: std::fmt::Debug>(answer: Result<T, Status>) {
    let status = answer.expect_err("a file hangs");
    // The client itself answers CANCELLED if the agent's answer is late.
    let codes = [Code::DeadlineExceeded, Code::Cancelled];
    assert!(codes.contains(&status.code()), "{status:?}");
}

/// Calls that arrive while kubelet's directories hang.
const STORM: usize = 48;

#[test]
fn waiting_lookups_take_no_thread_each() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--max-attaches=2");
        let mut node = Node::prepare(sandbox, setup);
        let plugins = node.kubelet.join("plugins");
        fs::create_dir_all(&plugins).unwrap();
        let disk = StuckTree::new(&plugins);
        node.start_first().await;
        let volumes: Vec<_> = (0..STORM)
            .map(|number| sandbox.volume_in("main", &format!("v{number}"), "block", MIB))
            .collect();
        for volume in &volumes {
            fs::create_dir_all(node.staging(volume)).unwrap();
        }
        let requests: Vec<_> = (volumes.iter().map(|it| node.stage_request(it))).collect();
        let idle = ResourceUsage::of(node.pid()).threads;
        disk.stop_all();
        let kubelets = node.timeout.replace(Duration::from_secs(3));
        let answers = at_once(requests.into_iter().map(|it| node.send_stage(it))).await;
        let looking = ResourceUsage::of(node.pid()).threads.saturating_sub(idle);
        // A stuck volume loses its permit after seconds.
        assert!(looking <= STORM / 4, "{looking} threads look");
        for answer in answers {
            assert_deadline_exceeded(answer);
        }
        disk.resume();
        node.timeout.set(kubelets);
        for volume in &volumes {
            node.retry_until_ok("staged", async || node.stage(volume).await)
                .await;
            node.unstage(volume).await.unwrap();
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_agent_raises_its_limit_of_descriptors() {
    story(async |sandbox| {
        let setup = NodeSetup {
            machine: Machine::FewDescriptors,
            ..NodeSetup::new(sandbox)
        };
        let node = Node::start_with(sandbox, setup.arg("--max-volumes=10000000")).await;
        let limits = fs::read_to_string(format!("/proc/{}/limits", node.pid())).unwrap();
        let open_files = limits
            .lines()
            .find(|line| line.starts_with("Max open files"));
        let words: Vec<_> = open_files.unwrap().split_whitespace().collect();
        let [soft, hard] = [words[3], words[4]];
        assert_eq!(soft, hard, "{limits}");
        if hard != "unlimited" {
            for words in ["10000000 volumes", "RLIMIT_NOFILE", hard] {
                node.wait_for_log(words).await;
            }
        }
        node.assert_clean().await;
    });
}

/// Clients that connect and send nothing.
const IDLE: usize = 2000;

#[test]
fn idle_metrics_clients_take_no_descriptors_from_volumes() {
    story(async |sandbox| {
        let port = free_port();
        let listen = format!("--metrics-listen=127.0.0.1:{port}");
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox).arg(&listen)).await;
        let mut idle = Vec::new();
        while idle.len() < IDLE {
            idle.extend(idle_clients(port, IDLE / 4).await);
            let volume = sandbox.volume(&format!("v{}", idle.len()), "ext4");
            let target = node.up(&volume, "pod").await;
            node.stats(&volume, &target).await.unwrap();
            node.down(&volume, "pod").await;
        }
        let open = || {
            fs::read_dir(format!("/proc/{}/fd", node.pid()))
                .unwrap()
                .count()
        };
        assert!(open() < 500, "{} descriptors are open", open());
        // The endpoint answers.
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        let dropped = "uring_csi_http_dropped_total{reason=\"crowded\"}";
        assert!(said.contains(dropped), "{said}");
        assert!(said.contains("uring_csi_admission_places{step=\"attach\"}"));
        drop(idle);
        node.assert_clean().await;
    });
}

/// A wrapper of a program: counts its running instances, and runs it.
const COUNTING: &str = "#!/bin/sh -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
program=$(basename $0)
: > /usr/local/sbin/running.$program.$$
ls /usr/local/sbin | grep -c ^running.$program >> /usr/local/sbin/seen.$program
cat /proc/self/oom_score_adj >> /usr/local/sbin/scores.$program
sleep 0.3
rm /usr/local/sbin/running.$program.$$
exec $program \"$@\"
";

#[test]
fn concurrent_mkfs_and_fsck_are_limited() {
    story(async |sandbox| {
        let programs = Path::new("/usr/local/sbin");
        run(&["mount", "-t", "tmpfs", "none", "/usr/local/sbin"]);
        for program in ["mkfs.ext4", "e2fsck"] {
            let program = programs.join(program);
            fs::write(&program, COUNTING).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let setup = NodeSetup::new(sandbox).arg("--max-mkfs=2");
        let node = Node::start_with(sandbox, setup.arg("--max-fsck=3")).await;
        let volumes: Vec<_> = (0..8)
            .map(|number| sandbox.volume(&format!("v{number}"), "ext4"))
            .collect();
        let lines = |name: &str| {
            let text = fs::read_to_string(programs.join(name)).unwrap();
            let lines = text.lines().map(|line| line.parse().unwrap());
            lines.collect::<Vec<u32>>()
        };
        // The second time they are to be checked.
        for (program, most) in [("mkfs.ext4", 2), ("e2fsck", 3)] {
            for staged in at_once(volumes.iter().map(|volume| node.stage(volume))).await {
                staged.unwrap();
            }
            let seen = lines(&format!("seen.{program}"));
            assert!(
                seen.len() == 8 && seen.iter().all(|&at_once| at_once <= most),
                "{program}: {seen:?}"
            );
            assert_eq!(lines(&format!("scores.{program}")), [1000; 8]);
            for volume in &volumes {
                node.unstage(volume).await.unwrap();
                let image = sandbox.image(volume);
                run(&[
                    "debugfs",
                    "-w",
                    "-R",
                    "ssv state 2",
                    image.to_str().unwrap(),
                ]);
            }
        }
        run(&["umount", "/usr/local/sbin"]);
        node.assert_clean().await;
    });
}
