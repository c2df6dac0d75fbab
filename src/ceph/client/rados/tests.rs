use std::{
    env,
    net::{Ipv4Addr, TcpListener},
    process::Command,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use testkit::TestCluster;

use super::*;
use crate::{
    ceph::{
        client::Credentials,
        testing::{TestPool, connect, credentials, timeouts},
    },
    secret::Secret,
};

#[test]
fn cluster_and_pools_are_found_by_id_and_name() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let cluster = connect(&test);
    assert_eq!(cluster.fsid(), test.fsid);
    let id = cluster.pool_id(&test.pool).unwrap();
    assert_eq!(cluster.pool_name(id).unwrap(), test.pool);
    assert!(cluster.pools().unwrap().contains(&test.pool));
    assert!(cluster.pool_id("missing").unwrap_err().is_not_found());
    assert!(cluster.pool_name(9999).unwrap_err().is_not_found());
    // A pool that is newer than this connection's map.
    let fresh = test.fresh_pool();
    let io = cluster.ioctx(&fresh, "").unwrap();
    assert_eq!(cluster.ioctx(io.pool_id(), "").unwrap().pool(), fresh);
}

#[test]
fn both_versions_of_the_protocol_are_spoken() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let as_user = credentials(&test);
    let second = Cluster::connect(&test.monitors_v2, &as_user, timeouts(30)).unwrap();
    assert_eq!(second.fsid(), test.fsid);
}

#[test]
fn commands_are_answered_or_refused_with_words() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let cluster = connect(&test);
    let answer = cluster.mon_command(&json!({"prefix": "df", "format": "json"}));
    assert!(serde_json::from_slice::<serde_json::Value>(&answer.unwrap()).is_ok());
    let error = cluster
        .mon_command(&json!({"prefix": "nonsense"}))
        .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("\"nonsense\" (command not known)"),
        "{error}"
    );
}

#[test]
fn a_wrong_key_is_denied_and_never_shown() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let wrong = "AQAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==";
    for user in [test.user.as_str(), "nobody"] {
        let as_user = Credentials {
            user: user.to_owned(),
            key: Secret::new(wrong.to_owned()),
        };
        let error = Cluster::connect(&test.monitors, &as_user, timeouts(30)).unwrap_err();
        assert!(error.is_access_denied(), "{error:?}");
        assert!(!format!("{error} {error:?}").contains(wrong));
    }
}

#[test]
fn a_cluster_that_is_silent_costs_the_timeout() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let monitors = [silent.local_addr().unwrap().to_string()];
    let as_user = Credentials {
        user: "csi".into(),
        key: Secret::new(String::new()),
    };
    let began = Instant::now();
    let error = Cluster::connect(&monitors, &as_user, timeouts(1)).unwrap_err();
    assert!(error.is_timed_out(), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn one_connection_at_a_time_has_a_lock() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let (io, cluster) = (&pool.io, &pool.cluster);
    let other = connect(cluster);
    let other = other.ioctx(io.pool(), io.namespace()).unwrap();
    let long = Duration::from_secs(600);
    let held = io.try_lock("o", "l", "", long).unwrap().unwrap();
    assert!(other.try_lock("o", "l", "", long).unwrap().is_none());
    assert!(other.try_lock("o", "another", "", long).unwrap().is_some());
    drop(held);
    let held = other.try_lock("o", "l", "", long).unwrap().unwrap();
    // The connection that has it may change when it expires.
    let renewed = other
        .try_lock("o", "l", "", Duration::from_millis(1))
        .unwrap();
    std::mem::forget((held, renewed));
    let expired = || io.try_lock("o", "l", "", long).unwrap().is_some();
    assert!((0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        expired()
    }));
}

#[test]
fn keys_are_written_read_and_removed() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    let create = WriteOp::new().create();
    io.operate("o", &create).unwrap();
    assert!(io.operate("o", &create).unwrap_err().is_exists());
    assert!(io.exists("o").unwrap());
    io.omap_set("o", &[("a.1", "x"), ("a.2", ""), ("b", "Ω\n")])
        .unwrap();
    let found = io.omap_get("o", &["b", "a.2", "missing"]).unwrap();
    let expected = [("a.2", ""), ("b", "Ω\n")];
    assert_eq!(
        found,
        expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
    );
    assert_eq!(io.omap_list("o", "a.").unwrap().len(), 2);
    io.omap_remove("o", &["a.1", "missing"]).unwrap();
    assert_eq!(io.omap_list("o", "").unwrap().len(), 2);
    io.remove("o").unwrap();
    assert!(!io.exists("o").unwrap());
    assert!(io.remove("o").unwrap_err().is_not_found());
    assert!(io.omap_get("o", &["a"]).unwrap_err().is_not_found());
    // Removing keys does not create the object.
    io.omap_remove("o", &["a"]).unwrap();
    assert!(!io.exists("o").unwrap());
    assert!(io.exists("with\0nul").unwrap_err().is_invalid());
}

#[test]
fn a_long_list_is_read_in_pages() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    let keys: Vec<_> = (0..2500).map(|nr| format!("key.{nr:05}")).collect();
    let entries: Vec<_> = keys.iter().map(|key| (key.as_str(), "v")).collect();
    io.omap_set("long", &entries).unwrap();
    assert!(io.omap_list("long", "key.").unwrap().keys().eq(&keys));
    let page = io.omap_page("long", "key.00009", "key.", 3).unwrap();
    assert!(page.more);
    assert!(page.entries.keys().eq(&keys[10..13]));
    let last = io.omap_page("long", "key.02498", "key.", 3).unwrap();
    assert!(!last.more);
    assert_eq!(last.entries.len(), 1);
}

#[test]
fn changes_are_made_together_or_not_at_all() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    io.operate("o", &WriteOp::new().create()).unwrap();
    let absent = WriteOp::new().compare("k", "").set([("k", "mine")]);
    io.operate("o", &absent).unwrap();
    assert!(io.operate("o", &absent).unwrap_err().is_mismatch());
    let taken = WriteOp::new().set([("other", "x")]).compare("k", "yours");
    assert!(io.operate("o", &taken).unwrap_err().is_mismatch());
    assert_eq!(io.omap_list("o", "").unwrap().len(), 1);
    let gone = WriteOp::new().compare("k", "mine").unset(["k"]);
    io.operate("o", &gone).unwrap();
    assert!(io.omap_list("o", "").unwrap().is_empty());
    let none = WriteOp::new().assert_exists().set([("k", "v")]);
    assert!(io.operate("none", &none).unwrap_err().is_not_found());
}

#[test]
fn many_threads_share_a_connection() {
    let Some(pool) = TestPool::new() else {
        return;
    };
    let io = &pool.io;
    let won = thread::scope(|scope| {
        let claim = || io.operate("one", &WriteOp::new().create()).is_ok();
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(claim)).collect();
        let won = threads.into_iter().map(|thread| thread.join().unwrap());
        won.filter(|won| *won).count()
    });
    assert_eq!(won, 1);
}

#[test]
fn librados_fits_the_stack_of_a_lane() {
    let Some(test) = TestCluster::shared() else {
        return;
    };
    let small = thread::Builder::new().stack_size(crate::lane::STACK);
    let thread = small.spawn(move || {
        let cluster = connect(&test);
        let io = cluster.ioctx(&test.pool, "").unwrap();
        crate::ceph::client::rbd::list(&io).unwrap();
    });
    thread.unwrap().join().unwrap();
}

#[test]
#[ignore = "the test below starts it in a process of its own"]
fn connects_and_ends() {
    static TEST: OnceLock<TestCluster> = OnceLock::new();
    // By the second version of the protocol, which encrypts the messages to monitors.
    extern "C" fn connect() {
        let test = TEST.get().expect("set before");
        let connected = Cluster::connect(&test.monitors_v2, &credentials(test), timeouts(30));
        std::mem::forget(connected.unwrap());
    }
    let _ = TEST.set(TestCluster::shared().expect("the test below has it"));
    Libraries::load().unwrap();
    // Handlers run in the reverse order, so this one after those that connecting registers.
    // SAFETY: the handler is a function of this program.
    assert_eq!(unsafe { libc::atexit(connect) }, 0);
    connect();
}

#[test]
fn a_process_may_end_while_it_connects() {
    let Some(_test) = TestCluster::shared() else {
        return;
    };
    let ended = Command::new(env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture"])
        .arg("ceph::client::rados::tests::connects_and_ends")
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
}
