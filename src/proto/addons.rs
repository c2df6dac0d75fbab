//! csi-addons' services, whose packages have neither a prefix nor a version.

use super::Redacted;

/// The name by which the code generated for the packages below finds CSI's messages.
mod csi {
    pub use crate::proto::csi as v1;
}

/// The plugin's name, its capabilities and its readiness.
pub mod identity {
    #![allow(missing_docs, clippy::pedantic)]
    tonic::include_proto!("identity");
}

/// Returning unused space.
pub mod reclaimspace {
    #![allow(missing_docs, clippy::pedantic)]
    tonic::include_proto!("reclaimspace");
    include!(concat!(env!("OUT_DIR"), "/reclaimspace.redacted.rs"));
}

/// Shutting networks off from the storage.
pub mod fence {
    #![allow(missing_docs, clippy::pedantic)]
    tonic::include_proto!("fence");
    include!(concat!(env!("OUT_DIR"), "/fence.redacted.rs"));
}

/// New keys for encrypted volumes.
pub mod encryptionkeyrotation {
    #![allow(missing_docs, clippy::pedantic)]
    tonic::include_proto!("encryptionkeyrotation");
    include!(concat!(
        env!("OUT_DIR"),
        "/encryptionkeyrotation.redacted.rs"
    ));
}

/// Replicating volumes to another cluster.
pub mod replication {
    #![allow(missing_docs, clippy::pedantic)]
    tonic::include_proto!("replication");
    include!(concat!(env!("OUT_DIR"), "/replication.redacted.rs"));
}
