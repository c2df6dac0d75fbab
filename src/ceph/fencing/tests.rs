use proptest::prelude::*;

use super::{Publication::Writer, *};
use crate::ceph::testing::TestPool;

fn client(address: &str) -> CephClient {
    CephClient {
        address: address.to_owned(),
        boot_id: "boot".to_owned(),
        through: Through::SharedKrbd,
        process: None,
    }
}

/// The node's entry without its nonce.
fn entry(has: &RegisteredNode) -> NodeEntry {
    NodeEntry {
        nonce: None,
        ..has.entry.clone()
    }
}

#[test]
fn a_node_registers_its_client_only_while_published() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    let uuid = Uuid::new_v4();
    let nodes = RegisteredNodes::of(io, uuid);
    assert!(
        nodes.publish("a", Writer).unwrap_err().is_not_found(),
        "no volume"
    );
    assert_eq!(nodes.list().unwrap(), []);
    io.omap_set(&entry_of(uuid), &[("csi.volname", "v")])
        .unwrap();
    let attach = |address: &str| {
        let entry = client(address).into();
        nodes.attach("a", &entry, Published::Now).unwrap()
    };
    assert!(!attach("1:0/1"));

    assert_eq!(nodes.publish("a", Writer).unwrap(), None);
    let published = nodes.list().unwrap();
    assert_eq!(
        (published[0].node.as_str(), entry(&published[0])),
        ("a", NodeEntry::default())
    );
    assert!(attach("1:0/1"));
    assert_eq!(nodes.publish("a", Writer).unwrap(), None);
    assert!(
        !nodes.withdraw(&published[0]).unwrap(),
        "it has the volume by now"
    );
    let attached = nodes.list().unwrap();
    assert_eq!(attached[0].entry.client, Some(client("1:0/1")));
    assert!(attach("1:0/1"));
    let again = nodes.list().unwrap();
    assert!(!nodes.withdraw(&attached[0]).unwrap(), "registered anew");
    assert!(nodes.withdraw(&again[0]).unwrap());
    assert!(!attach("1:0/2"));
    assert_eq!(nodes.list().unwrap(), []);
    assert_eq!(nodes.publish("a", Writer).unwrap(), None);
    assert!(!nodes.withdraw(&published[0]).unwrap(), "published anew");
}

#[test]
fn a_node_being_unpublished_registers_no_client() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    let uuid = Uuid::new_v4();
    let nodes = RegisteredNodes::of(io, uuid);
    io.omap_set(&entry_of(uuid), &[("csi.volname", "v")])
        .unwrap();
    assert_eq!(nodes.publish("a", Writer).unwrap(), None);
    let since = Uuid::new_v4();
    let starting = NodeEntry {
        since: Some(since),
        ..NodeEntry::from(Starting {
            host: "10.0.0.5".to_owned(),
            boot_id: "boot".to_owned(),
        })
    };
    let unbroken = Published::Since(since, None);
    assert!(!nodes.attach("a", &starting, unbroken).unwrap());
    assert!(nodes.attach("a", &starting, Published::Now).unwrap());
    assert!(nodes.is_published("a", unbroken).unwrap());
    let [seen] = &nodes.list().unwrap()[..] else {
        panic!("one node");
    };
    assert_eq!(entry(seen), starting);

    let last = nodes.withdraw_soon(seen).unwrap().unwrap();
    assert_eq!(nodes.withdraw_soon(seen).unwrap(), None);
    assert_eq!(nodes.list().unwrap(), std::slice::from_ref(&last));
    let its = NodeEntry {
        since: Some(since),
        ..client("10.0.0.5:0/1").into()
    };
    for published in [Published::Now, unbroken] {
        assert!(!nodes.attach("a", &its, published).unwrap());
        assert!(!nodes.is_published("a", published).unwrap());
    }
    // Published to again before it was taken out, it goes on.
    assert_eq!(nodes.publish("a", Writer).unwrap(), None);
    assert!(!nodes.withdraw(&last).unwrap());
    assert!(nodes.attach("a", &its, unbroken).unwrap());
    let found = nodes.list().unwrap().pop().unwrap();
    assert_eq!(entry(&found), its);
    let last = nodes.withdraw_soon(&found).unwrap().unwrap();
    assert!(nodes.withdraw(&last).unwrap());
    assert_eq!(nodes.publish("a", Writer).unwrap(), None);
    assert!(!nodes.attach("a", &its, unbroken).unwrap(), "it was broken");
}

#[test]
fn a_host_is_an_address_without_its_port() {
    for (address, host) in [
        ("10.0.0.5:0/1234567", "10.0.0.5"),
        ("v2:10.0.0.5:0/1", "10.0.0.5"),
        ("[fd00::1]:0/1", "[fd00::1]"),
        ("v1:[fd00::1]:0/1", "[fd00::1]"),
        ("", ""),
    ] {
        assert_eq!(host_of(address), host);
    }
}

#[test]
fn entries_of_earlier_releases_are_read() {
    assert_eq!(NodeEntry::parse("null"), NodeEntry::default());
    let text = r#"{"address":"1:0/1","boot_id":"boot","through":"shared-krbd"}"#;
    assert_eq!(NodeEntry::parse(text), client("1:0/1").into());
    // As an earlier one reads what is written now.
    let mut served = client("1:0/1");
    served.process = Some(Process { pid: 7, began: 8 });
    let written = NodeEntry::from(served.clone()).anew();
    assert_eq!(
        serde_json::from_str::<CephClient>(&written).unwrap(),
        served
    );
}

proptest! {
    #[test]
    fn any_entry_is_read(text: String) {
        NodeEntry::parse(&text);
    }

    #[test]
    fn a_written_entry_reads_back(address: String, host: String, pid: i32, began: u64, which in 0..3) {
        let has = CephClient {
            address,
            boot_id: host.clone(),
            through: Through::RbdNbd,
            process: (which == 1).then_some(Process { pid, began }),
        };
        let starting = Starting { host, boot_id: "boot".to_owned() };
        let entry = NodeEntry {
            client: (which > 0).then_some(has),
            starting: (which == 0).then_some(starting),
            since: Some(Uuid::new_v4()),
            withdrawing: which == 2,
            read_only: which == 1,
            nonce: None,
        };
        prop_assert_eq!(NodeEntry::parse(&entry.write()), entry);
    }
}

#[test]
fn a_fence_stays_until_it_is_lifted() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let (io, cluster) = (&pool.io, &pool.cluster);
    let fences = Fences::of(io);
    assert_eq!(fences.list().unwrap(), []);
    let fence = Fence {
        node: "a".to_owned(),
        client: client("127.9.9.9:0/12345"),
        volume: "v".to_owned(),
        ended: false,
    };
    let listed = || cluster.ceph(&["osd", "blocklist", "ls"]);
    fences.raise(&fence).unwrap();
    assert!(listed().contains(&fence.client.address));
    assert_eq!(fences.list().unwrap(), std::slice::from_ref(&fence));
    fences.record_ended(&fence).unwrap();
    assert!(fences.list().unwrap()[0].ended);
    for _ in 0..2 {
        fences.lift(&fence).unwrap();
        assert!(!listed().contains(&fence.client.address));
        assert_eq!(fences.list().unwrap(), []);
    }
}
