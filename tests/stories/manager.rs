//! The volume manager: files ask for volumes, and the agent makes them without a caller.

use std::{
    fs::{self, File},
    io,
    os::unix::{
        fs::{MetadataExt as _, symlink},
        net::UnixDatagram,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use testkit::{
    Content, Controller, MIB, NbdServer, NfsServer, Node, NodeSetup, Rng, SHARE, Sandbox, Volume,
    all_loops, can_use_nfs, eventually, kernel_has_nbd, loops_over, run, story,
};

use super::{
    nbd::own,
    nfs_controller,
    observability::{free_port, get},
    operator::Operator,
};

/// A node whose agent follows a directory, and an operator.
struct Machine {
    node: Node,
    operator: Operator,
    directory: PathBuf,
}

impl Machine {
    async fn start(sandbox: &Sandbox) -> Self {
        Self::start_with(sandbox, Self::setup(sandbox)).await
    }

    /// A node with a pool.
    fn setup(sandbox: &Sandbox) -> NodeSetup {
        let mut setup = NodeSetup::new(sandbox);
        setup.pools = vec![format!("main={},local", sandbox.pool("main").display())];
        setup
    }

    async fn start_with(sandbox: &Sandbox, setup: NodeSetup) -> Self {
        let directory = sandbox.dir().join("volumes");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join(".uring-csi-volumes"), "").unwrap();
        let setup = setup.arg(&format!("--volumes={}", directory.display()));
        let node = Node::start_with(sandbox, setup).await;
        let operator = Operator::with_sockets(node.socket(), node.socket());
        Self {
            node,
            operator,
            directory,
        }
    }

    /// With a controller, to which its operator talks, too.
    async fn start_with_controller(sandbox: &Sandbox) -> (Self, Controller) {
        let machine = Self::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let controller = Controller::start(sandbox).await;
        let operator = Operator::new(&machine.node, &controller);
        (
            Self {
                operator,
                ..machine
            },
            controller,
        )
    }

    /// Where a volume is to appear.
    fn path(&self, name: &str) -> PathBuf {
        self.node.kubelet.join(name)
    }

    /// The text of a file for the image of this name.
    fn file(&self, name: &str, access: &str, more: &str) -> String {
        let path = self.path(name);
        let path = path.display();
        format!(
            "[source]\nbackend = 'loop'\npool = 'main'\nimage = '{name}.img'\n\
             [{access}]\npath = '{path}'\n{more}\n"
        )
    }

    /// The text of a file for this volume.
    fn file_of(&self, name: &str, volume: &Volume, more: &str) -> String {
        let pairs = volume.context.iter();
        let source = pairs.map(|(key, value)| format!("{key} = '{value}'\n"));
        let source = source.collect::<Vec<_>>().concat();
        let (handle, path) = (&volume.handle, self.path(name));
        format!(
            "handle = '{handle}'\n[source]\n{source}[mount]\npath = '{}'\n{more}\n",
            path.display()
        )
    }

    fn write(&self, name: &str, text: &str) {
        let new = self.directory.join(".new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.directory.join(format!("{name}.toml"))).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.directory.join(format!("{name}.toml"))).unwrap();
    }

    #[track_caller]
    fn wait(&self, name: &str, until: &str) {
        let args = ["wait", name, "--for", until, "--timeout", "100s"];
        let (code, _, err) = self.operator.run(&args);
        assert_eq!(code, 0, "{err}");
    }

    /// What `uringctl wanted` has under this name; nothing while the agent starts.
    fn rows(&self, name: &str) -> Vec<Value> {
        let (code, listed, _) = self.operator.run(&["wanted", "--json"]);
        if code != 0 {
            return Vec::new();
        }
        let listed: Value = serde_json::from_str(&listed).expect("JSON");
        let rows = listed["volumes"].as_array().expect("volumes").iter();
        rows.filter(|row| row["name"] == name).cloned().collect()
    }

    /// Waits until `uringctl wanted` shows the volume in this state with these words.
    async fn wait_for(&self, name: &str, state: &str, words: &str) {
        eventually(&format!("{name} {state}: {words}"), async || {
            let is_it = |row: &Value| {
                let detail = row["detail"].as_str().unwrap_or_default();
                row["state"] == state && detail.contains(words)
            };
            self.rows(name).iter().any(is_it).then_some(())
        })
        .await;
    }
}

fn image(sandbox: &Sandbox, name: &str) -> PathBuf {
    sandbox.volume_in("main", name, "ext4", 64 * MIB);
    sandbox.pool("main").join(format!("{name}.img"))
}

/// The options of the mount at a path, and of its superblock; empty if there is none.
fn all_options_at(path: &Path) -> (String, String) {
    let mounts = run(&["cat", "/proc/self/mountinfo"]);
    let path = path.display().to_string();
    let fields = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let mut found = fields.filter(|fields| fields[4] == path);
    found
        .next()
        .map(|fields| (fields[5].to_owned(), fields[fields.len() - 1].to_owned()))
        .unwrap_or_default()
}

/// The options of the mount at a path; empty if there is none.
fn options_at(path: &Path) -> String {
    all_options_at(path).0
}

#[test]
fn a_file_asks_for_a_volume() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let path = machine.path("data");
        let content = Content::new("managed");
        let file = sandbox.dir().join("data.toml");
        let access = "fs = 'ext4'\nowner = '999:998'\nmode = '0750'";
        fs::write(&file, machine.file("data", "mount", access)).unwrap();
        let file = file.to_str().unwrap();
        let plan = |args: &[&str]| {
            let planned = machine.operator.json(&[&["plan"], args].concat());
            let volumes = planned["volumes"].as_array().expect("volumes");
            volumes.first().cloned().unwrap_or_default()
        };
        let new = plan(&[file]);
        assert_eq!(new["reason"], "data.toml asks for it");
        let actions = ["take over data.toml", "attach and mount", "publish"];
        assert_eq!(new["actions"], Value::from(actions.to_vec()));
        assert_eq!(plan(&[]), Value::Null, "nothing was written");
        machine.operator.json(&["apply", file]);
        machine.wait("data", "mounted");
        let (ready, actions) = (plan(&[]), plan(&[])["actions"].clone());
        assert_eq!(
            (&ready["state"], actions),
            (&"ready".into(), Value::Array(Vec::new()))
        );
        let root = fs::metadata(&path).unwrap();
        let access = (root.uid(), root.gid(), root.mode() & 0o7777);
        assert_eq!(access, (999, 998, 0o750));
        content.write(&path.join("file"));

        // Another setup: not while it is in use.
        let open = File::open(path.join("file")).unwrap();
        machine.write(
            "data",
            &machine.file("data", "mount", "options = ['nosuid', 'noexec']"),
        );
        machine.wait_for("data", "failed", "in use").await;
        assert!(!options_at(&path).contains("noexec"));
        drop(open);
        machine.wait("data", "mounted");
        assert!(options_at(&path).contains("noexec"));
        content.assert_in(&path.join("file"));

        // Unmounted by others, it comes back.
        run(&["umount", path.to_str().unwrap()]);
        eventually("mounted again", async || {
            path.join("file").exists().then_some(())
        })
        .await;

        // Another path, by a file of another name.
        let other = machine.path("other");
        let text = machine.file("data", "mount", "options = ['nosuid', 'noexec']");
        let text = text.replace(path.to_str().unwrap(), other.to_str().unwrap());
        machine.write("renamed", &format!("handle = 'data'\n{text}"));
        machine
            .wait_for("renamed", "bad", "handle: is that of data.toml")
            .await;
        machine.remove("data");
        machine.wait("renamed", "mounted");
        content.assert_in(&other.join("file"));
        assert!(!path.exists());
        assert_eq!(loops_over(&image).len(), 1);

        machine.operator.json(&["remove", "renamed"]);
        machine.wait("renamed", "gone");
        assert!(loops_over(&image).is_empty());
        machine.node.assert_clean().await;
    });
}

#[test]
fn options_change_while_the_volume_is_in_use() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let path = machine.path("data");
        let ask = |options: &str| {
            let options = format!("fs = 'ext4'\noptions = [{options}]");
            machine.write("data", &machine.file("data", "mount", &options));
        };
        let has = |option: &str| {
            let (mount, superblock) = all_options_at(&path);
            let mut all = mount.split(',').chain(superblock.split(','));
            all.any(|it| it == option)
        };
        ask("");
        machine.wait("data", "mounted");
        let content = Content::new("in use");
        content.write(&path.join("file"));
        let open = File::open(path.join("file")).unwrap();
        let loops = loops_over(&image);

        ask("'noexec', 'sync', 'commit=30'");
        machine.wait("data", "mounted");
        assert!(has("noexec") && has("sync") && has("commit=30"));
        ask("'commit=20'");
        machine.wait("data", "mounted");
        assert!(has("commit=20") && !has("noexec") && !has("sync"));
        // The kernel refuses this one, and a new mount waits for the user.
        ask("'commit=20', 'data=journal'");
        machine
            .wait_for("data", "failed", "keeps its options while it is mounted")
            .await;
        machine.wait_for("data", "failed", "needed since").await;
        ask("'commit=20'");
        machine.wait("data", "mounted");

        // Read-only, once nobody writes.
        let written = File::options()
            .append(true)
            .open(path.join("file"))
            .unwrap();
        ask("'commit=20', 'ro'");
        machine.wait_for("data", "failed", "open for writing").await;
        // Nothing was changed.
        ask("'commit=20'");
        machine.wait("data", "mounted");
        assert_eq!(loops_over(&image), loops);
        ask("'commit=20', 'ro'");
        machine.wait_for("data", "failed", "open for writing").await;
        drop(written);
        machine.wait("data", "mounted");
        let refused = fs::write(path.join("new"), "").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(loops_over(&image), loops);
        machine.node.kill9().await;
        machine.node.restart().await;
        machine.wait("data", "mounted");
        // Writable only by another stage.
        ask("'commit=20'");
        machine.wait_for("data", "failed", "in use").await;
        drop(open);
        machine.wait("data", "mounted");
        fs::write(path.join("new"), "").unwrap();
        content.assert_in(&path.join("file"));
        machine.remove("data");
        machine.wait("data", "gone");
        machine.node.assert_clean().await;
    });
}

#[test]
fn nothing_is_undone_that_may_be_wanted() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let node = &machine.node;
        for name in ["one", "two"] {
            image(sandbox, name);
            machine.write(name, &machine.file(name, "mount", ""));
            machine.wait(name, "mounted");
        }
        // Kubelet's volume, for which no file asks.
        let kubelets = sandbox.volume("kubelets", "ext4");
        let target = node.up(&kubelets, "pod").await;

        // A file that cannot be used any more.
        let text = machine.file("one", "mount", "option = 'noatime'");
        machine.write("one", &text);
        machine
            .wait_for("one", "bad", "line 7: unknown field `option`")
            .await;
        machine
            .wait_for("one", "blocked", "one.toml cannot be used")
            .await;
        // The directory is not the one that it was.
        let marker = machine.directory.join(".uring-csi-volumes");
        fs::remove_file(&marker).unwrap();
        machine.remove("two");
        machine
            .wait_for("two", "blocked", "has no file .uring-csi-volumes")
            .await;
        let moved = machine.directory.with_extension("moved");
        fs::rename(&machine.directory, &moved).unwrap();
        node.kill9().await;
        node.restart().await;
        machine.wait_for("two", "blocked", "cannot be read").await;
        // A new directory would be one without their files.
        let new = sandbox.dir().join("new.toml");
        fs::write(&new, machine.file("new", "mount", "")).unwrap();
        let new = new.to_str().unwrap();
        let at = machine.directory.to_str().unwrap();
        for apply in [&["apply", new][..], &["apply", new, "--directory", at]] {
            let (code, _, err) = machine.operator.run(apply);
            assert!(code == 5 && err.contains(at), "{code}: {err}");
        }
        assert!(!machine.directory.exists());
        for name in ["one", "two"] {
            assert_ne!(options_at(&machine.path(name)), "", "{name}");
        }
        // What is wanted no more goes, also if that was while no agent ran.
        node.kill9().await;
        fs::rename(&moved, &machine.directory).unwrap();
        machine.remove("one");
        fs::write(marker, "").unwrap();
        node.restart().await;
        machine.wait("one", "gone");
        machine.wait("two", "gone");
        assert!(!machine.path("one").exists() && !machine.path("two").exists());
        // Only what the manager has set up.
        assert_ne!(options_at(&target), "");
        machine.write(
            "mine",
            &format!("handle = 'kubelets'\n{}", machine.file("x", "mount", "")),
        );
        machine
            .wait_for("mine", "blocked", "staged by others")
            .await;
        machine.remove("mine");
        node.down(&kubelets, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn a_raw_volume_is_a_device_at_a_path() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "disk");
        machine.write("disk", &machine.file("disk", "raw", ""));
        machine.wait("disk", "mounted");
        let path = machine.path("disk");
        let content = Content::new("raw");
        content.write_at(&path, MIB).unwrap();
        // The lock is held, also after it was lost while no agent ran.
        let device = loops_over(&image).remove(0);
        let locks = || {
            let over = |on: &Path| on == path || on == device;
            let locks = all_loops().into_iter().filter(|(_, on)| over(on));
            locks.map(|(lock, _)| lock).collect::<Vec<_>>()
        };
        let locked_again = async || {
            eventually("locked", async || (locks().len() == 1).then_some(())).await;
        };
        assert_eq!(locks().len(), 1);
        machine.node.kill9().await;
        run(&["losetup", "--detach", locks()[0].to_str().unwrap()]);
        machine.node.restart().await;
        locked_again().await;
        // The lock of a path that others have unmounted goes.
        machine.node.kill9().await;
        let orphan = locks().remove(0);
        run(&["umount", "--lazy", path.to_str().unwrap()]);
        machine.node.restart().await;
        machine.wait("disk", "mounted");
        locked_again().await;
        eventually("released", async || {
            let is_orphan =
                |(lock, on): &(PathBuf, PathBuf)| *lock == orphan && on == Path::new("/");
            (!all_loops().iter().any(is_orphan)).then_some(())
        })
        .await;
        // It grows while it is in use.
        let open = File::open(&path).unwrap();
        let text = format!("size = '96Mi'\n{}", machine.file("disk", "raw", ""));
        machine.write("disk", &text);
        machine.wait("disk", "mounted");
        let size = run(&["blockdev", "--getsize64", path.to_str().unwrap()]);
        assert_eq!(size.trim(), (96 * MIB).to_string());
        // It stays while it is in use.
        machine.remove("disk");
        machine.wait_for("disk", "failed", "in use").await;
        assert_eq!(loops_over(&image).len(), 1);
        machine.write("disk", &text);
        machine.wait("disk", "mounted");
        locked_again().await;
        machine.remove("disk");
        machine.wait_for("disk", "failed", "in use").await;
        drop(open);
        machine.wait("disk", "gone");
        assert!(locks().is_empty());
        content.assert_at(&image, MIB);
        assert!(loops_over(&image).is_empty());
        machine.node.assert_clean().await;
    });
}

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

        // As after a reboot: nothing of the agent's but the file is left.
        machine.node.kill9().await;
        run(&["umount", text]);
        let staged = run(&[
            "findmnt",
            "--noheadings",
            "--list",
            "--output",
            "TARGET",
            "--types",
            "ext4",
        ]);
        for mount in staged.lines().filter(|line| line.contains("managed-")) {
            run(&["umount", mount.trim()]);
        }
        let device = held["volumes"][0]["device"].as_str().unwrap();
        run(&["losetup", "--detach", device]);
        for records in ["volumes", "managed"] {
            fs::remove_dir_all(machine.node.run_dir.join(records)).unwrap();
        }
        machine.node.restart().await;
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

#[test]
fn a_volume_that_a_file_asks_for_is_not_deleted() {
    story(async |sandbox| {
        let share = sandbox.dir().join("export");
        fs::create_dir(&share).unwrap();
        let controller = nfs_controller::over(sandbox, &share).await;
        let machine = Machine::start(sandbox).await;
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
fn a_mount_of_others_at_its_path_is_not_the_volume() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        image(sandbox, "data");
        let path = machine.path("data");
        let text = path.to_str().unwrap();
        machine.write("data", &machine.file("data", "mount", ""));
        machine.wait("data", "mounted");
        run(&["mount", "-t", "tmpfs", "others", text]);
        fs::write(path.join("theirs"), "").unwrap();
        machine
            .wait_for("data", "failed", "something else is mounted")
            .await;
        // Neither by another path, nor without its file.
        let new = machine.path("new").display().to_string();
        let moved = machine.file("data", "mount", "").replace(text, &new);
        machine.write("data", &moved);
        machine
            .wait_for("data", "failed", "something else is mounted")
            .await;
        assert_eq!(options_at(Path::new(&new)), "");
        machine.remove("data");
        machine
            .wait_for("data", "failed", "cannot unmount and detach")
            .await;
        assert!(path.join("theirs").exists());
        run(&["umount", text]);
        machine.wait("data", "gone");
        machine.node.assert_clean().await;
    });
}

#[test]
fn what_is_at_a_wrong_path_is_kept_and_keeps_no_volume() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let image = image(sandbox, "data");
        let right = machine.file("data", "mount", "");
        let (full, link) = (machine.path("full"), machine.path("link"));
        fs::create_dir(&full).unwrap();
        fs::write(full.join("theirs"), "").unwrap();
        symlink(&full, &link).unwrap();
        for (wrong, why) in [(&full, "is not empty"), (&link, "")] {
            let at = |path: &Path| format!("path = '{}'", path.display());
            let wrong = right.replace(&at(&machine.path("data")), &at(wrong));
            machine.write("data", &wrong);
            machine.wait_for("data", "failed", why).await;
            machine.write("data", &right);
            machine.wait("data", "mounted");
            machine.write("data", &wrong);
            machine.wait_for("data", "failed", why).await;
            assert_eq!(loops_over(&image).len(), 1);
            machine.remove("data");
            machine.wait("data", "gone");
            assert!(loops_over(&image).is_empty());
        }
        assert!(full.join("theirs").exists() && link.is_symlink());
        machine.node.assert_clean().await;
    });
}

/// An export and directories; the server of the directories dies and returns.
#[test]
fn a_dead_server_delays_no_other_volume() {
    if !kernel_has_nbd() || !can_use_nfs() {
        return;
    }
    story(async |sandbox| {
        let mut nfs = NfsServer::start(sandbox, "server").await;
        let nbd = NbdServer::start(sandbox).await;
        let machine = Machine::start_with(sandbox, NodeSetup::new(sandbox)).await;
        let directory = nfs.volume("directory", "directory");
        let late = nfs.volume("late", "late");
        let export = nbd.over(Volume::filesystem(&own(sandbox, "export"), "ext4"));
        NbdServer::image(sandbox, &export.handle, 64 * MIB);
        machine.write("directory", &machine.file_of("directory", &directory, ""));
        machine.wait("directory", "mounted");
        let content = Content::new("directory");
        content.write(&machine.path("directory").join("file"));

        nfs.kill9();
        machine.write("late", &machine.file_of("late", &late, ""));
        for options in ["", "options = ['noexec', 'sync']"] {
            machine.write("export", &machine.file_of("export", &export, options));
            machine.wait("export", "mounted");
        }
        let options = all_options_at(&machine.path("export"));
        assert!(options.0.contains("noexec") && options.1.contains("sync"));
        machine.remove("export");
        machine.wait("export", "gone");
        assert_eq!(options_at(&machine.path("late")), "");

        nfs.restart().await;
        machine.wait("late", "mounted");
        content.assert_in(&machine.path("directory").join("file"));
        for name in ["directory", "late"] {
            machine.remove(name);
            machine.wait(name, "gone");
        }
        machine.node.assert_clean().await;
    });
}

/// Kills the agent at one of its steps, while files come, change and go.
#[test]
fn an_agent_that_is_killed_continues() {
    story(async |sandbox| {
        let machine = Machine::start(sandbox).await;
        let node = &machine.node;
        image(sandbox, "steady");
        machine.write("steady", &machine.file("steady", "mount", ""));
        machine.wait("steady", "mounted");
        let steady = Content::new("steady");
        steady.write(&machine.path("steady").join("file"));
        let open = File::open(machine.path("steady").join("file")).unwrap();
        let data = image(sandbox, "data");
        let content = Content::new("data");
        let mut at = Rng::new().below(11);
        let mut has_content = false;
        loop {
            node.kill9().await;
            node.start_crashing_at(at).await;
            let mut crashed = false;
            for (state, more) in [
                ("mounted", ""),
                ("mounted", "options = ['noexec']"),
                ("gone", ""),
            ] {
                match state {
                    "gone" => machine.remove("data"),
                    _ => machine.write("data", &machine.file("data", "mount", more)),
                }
                eventually(state, async || {
                    if node.has_exited() {
                        assert!(!crashed, "it ends once");
                        crashed = true;
                        node.restart().await;
                    }
                    let args = ["wait", "data", "--for", state, "--timeout", "300ms"];
                    (machine.operator.run(&args).0 == 0).then_some(())
                })
                .await;
                let file = machine.path("data").join("file");
                if state == "mounted" {
                    if has_content {
                        content.assert_in(&file);
                    } else {
                        content.write(&file);
                        has_content = true;
                    }
                    assert_eq!(
                        options_at(&machine.path("data")).contains("noexec"),
                        !more.is_empty()
                    );
                } else {
                    assert!(!machine.path("data").exists());
                    assert!(loops_over(&data).is_empty());
                }
                steady.assert_in(&machine.path("steady").join("file"));
            }
            if !crashed {
                break;
            }
            at += 11;
        }
        // None at all in a build without debug assertions.
        assert!(at > 20, "there are more than {at} steps");
        // From here on it does not end.
        node.kill9().await;
        node.restart().await;
        drop(open);
        machine.remove("steady");
        machine.wait("steady", "gone");
        machine.node.assert_clean().await;
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
