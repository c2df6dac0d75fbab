//! The volume manager: files ask for volumes, and the agent makes them without a caller.

mod boot;
mod ceph;
mod changes;
mod controlled;
mod kept;
mod killed;
mod lifecycle;
mod servers;

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::statvfs;
use serde_json::Value;
use testkit::{
    Controller, MIB, Node, NodeSetup, Sandbox, Volume, eventually, files_below, mounts_below, run,
};

use super::operator::Operator;

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
        (machine.with_controller(&controller), controller)
    }

    /// Its operator talks to this controller, too.
    fn with_controller(self, controller: &Controller) -> Self {
        let operator = Operator::new(&self.node, controller);
        Self { operator, ..self }
    }

    /// As a reboot: of the agent's only the files are left. `detach` detaches the devices.
    async fn reboot(&self, detach: impl FnOnce()) {
        self.node.kill9().await;
        for dir in [&self.node.kubelet, &self.node.run_dir] {
            for mount in mounts_below(dir).iter().rev() {
                run(&["umount", mount.to_str().unwrap()]);
            }
        }
        detach();
        for file in files_below(&self.node.run_dir) {
            fs::remove_file(file).unwrap();
        }
        self.node.restart().await;
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

/// The bytes of a file system.
fn capacity(path: &Path) -> u64 {
    let stat = statvfs(path).unwrap();
    stat.f_blocks * stat.f_frsize
}
