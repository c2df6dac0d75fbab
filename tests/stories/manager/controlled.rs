//! Files by `uringctl apply` and `up`, also of volumes that the controller makes.

use std::{fs, path::PathBuf};

use serde_json::Value;
use testkit::{Content, Controller, MIB, SHARE, Sandbox, run, story};

use super::{
    super::{nfs_controller, operator::Operator},
    Machine, image,
};

#[test]
fn a_volume_that_up_makes_persists() {
    story(async |sandbox| {
        let (machine, _controller) = Machine::start_with_controller(sandbox).await;
        let operator = &machine.operator;
        let path = machine.path("data");
        let text = path.to_str().unwrap();
        let up = ["up", "data", "64Mi", text, "--persist"];
        // A file of that name that asks for another volume stays as it is.
        image(sandbox, "other");
        machine.write("data", &machine.file("other", "mount", ""));
        let (code, _, err) = operator.run(&up);
        assert!(code == 5 && err.contains("something else"), "{code}: {err}");
        machine.remove("data");
        machine.wait("data", "gone");

        let content = Content::new("persists");
        for _ in 0..2 {
            operator.json(&up);
            if !path.join("file").exists() {
                content.write(&path.join("file"));
            }
        }
        let held = operator.json(&["volumes"]);
        let id = held["volumes"][0]["volume_id"].as_str().unwrap().to_owned();
        for command in [
            &["down", "data"][..],
            &["unstage", &id],
            &["unpublish", &id, text],
        ] {
            let (code, _, err) = operator.run(command);
            assert_eq!(code, 5, "{command:?}: {err}");
            assert!(err.contains("uringctl remove data"), "{err}");
        }
        content.assert_in(&path.join("file"));

        let device = held["volumes"][0]["device"].as_str().unwrap();
        machine
            .reboot(|| drop(run(&["losetup", "--detach", device])))
            .await;
        machine.wait("data", "mounted");
        content.assert_in(&path.join("file"));

        // One that `up` holds without a file stays where it is.
        let plain = machine.path("plain");
        let plain = plain.to_str().unwrap();
        machine.operator.json(&["up", "plain", "64Mi", plain]);
        let again = ["up", "plain", "64Mi", plain, "--persist"];
        let (code, _, err) = machine.operator.run(&again);
        assert!(
            code == 5 && err.contains("staged by others"),
            "{code}: {err}"
        );
        machine.operator.json(&["down", "plain", "--delete"]);
        machine.operator.json(&["remove", "data"]);
        machine.wait("data", "gone");
        machine.operator.json(&["delete", "data"]);
        machine.node.assert_clean().await;
    });
}

#[test]
fn a_file_that_the_agent_would_refuse_is_not_written() {
    story(async |sandbox| {
        let (machine, _controller) = Machine::start_with_controller(sandbox).await;
        let operator = &machine.operator;
        for name in ["data", "other"] {
            let image = sandbox.volume_in("main", name, "ext4", 64 * MIB);
            machine.write(name, &machine.file_of(name, &image, ""));
            machine.wait(name, "mounted");
        }
        let at = |name: &str| machine.directory.join(format!("{name}.toml"));
        let good = fs::read_to_string(at("data")).unwrap();
        let file = sandbox.dir().join("data.toml");
        let refused = |text: &str, words: &str| {
            fs::write(&file, text).unwrap();
            let (code, _, err) = operator.run(&["apply", file.to_str().unwrap()]);
            assert!(code == 2 && err.contains(words), "{text}: {code}: {err}");
            assert_eq!(fs::read_to_string(at("data")).unwrap(), good);
        };
        let path = machine.path("data").display().to_string();
        let others = machine.path("other").display().to_string();
        refused(&good.replace(&path, "/nowhere/data"), "--allow-path");
        refused(&format!("{good}options = ['nonsense=1']\n"), "nonsense");
        refused(&good.replace("'loop'", "'lop'"), "lop");
        refused(&good.replace(&path, &others), "path: is that of other.toml");
        let handle = "handle = 'data'";
        assert!(good.contains(handle));
        refused(
            &good.replace(handle, "handle = 'other'"),
            "handle: is that of other.toml",
        );
        // No volume is created for such a file.
        let named = |path: &str, options: &str, parameters: &str| {
            format!(
                "size = '64Mi'\n[volume]\nname = 'new'\nparameters = {{ {parameters} }}\n\
                 [mount]\npath = '{path}'\noptions = [{options}]\n"
            )
        };
        refused(&named("/nowhere/data", "", ""), "--allow-path");
        refused(&named(&path, "'nfsvers=4.1'", ""), "nfsvers");
        let of_server = "server = '127.0.0.1', share = '/none'";
        refused(&named(&others, "'nfsvers=4.1'", of_server), "other.toml");
        let listed = operator.json(&["list"])["volumes"].to_string();
        assert!(!listed.contains("\"new\""), "{listed}");
        for name in ["data", "other"] {
            machine.remove(name);
            machine.wait(name, "gone");
        }
        machine.node.assert_clean().await;
    });
}

#[test]
fn a_file_names_a_volume_of_the_controller() {
    story(async |sandbox| {
        let (machine, _controller) = Machine::start_with_controller(sandbox).await;
        let operator = &machine.operator;
        let path = machine.path("data");
        let file = sandbox.dir().join("data.toml");
        let write = |size: &str, volume: &str| {
            let text = format!(
                "size = '{size}'\n[volume]\n{volume}\n[raw]\npath = '{}'\n",
                path.display()
            );
            fs::write(&file, text).unwrap();
        };
        let command = |command| operator.run(&[command, file.to_str().unwrap()]);
        let apply = || {
            let (code, _, err) = command("apply");
            assert_eq!(code, 0, "{err}");
            machine.wait("data", "mounted");
        };
        let volumes = || operator.json(&["list"])["volumes"].clone();

        write("64Mi", "name = 'data-1'");
        for of in ["plan", "apply"] {
            let (code, _, err) = command(of);
            assert!(code == 3 && err.contains("data-1"), "{of}: {code}: {err}");
        }
        write("64Mi", "name = 'data-1'\nparameters = {}");
        let (_, planned, _) = command("plan");
        assert!(planned.contains("create volume data-1"), "{planned}");
        assert_eq!(
            volumes(),
            Value::Array(Vec::new()),
            "a plan creates nothing"
        );
        apply();
        let content = Content::new("named");
        content.write_at(&path, MIB).unwrap();
        let one = volumes();
        assert_eq!(one[0]["name"], "data-1");
        // As after an uringctl that was killed before it wrote the file.
        machine.remove("data");
        machine.wait("data", "gone");
        apply();
        assert_eq!(volumes(), one);

        write("96Mi", "name = 'data-1'\nparameters = {}");
        apply();
        assert_eq!(volumes()[0]["capacity_bytes"], 96 * MIB);
        let size = run(&["blockdev", "--getsize64", path.to_str().unwrap()]);
        assert_eq!(size.trim(), (96 * MIB).to_string());
        // A smaller size is less than it has, other parameters are those of another volume.
        write("64Mi", "name = 'data-1'");
        apply();
        write("64Mi", "name = 'data-1'\nparameters.directIO = 'false'");
        let (code, _, err) = command("apply");
        assert!(code == 4 && err.contains("create data-1"), "{code}: {err}");
        content.assert_at(&path, MIB);

        // Whoever writes the agent's directory without uringctl learns what is missing.
        let text = fs::read_to_string(&file).unwrap();
        machine.write("data", &text);
        machine
            .wait_for("data", "bad", "`uringctl apply` asks")
            .await;
        operator.json(&["remove", "data"]);
        machine.wait("data", "gone");
        operator.json(&["delete", "data-1"]);
        machine.node.assert_clean().await;
    });
}

/// A controller of directories of a share, and a machine.
async fn over_share(sandbox: &Sandbox) -> (PathBuf, Controller, Machine) {
    let share = sandbox.dir().join("export");
    fs::create_dir(&share).unwrap();
    let controller = nfs_controller::over(sandbox, &share).await;
    (share, controller, Machine::start(sandbox).await)
}

/// The controller lists it without its name.
#[test]
fn a_directory_of_a_server_is_found_by_its_name_and_grown() {
    story(async |sandbox| {
        let (share, controller, machine) = over_share(sandbox).await;
        let operator = Operator::new(&machine.node, &controller);
        let file = sandbox.dir().join("data.toml");
        // Not that of the agent, which would try to mount it.
        let at = sandbox.dir().join("files");
        for size in ["64Mi", "128Mi", "96Mi"] {
            let text = format!(
                "size = '{size}'\n[volume]\nname = 'data-1'\n\
                 parameters = {{ server = '127.0.0.1', share = '{SHARE}' }}\n\
                 [mount]\npath = '{}'\n",
                machine.path("data").display()
            );
            fs::write(&file, text).unwrap();
            let file = file.to_str().unwrap();
            let (_, planned, _) = operator.run(&["plan", file]);
            assert!(
                planned.contains("find or create volume data-1"),
                "{planned}"
            );
            operator.json(&["apply", file, "--directory", at.to_str().unwrap()]);
        }
        assert!(share.join("data-1").exists());
        let written = fs::read_to_string(at.join("data.toml")).unwrap();
        assert!(written.contains("127.0.0.1#share#data-1##"), "{written}");
        machine.node.assert_clean().await;
    });
}

#[test]
fn a_volume_that_a_file_asks_for_is_not_deleted() {
    story(async |sandbox| {
        let (share, controller, machine) = over_share(sandbox).await;
        let operator = Operator::new(&machine.node, &controller);
        let claim = nfs_controller::claim("data", &[]);
        let made = controller.create(claim).await.expect("made");
        let path = machine.path("data");
        // No server answers there, so nothing of it is on the node yet.
        let text = format!(
            "handle = '{}'\n[source]\nbackend = 'nfs'\nserver = '127.0.0.1'\nshare = '{SHARE}'\n\
             subDir = 'data'\n[mount]\npath = '{}'\n",
            made.volume_id,
            path.display()
        );
        machine.write("mine", &text);
        machine.wait_for("mine", "failed", "").await;
        for delete in [&["delete"][..], &["down", "--delete"]] {
            let (code, _, err) = operator.run(&[delete, &[&made.volume_id]].concat());
            assert!(code == 5 && err.contains("mine.toml"), "{code}: {err}");
        }
        assert!(share.join("data").exists());
        machine.remove("mine");
        machine.wait("mine", "gone");
        operator.json(&["delete", &made.volume_id]);
        assert!(!share.join("data").exists());
        machine.node.assert_clean().await;
    });
}
