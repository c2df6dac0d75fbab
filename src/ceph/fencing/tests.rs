use super::*;
use crate::ceph::testing::Place;

fn client(address: &str) -> Client {
    Client {
        address: address.to_owned(),
        boot_id: "boot".to_owned(),
        through: Through::SharedKrbd,
    }
}

#[test]
fn a_node_enters_its_client_only_while_it_is_published_to() {
    let Some(Place { io, cluster: _test }) = Place::new() else {
        return;
    };
    let uuid = Uuid::new_v4();
    let nodes = Attachments::of(&io, uuid);
    assert!(nodes.publish("a").unwrap_err().is_not_found(), "no volume");
    assert_eq!(nodes.list().unwrap(), []);
    io.omap_set(&entry_of(uuid), &[("csi.volname", "v")])
        .unwrap();
    assert!(!nodes.attach("a", &client("1:0/1")).unwrap());

    nodes.publish("a").unwrap();
    let published = nodes.list().unwrap();
    assert_eq!(
        (published[0].node.as_str(), &published[0].client),
        ("a", &None)
    );
    assert!(nodes.attach("a", &client("1:0/1")).unwrap());
    nodes.publish("a").unwrap();
    assert!(!nodes.withdraw(&published[0]).unwrap(), "it has it by now");
    let attached = nodes.list().unwrap();
    assert_eq!(attached[0].client, Some(client("1:0/1")));
    assert!(nodes.withdraw(&attached[0]).unwrap());
    assert!(!nodes.attach("a", &client("1:0/2")).unwrap());
    assert_eq!(nodes.list().unwrap(), []);
}

#[test]
fn a_fence_stays_until_it_is_lifted() {
    let Some(Place { io, cluster }) = Place::new() else {
        return;
    };
    let fences = Fences::of(&io);
    assert_eq!(fences.list().unwrap(), []);
    let fence = Fence {
        node: "a".to_owned(),
        client: client("127.9.9.9:0/12345"),
        volume: "v".to_owned(),
        gone: false,
    };
    let listed = || cluster.ceph(&["osd", "blocklist", "ls"]);
    fences.raise(&fence).unwrap();
    assert!(listed().contains(&fence.client.address));
    assert_eq!(fences.list().unwrap(), std::slice::from_ref(&fence));
    fences.is_gone(&fence).unwrap();
    assert!(fences.list().unwrap()[0].gone);
    for _ in 0..2 {
        fences.lift(&fence).unwrap();
        assert!(!listed().contains(&fence.client.address));
        assert_eq!(fences.list().unwrap(), []);
    }
}
