//! The start and the shutdown of a machine.

use std::{
    fs::{self, File},
    os::unix::net::UnixDatagram,
    time::Duration,
};

use testkit::{eventually, free_port, loops_over, story};

use super::{super::observability::get, Machine, image, options_at};

#[test]
fn systemd_learns_when_the_wanted_volumes_are_there() {
    story(async |sandbox| {
        let port = free_port();
        let listen = format!("--metrics-listen=127.0.0.1:{port}");
        let setup = Machine::setup(sandbox).arg(&listen);
        let machine = Machine::start_with(sandbox, setup).await;
        let node = &machine.node;
        node.kill9().await;
        image(sandbox, "data");
        machine.write("data", &machine.file("data", "mount", ""));
        // No image: somebody has to make one.
        machine.write("none", &machine.file("none", "mount", ""));
        let socket = sandbox.dir().join("notify.sock");
        let systemd = UnixDatagram::bind(&socket).unwrap();
        systemd
            .set_read_timeout(Some(Duration::from_secs(100)))
            .unwrap();
        let next = || {
            let mut bytes = [0; 4096];
            let read = systemd.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..read]).into_owned()
        };
        node.start_notifying(&socket);
        let mut told = next();
        while !told.contains("READY=1") {
            told = next();
        }
        assert!(
            told.contains("STATUS=1 of 2 volumes ready; none: cannot attach"),
            "{told}"
        );
        assert_ne!(options_at(&machine.path("data")), "");
        eventually("one is there and one is not", async || {
            let metrics = get(port, "/metrics").unwrap_or_default();
            let has = |line: &str| metrics.lines().any(|it| it == line);
            let is_it = has("uring_csi_wanted_volumes{state=\"ready\"} 1")
                && has("uring_csi_wanted_volumes{state=\"failed\"} 1")
                && has("uring_csi_managed_volumes 1")
                && !has("uring_csi_wanted_volume_age_seconds 0");
            is_it.then_some(())
        })
        .await;
        image(sandbox, "none");
        while !told.contains("STATUS=2 of 2 volumes ready") {
            told = next();
            assert!(!told.contains("READY=1"), "once");
        }
        for name in ["data", "none"] {
            machine.remove(name);
            machine.wait(name, "gone");
        }
        node.assert_clean().await;
    });
}

#[test]
fn parked_volumes_are_gone_until_the_next_boot() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let (one, two) = (image(sandbox, "one"), image(sandbox, "two"));
        for name in ["one", "two"] {
            machine.write(name, &machine.file(name, "mount", ""));
        }
        for name in ["one", "two"] {
            machine.wait(name, "mounted");
        }
        let used = File::create(machine.path("two").join("file")).unwrap();
        let park = |timeout| machine.operator.run(&["park", "--timeout", timeout]);
        let (code, _, error) = park("2s");
        assert_eq!(code, 6, "{error}");
        assert!(error.contains("two is not gone yet"), "{error}");
        assert!(loops_over(&one).is_empty());
        drop(used);
        let (code, _, error) = park("60s");
        assert_eq!(code, 0, "{error}");
        assert!(loops_over(&two).is_empty());

        // An agent that was killed leaves them parked, and a new file asks for nothing.
        machine.node.kill9().await;
        machine.node.restart().await;
        image(sandbox, "three");
        machine.write("three", &machine.file("three", "mount", ""));
        eventually("the agent answers", async || {
            let (code, shown, _) = machine.operator.run(&["wanted"]);
            (code == 0 && shown.contains("parked")).then_some(())
        })
        .await;
        let (_, planned, _) = machine.operator.run(&["plan", "--json"]);
        assert!(!planned.contains("three"), "{planned}");
        let bad = sandbox.dir().join("bad.toml");
        fs::write(&bad, machine.file("bad", "mount", "options = ['no-such']")).unwrap();
        let (code, _, error) = machine.operator.run(&["apply", bad.to_str().unwrap()]);
        assert_eq!(code, 2, "{error}");

        let (code, _, error) = machine.operator.run(&["unpark"]);
        assert_eq!(code, 0, "{error}");
        for name in ["one", "two", "three"] {
            machine.wait(name, "mounted");
        }
    });
}
