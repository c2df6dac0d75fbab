//! Pools whose file system is not mounted.

use std::{fs, path::Path};

use testkit::{
    Controller, ControllerSetup, MIB, Node, Sandbox, Volume, claim, eventually, free_port, refused,
    run, story,
};
use tonic::Code::Unavailable;
use uring_csi::proto::csi::ListVolumesRequest;

use crate::{
    inline::{inline, publish, with_inline},
    observability::get,
};

/// The listener by which an agent reports whether it is ready.
struct Listener(u16);

impl Listener {
    fn arg(&self) -> String {
        format!("--metrics-listen=127.0.0.1:{}", self.0)
    }

    async fn says(&self, status: &str, word: &str) {
        eventually(&format!("/readyz says {status} and {word:?}"), async || {
            let answer = get(self.0, "/readyz").ok()?;
            let fits = answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(word);
            fits.then_some(())
        })
        .await;
    }
}

/// A directory that is bind-mounted in place of the file system of pool `main`.
struct Disk {
    real: String,
    pool: String,
}

impl Disk {
    fn of(sandbox: &Sandbox) -> Self {
        let [real, pool] = ["real", "main"].map(|name| sandbox.pool(name));
        let [real, pool] = [real, pool].map(|path| path.to_str().unwrap().to_owned());
        Self { real, pool }
    }

    fn mount(&self) {
        run(&["mount", "--bind", &self.real, &self.pool]);
    }

    /// Lazily: attached loop devices keep the file system in use.
    fn unmount(&self) {
        run(&["umount", "--lazy", &self.pool]);
    }

    fn assert_empty(&self) {
        assert_eq!(fs::read_dir(&self.pool).unwrap().count(), 0);
    }
}

#[test]
fn an_unmounted_pool_is_unavailable_to_a_node() {
    story(async |sandbox| {
        let (disk, listener) = (Disk::of(sandbox), Listener(free_port()));
        disk.mount();
        let setup = with_inline(sandbox).arg(&listener.arg());
        let node = Node::start_with(sandbox, setup).await;
        let [first, second] = ["first", "second"].map(inline);
        let claimed = sandbox.volume_in("main", "static", "ext4", 64 * MIB);
        node.send_publish(publish(&node, &first)).await.unwrap();

        disk.unmount();
        for _ in 0..2 {
            let answer = node.send_publish(publish(&node, &second)).await;
            refused(answer, Unavailable, &["is it mounted?"]);
        }
        refused(node.stage(&claimed).await, Unavailable, &["is it mounted?"]);
        listener.says("503", "is it mounted?").await;
        disk.assert_empty();

        disk.mount();
        listener.says("200", "").await;
        node.send_publish(publish(&node, &second)).await.unwrap();
        for volume in [&first, &second] {
            node.unpublish(volume, "pod").await.unwrap();
        }
        node.up(&claimed, "pod").await;
        node.down(&claimed, "pod").await;
        node.assert_clean().await;
    });
}

#[test]
fn an_unmounted_pool_is_unavailable_to_a_controller() {
    story(async |sandbox| {
        let (disk, listener) = (Disk::of(sandbox), Listener(free_port()));
        let setup = ControllerSetup {
            args: vec![listener.arg()],
            ..ControllerSetup::new(sandbox)
        };
        let controller = Controller::start_with(sandbox, setup).await;
        // By then the controller has read the directory.
        listener.says("200", "").await;
        disk.assert_empty();

        disk.mount();
        let capability = Volume::filesystem("any", "ext4").capability;
        let request = claim("pvc", "main", &capability, 64 * MIB);
        let made = controller.create(request.clone()).await.unwrap();
        disk.unmount();
        refused(
            controller.create(request.clone()).await,
            Unavailable,
            &["is it mounted?"],
        );
        // A success would leak the volume: a caller does not repeat a delete that succeeded.
        let answer = controller.delete(&made.volume_id).await;
        refused(answer, Unavailable, &["is it mounted?"]);
        listener.says("503", "is it mounted?").await;
        let mut client = controller.client();
        let listed = client.list_volumes(ListVolumesRequest::default());
        refused(listed.await, Unavailable, &["is it mounted?"]);
        disk.assert_empty();

        disk.mount();
        let again = controller.create(request).await.unwrap();
        assert_eq!(again.volume_id, made.volume_id);
        controller.delete(&made.volume_id).await.unwrap();
        let image = Path::new(&disk.real).join(&made.volume_context["image"]);
        assert!(!image.exists());
    });
}

/// An agent that has never seen the pool cannot distinguish its mount point from it.
#[test]
fn a_pool_that_must_be_mounted_is_unavailable_until_it_is() {
    story(async |sandbox| {
        let (disk, listener) = (Disk::of(sandbox), Listener(free_port()));
        let mut setup = with_inline(sandbox).arg(&listener.arg());
        setup.pools[0].push_str(",mounted");
        let node = Node::start_with(sandbox, setup).await;
        let volume = inline("v");
        let answer = node.send_publish(publish(&node, &volume)).await;
        refused(answer, Unavailable, &["nothing is mounted", &disk.pool]);
        listener.says("503", "nothing is mounted").await;
        disk.assert_empty();

        disk.mount();
        listener.says("200", "").await;
        node.send_publish(publish(&node, &volume)).await.unwrap();
        node.unpublish(&volume, "pod").await.unwrap();
        disk.unmount();
        node.assert_clean().await;
    });
}
