//! Links are kept: dead connections are heard of, and mended until they are
//! alive again.

use std::{
    io,
    rc::Rc,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use rustix::event::PollFlags;

use super::{Link, Links, NbdError, Outage, link::Mended, link_table::Event, lock};
use crate::{
    admission::Gate,
    error_chain,
    kernel::nbd::netlink::Listener,
    lane::Lanes,
    ring::{self, poll, timer},
};

/// Between the attempts to reach a server that is away: at first, and at most.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The kernel announces a dead connection a moment before it is shut down.
const SECOND_LOOK: Duration = Duration::from_millis(100);

/// Keeps all links, for ever. Runs on the runtime thread; what may block goes
/// to lanes.
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

/// Takes the kernel's announcements of dead connections.
async fn hear(links: Links, lanes: Lanes, gate: Gate, listener: Listener) {
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
                    tracing::warn!(%error, "announcements of dead NBD connections were lost: all are looked at");
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

/// The next attach listens anew.
fn deaf(links: &Links, error: &io::Error) {
    tracing::error!(%error, "dead NBD connections are not heard of");
    *lock(&links.0.listening) = false;
}

/// Begins to mend a link, unless that is under way.
fn check(links: &Links, link: &Arc<Link>, lanes: &Lanes, gate: &Gate) {
    link.again.store(true, Relaxed);
    if !link.mending.swap(true, Relaxed) {
        let (link, lanes) = (Arc::clone(link), lanes.clone());
        ring::spawn(mend(links.clone(), link, lanes, gate.clone()));
    }
}

/// Servers are connected to one at a time each: those that are away hold few threads.
async fn mend(links: Links, link: Arc<Link>, lanes: Lanes, gate: Gate) {
    let mut wait = FIRST_WAIT;
    let mut looked_twice = false;
    let node = link.device.block.node.display();
    loop {
        let server = link.identifier.export.server().to_string();
        let Ok(place) = gate.enter(&server).await else {
            timer::sleep(wait).await;
            continue;
        };
        link.again.store(false, Relaxed);
        let attempt = {
            let (links, link) = (links.clone(), Arc::clone(&link));
            let export = link.identifier.export.to_string();
            lanes.run(&export, "reconnect", move || {
                let _place = place;
                link.mend(&links)
            })
        };
        match attempt.await {
            Ok(Mended::Gone) => break,
            Ok(Mended::Already) if !looked_twice => {
                looked_twice = true;
                timer::sleep(SECOND_LOOK).await;
                continue;
            }
            Ok(done) => {
                let outage = lock(&link.outage).take();
                if let Some(outage) = outage {
                    tracing::info!(device = %node, export = %link.identifier.export, seconds = outage.since.elapsed().as_secs(), "the server is back");
                } else if let Mended::Now = done {
                    tracing::info!(device = %node, export = %link.identifier.export, "connections renewed");
                }
                if !link.again.load(Relaxed) {
                    break;
                }
                (wait, looked_twice) = (FIRST_WAIT, false);
                continue;
            }
            Err(error) => report_outage(&link, &error),
        }
        timer::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
    // No await between the last look at `again` and here: nothing is missed.
    link.mending.store(false, Relaxed);
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
