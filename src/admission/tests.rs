use clap::Parser as _;

use super::*;

const LONG: Duration = Duration::from_secs(3600);

fn gate(permits: usize, queue: usize) -> Gate {
    Gate::new(Bounds {
        queue,
        ..Bounds::new("attach", "--max-attaches", permits, LONG)
    })
}

fn admitted(entry: Result<Entry, Full>) -> Permit {
    match entry.unwrap() {
        Entry::Admitted(permit) => permit,
        Entry::Waits(_) => panic!("there is no permit"),
    }
}

fn waits(entry: Result<Entry, Full>) -> oneshot::Receiver<Permit> {
    match entry.unwrap() {
        Entry::Admitted(_) => panic!("there is a permit"),
        Entry::Waits(turn) => turn,
    }
}

#[test]
fn permits_are_granted_in_order_of_arrival() {
    let gate = gate(1, 8);
    let first = admitted(gate.ask("a"));
    let mut second = waits(gate.ask("a"));
    let mut third = waits(gate.ask("b"));
    assert!(second.try_recv().is_err());
    drop(first);
    let second = second.try_recv().unwrap();
    assert!(third.try_recv().is_err());
    drop(second);
    drop(third.try_recv().unwrap());
    assert_eq!(gate.load(), Load::default());
}

#[test]
fn a_domain_leaves_permits_to_others() {
    let gate = gate(8, 64);
    let dead: Vec<_> = (0..6).map(|_| admitted(gate.ask("dead"))).collect();
    let waiting: Vec<_> = (0..40).map(|_| waits(gate.ask("dead"))).collect();
    let alive = [admitted(gate.ask("one")), admitted(gate.ask("two"))];
    let mut third = waits(gate.ask("three"));
    drop(alive);
    drop(third.try_recv().unwrap());
    drop((dead, waiting));
    assert_eq!(gate.load(), Load::default());
}

#[test]
fn nothing_is_attached_behind_a_full_queue() {
    let gates = gates(&["--max-fsck=1", "--max-waiting=4"]);
    let refuse_full = |domain| gates.refuse_full(domain, &[&gates.probe, &gates.fsck]);
    let held = admitted(gates.fsck.ask("one"));
    let waiting: Vec<_> = (0..2).map(|_| waits(gates.fsck.ask("one"))).collect();
    refuse_full("one").unwrap();
    let third = waits(gates.fsck.ask("one"));
    let full = refuse_full("one").unwrap_err();
    assert_eq!((full.step, full.flag), ("fsck", "--max-fsck"));
    refuse_full("two").unwrap();
    // One that is not checked, as a raw one, goes on.
    gates.refuse_full("one", &[&gates.probe]).unwrap();
    // What is attached is not refused.
    let others = [waits(gates.fsck.ask("one")), waits(gates.fsck.ask("two"))];
    refuse_full("two").unwrap_err();
    drop((waiting, third, others, held));
    refuse_full("one").unwrap();
}

#[test]
fn the_queues_of_dead_domains_delay_no_other() {
    let gate = gate(4, 64);
    let mut dead: Vec<_> = (0..3).map(|_| admitted(gate.ask("dead"))).collect();
    let dying = admitted(gate.ask("dying"));
    let waiting: Vec<_> = (0..8).map(|_| waits(gate.ask("dying"))).collect();
    let mut alive = waits(gate.ask("alive"));
    drop(dead.pop());
    drop(alive.try_recv().unwrap());
    drop((dead, dying, waiting));
    assert_eq!(gate.load(), Load::default());
}

#[test]
fn a_full_queue_refuses_with_the_reason() {
    let gate = gate(1, 4);
    let _place = admitted(gate.ask("dead"));
    let _waiting: Vec<_> = (0..3).map(|_| waits(gate.ask("dead"))).collect();
    let refused = gate.ask("dead").unwrap_err().to_string();
    for word in ["3 volumes", "attach", "--max-waiting", "--max-attaches"] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
    let _other = waits(gate.ask("other"));
    assert_eq!(gate.ask("third").unwrap_err().waiting, 4);
}

fn gates(flags: &[&str]) -> Gates {
    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        limits: Limits,
    }
    let flags = Flags::try_parse_from([&["node"], flags].concat()).unwrap();
    Gates::new(&flags.limits)
}

/// A stage passes the look first, whether its source has a device to attach or not.
#[test]
fn a_stage_is_refused_before_it_begins() {
    let gates = gates(&["--max-attaches=1", "--max-waiting=1"]);
    let _first = admitted(gates.look.ask("server"));
    let _second = waits(gates.look.ask("server"));
    let refused = gates.look.ask("another").unwrap_err();
    assert_eq!((refused.step, refused.waiting), ("look", 1));
    // Not half of a stage.
    let _place = admitted(gates.mount.ask("server"));
    let _: Vec<_> = (0..64)
        .map(|_| gates.mount.ask("server").unwrap())
        .collect();
}

#[test]
fn one_volume_of_each_server_is_reconnected_at_once() {
    let Gates { reconnect, .. } = gates(&["--max-reconnects=2"]);
    let first = admitted(reconnect.ask("server"));
    let mut second = waits(reconnect.ask("server"));
    let another = admitted(reconnect.ask("another"));
    // The limit of all servers.
    let mut third = waits(reconnect.ask("third"));
    drop(another);
    drop(third.try_recv().unwrap());
    assert!(second.try_recv().is_err(), "its server has a permit");
    drop(first);
    drop(second.try_recv().unwrap());
    assert_eq!(reconnect.load(), Load::default());
}

#[test]
fn a_stuck_step_loses_its_permit_and_a_renewed_one_keeps_it() {
    let gate = gate(1, 8);
    let stuck = admitted(gate.ask("a"));
    let mut second = waits(gate.ask("a"));
    let begun = Instant::now();
    gate.expire(begun);
    assert!(second.try_recv().is_err());
    gate.expire(begun + 2 * LONG);
    let second = second.try_recv().unwrap();
    let load = Load {
        held: 1,
        stuck: 1,
        waiting: 0,
    };
    assert_eq!(gate.load(), load);
    // Its end frees no permit: it has none any more.
    let mut third = waits(gate.ask("a"));
    drop(stuck);
    assert!(third.try_recv().is_err());
    second.renew();
    gate.expire(Instant::now());
    assert!(third.try_recv().is_err());
    drop(second);
    drop(third.try_recv().unwrap());
    assert_eq!(gate.load(), Load::default());
}

#[test]
fn stuck_steps_count_against_their_domain_until_they_end() {
    let gate = Gate::new(Bounds {
        counts_stuck: true,
        ..gate(4, 64).0.bounds
    });
    let mut stuck: Vec<_> = (0..3).map(|_| admitted(gate.ask("dead"))).collect();
    let mut next = waits(gate.ask("dead"));
    gate.expire(Instant::now() + 2 * LONG);
    assert_eq!(gate.load().stuck, 3);
    assert!(next.try_recv().is_err());
    // All permits are free for others.
    let others = ["one", "two", "three", "four"].map(|other| admitted(gate.ask(other)));
    drop(stuck.pop());
    assert!(next.try_recv().is_err(), "the others have them");
    drop(others);
    let next = next.try_recv().unwrap();
    let mut last = waits(gate.ask("dead"));
    drop(stuck.pop());
    drop(last.try_recv().unwrap());
    drop((stuck, next));
    assert_eq!(gate.load(), Load::default());
}

#[test]
fn a_caller_that_gave_up_takes_no_place() {
    let gate = gate(1, 8);
    let first = admitted(gate.ask("a"));
    drop(waits(gate.ask("a")));
    let mut second = waits(gate.ask("a"));
    drop(first);
    drop(second.try_recv().unwrap());
    assert_eq!(gate.load(), Load::default());
}

#[test]
fn a_lane_waits_for_a_place() {
    let gate = gate(1, usize::MAX);
    let first = admitted(gate.ask("a"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| drop(gate.enter_on_lane("a").unwrap()));
        while gate.load().waiting == 0 {
            std::thread::yield_now();
        }
        drop(first);
        waiting.join().unwrap();
    });
    assert_eq!(gate.load(), Load::default());
}
