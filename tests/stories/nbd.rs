//! Exports of NBD servers, on a kernel that has the driver: servers that work, that stop
//! and restart, whose exports change, and that do not speak NBD.

mod growth;
mod killed;
mod lifecycle;
mod outages;
mod refusals;
mod restarts;

use testkit::{Content, KINDS, NbdServer, Node, Sandbox, Volume, kernel_has_nbd, story};

pub fn nbd_story(body: impl AsyncFnOnce(&Sandbox) + Send) {
    if kernel_has_nbd() {
        story(body);
    }
}

/// A name that no other story's volume has: an agent without a record finds a
/// device by its volume's handle.
pub fn own(sandbox: &Sandbox, name: &str) -> String {
    let dir = sandbox.dir().file_name().expect("a name").display();
    format!("{dir}.{name}")
}

/// A volume over the export of its own name, which is there already.
fn over(server: &NbdServer, name: &str, kind: &str) -> Volume {
    server.over(match kind {
        "block" => Volume::block(name),
        kind => Volume::filesystem(name, kind),
    })
}

/// A volume over a blank export of its own.
pub fn blank(sandbox: &Sandbox, server: &NbdServer, name: &str, kind: &str) -> Volume {
    let (_, bytes) = KINDS
        .iter()
        .find(|(known, _)| *known == kind)
        .expect("a kind");
    let name = own(sandbox, name);
    NbdServer::image(sandbox, &name, *bytes);
    over(server, &name, kind)
}

async fn health(node: &Node, volume: &Volume) -> Vec<String> {
    let path = node.target(volume, "pod");
    let found = node.health(volume, &path).await.expect("health");
    found.into_iter().map(|entry| entry.reason).collect()
}

/// Asserts that the content is there, on the server and not in a cache.
fn is_there(content: &Content, volume: &Volume, target: &std::path::Path) {
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("procfs");
    content.assert_kept(volume, target);
}

/// Two full lives; the second finds the data of the first.
async fn lifecycle(node: &Node, volume: &Volume) {
    let content = Content::new(&volume.handle);
    for round in 0..2 {
        let target = node.up(volume, "pod").await;
        if round == 0 {
            content.put(volume, &target);
        }
        is_there(&content, volume, &target);
        assert!(!node.stats(volume, &target).await.unwrap().is_empty());
        assert_eq!(health(node, volume).await, Vec::<String>::new());
        node.down(volume, "pod").await;
    }
}
