//! ceph-csi's formats, letter for letter, so that volumes pass between it and this
//! driver.
//!
//! ```text
//!  config        its files config.json and cluster-mapping.json
//!  handle        volume and snapshot ids
//!  journal       names and entries, in omaps of a pool
//!  map_options   `mapOptions` of a StorageClass
//!  encryption    sealed passphrases in an image's metadata
//! ```

pub mod config;
pub mod encryption;
pub mod handle;
pub mod journal;
pub mod map_options;
