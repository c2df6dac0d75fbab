//! Ceph, as node and controller see it.
//!
//! What there is in a cluster and how it is called, ceph-csi has settled, and
//! volumes pass between it and this driver: [`config`] reads its files,
//! [`handle`] its volume handles. [`rados`] and [`rbd`] talk to a cluster through
//! Ceph's own libraries, which are loaded at run time ([`library`]);
//! [`connections`] keeps one connection for each cluster and user.
//!
//! All of it blocks, for as long as a cluster is slow, so it runs on lanes.

mod call;
pub mod config;
pub mod connections;
mod credentials;
pub mod encryption;
mod error;
pub mod fencing;
pub mod handle;
pub mod journal;
pub mod library;
pub mod map_options;
pub mod monitor;
pub mod rados;
pub mod rbd;

#[cfg(test)]
use crate::left_out;
#[cfg(test)]
#[path = "../../tests/ceph/cluster.rs"]
pub(crate) mod test_cluster;
#[cfg(test)]
pub(crate) mod testing;

pub use credentials::{Credentials, CredentialsError};
pub use error::{CephError, or_exists, or_missing};
