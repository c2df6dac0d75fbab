//! `uringctl doctor` with agents whose pools and clusters have faults.

use std::{
    io::Write as _,
    net::{Ipv4Addr, TcpListener},
    time::{Duration, Instant},
};

use serde_json::Value;
use testkit::{
    Controller, ControllerSetup, Node, NodeSetup, Sandbox, StuckFile, StuckTree, free_port, run,
    story,
};

use crate::operator::Operator;

/// What it says of `name`: the state, what it found, and the advice.
fn checked(doctor: &Value, name: &str) -> [String; 3] {
    let all = doctor["checks"].as_array().unwrap();
    let found = all.iter().find(|check| check["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no check of {name}: {doctor:#}"));
    ["state", "found", "advice"].map(|key| found[key].as_str().unwrap().to_owned())
}

/// Its checks; the machine of the test may be unfit in other respects.
fn doctor(operator: &Operator, node: &Node) -> Value {
    let kubelet = node.kubelet.to_str().unwrap();
    let (_, out, err) = operator.run(&["doctor", "--json", "--kubelet-dir", kubelet]);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

#[test]
fn doctor_names_each_pool_and_cluster_that_cannot_be_used() {
    story(async |sandbox| {
        // A monitor greets who connects (doc/dev/msgr2.rst).
        let monitor = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = monitor.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut client, _)) = monitor.accept() {
                let _ = client.write_all(b"ceph v2\n");
            }
        });
        let config = sandbox.dir().join("clusters.json");
        let clusters = format!(
            r#"[{{"clusterID": "east", "monitors": ["{address}"]}},
                {{"clusterID": "west", "monitors": ["127.0.0.1:{}"]}}]"#,
            free_port()
        );
        std::fs::write(&config, clusters).unwrap();
        let [read_only, missing] = ["read-only", "missing"].map(|name| sandbox.dir().join(name));
        std::fs::create_dir(&read_only).unwrap();
        let mut setup = NodeSetup::new(sandbox).arg(&format!("--ceph-config={}", config.display()));
        setup.pools.extend([
            format!("read-only={}", read_only.display()),
            format!("missing={}", missing.display()),
        ]);
        let path = read_only.to_str().unwrap();
        run(&["mount", "--bind", path, path]);
        run(&["mount", "-o", "remount,bind,ro", path]);
        let node = Node::start_with(sandbox, setup).await;
        let controller = Controller::start(sandbox).await;
        let operator = Operator::new(&node, &controller);
        operator.json(&["create", "v", "64Mi"]);

        let found = doctor(&operator, &node);
        for agent in ["node agent", "controller"] {
            let [state, main, advice] = checked(&found, &format!("{agent}: pool main"));
            assert!(state == "good" && advice.is_empty(), "{main}: {advice}");
            assert!(
                main.starts_with("writable, ") && main.contains(" free"),
                "{main}"
            );
        }
        for (name, words, advised) in [
            ("pool read-only", "Read-only", "writable"),
            ("pool missing", missing.to_str().unwrap(), "mount it"),
            ("cluster west", "no monitor answers", "--ceph-config"),
        ] {
            let [state, what, advice] = checked(&found, &format!("node agent: {name}"));
            assert!(
                state == "lacks" && what.contains(words),
                "{name}: {state} {what}"
            );
            assert!(advice.contains(advised), "{name}: {advice}");
        }
        let [state, what, _] = checked(&found, "node agent: cluster east");
        assert!(
            state == "good" && what.contains(&address.to_string()),
            "{what}"
        );

        run(&["umount", path]);
        std::fs::create_dir(&missing).unwrap();
        let found = doctor(&operator, &node);
        for pool in ["read-only", "missing"] {
            let [state, what, _] = checked(&found, &format!("node agent: pool {pool}"));
            assert_eq!(state, "good", "{what}");
        }
        operator.json(&["delete", "v"]);
        node.assert_clean().await;
    });
}

#[test]
fn doctor_waits_seconds_for_a_pool_that_hangs() {
    if !StuckFile::possible() {
        return;
    }
    story(async |sandbox: &Sandbox| {
        let hung = sandbox.pool("hung");
        let disk = StuckTree::new(&hung);
        let setup = ControllerSetup::new(sandbox).pool("hung", &hung);
        let node = Node::start(sandbox).await;
        let controller = Controller::start_with(sandbox, setup).await;
        let operator = Operator::new(&node, &controller);
        disk.stop_all();
        let begun = Instant::now();
        let found = doctor(&operator, &node);
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "{:?}",
            begun.elapsed()
        );
        let [state, what, advice] = checked(&found, "controller: pool hung");
        assert!(
            state == "lacks" && what.contains("has not answered"),
            "{state} {what}"
        );
        assert!(advice.contains("disk or server"), "{advice}");
        let [state, what, _] = checked(&found, "controller: pool main");
        assert_eq!(state, "good", "{what}");
        disk.resume();
        node.assert_clean().await;
    });
}
