//! A client of a Ceph cluster: [`rados`] for objects, [`rbd`] for images, both by
//! Ceph's own libraries, which are loaded at run time ([`library`]).
//!
//! [`Connections`](connections::Connections) keeps one connection for each cluster
//! and user; [`monitor`] waits for the greeting of a monitor, without any library.

mod call;
pub mod connections;
mod credentials;
mod error;
pub mod library;
pub mod monitor;
pub mod rados;
pub mod rbd;

pub use credentials::{Credentials, CredentialsError};
pub use error::{CephError, or_exists, or_missing};
