//! What the tests of this module share: a cluster, and a place in it for each.

use std::{process::Command, sync::Arc, time::Duration};

use uuid::Uuid;

use super::{
    client::{
        Credentials,
        rados::{Cluster, IoCtx, Timeouts},
        rbd,
    },
    test_cluster::{TestCluster, answer_of},
};
use crate::secret::Secret;

pub(crate) fn credentials(cluster: &TestCluster) -> Credentials {
    Credentials {
        user: cluster.user.clone(),
        key: Secret::new(cluster.key.clone()),
    }
}

pub(crate) fn timeouts(seconds: u64) -> Timeouts {
    Timeouts {
        connect: Duration::from_secs(seconds),
        operation: Duration::from_secs(seconds),
    }
}

pub(crate) fn connect(cluster: &TestCluster) -> Arc<Cluster> {
    Cluster::connect(&cluster.monitors, &credentials(cluster), timeouts(30)).unwrap()
}

/// A namespace that nobody else uses, for as long as the cluster is used.
pub(crate) struct Place {
    pub cluster: TestCluster,
    pub io: IoCtx,
}

impl Place {
    /// None where Ceph is not installed.
    pub fn new() -> Option<Self> {
        let cluster = TestCluster::shared()?;
        let connected = connect(&cluster);
        let namespace = Uuid::new_v4().simple().to_string();
        let pool = connected.ioctx(&cluster.pool, "").unwrap();
        rbd::create_namespace(&pool, &namespace).unwrap();
        let io = connected.ioctx(&cluster.pool, &namespace).unwrap();
        Some(Self { cluster, io })
    }
}

#[test]
#[allow(clippy::disallowed_methods, reason = "not the product's child")]
fn a_program_of_ceph_that_aborts_at_its_exit_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let run = |script: &str| {
        let mut sh = Command::new("sh");
        answer_of(sh.args(["-c", script]).current_dir(dir.path())).unwrap()
    };
    let whole = run("echo image; kill -ABRT $$");
    assert!(whole.status.success());
    assert_eq!(whole.stdout, b"image\n");
    let silent = run("mkdir once && kill -ABRT $$; echo image");
    assert!(silent.status.success());
    assert_eq!(silent.stdout, b"image\n");
    // EEXIST: the first time it was done.
    assert!(run("mkdir made && kill -ABRT $$; exit 17").status.success());
    assert_eq!(run("exit 17").status.code(), Some(17));
    assert!(!run("kill -ABRT $$").status.success());
}
