//! The programs: their flags, the privileges that they drop, and the services that they
//! start. Their bodies are in this library so that the compiler finds code that none of
//! them uses; `src/bin` only calls them.

#[cfg(feature = "controller")]
pub mod controller;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "node")]
mod notify;
#[cfg(any(feature = "node", feature = "controller"))]
mod sockets;
#[cfg(feature = "holder")]
pub mod supervisor;

/// The key management systems of encrypted Ceph volumes.
#[cfg(any(feature = "node", feature = "controller"))]
fn kms_config(options: &crate::config::CephOptions) -> crate::ceph::kms::KmsConfig {
    crate::ceph::kms::KmsConfig {
        config: options.kms_config.clone(),
        secrets: options.kms_secrets.clone(),
        token: options.kms_token.clone(),
    }
}

/// Updates the metrics of threads.
#[cfg(any(feature = "node", feature = "controller"))]
fn report_threads(lanes: &crate::lane::Lanes) {
    /// A thread in one step for longer than this counts as stuck.
    const STUCK_AFTER: std::time::Duration = std::time::Duration::from_secs(30);
    let busy = lanes.busy();
    let stuck = busy
        .iter()
        .filter(|busy| busy.since.elapsed() > STUCK_AFTER);
    crate::observe::metrics::blocking_threads(lanes.threads(), stuck.count());
}
