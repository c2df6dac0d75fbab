//! uring-csi: a CSI driver for block volumes on storage-heavy nodes.
//!
//! Arrows run one way, `program → csi → volume → {device, fs, mount} → {ring, lane,
//! kernel}`; neither [`volume`] nor [`csi`] knows a backend's name. See
//! `docs/architecture.md`.

// A program with some features only leaves code of the library unused.
#![cfg_attr(
    not(all(
        feature = "node",
        feature = "holder",
        feature = "controller",
        feature = "cli"
    )),
    allow(dead_code, unused_imports)
)]
// Tests start programs, mount and wait by themselves.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod capability;
mod digest;
mod done;
mod endpoint;
mod error_chain;
#[cfg(any(feature = "node", feature = "cli"))]
mod file;
mod finding;

#[cfg(any(feature = "node", feature = "controller"))]
mod admission;
mod ceph;
mod config;
mod crash;
mod csi;
mod kind;
mod lane;
#[cfg(any(feature = "node", feature = "cli"))]
mod manager;
mod nbd;
#[cfg(any(feature = "node", feature = "controller"))]
mod nfs;
mod observe;
#[cfg(any(feature = "node", feature = "controller"))]
mod parse_bool;
mod pool;
pub mod program;
pub mod proto;
mod secret;
mod size;

#[cfg(feature = "controller")]
mod provision;

#[cfg(feature = "cli")]
pub mod cli;

#[cfg(feature = "node")]
mod device;
#[cfg(any(feature = "node", feature = "controller"))]
mod fs;
mod kernel;
#[cfg(feature = "node")]
mod mount;
#[cfg(feature = "node")]
mod ring;
#[cfg(feature = "node")]
mod supervisor;
#[cfg(feature = "node")]
mod volume;

pub(crate) use crash::crash_point;
#[cfg(feature = "node")]
pub(crate) use crash::{hold_point, is_held};
#[cfg(feature = "node")]
pub use done::Detached;
pub use done::Done;
pub use error_chain::error_chain;
pub use kind::Kind;

/// What the stories, benches and fuzz targets of this repository use beside the programs.
/// Everything else is private, so that the compiler reports unused code.
#[doc(hidden)]
pub mod internals {
    pub use crate::{
        ceph::{
            client::{
                CephError, Credentials,
                library::Libraries,
                rados::{Cluster, IoCtx, Timeouts},
                rbd::{Header, ImageName, ImageOptions, OpenMode},
            },
            csi_format::{
                handle::Handle,
                journal::{Journal, JournalEntry, JournalKind, NameEntry},
            },
        },
        endpoint::Endpoint,
        secret::{Secret, Secrets},
    };
    #[cfg(feature = "node")]
    pub use crate::{
        device::nbd::{LinkOptions, Links},
        fs::probe::{Block, Content, classify, regions},
        kernel::nbd::netlink::announced,
        mount::{bind, options::MountOptions, path::Roots, unmount},
        nbd::{Export, Server},
        ring::probe::Prober,
    };

    #[cfg(feature = "node")]
    pub mod handshake {
        pub use crate::device::nbd::handshake::{go, query};
    }
    pub mod rbd {
        pub use crate::ceph::client::rbd::{Image, create, image_id, list};
    }
    pub mod trash {
        pub use crate::ceph::client::rbd::trash::{list, move_image, remove};
    }
    pub mod encryption {
        pub use crate::ceph::csi_format::encryption::{
            ENCRYPTED, PREPARED, SEALED_KEY, STATE_KEY, generate, open, passphrase, seal,
        };
    }
}
