//! Shared by the tests of this module: a cluster, and a namespace in it for each test.

use std::{sync::Arc, time::Duration};

use testkit::TestCluster;
use uuid::Uuid;

use super::client::{
    Credentials,
    rados::{Cluster, IoCtx, Timeouts},
    rbd,
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

/// A namespace of one test, in a cluster that lives as long as this.
pub(crate) struct TestPool {
    pub cluster: TestCluster,
    pub io: IoCtx,
}

impl TestPool {
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

/// So that no pattern takes it apart: a cluster that the pattern leaves out would be dropped
/// there, and could end while the test runs.
impl Drop for TestPool {
    fn drop(&mut self) {}
}
