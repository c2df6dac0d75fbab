use std::{
    iter,
    net::{Ipv4Addr, TcpListener},
};

use serde_json::json;
use testkit::TestCluster;

use super::*;
use crate::{
    ceph::{
        client::{
            rados::IoCtx,
            rbd::{self, Image, ImageOptions, OpenMode},
        },
        testing::{connect, credentials, timeouts},
    },
    secret::Secret,
};

#[test]
fn a_connection_is_shared_until_it_is_lost() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let short = Duration::from_millis(40);
    let connections = Connections::with_idle_time(timeouts(30), short).unwrap();
    let get = || {
        connections
            .get("shared", &test.monitors, &credentials(&test), None)
            .unwrap()
    };
    let all = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(get)).collect();
        let all = threads.into_iter().map(|thread| thread.join().unwrap());
        all.collect::<Vec<_>>()
    });
    let first = all[0].clone();
    assert!(all.iter().all(|other| Arc::ptr_eq(&first, other)));
    let io = first.ioctx(&test.pool, "").unwrap();
    let address = address_of(&io);
    let other = connect(&test);
    let fence = |op: &str| {
        let command = json!({"prefix": "osd blocklist", "blocklistop": op, "addr": address});
        other.mon_command(&command).unwrap();
    };
    fence("add");
    // The OSD learns of it a moment later.
    let fenced = iter::repeat_with(|| io.exists("x")).find_map(Result::err);
    assert!(fenced.unwrap().is_blocklisted());
    let reachable = |is| [("shared".to_owned(), is)];
    assert_eq!(connections.reachable(), reachable(Some(false)));
    drop(io);
    let second = get();
    assert!(!Arc::ptr_eq(&first, &second));
    assert_eq!(connections.reachable(), reachable(Some(true)));
    assert_eq!(counted(&connections, "shared"), [("lost", 1)]);
    let io = second.ioctx(&test.pool, "").unwrap();
    assert!(!io.exists("x").unwrap());
    fence("rm");
    // The lost connection ends after its last use.
    let weak = Arc::downgrade(&first);
    drop((all, first));
    while weak.strong_count() > 0 {
        thread::park_timeout(short);
    }
}

/// The errors of a cluster that were counted, by reason.
fn counted(connections: &Connections, cluster_id: &str) -> Vec<(&'static str, u64)> {
    let errors = connections.errors().into_iter();
    errors
        .filter(|(id, _, count)| id == cluster_id && *count > 0)
        .map(|(_, reason, count)| (reason, count))
        .collect()
}

/// The address of a connection, from the watchers of an image that it has open.
fn address_of(io: &IoCtx) -> String {
    let name = uuid::Uuid::new_v4().to_string();
    rbd::create(io, &name, 1 << 20, &ImageOptions::default()).unwrap();
    let image = Image::open(io, &name, OpenMode::ReadWrite).unwrap();
    let watchers = image.watchers().unwrap();
    assert_eq!(watchers.len(), 1);
    assert!(watchers[0].own);
    watchers[0].address.clone()
}

#[test]
fn an_idle_connection_ends() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let short = Duration::from_millis(40);
    let connections = Connections::with_idle_time(timeouts(30), short).unwrap();
    let used = connections.get("idle", &test.monitors, &credentials(&test), None);
    let used = used.unwrap();
    let weak = Arc::downgrade(&used);
    thread::park_timeout(short * 3);
    assert!(weak.upgrade().is_some());
    drop(used);
    while weak.strong_count() > 0 {
        thread::park_timeout(short);
    }
}

#[test]
fn a_dead_cluster_costs_its_callers_one_timeout_and_others_none() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let dead = [silent.local_addr().unwrap().to_string()];
    let gone = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let closed = [gone.local_addr().unwrap().to_string()];
    drop(gone);
    let nobody = Credentials {
        user: "csi".into(),
        key: Secret::new(String::new()),
    };
    let connections = Connections::new(timeouts(2)).unwrap();
    thread::scope(|scope| {
        let get = || connections.get("dead", &dead, &nobody, None).unwrap_err();
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(get)).collect();
        // Callers of another cluster do not wait for them.
        let error = connections
            .get("closed", &closed, &nobody, None)
            .unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
        for thread in threads {
            assert!(thread.join().unwrap().is_timed_out());
        }
    });
    let unreachable = |id: &str| (id.to_owned(), Some(false));
    assert_eq!(
        connections.reachable(),
        [unreachable("closed"), unreachable("dead")]
    );
    assert_eq!(counted(&connections, "closed"), [("unanswered", 1)]);
    let [("unanswered", dead_attempts)] = counted(&connections, "dead")[..] else {
        panic!("{:?}", connections.errors());
    };
    // Each attempt made one connection, and the listener has them all.
    silent.set_nonblocking(true).unwrap();
    let attempts = iter::from_fn(|| silent.accept().ok()).count();
    assert!(attempts < 8, "{attempts}");
    assert_eq!(u64::try_from(attempts), Ok(dead_attempts));
}
