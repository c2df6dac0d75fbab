//! An operator with uringctl on one machine, without Kubernetes.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use testkit::{
    Content, Controller, ControllerSetup, Node, NodeSetup, Sandbox, StuckFile, StuckTree,
    eventually, program, refused, request, run, story,
};
use tonic::Code::{DeadlineExceeded, Unavailable};
use uring_csi::proto::csi::{
    CreateVolumeGroupSnapshotRequest, ListSnapshotsRequest, ListVolumesRequest,
    group_controller_client::GroupControllerClient,
};

/// uringctl with the sockets of a story's agents.
pub struct Operator {
    endpoints: [String; 4],
}

impl Operator {
    pub fn new(node: &Node, controller: &Controller) -> Self {
        Self::with_sockets(node.socket(), controller.socket())
    }

    pub fn with_sockets(node: &Path, controller: &Path) -> Self {
        let endpoint = |socket: &Path| format!("unix://{}", socket.display());
        Self {
            endpoints: [
                "--node-endpoint".to_owned(),
                endpoint(node),
                "--controller-endpoint".to_owned(),
                endpoint(controller),
            ],
        }
    }

    /// The exit code, stdout and stderr.
    pub fn run(&self, args: &[&str]) -> (i32, String, String) {
        Self::end(self.start(args))
    }

    /// Starts a command whose end is for later.
    pub fn start(&self, args: &[&str]) -> Child {
        Command::new(program("uringctl"))
            .args(&self.endpoints)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("uringctl")
    }

    /// What it ended with, as [`Operator::run`].
    pub fn end(started: Child) -> (i32, String, String) {
        let output = started.wait_with_output().expect("uringctl");
        let [out, err] = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code().expect("no signal"), out, err)
    }

    /// The JSON answer of a command that must succeed.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let (code, out, err) = self.run(&[args, &["--json"]].concat());
        assert_eq!(code, 0, "{args:?}: {err}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args:?}: {error}: {out}"))
    }
}

/// A node, a controller, and an operator of both.
pub async fn machine(sandbox: &Sandbox) -> (Node, Controller, Operator) {
    let mut setup = NodeSetup::new(sandbox);
    setup.pools = vec![format!("main={},shared", sandbox.pool("main").display())];
    let node = Node::start_with(sandbox, setup).await;
    let controller = Controller::start(sandbox).await;
    let operator = Operator::new(&node, &controller);
    (node, controller, operator)
}

#[test]
fn uringctl_up_and_down() {
    story(async |sandbox| {
        let (node, _controller, operator) = machine(sandbox).await;
        let path = node.kubelet.join("data");
        let text = path.to_str().unwrap();
        let content = Content::new("operator");
        for _ in 0..2 {
            let done = operator.json(&["up", "data-1", "64Mi", text, "--fs", "ext4"]);
            let steps: Vec<_> = done["steps"].as_array().unwrap().iter().collect();
            assert_eq!(steps.len(), 3, "{done}");
            assert_eq!(steps[1]["name"], "stage");
        }
        content.write(&path.join("file"));

        let held = operator.json(&["volumes"]);
        assert!(held.to_string().contains("/dev/loop"), "{held}");
        let stats = operator.json(&["stats", "data-1"]);
        assert!(stats.to_string().contains("inodes"), "{stats}");
        operator.json(&["health"]);
        operator.json(&["info"]);
        let (code, out, _) = operator.run(&["list"]);
        assert!(code == 0 && out.contains("data-1"), "{out}");

        // In use: not to be deleted, and the exit code says why.
        let (code, _, err) = operator.run(&["delete", "data-1"]);
        assert_eq!(code, 5, "{err}");
        assert!(err.contains(text), "{err}");

        operator.json(&["down", text]);
        assert!(!path.exists());
        operator.json(&["up", "data-1", "64Mi", text, "--fs", "ext4"]);
        content.assert_in(&path.join("file"));
        operator.json(&["down", "data-1", "--delete"]);
        assert!(!operator.run(&["list"]).1.contains("data-1"));
        node.assert_clean().await;
    });
}

#[test]
fn exit_codes_distinguish_kinds_of_errors() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let path = node.kubelet.join("data");
        let path = path.to_str().unwrap();
        for (code, args) in [
            (2, &["up", "v", "lots", path][..]),
            (2, &["create", "v", "10"][..]),
            (2, &["up", "v", "64Mi", path, "--pool", "none"][..]),
            (2, &["up", "v", "64Mi", "/etc/data"][..]),
            (3, &["stats", "none"][..]),
            (3, &["delete", "none"][..]),
            (3, &["down", "none"][..]),
        ] {
            let (found, _, err) = operator.run(args);
            assert_eq!(found, code, "{args:?}: {err}");
            assert!(!err.is_empty());
        }
        operator.json(&["down", "v", "--delete"]);
        operator.json(&["create", "v", "64Mi"]);
        let (code, _, err) = operator.run(&["create", "v", "128Mi"]);
        assert_eq!(code, 4, "{err}");
        // What was done before an error is said.
        let (code, out, err) = operator.run(&["delete", "v", "none"]);
        assert!(code == 3 && err.contains("none"), "{code}: {err}");
        assert!(out.starts_with("deleted "), "{out}");

        let (code, _, err) = operator.run(&["create", "huge", "1Ei"]);
        assert_eq!(code, 7, "{err}");
        // A script gets an error as JSON.
        let (code, _, err) = operator.run(&["delete", "none", "--json"]);
        let error: Value = serde_json::from_str(&err).unwrap();
        assert_eq!(error["exit_code"], code, "{err}");
        assert!(error["error"].to_string().contains("none"), "{err}");

        operator.json(&["up", "v", "64Mi", path]);
        controller.terminate();
        controller.wait_for_exit().await;
        let (code, _, err) = operator.run(&["list"]);
        assert_eq!(code, 8, "{err}");
        assert!(err.contains("uring-csi-controller"), "{err}");
        // The node knows the names of its volumes without a controller.
        let held = operator.json(&["volumes"]);
        assert_eq!(held["volumes"][0]["name"], "v", "{held}");
        let (code, _, err) = operator.run(&["down", "none"]);
        assert_eq!(code, 8, "{err}");
        operator.json(&["down", "v"]);
        node.assert_clean().await;
    });
}

#[test]
fn what_was_done_is_said() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        let path = node.kubelet.join("data");
        let text = path.to_str().unwrap();
        // The steps before the one that failed, also as JSON.
        let (code, out, _) = operator.run(&["up", "data", "64Mi", "/etc/data"]);
        assert!(code == 2 && out.contains("stage"), "{code}: {out}");
        let (code, out, err) = operator.run(&["up", "data", "64Mi", "/etc/data", "--json"]);
        let done: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (code, done["steps"][1]["name"].as_str()),
            (2, Some("stage")),
            "{out}"
        );
        assert!(err.starts_with('{'), "{err}");

        operator.json(&["up", "data", "64Mi", text]);
        // The process that keeps a target busy is named.
        let file = std::fs::File::create(path.join("file")).unwrap();
        let process = format!("process {} (", std::process::id());
        let (code, _, err) = operator.run(&["unpublish", "data", text]);
        assert!(code == 6 && err.contains(&process), "{code}: {err}");
        let (code, out, err) = operator.run(&["down", "data"]);
        assert!(code == 6 && err.contains(&process), "{code}: {out}{err}");
        drop(file);

        let (code, out, _) = operator.run(&["expand", "data", "32Mi"]);
        let is_less = out.contains("has 64Mi, more than 32Mi");
        assert!(code == 0 && is_less, "{code}: {out}");

        for (done, args) in [
            ("unpublished", &["unpublish", "data", text][..]),
            ("unstaged", &["unstage", "data"][..]),
        ] {
            let (code, out, _) = operator.run(args);
            assert!(
                code == 0 && out.contains(&format!("data {done} at")),
                "{out}"
            );
            let (code, out, _) = operator.run(args);
            let already = format!("data was {done} already at");
            assert!(code == 0 && out.contains(&already), "{out}");
        }
        let log = node.log();
        for line in ["staged", "published", "unpublished", "unstaged"] {
            assert!(log.contains(&format!(" {line} ")), "{line}: {log}");
        }
        assert!(log.contains("formatted=true device=/dev/loop"), "{log}");
        assert!(controller.log().contains("created an image"));
        operator.json(&["delete", "data"]);

        // A socket of the other agent.
        let swapped = Operator::with_sockets(controller.socket(), node.socket());
        for args in [&["list"][..], &["volumes"][..]] {
            let (code, _, err) = swapped.run(args);
            assert!(
                code == 1 && err.contains("names another"),
                "{args:?}: {code}: {err}"
            );
        }
        node.assert_clean().await;
    });
}

#[test]
fn an_image_that_was_renamed_or_deleted_is_unhealthy() {
    story(async |sandbox| {
        let (node, _controller, operator) = machine(sandbox).await;
        let path = node.kubelet.join("data");
        operator.json(&["up", "data", "64Mi", path.to_str().unwrap()]);
        operator.json(&["health"]);
        let pool = sandbox.pool("main");
        let images = std::fs::read_dir(&pool).unwrap().flatten();
        let mut images = images.map(|entry| entry.path());
        let image = images.find(|path| path.is_file()).unwrap();
        let other = image.with_extension("other");
        std::fs::rename(&image, &other).unwrap();
        let (code, out, err) = operator.run(&["health"]);
        assert!(code == 9 && err.contains("data"), "{code}: {err}");
        assert!(
            out.contains("ImageRenamed") && out.contains(".other now"),
            "{out}"
        );
        std::fs::rename(&other, &image).unwrap();
        operator.json(&["health"]);

        std::fs::remove_file(&image).unwrap();
        let (code, out, _) = operator.run(&["health", "--json"]);
        let unhealthy: Value = serde_json::from_str(&out).unwrap();
        let status = &unhealthy["volumes"][0]["conditions"][0]["status"];
        assert_eq!((code, status.as_str()), (9, Some("data_loss")), "{out}");
        operator.json(&["down", "data", "--delete"]);
        node.assert_clean().await;
    });
}

#[test]
fn snapshots_have_names() {
    story(async |sandbox| {
        let (node, _controller, operator) = machine(sandbox).await;
        operator.json(&["create", "data", "64Mi"]);
        for name in ["first", "second"] {
            let taken = operator.json(&["snapshot", "create", "data", name]);
            assert_eq!(taken["snapshots"][0]["name"], name, "{taken}");
        }
        let (_, text, _) = operator.run(&["snapshot", "list"]);
        assert!(text.starts_with("NAME "), "{text}");
        assert!(
            text.contains("\nfirst ") || text.contains("\nsecond "),
            "{text}"
        );
        operator.json(&["create", "copy", "64Mi", "--from-snapshot", "first"]);
        for args in [
            &["snapshot", "delete", "none"][..],
            &["create", "other", "64Mi", "--from-snapshot", "none"][..],
        ] {
            let (code, _, err) = operator.run(args);
            assert!(code == 3 && err.contains("none"), "{args:?}: {code}: {err}");
        }
        // What was done before an error is said, and the rest stays.
        let (code, out, _) = operator.run(&["snapshot", "delete", "first", "none", "second"]);
        assert!(code == 3 && out.starts_with("deleted "), "{code}: {out}");
        let left = operator.json(&["snapshot", "list"]);
        assert_eq!(left["snapshots"].as_array().unwrap().len(), 1, "{left}");
        assert_eq!(left["snapshots"][0]["name"], "second", "{left}");
        let id = left["snapshots"][0]["snapshot_id"].as_str().unwrap();
        let gone = operator.json(&["snapshot", "delete", id]);
        assert_eq!(gone["deleted"][0], id, "{gone}");
        operator.json(&["delete", "data", "copy"]);
        node.assert_clean().await;
    });
}

/// With a pool `hung`, whose disk may be stopped.
async fn with_pool_to_hang(sandbox: &Sandbox) -> (StuckTree, Node, Controller) {
    let hung = sandbox.pool("hung");
    let disk = StuckTree::new(&hung);
    let node = Node::start(sandbox).await;
    let setup = ControllerSetup::new(sandbox).pool("hung", &hung);
    (disk, node, Controller::start_with(sandbox, setup).await)
}

#[test]
fn an_incomplete_list_names_the_hung_pool() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let (disk, node, controller) = with_pool_to_hang(sandbox).await;
        let operator = Operator::new(&node, &controller);
        operator.json(&["create", "here", "64Mi", "--pool", "main"]);
        operator.json(&["snapshot", "create", "here", "as-it-was"]);
        disk.stop_all();
        // The hanging call of the first does not delay the others.
        for (args, shown) in [
            (&["list"][..], "here"),
            (&["snapshot", "list"], "here"),
            (&["list"], "here"),
        ] {
            let (code, out, err) = operator.run(args);
            assert_eq!(code, 1, "{args:?}: {err}");
            assert!(out.contains(shown), "{args:?}: {out}");
            let warning = "pool \"hung\" has not answered";
            assert!(err.contains(warning) && err.contains("incomplete"), "{err}");
        }
        // A caller that accepts no incomplete list gets an error that names the pool.
        let whole = request(ListVolumesRequest::default(), Duration::from_secs(4));
        let answer = controller.client().list_volumes(whole).await;
        refused(answer, DeadlineExceeded, &["pool \"hung\""]);
        disk.resume();
        operator.json(&["snapshot", "delete", "as-it-was"]);
        operator.json(&["delete", "here"]);
        node.assert_clean().await;
    });
}

#[test]
fn a_hung_pool_delays_no_create_in_another() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let (disk, node, controller) = with_pool_to_hang(sandbox).await;
        let operator = Operator::new(&node, &controller);
        disk.stop_all();
        operator.json(&["create", "v", "64Mi", "--pool", "main"]);
        let other = operator.json(&["create", "other", "64Mi", "--pool", "main"]);
        let other = other["volume_id"].as_str().unwrap();
        // uringctl would look for the name in all pools.
        let snapshot = controller.snapshot(other, "as-it-was").await.unwrap();
        let message = CreateVolumeGroupSnapshotRequest {
            name: "group".to_owned(),
            source_volume_ids: vec![other.to_owned()],
            ..Default::default()
        };
        let mut client = GroupControllerClient::new(controller.channel());
        let taken = client.create_volume_group_snapshot(message).await.unwrap();
        let group = taken.into_inner().group_snapshot.unwrap();
        disk.resume();
        operator.json(&["snapshot", "group", "delete", &group.group_snapshot_id]);
        controller
            .delete_snapshot(&snapshot.snapshot_id)
            .await
            .unwrap();
        operator.json(&["delete", "v", "other"]);
        node.assert_clean().await;
    });
}

#[test]
fn group_snapshots_are_listed_and_deleted() {
    story(async |sandbox| {
        let (node, controller, operator) = machine(sandbox).await;
        operator.json(&["create", "v", "64Mi"]);
        let other = operator.json(&["create", "other", "64Mi"]);
        operator.json(&["snapshot", "create", "v", "alone"]);
        let empty = operator.json(&["snapshot", "group", "list"]);
        assert_eq!(empty["groups"], serde_json::json!([]));
        let listed = operator.json(&["list"]);
        let ids = listed["volumes"].as_array().unwrap().iter();
        let ids = ids.map(|one| one["volume_id"].as_str().unwrap().to_owned());
        let message = CreateVolumeGroupSnapshotRequest {
            name: "both".to_owned(),
            source_volume_ids: ids.collect(),
            ..Default::default()
        };
        let mut client = GroupControllerClient::new(controller.channel());
        let taken = client.create_volume_group_snapshot(message).await.unwrap();
        let taken = taken.into_inner().group_snapshot.unwrap();
        let groups = operator.json(&["snapshot", "group", "list"]);
        assert_eq!(groups["groups"].as_array().unwrap().len(), 1, "{groups}");
        let group = &groups["groups"][0];
        assert_eq!(group["group_snapshot_id"], taken.group_snapshot_id);
        assert_eq!(group["snapshot_ids"].as_array().unwrap().len(), 2);
        let created = taken.creation_time.unwrap().seconds;
        assert_eq!(group["creation_time"], created);
        let (_, text, _) = operator.run(&["snapshot", "group", "list"]);
        assert!(text.contains(&taken.group_snapshot_id), "{text}");
        let delete = ["snapshot", "group", "delete", &taken.group_snapshot_id];
        operator.json(&delete);
        let (code, _, error) = operator.run(&delete);
        assert_eq!(code, 3, "{error}");
        assert!(error.contains("no group snapshot has the id"), "{error}");
        let groups = operator.json(&["snapshot", "group", "list"]);
        assert_eq!(groups["groups"], serde_json::json!([]));
        let alone = operator.json(&["snapshot", "list"]);
        assert_eq!(alone["snapshots"].as_array().unwrap().len(), 1);
        let alone = alone["snapshots"][0]["snapshot_id"].as_str().unwrap();
        operator.json(&["snapshot", "delete", alone]);
        operator.json(&["delete", "v", other["volume_id"].as_str().unwrap()]);
        node.assert_clean().await;
    });
}

#[test]
fn a_copy_under_way_is_shown_as_not_ready() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox| {
        let node = Node::start(sandbox).await;
        let controller = Controller::start(sandbox).await;
        let operator = Operator::new(&node, &controller);
        let source = operator.json(&["create", "source", "64Mi"]);
        let claims = sandbox.pool("main").join(".uring-csi/claims");
        std::fs::create_dir_all(&claims).unwrap();
        // A copy claims its source first.
        let stuck = StuckTree::new(&claims);
        stuck.stop_all();
        let copies = [
            operator.start(&["snapshot", "create", "source", "as-it-was"]),
            operator.start(&["clone", "source", "copy"]),
        ];
        let listed = eventually("the copies are listed", async || {
            let snapshots = operator.json(&["snapshot", "list"]);
            let volumes = operator.json(&["list"]);
            let both = snapshots["snapshots"][0].is_object() && volumes["copies"][0].is_object();
            both.then_some((snapshots, volumes))
        });
        let (snapshots, volumes) = listed.await;
        let snapshot = &snapshots["snapshots"][0];
        assert_eq!(snapshot["ready_to_use"], false, "{snapshots}");
        assert_eq!(snapshot["copied_bytes"], 0, "{snapshots}");
        assert_eq!(snapshot["source_volume_id"], source["volume_id"]);
        assert_eq!(volumes["volumes"].as_array().unwrap().len(), 1);
        assert_eq!(volumes["copies"][0]["name"], "copy");
        let (_, text, _) = operator.run(&["snapshot", "list"]);
        assert!(text.contains("no, 0 of 64Mi copied"), "{text}");
        let (_, text, _) = operator.run(&["list"]);
        assert!(text.contains("copy: 0 of 64Mi copied"), "{text}");
        // What is not complete is in no list of CSI.
        let all = request(ListSnapshotsRequest::default(), Duration::from_secs(60));
        let all = controller.client().list_snapshots(all).await.unwrap();
        assert!(all.into_inner().entries.is_empty());

        run(&["umount", "-l", claims.to_str().unwrap()]);
        drop(stuck);
        let _ = copies.map(Operator::end);
        operator.json(&["snapshot", "create", "source", "as-it-was"]);
        operator.json(&["clone", "source", "copy"]);
        let snapshots = operator.json(&["snapshot", "list"]);
        assert_eq!(
            snapshots["snapshots"][0]["ready_to_use"], true,
            "{snapshots}"
        );
        assert_eq!(operator.json(&["list"])["copies"], Value::Null);
        operator.json(&["snapshot", "delete", "as-it-was"]);
        operator.json(&["delete", "source", "copy"]);
        node.assert_clean().await;
    });
}

#[test]
fn an_incomplete_list_names_what_is_unreachable() {
    story(async |sandbox| {
        let mut setup = NodeSetup::new(sandbox);
        setup.pools = vec![format!("main={},shared", sandbox.pool("main").display())];
        let node = Node::start_with(sandbox, setup).await;
        let away = sandbox.pool("away");
        let setup = ControllerSetup::new(sandbox).pool("away", &away);
        let controller = Controller::start_with(sandbox, setup).await;
        let operator = Operator::new(&node, &controller);
        operator.json(&["create", "here", "64Mi", "--pool", "main"]);
        operator.json(&["create", "there", "64Mi", "--pool", "away"]);
        let whole = operator.json(&["list"]);
        assert_eq!(whole["volumes"].as_array().unwrap().len(), 2, "{whole}");
        assert!(whole.get("omitted").is_none(), "{whole}");

        std::fs::rename(&away, away.with_extension("moved")).unwrap();
        let (code, out, err) = operator.run(&["list"]);
        assert_eq!(code, 1, "{err}");
        assert!(out.contains("here") && !out.contains("there"), "{out}");
        assert!(err.contains("away") && err.contains("incomplete"), "{err}");
        let (code, out, _) = operator.run(&["list", "--json"]);
        assert_eq!(code, 1);
        let part: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(part["volumes"].as_array().unwrap().len(), 1, "{part}");
        assert!(part["omitted"].to_string().contains("away"), "{part}");
        // A sidecar would take a missing volume for a deleted one.
        let message = ListVolumesRequest::default();
        let answer = controller.client().list_volumes(message).await;
        refused(answer, Unavailable, &["away"]);
        // So would a lookup by name.
        let (code, _, err) = operator.run(&["delete", "there"]);
        assert_ne!(code, 3, "{err}");
        std::fs::rename(away.with_extension("moved"), &away).unwrap();
        operator.json(&["delete", "here", "there"]);
        node.assert_clean().await;
    });
}
