//! Ceph, as node and controller see it: configuration and names as ceph-csi has
//! them, and its libraries, loaded at run time.

pub mod encryption;
pub mod handle;

#[cfg(test)]
#[path = "../../tests/ceph/cluster.rs"]
pub(crate) mod test_cluster;
