//! Nodes that do not let go of a volume. A node is a connection of librbd's here;
//! what the kernel's client does is told by stories.

use super::*;
use crate::{
    capability::AccessMode::{
        self, MultiNodeReader, MultiNodeWriter, SingleNodeReader, SingleNodeSingleWriter,
        SingleNodeWriter,
    },
    ceph::{
        client::rbd::{Image, OpenMode},
        fencing::{
            CephClient, Fence, Fences, NodeEntry, Published, RegisteredNodes, STARTS_WITHIN,
            Starting, Through, host_of,
        },
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

    async fn publish(&self, node: &str) -> BTreeMap<String, String> {
        self.publish_as(node, SingleNodeWriter, false)
            .await
            .unwrap()
    }

    async fn publish_as(
        &self,
        node: &str,
        mode: AccessMode,
        read_only: bool,
    ) -> Result<BTreeMap<String, String>, ProvisionError> {
        let new = PublishRequest {
            handle: self.volume.handle.clone(),
            node: node.to_owned(),
            mode,
            read_only,
            context: self.volume.context.clone().into_iter().collect(),
            secrets: self.home.secrets(),
        };
        self.home.rbd.publish_volume(new).await
    }

    async fn unpublish(&self, node: &str, within: Duration) -> Result<(), ProvisionError> {
        let (handle, node) = (self.volume.handle.clone(), node.to_owned());
        let secrets = self.home.secrets();
        let rbd = &self.home.rbd;
        rbd.unpublish_volume(handle, node, within, secrets).await
    }

    /// An earlier release did not refuse a second node.
    fn entry_of_earlier_release(&self, node: &str) {
        let key = format!("uring-csi.node.{node}");
        let entry = [(&*key, "null")];
        self.home.io().omap_set(&self.object(), &entry).unwrap();
    }

    /// The journal's entry of the volume.
    fn object(&self) -> String {
        let handle = &self.volume.handle;
        format!("csi.volume.{}", &handle[handle.len() - 36..])
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
    assert!(it.publish("a").await.contains_key("fencing"));
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
    it.publish("a").await;
    assert!(listed().contains(&fence.client.address), "not gone yet");
    Fences::of(&it.home.io()).record_ended(&fence).unwrap();
    it.publish("a").await;
    assert!(!listed().contains(&fence.client.address));
    assert_eq!(it.fences(), []);
}

#[tokio::test]
async fn a_client_that_closes_in_time_is_not_fenced() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    it.publish("a").await;
    let node = it.open();
    it.enter("a", &node);
    it.unpublish("a", Duration::ZERO).await.unwrap_err();
    drop(node);
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert_eq!(it.fences(), []);
    // Nor is whoever else may have it.
    it.publish("a").await;
    it.entry_of_earlier_release("b");
    let other = it.open();
    it.enter("b", &other);
    it.unpublish("a", Duration::ZERO).await.unwrap();
    assert!(!other.is_fenced());
    drop(other);
    it.unpublish("", PATIENTLY).await.unwrap();
    let shared = it.publish_as("a", MultiNodeWriter, false).await;
    assert!(shared.unwrap().is_empty());
    let many = it.open();
    it.unpublish("a", Duration::ZERO).await.unwrap();
    assert!(!many.is_fenced());
}

#[tokio::test]
async fn one_node_at_a_time_has_a_volume_for_one_node() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    let fails = async |node, mode, read_only| {
        let error = it.publish_as(node, mode, read_only).await.unwrap_err();
        (error.kind(), error.to_string())
    };
    it.publish("a").await;
    it.publish_as("a", SingleNodeSingleWriter, false)
        .await
        .unwrap();
    for (mode, read_only) in [
        (SingleNodeWriter, false),
        (SingleNodeReader, false),
        (MultiNodeReader, true),
    ] {
        let (kind, said) = fails("b", mode, read_only).await;
        assert_eq!(kind, ErrorKind::Precondition, "{said}");
        assert!(said.contains("\"a\""), "{said}");
    }
    for (mode, read_only) in [
        (SingleNodeWriter, true),
        (SingleNodeReader, false),
        (MultiNodeReader, false),
        (MultiNodeWriter, false),
    ] {
        let (kind, said) = fails("a", mode, read_only).await;
        assert_eq!(kind, ErrorKind::Conflict, "{said}");
    }
    // A fail-over waits for the fence of the lost node, and for no longer.
    let lost = it.open();
    assert!(it.enter("a", &lost));
    it.unpublish("a", Duration::ZERO).await.unwrap_err();
    let (kind, said) = fails("b", SingleNodeWriter, false).await;
    assert_eq!(kind, ErrorKind::InUse, "{said}");
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert!(lost.is_fenced());
    drop(lost);
    it.publish("b").await;
    it.unpublish("b", PATIENTLY).await.unwrap();

    // A reader is fenced by nobody.
    let reads = it.publish_as("a", SingleNodeReader, false).await;
    assert!(reads.unwrap().is_empty());
    let reader = it.open();
    assert!(!it.enter("a", &reader), "it may not write");
    let (kind, said) = fails("a", SingleNodeWriter, false).await;
    assert_eq!(kind, ErrorKind::Conflict, "{said}");
    let (kind, said) = fails("b", SingleNodeReader, false).await;
    assert_eq!(kind, ErrorKind::Precondition, "{said}");
    it.unpublish("a", Duration::ZERO).await.unwrap();
    assert!(!reader.is_fenced());
    drop(reader);

    // Of what an earlier release published twice, each repeat is answered.
    it.publish("a").await;
    it.entry_of_earlier_release("b");
    it.publish("a").await;
    it.publish("b").await;
    let (kind, said) = fails("c", SingleNodeWriter, false).await;
    assert_eq!(kind, ErrorKind::Precondition, "{said}");
    // By hand, as docs/ceph.md has it.
    let keys = ["uring-csi.node.a", "uring-csi.node.b"];
    it.home.io().omap_remove(&it.object(), &keys).unwrap();
    it.publish("c").await;
}

#[tokio::test]
async fn of_nodes_that_are_published_to_at_once_one_gets_the_volume() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    let nodes = ["a", "b", "c", "d"];
    let publish = |node| it.publish_as(node, SingleNodeWriter, false);
    let answers = join_all(nodes.map(publish)).await;
    let published = answers.into_iter().flatten().count();
    assert_eq!(published, 1);
    assert_eq!(it.nodes().list().unwrap().len(), 1);
}

#[tokio::test]
async fn an_unregistered_client_is_named() {
    let Some(it) = Fenced::new().await else {
        return;
    };
    it.publish("a").await;
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
    it.publish("a").await;
    let nodes = it.nodes();
    let begins = || nodes.attach("a", &starting("10.0.0.5"), Published::Now);
    assert!(begins().unwrap());
    let waits = it.unpublish("a", Duration::ZERO).await.unwrap_err();
    assert_eq!(waits.kind(), ErrorKind::InUse, "though nobody watches");
    assert!(!begins().unwrap(), "it is being unpublished");
    it.publish("a").await;
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
    it.publish("a").await;
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
        it.publish("a").await;
    }
    assert!(nodes.attach("a", &starting(host), Published::Now).unwrap());
    it.unpublish("a", PATIENTLY).await.unwrap();
    assert!(node.is_fenced());
    let fence = it.fences().pop().unwrap();
    assert_eq!(fence.client.address, node.client.address);
}
