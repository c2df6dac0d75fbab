//! What systemd learns of the node agent (sd_notify(3)); nothing without systemd.

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::manager::Summary;

/// How long the start of the machine waits for volumes whose server may come back.
const BOOT_WITHIN: Duration = Duration::from_secs(60);

/// The time after which systemd is told again.
const AGAIN: Duration = Duration::from_secs(1);

/// Says that the agent is ready: once all volumes that files ask for are there, or cannot
/// be before somebody changes something; then what is missing, whenever that changes.
pub async fn announce(volumes: Option<watch::Receiver<Summary>>) {
    let Some(mut volumes) = volumes else {
        while !tell("READY=1") {
            tokio::time::sleep(AGAIN).await;
        }
        return;
    };
    let until = Instant::now() + BOOT_WITHIN;
    let mut is_ready = false;
    loop {
        let now = volumes.borrow_and_update().clone();
        let left = until.saturating_duration_since(Instant::now());
        let mut state = format!("STATUS={}", now.text);
        let begins = !is_ready && (now.is_settled || left.is_zero());
        if begins {
            state.push_str("\nREADY=1");
        }
        is_ready |= tell(&state) && begins;
        let changed = volumes.changed();
        let pause = match (is_ready, begins) {
            (true, _) => Duration::MAX,
            (false, true) => AGAIN,
            (false, false) => left,
        };
        if let Ok(Err(_)) = tokio::time::timeout(pause, changed).await {
            return;
        }
    }
}

/// Returns whether systemd has not to be told again.
fn tell(state: &str) -> bool {
    match send(state) {
        Err(error) => {
            tracing::warn!(%error, state, "cannot notify systemd");
            error.kind() != io::ErrorKind::WouldBlock
        }
        Ok(()) => true,
    }
}

fn send(state: &str) -> io::Result<()> {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(path)?,
    };
    let socket = UnixDatagram::unbound()?;
    // systemd may be busy; the runtime thread is not to wait for it.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}
