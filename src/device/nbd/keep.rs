//! Keeps links: listens for dead connections, and reconnects until the server is back.

use std::{
    io,
    rc::Rc,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use rustix::event::PollFlags;

use super::{Link, Links, NbdError, Outage, link::Reconnected, link_table::Event, lock};
use crate::{
    admission::Gate,
    error_chain,
    kernel::nbd::netlink::LinkListener,
    lane::Lanes,
    ring::{self, poll},
};

/// The delay between attempts to reach a server that is away: the first, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The kernel announces a dead connection a moment before it is shut down.
const SECOND_LOOK: Duration = Duration::from_millis(100);

/// How long a server may take to answer the read that shows whether it is away.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Keeps all links, for ever. Runs on the runtime thread; calls that may block run on
/// lanes.
pub async fn keep(links: Links, lanes: Lanes, gate: Gate) {
    let Some(mut events) = lock(&links.0.events).take() else {
        return;
    };
    while let Some(event) = events.recv().await {
        match event {
            Event::Check(link) => check(&links, &link, &lanes, &gate),
            Event::Listening(listener) => {
                ring::spawn(hear(links.clone(), lanes.clone(), gate.clone(), listener));
            }
        }
    }
}

/// Reads the kernel's announcements of dead connections.
async fn hear(links: Links, lanes: Lanes, gate: Gate, listener: LinkListener) {
    let listener = Rc::new(listener);
    let mut ready = match poll::watch(Rc::clone(&listener), PollFlags::IN) {
        Ok(ready) => ready,
        Err(error) => return deaf(&links, &error),
    };
    loop {
        if let Err(error) = ready.next().await {
            return deaf(&links, &error);
        }
        loop {
            match listener.take() {
                Ok(index) => {
                    let link = lock(&links.0.links).get(&index).cloned();
                    if let Some(link) = link {
                        check(&links, &link, &lanes, &gate);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "announcements of dead NBD connections were lost: checking all links");
                    let all: Vec<_> = lock(&links.0.links).values().cloned().collect();
                    for link in all {
                        check(&links, &link, &lanes, &gate);
                    }
                    break;
                }
            }
        }
    }
}

/// After an error of the socket: the next attach opens a new one.
fn deaf(links: &Links, error: &io::Error) {
    tracing::error!(%error, "cannot listen for dead NBD connections");
    *lock(&links.0.listening) = false;
}

/// Starts to reconnect a link, unless a task does already.
fn check(links: &Links, link: &Arc<Link>, lanes: &Lanes, gate: &Gate) {
    link.again.store(true, Relaxed);
    if !link.reconnecting.swap(true, Relaxed) {
        let (link, lanes) = (Arc::clone(link), lanes.clone());
        ring::spawn(reconnect(links.clone(), link, lanes, gate.clone()));
    }
}

/// Reconnects a link until its server is back. The gate has one place for each server, so
/// servers that are away occupy few threads.
async fn reconnect(links: Links, link: Arc<Link>, lanes: Lanes, gate: Gate) {
    let mut wait = FIRST_WAIT;
    let mut looked_twice = false;
    let (mut reading, mut told) = (None, false);
    let node = link.device.block.node.display();
    loop {
        let server = link.identifier.export.server().to_string();
        let Ok(place) = gate.enter(&server).await else {
            tokio::time::sleep(wait).await;
            continue;
        };
        link.again.store(false, Relaxed);
        let attempt = {
            let (links, link) = (links.clone(), Arc::clone(&link));
            let export = link.identifier.export.to_string();
            lanes.run(&export, "reconnect", move || {
                let _place = place;
                link.reconnect(&links)
            })
        };
        match attempt.await {
            Ok(Reconnected::Gone) => break,
            Ok(Reconnected::Already) if !looked_twice => {
                looked_twice = true;
                tokio::time::sleep(SECOND_LOOK).await;
                continue;
            }
            Ok(done) => {
                if end_outage(&link) {
                    told = false;
                } else if let Reconnected::Now = done {
                    tracing::info!(device = %node, export = %link.identifier.export, "connections renewed");
                }
                if !link.again.load(Relaxed) {
                    break;
                }
                (wait, looked_twice) = (FIRST_WAIT, false);
                continue;
            }
            Err(error @ NbdError::Server { .. })
                if link.may_be_alive() && answers(&link, &lanes, &mut reading).await =>
            {
                if end_outage(&link) {
                    told = false;
                }
                if !std::mem::replace(&mut told, true) {
                    let why = error_chain(&error);
                    tracing::info!(device = %node, why, "no fresh connections, but the device works");
                }
                // The kernel announces the next that dies.
                if link.is_of_earlier_agent() && !link.again.load(Relaxed) {
                    break;
                }
            }
            Err(_) if link.is_detached() => break,
            Err(error) => report_outage(&link, &error),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
    // No await between the last check of `again` and here: no announcement is lost.
    link.reconnecting.store(false, Relaxed);
}

/// Whether the server answers a read of the device, though no fresh connection can be made: it
/// may be at its limit of clients. A read that hangs is not waited for again, and there is
/// no second one.
async fn answers(
    link: &Arc<Link>,
    lanes: &Lanes,
    reading: &mut Option<BoxFuture<'static, bool>>,
) -> bool {
    let wait = match reading {
        None => ANSWERS_WITHIN,
        Some(_) => Duration::ZERO,
    };
    let read = reading.get_or_insert_with(|| {
        let (link, export) = (Arc::clone(link), link.identifier.export.to_string());
        Box::pin(lanes.run(&export, "read", move || link.answers()))
    });
    let Ok(answers) = tokio::time::timeout(wait, read).await else {
        return false;
    };
    *reading = None;
    answers
}

/// Ends a reported outage; false if there was none.
fn end_outage(link: &Link) -> bool {
    let Some(outage) = lock(&link.outage).take() else {
        return false;
    };
    tracing::info!(device = %link.device.block.node.display(), export = %link.identifier.export, seconds = outage.since.elapsed().as_secs(), "the server is back");
    true
}

fn report_outage(link: &Link, error: &NbdError) {
    let why = error_chain(error);
    let mut outage = lock(&link.outage);
    if let Some(outage) = &mut *outage {
        outage.why = why;
        return;
    }
    tracing::warn!(device = %link.device.block.node.display(), error = why, seconds = link.options.dead_seconds, "a server is away; requests wait for it, then fail");
    *outage = Some(Outage {
        since: Instant::now(),
        timeout: Duration::from_secs(link.options.dead_seconds.into()),
        why,
    });
}
