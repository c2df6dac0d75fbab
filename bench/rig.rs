//! The agent under test, the table of medians at the end, and the ratios that CI guards.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use criterion::{BenchmarkGroup, measurement::WallTime};
use testkit::{Node, NodeSetup, Sandbox, run_err};
use tokio::runtime::Runtime;
use uring_csi::proto::csi::{GetPluginInfoRequest, identity_client::IdentityClient};

use crate::ratios::Ratios;

pub struct Rig {
    backend: String,
    pub runtime: Runtime,
    // The agent ends before its directories do.
    pub node: Node,
    pub sandbox: Sandbox,
    /// Every single run's time, by case and way.
    times: RefCell<BTreeMap<(String, &'static str), Vec<Duration>>>,
    /// Of cases to their base.
    ratios: RefCell<Ratios>,
    /// As theirs, which are borrowed while they are measured.
    guards_ratios: bool,
}

impl Rig {
    pub fn start(backend: &str, setup: impl FnOnce(&Sandbox) -> NodeSetup) -> Self {
        let sandbox = Sandbox::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let node = runtime.block_on(Node::start_with(&sandbox, setup(&sandbox)));
        let ratios = Ratios::load(backend);
        Self {
            backend: backend.to_owned(),
            runtime,
            node,
            sandbox,
            times: RefCell::default(),
            guards_ratios: ratios.guarded,
            ratios: RefCell::new(ratios),
        }
    }

    /// Times `run`.
    pub fn measure(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &str,
        way: &'static str,
        mut run: impl FnMut(),
    ) {
        self.sum(group, case, way, || timed(&mut run));
    }

    /// Times `run` alone: not what is `before` and `after`, nor what udevd does
    /// in between, or has left to do after the last run.
    pub fn measure_between(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &str,
        way: &'static str,
        mut before: impl FnMut(),
        mut run: impl FnMut(),
        mut after: impl FnMut(),
    ) {
        self.sum(group, case, way, || {
            before();
            settle();
            let took = timed(&mut run);
            settle();
            after();
            took
        });
    }

    /// Times `up` and `down` together, without what is `before`, nor what udevd
    /// does in between, as in any life that is longer than these, or has left to do after
    /// the last one.
    pub fn measure_life(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &str,
        way: &'static str,
        mut before: impl FnMut(),
        mut up: impl FnMut(),
        mut down: impl FnMut(),
    ) {
        self.sum(group, case, way, || {
            before();
            settle();
            time_of(&mut up, &mut down, true)
        });
    }

    /// A call that answers a constant, on a new connection.
    pub async fn call_for_nothing(&self) {
        let mut client = IdentityClient::new(self.node.channel());
        let answer = client.get_plugin_info(GetPluginInfoRequest {}).await;
        answer.expect("an answer");
    }

    /// How many times longer `ours` takes than `base`, each alternating with the other: without
    /// udevd, whose work on the devices of one would delay the other. Only the guarded run is
    /// beside it: the events that udevd handles afterwards would take minutes.
    pub fn compare(
        &self,
        case: &str,
        ours: impl FnMut() -> Duration,
        base: impl FnMut() -> Duration,
    ) {
        let _udevd = (!self.guards_ratios()).then(PausedUdevd::new);
        self.ratios.borrow_mut().measure(case, ours, base);
    }

    /// The time of `up` and `down` where two are compared, without what udevd does in between.
    pub fn time_of_life(&self, up: impl FnMut(), down: impl FnMut()) -> Duration {
        time_of(up, down, self.guards_ratios())
    }

    /// Whether `bench/ratios.txt` holds for this run.
    pub fn guards_ratios(&self) -> bool {
        self.guards_ratios
    }

    /// Whether no case takes much longer than it did.
    pub fn print_ratios(&self) -> bool {
        self.ratios.borrow().print()
    }

    /// Sums up what `run` says that it took, and notes each.
    fn sum(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &str,
        way: &'static str,
        mut run: impl FnMut() -> Duration,
    ) {
        group.bench_function(way, |bencher| {
            bencher.iter_custom(|times| {
                let mut sum = Duration::ZERO;
                for _ in 0..times {
                    let took = run();
                    sum += took;
                    let mut all = self.times.borrow_mut();
                    all.entry((case.to_owned(), way)).or_default().push(took);
                }
                sum
            });
        });
    }

    /// Medians of all runs, and how many times longer each takes than the least that the
    /// case costs, and than the programs. `make bench UPDATE=1` copies the rows.
    pub fn print_summary(&self) {
        let times = self.times.borrow();
        let medians: BTreeMap<_, _> = times
            .iter()
            .map(|((case, way), times)| ((case.as_str(), *way), median(times)))
            .collect();
        let mut rows: Vec<_> = medians
            .iter()
            .map(|((case, way), median)| (*case, *median, *way))
            .collect();
        rows.sort_unstable();
        println!("\n| backend | case | way | median | to bare | to exec |");
        println!("| --- | --- | --- | ---: | ---: | ---: |");
        let backend = &self.backend;
        for (case, median, way) in rows {
            let to = |ways: &[&'static str]| {
                let base = ways.iter().find_map(|way| medians.get(&(case, *way)))?;
                Some(format!("{:.2}", median.as_secs_f64() / base.as_secs_f64()))
            };
            let [bare, exec] = [LEAST, PROGRAMS].map(|ways| to(ways).unwrap_or_default());
            println!("| {backend} | {case} | {way} | {median:.1?} | {bare} | {exec} |");
        }
    }
}

/// The ways that do no more than a case must.
const LEAST: &[&str] = &["bare", "library", "GetPluginInfo", "empty service", "text"];

/// The ways that run programs.
const PROGRAMS: &[&str] = &["exec", "exec df", "cp"];

/// The time of `up` and `down`; where it `settles`, what udevd does in between is not timed.
fn time_of(up: impl FnMut(), down: impl FnMut(), settles: bool) -> Duration {
    let took = timed(up);
    if settles {
        settle();
    }
    took + timed(down)
}

pub fn timed(mut run: impl FnMut()) -> Duration {
    let begin = Instant::now();
    run();
    begin.elapsed()
}

/// Where udevd runs, waits until it has looked at new devices. By default udevadm gives up after
/// two minutes, which the events of many RBD devices can take.
fn settle() {
    udevadm(&["settle", "--timeout=1800"]);
}

/// While it lives, udevd, where it runs, leaves events in its queue. If the bench is killed,
/// `udevadm control --start-exec-queue` undoes it.
pub struct PausedUdevd(());

impl PausedUdevd {
    pub fn new() -> Self {
        settle();
        udevadm(&["control", "--stop-exec-queue"]);
        Self(())
    }
}

impl Drop for PausedUdevd {
    fn drop(&mut self) {
        udevadm(&["control", "--start-exec-queue"]);
        settle();
    }
}

/// Calls udevadm(8) where udevd runs. After a failure udevd's work would fall into some way's
/// time, so it is printed.
fn udevadm(arguments: &[&str]) {
    if !Path::new("/run/udev/control").exists() {
        return;
    }
    if let Err(error) = run_err(&[&["udevadm"], arguments].concat()) {
        eprintln!("udevadm {arguments:?}: {error}");
    }
}

pub fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[sorted.len() / 2]
}
