//! A controller stalls at each change that it makes in a cluster, another does its
//! work, and the first goes on: neither takes away what the other has answered for.

use std::process::Child;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::*;

/// A controller that has stopped itself.
struct Stalled(Child);

impl Home {
    /// None: it was done before that.
    fn stalls(&self, at: usize) -> Option<Stalled> {
        let mut victim = self.victim((&[], &[]));
        let stalled = Stalled(victim.env("STALL_AT", at.to_string()).spawn().unwrap());
        let waited = waitpid(Some(stalled.pid()), WaitOptions::UNTRACED).unwrap();
        let (_, status) = waited.expect("a child");
        assert!(status.stopped() || status.exit_status() == Some(0));
        status.stopped().then_some(stalled)
    }

    /// How many snapshots the pool's images have.
    fn snapshots(&self) -> usize {
        let listed = self.cluster.rbd(&["ls", "--long", &self.pool]);
        let names = listed.lines().filter_map(|line| line.split(' ').next());
        names.filter(|name| name.contains('@')).count()
    }
}

impl Stalled {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    async fn goes_on(mut self) {
        kill_process(self.pid(), Signal::CONT).unwrap();
        let ended = tokio::task::spawn_blocking(move || self.0.wait());
        assert!(ended.await.unwrap().unwrap().success());
    }
}

#[tokio::test]
async fn a_stalled_controller_removes_nothing_when_it_continues() {
    let Some(home) = Home::of_its_own() else {
        return;
    };
    for at in 0.. {
        let stalled = home.stalls(at);
        home.party().make().await;
        let made = home.party().handles().await;
        let is_done = stalled.is_none();
        if let Some(stalled) = stalled {
            stalled.goes_on().await;
        }
        assert_eq!(home.party().handles().await, made, "stalled at {at}");
        // One of them stands between the clone and its source.
        assert_eq!(home.images().len(), 5, "stalled at {at}");
        assert_eq!(home.snapshots(), 1, "stalled at {at}");
        // It finds what it has answered for.
        home.party().make().await;
        assert_eq!(home.party().handles().await, made, "stalled at {at}");
        home.party().unmake(&made.0, &made.1).await;
        home.assert_empty(at).await;
        if is_done {
            assert!(at > 20, "only {at} points");
            return;
        }
    }
}
