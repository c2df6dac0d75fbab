//! Nodes that do not let go of a volume. A node is a connection of librbd's here;
//! what the kernel's client does is told by stories.

use super::*;
use crate::ceph::{
    client::rbd::{Image, OpenMode},
    fencing::{
        CephClient, Fence, Fences, NodeEntry, Published, RegisteredNodes, STARTS_WITHIN, Starting,
        Through, host_of,
    },
};

/// Longer than anything here takes.
const PATIENTLY: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_millis(300);

/// A node that has a volume.
struct Node {
    image: Image,
    client: CephClient,
}

impl Node {
    fn is_fenced(&self) -> bool {
        let written = self.image.metadata_set("key", "value");
        written.is_err_and(|error| error.is_blocklisted())
    }
}

struct Fenced {
    home: Home,
    volume: VolumeInfo,
}

impl Fenced {
    async fn new() -> Option<Self> {
        let mut home = Home::new()?;
        home.rbd = rbd_fencing(home.dir.path(), Some(GRACE));
        assert!(home.rbd.abilities().publishes);
        let volume = home.make(home.volume("v", MIB)).await;
        Some(Self { home, volume })
    }

    /// Somebody has the image open.
    fn open(&self) -> Node {
        let name = &self.volume.context["imageName"];
        let image = Image::open(&self.home.io(), name, OpenMode::ReadWrite).unwrap();
        let own = image.watchers().unwrap().into_iter().find(|one| one.own);
        let client = CephClient {
            address: own.unwrap().address,
            boot_id: "boot".to_owned(),
            through: Through::OwnKrbd,
            process: None,
        };
        Node { image, client }
    }

    /// The node enters its client; whether it may have the volume.
    fn enter(&self, node: &str, has: &Node) -> bool {
        let entry = has.client.clone().into();
        self.nodes().attach(node, &entry, Published::Now).unwrap()
    }

    fn nodes(&self) -> RegisteredNodes {
        let handle = &self.volume.handle;
        let uuid = handle[handle.len() - 36..].parse().unwrap();
        RegisteredNodes::of(&self.home.io(), uuid)
    }

    async fn publish(&self, node: &str, one_writer: bool) -> BTreeMap<String, String> {
        let new = PublishRequest {
            handle: self.volume.handle.clone(),
            node: node.to_owned(),
            one_writer,
            context: self.volume.context.clone().into_iter().collect(),
            secrets: self.home.secrets(),
        };
        self.home.rbd.publish_volume(new).await.unwrap()
    }

    async fn unpublish(&self, node: &str, within: Duration) -> Result<(), ProvisionError> {
        let (handle, node) = (self.volume.handle.clone(), node.to_owned());
        let secrets = self.home.secrets();
        let rbd = &self.home.rbd;
        rbd.unpublish_volume(handle, node, within, secrets).await
    }

    fn fences(&self) -> Vec<Fence> {
        Fences::of(&self.home.io()).list().unwrap()
    }
}

#[tokio::test]
async fn fencing_is_off_by_default() {
    let Some(home) = Home::new() else { return };
    assert!(!home.rbd.abilities().publishes);
}

#[tokio::test]
async fn a_client_that_keeps_the_image_open_is_fenced_until_it_is_gone() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    let stranger = it.open();
    assert!(!it.enter("a", &stranger), "not published to it");
    drop(stranger);
    assert!(it.publish("a", true).await.contains_key("fencing"));
    let node = it.open();
    assert!(it.enter("a", &node));
    // The caller is answered when its time is over, and the grace goes on.
    let waits = it.unpublish("a", Duration::ZERO).await.unwrap_err();
    assert_eq!(waits.kind(), ErrorKind::InUse);
    assert!(waits.to_string().contains("\"a\""), "{waits}");
    assert!(!node.is_fenced());
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert!(node.is_fenced());
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert!(!it.enter("a", &it.open()), "it is late");

    let fence = it.fences().pop().unwrap();
    assert_eq!((&*fence.node, &fence.client), ("a", &node.client));
    let listed = || it.home.cluster.ceph(&["osd", "blocklist", "ls"]);
    it.publish("a", true).await;
    assert!(listed().contains(&fence.client.address), "not gone yet");
    Fences::of(&it.home.io()).record_ended(&fence).unwrap();
    it.publish("a", true).await;
    assert!(!listed().contains(&fence.client.address));
    assert_eq!(it.fences(), []);
}

#[tokio::test]
async fn a_client_that_closes_in_time_is_not_fenced() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    it.publish("a", true).await;
    let node = it.open();
    it.enter("a", &node);
    it.unpublish("a", Duration::ZERO).await.unwrap_err();
    drop(node);
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert_eq!(it.fences(), []);
    // Nor is whoever else may have it.
    it.publish("a", true).await;
    it.publish("b", true).await;
    let other = it.open();
    it.enter("b", &other);
    it.unpublish("a", Duration::ZERO).await.unwrap();
    assert!(!other.is_fenced());
    drop(other);
    it.unpublish("", PATIENTLY).await.unwrap();
    assert!(it.publish("a", false).await.is_empty());
    let many = it.open();
    it.unpublish("a", Duration::ZERO).await.unwrap();
    assert!(!many.is_fenced());
}

#[tokio::test]
async fn an_unregistered_client_is_named() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    it.publish("a", true).await;
    let stranger = it.open();
    let refused = it.unpublish("a", PATIENTLY).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Precondition);
    let said = refused.to_string();
    assert!(said.contains(&stranger.client.address), "{said}");
    assert!(!stranger.is_fenced());
    assert_eq!(it.fences(), []);
    drop(stranger);
    it.unpublish("a", PATIENTLY).await.unwrap();
}

/// A node has begun a client, and did not say yet which it is.
fn starting(host: &str) -> NodeEntry {
    NodeEntry::from(Starting {
        host: host.to_owned(),
        boot_id: "boot".to_owned(),
    })
}

#[tokio::test]
async fn a_starting_client_is_waited_for_and_not_registered_any_more() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    it.publish("a", true).await;
    let nodes = it.nodes();
    let begins = || nodes.attach("a", &starting("10.0.0.5"), Published::Now);
    assert!(begins().unwrap());
    let waits = it.unpublish("a", Duration::ZERO).await.unwrap_err();
    assert_eq!(waits.kind(), ErrorKind::InUse, "though nobody watches");
    assert!(!begins().unwrap(), "it is being unpublished");
    it.publish("a", true).await;
    assert!(begins().unwrap());
    let begun = std::time::Instant::now();
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert!(begun.elapsed() >= STARTS_WITHIN);
    assert_eq!((nodes.list().unwrap(), it.fences()), (vec![], vec![]));
}

#[tokio::test]
async fn the_only_starting_client_of_a_lost_node_is_fenced() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    it.publish("a", true).await;
    let node = it.open();
    let host = host_of(&node.client.address);
    let nodes = it.nodes();
    for (host, others) in [("192.0.2.1", 0), (host, 1)] {
        assert!(nodes.attach("a", &starting(host), Published::Now).unwrap());
        let others: Vec<_> = (0..others).map(|_| it.open()).collect();
        let refused = it.unpublish("a", PATIENTLY).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Precondition, "{refused}");
        assert!(!node.is_fenced());
        drop(others);
        it.publish("a", true).await;
    }
    assert!(nodes.attach("a", &starting(host), Published::Now).unwrap());
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert!(node.is_fenced());
    let fence = it.fences().pop().unwrap();
    assert_eq!(fence.client.address, node.client.address);
}
