//! Stats, health, metrics and logs, and no secret in them.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    thread,
};

use testkit::{
    Content, MIB, Node, NodeSetup, Volume, eventually, free_port, loops_over, refused, run, story,
};
use tonic::Code::{AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable};
use uring_csi::proto::csi::{VolumeHealthErrorType, volume_usage::Unit};

/// GET from the HTTP listener: the head and the body in one.
pub fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn stats_are_those_of_statfs() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        std::fs::write(target.join("file"), vec![1; 4 << 20]).unwrap();
        let staging = node.staging(&volume);
        for path in [&target, &staging] {
            let usage = node.stats(&volume, path).await.unwrap();
            let found = rustix::fs::statvfs(&target).unwrap();
            let by_unit = |unit| usage.iter().find(|usage| usage.unit() == unit).unwrap();
            let bytes = by_unit(Unit::Bytes);
            let expected = i64::try_from(found.f_blocks * found.f_frsize).unwrap();
            assert_eq!(bytes.total, expected);
            assert!(bytes.used >= 4 << 20 && bytes.available > 0);
            assert!(bytes.used + bytes.available <= bytes.total);
            let inodes = by_unit(Unit::Inodes);
            assert_eq!(inodes.total, i64::try_from(found.f_files).unwrap());
            assert!(inodes.used > 0 && inodes.available > 0);
        }
        assert!(node.health(&volume, &target).await.unwrap().is_empty());
        node.down(&volume, "pod").await;

        let raw = sandbox.volume_in("main", "raw", "block", 64 * MIB);
        let target = node.up(&raw, "pod").await;
        let usage = node.stats(&raw, &target).await.unwrap();
        assert_eq!(usage.len(), 1);
        assert_eq!(usage[0].unit(), Unit::Bytes);
        assert_eq!(u64::try_from(usage[0].total).unwrap(), 64 * MIB);
        assert!(node.health(&raw, &target).await.unwrap().is_empty());
        node.down(&raw, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn an_unread_log_delays_no_call() {
    story(async |sandbox| {
        let port = free_port();
        let setup = NodeSetup::new(sandbox)
            .arg("--log-level=trace,uring_csi=trace")
            .arg(&format!("--metrics-listen=127.0.0.1:{port}"));
        let node = Node::prepare(sandbox, setup);
        node.leave_log_unread();
        node.restart().await;
        let missing = Volume::filesystem("missing", "ext4").over("main", "no.img");
        let flood = async || {
            // More than the pipe and the agent's buffer hold.
            for _ in 0..300 {
                node.stage(&missing).await.expect_err("no such image");
            }
            assert_eq!(node.probe().await, Some(true));
        };
        flood().await;
        let volume = sandbox.volume("v", "ext4");
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;
        eventually("dropped lines are counted", async || {
            flood().await;
            let metrics = get(port, "/metrics").ok()?;
            let prefix = "uring_csi_log_lines_dropped_total ";
            let count = metrics.lines().find_map(|line| line.strip_prefix(prefix))?;
            (count.parse::<u64>().ok()? > 0).then_some(())
        })
        .await;

        // The log continues, and counts the missing lines.
        let mut log = BufReader::new(node.take_log_pipe());
        let read = thread::spawn(move || {
            let mut line = String::new();
            while !line.contains("log lines dropped") {
                line.clear();
                assert!(log.read_line(&mut line).expect("lines") > 0, "no such line");
            }
            log
        });
        eventually("it says how many", async || {
            node.probe().await;
            read.is_finished().then_some(())
        })
        .await;
        let log = read.join().expect("a line");

        // Nor does the agent's exit wait for a reader.
        flood().await;
        node.terminate();
        assert!(node.wait_for_exit().await.success());
        drop(log);
    });
}

#[test]
fn a_file_system_error_is_reported_until_it_is_gone() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "ext4");
        let target = node.up(&volume, "pod").await;
        // The kernel's own way to try this (Documentation/ABI/testing/sysfs-fs-ext4).
        let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
        let trigger = Path::new("/sys/fs/ext4")
            .join(device.file_name().unwrap())
            .join("trigger_fs_error");
        std::fs::write(trigger, "story").unwrap();
        // The kernel counts it on a worker of its own (ext4, s_sb_upd_work); that the
        // file system is read-only from then on is how the agent mounts an ext4.
        let health = eventually(
            "health reports the error and the read-only mount",
            async || {
                let health = node.health(&volume, &target).await.unwrap();
                (health.len() == 2).then_some(health)
            },
        )
        .await;
        let reasons: Vec<_> = health.iter().map(|entry| &*entry.reason).collect();
        assert_eq!(reasons, ["ReadOnly", "FileSystemErrors"], "{health:?}");
        assert!(health.iter().all(|entry| !entry.message.is_empty()));
        node.down(&volume, "pod").await;

        // The next stage repairs it.
        let target = node.up(&volume, "pod").await;
        assert!(node.health(&volume, &target).await.unwrap().is_empty());

        std::fs::remove_file(sandbox.image(&volume)).unwrap();
        let health = node.health(&volume, &target).await.unwrap();
        assert_eq!(
            health[0].status(),
            VolumeHealthErrorType::DataLoss,
            "{health:?}"
        );
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

/// XFS does so after an error that it cannot undo, and answers no stat(2) then.
#[test]
fn a_shut_down_file_system_is_reported_and_unstaged() {
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let volume = sandbox.volume("v", "xfs");
        let target = node.up(&volume, "pod").await;
        Content::new("kept").write(&target.join("file"));
        run(&["xfs_io", "-x", "-c", "shutdown", target.to_str().unwrap()]);

        let health = node.health(&volume, &target).await.unwrap();
        assert_eq!(health.len(), 1, "{health:?}");
        assert_eq!(health[0].status(), VolumeHealthErrorType::Inaccessible);
        let words = ["has shut down", "kernel log"];
        let again = node.send_stage(node.stage_request(&volume)).await;
        // A final code would have kubelet forget the mount.
        refused(again, Unavailable, &words);
        let another = node.publish(&volume, "another").await;
        refused(another, FailedPrecondition, &words);
        node.down(&volume, "pod").await;

        let target = node.up(&volume, "pod").await;
        Content::new("kept").assert_in(&target.join("file"));
        assert!(node.health(&volume, &target).await.unwrap().is_empty());
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn metrics_count_calls_and_steps() {
    story(async |sandbox| {
        let port = free_port();
        let listen = format!("--metrics-listen=127.0.0.1:{port}");
        let node = Node::start_with(sandbox, NodeSetup::new(sandbox).arg(&listen)).await;
        let volume = sandbox.volume("v", "ext4");
        node.up(&volume, "pod").await;
        let bad = sandbox.volume("bad", "zfs");
        refused(node.stage(&bad).await, InvalidArgument, &[]);
        node.down(&volume, "pod").await;

        let metrics = testkit::eventually("metrics", async || get(port, "/metrics").ok()).await;
        for series in [
            "uring_csi_build_info{",
            "uring_csi_calls_total{method=\"NodeStageVolume\",code=\"OK\"} 1\n",
            "uring_csi_calls_total{method=\"NodeStageVolume\",code=\"INVALID_ARGUMENT\"} 1\n",
            "uring_csi_calls_total{method=\"NodeExpandVolume\",code=\"OK\"} 0\n",
            "uring_csi_calls_in_flight{method=\"NodeStageVolume\"} 0\n",
            "uring_csi_call_duration_seconds_count{method=\"NodeStageVolume\"} 2\n",
            "uring_csi_step_failures_total{step=\"mkfs\",backend=\"loop\"} 0\n",
            "uring_csi_mkfs_total{outcome=\"formatted\"} 1\n",
            "uring_csi_mkfs_total{outcome=\"refused\"} 0\n",
            "uring_csi_admission_refused_total{step=\"attach\"} 0\n",
            "uring_csi_stuck_threads 0\n",
            "uring_csi_ready 1\n",
            "process_open_fds ",
            "step=\"mount\"",
            "le=\"0.00005\"",
        ] {
            assert!(metrics.contains(series), "{series} is not in\n{metrics}");
        }
        assert!(!metrics.contains("v.img") && !metrics.contains("/globalmount"));
        for path in ["/healthz", "/readyz"] {
            let answer = get(port, path).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        }
        node.assert_clean().await;
    });
}

#[test]
fn the_lines_of_a_call_have_its_trace_id() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox)
            .arg("--log-level=debug")
            .arg("--log-format=json");
        let node = Node::start_with(sandbox, setup).await;
        let volume = sandbox.volume("v", "ext4");
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        let mut request = tonic::Request::new(node.stage_request(&volume));
        let parent = format!("00-{id}-00f067aa0ba902b7-01").parse().unwrap();
        request.metadata_mut().insert("traceparent", parent);
        std::fs::create_dir_all(node.staging(&volume)).unwrap();
        node.client().node_stage_volume(request).await.unwrap();
        node.publish(&volume, "pod").await.unwrap();
        node.down(&volume, "pod").await;
        node.assert_clean().await;
        // All lines are written then.
        node.terminate();
        node.wait_for_exit().await;
        let log = node.log();
        let lines = log
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let steps_and_answers: Vec<_> = lines
            .filter(|line| line["message"] == "step" || line["message"] == "answered")
            .collect();
        assert!(steps_and_answers.len() > 10, "{log}");
        for line in &steps_and_answers {
            let call = &line["spans"][0];
            assert_eq!(call["trace_id"].as_str().map(str::len), Some(32), "{line}");
            let is_staged = call["method"] == "NodeStageVolume";
            assert_eq!(call["trace_id"] == id, is_staged, "{line}");
        }
    });
}

#[test]
fn secrets_are_never_logged() {
    story(async |sandbox| {
        let setup = NodeSetup::new(sandbox).arg("--log-level=trace");
        let node = Node::start_with(sandbox, setup).await;
        let mut volume = sandbox.volume("v", "ext4");
        let secret = "hunter2-b7e1";
        volume.secrets = [("userKey".to_owned(), secret.to_owned())].into();
        node.up(&volume, "pod").await;
        let mut wrong = node.stage_request(&volume);
        wrong.volume_capability = None;
        node.send_stage(wrong).await.unwrap_err();
        let target = node.target(&volume, "pod");
        node.expand(&volume, &target, 64 * MIB).await.unwrap();

        // The log has the calls.
        node.wait_for_log("NodeStageVolume").await;
        node.wait_for_log("NodeExpandVolume").await;
        let mut places = vec![("the log", node.log())];
        for dir in [&node.run_dir, &node.state_dir] {
            for file in testkit::files_below(dir) {
                let bytes = std::fs::read(&file).unwrap_or_default();
                places.push(("a record", String::from_utf8_lossy(&bytes).into_owned()));
            }
        }
        for (place, text) in places {
            assert!(!text.contains(secret), "{place} holds the secret");
        }
        node.down(&volume, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_node_whose_mounts_do_not_reach_pods_is_not_ready() {
    story(async |sandbox| {
        let port = free_port();
        let listen = format!("--metrics-listen=127.0.0.1:{port}");
        let node = Node::prepare(sandbox, NodeSetup::new(sandbox).arg(&listen));
        let kubelet = node.kubelet.to_str().unwrap();
        run(&["mount", "--make-private", kubelet]);
        node.spawn();
        let ready = testkit::eventually("an answer", async || node.probe().await).await;
        assert!(!ready, "no pod would see the mounts");
        let answer = get(port, "/readyz").unwrap();
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("mountPropagation"), "{answer}");
        node.wait_for_log("mountPropagation").await;
    });
}

/// Given a volume's staging path and its device.
type MakeReadOnly<'a> = &'a dyn Fn(&Path, &Path);

/// The effect of `errors=remount-ro`: kernels before 6.14 make the superblock read-only,
/// later ones refuse writes and leave it as it is.
#[test]
fn a_file_system_made_read_only_by_an_error_is_reported_and_stays_published() {
    let error = |_: &Path, device: &Path| {
        let ext4 = Path::new("/sys/fs/ext4").join(device.file_name().unwrap());
        std::fs::write(ext4.join("trigger_fs_error"), "story").unwrap();
    };
    let remount = |staging: &Path, _: &Path| {
        run(&["mount", "-o", "remount,ro", staging.to_str().unwrap()]);
    };
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let ways: [(_, MakeReadOnly<'_>); 2] = [("new", &error), ("old", &remount)];
        for (name, make_read_only) in ways {
            let volume = sandbox.volume(name, "ext4").flags(&["errors=remount-ro"]);
            let target = node.up(&volume, "pod").await;
            node.publish_read_only(&volume, "reader").await.unwrap();
            let device = loops_over(&sandbox.image(&volume)).pop().unwrap();
            make_read_only(&node.staging(&volume), &device);
            eventually("health reports the error", async || {
                let health = node.health(&volume, &target).await.unwrap();
                let reported = health.iter().any(|entry| entry.reason == "ReadOnly");
                reported.then_some(())
            })
            .await;
            std::fs::write(target.join("file"), "").unwrap_err();

            node.stage(&volume).await.unwrap();
            node.publish(&volume, "pod").await.unwrap();
            node.publish_read_only(&volume, "reader").await.unwrap();
            let other = node.publish_read_only(&volume, "pod").await;
            refused(other, AlreadyExists, &["writable"]);
            let other = node.publish(&volume, "reader").await;
            refused(other, AlreadyExists, &["read-only"]);
            node.unpublish(&volume, "reader").await.unwrap();
            node.down(&volume, "pod").await;

            // The next stage repairs it.
            let target = node.up(&volume, "pod").await;
            std::fs::write(target.join("file"), "").unwrap();
            node.down(&volume, "pod").await;
        }
        node.assert_clean().await;
    });
}

#[test]
fn a_node_without_its_pool_or_clusters_is_not_ready_until_they_appear() {
    story(async |sandbox| {
        let port = free_port();
        let [config, pool] = ["clusters.json", "later"].map(|name| sandbox.dir().join(name));
        let mut setup = NodeSetup::new(sandbox)
            .arg(&format!("--metrics-listen=127.0.0.1:{port}"))
            .arg(&format!("--ceph-config={}", config.display()));
        setup.pools.push(format!("later={}", pool.display()));
        // Kubernetes restarts an agent whose probe is not ready, and a restart mounts no pool.
        let node = Node::start_with(sandbox, setup).await;
        let until = async |status: &str, words: &[&str]| {
            eventually(
                &format!("/readyz says {status} and {words:?}"),
                async || {
                    let answer = get(port, "/readyz").ok()?;
                    let fits = answer.starts_with(&format!("HTTP/1.1 {status}"))
                        && words.iter().all(|word| answer.contains(word));
                    fits.then_some(())
                },
            )
            .await;
        };
        let missing = [pool.to_str().unwrap(), config.to_str().unwrap()];
        until("503", &missing).await;
        for word in missing {
            node.wait_for_log(word).await;
        }
        assert_eq!(node.probe().await, Some(true));
        // Volumes of reachable pools and clusters work.
        let volume = sandbox.volume("v", "ext4");
        node.up(&volume, "pod").await;
        node.down(&volume, "pod").await;

        std::fs::create_dir(&pool).unwrap();
        std::fs::write(&config, r#"[{"clusterID": "no-monitors"}]"#).unwrap();
        until("503", &["no-monitors"]).await;
        std::fs::write(&config, "[").unwrap();
        until("503", &["clusters.json"]).await;
        std::fs::write(
            &config,
            r#"[{"clusterID": "a", "monitors": ["127.0.0.1:1"]}]"#,
        )
        .unwrap();
        until("200", &[]).await;
        std::fs::remove_dir(&pool).unwrap();
        until("503", &["later"]).await;
        node.assert_clean().await;
    });
}
