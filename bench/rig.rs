//! The agent under test, and the table of medians at the end.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    time::{Duration, Instant},
};

use criterion::{BenchmarkGroup, measurement::WallTime};
use tokio::runtime::Runtime;

use crate::harness::{Node, Sandbox};

pub struct Rig {
    pub runtime: Runtime,
    // The agent ends before its directories do.
    pub node: Node,
    pub sandbox: Sandbox,
    /// Every single run's time, by case and way.
    times: RefCell<BTreeMap<(String, &'static str), Vec<Duration>>>,
}

impl Rig {
    pub fn start() -> Self {
        let sandbox = Sandbox::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let node = runtime.block_on(Node::start(&sandbox));
        Self {
            runtime,
            node,
            sandbox,
            times: RefCell::default(),
        }
    }

    /// Times `run` alone, with `before` in front of and `after` behind each.
    pub fn measure_between(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &str,
        way: &'static str,
        mut before: impl FnMut(),
        mut run: impl FnMut(),
        mut after: impl FnMut(),
    ) {
        group.bench_function(way, |bencher| {
            bencher.iter_custom(|times| {
                let mut sum = Duration::ZERO;
                for _ in 0..times {
                    before();
                    let begin = Instant::now();
                    run();
                    let took = begin.elapsed();
                    after();
                    sum += took;
                    let mut all = self.times.borrow_mut();
                    all.entry((case.to_owned(), way)).or_default().push(took);
                }
                sum
            });
        });
    }

    /// Times `run`.
    pub fn measure(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &str,
        way: &'static str,
        run: impl FnMut(),
    ) {
        self.measure_between(group, case, way, || {}, run, || {});
    }

    /// Medians of all runs, and how many times longer than the first way each takes.
    pub fn print_summary(&self) {
        let times = self.times.borrow();
        println!("\n| case | way | median | ratio |\n| --- | --- | ---: | ---: |");
        let mut best = (String::new(), Duration::ZERO);
        let mut rows: Vec<_> = times
            .iter()
            .map(|((case, way), times)| (case, median(times), way))
            .collect();
        rows.sort();
        for (case, median, way) in rows {
            if best.0 != *case {
                best = (case.clone(), median);
            }
            let ratio = median.as_secs_f64() / best.1.as_secs_f64();
            println!("| {case} | {way} | {median:.1?} | {ratio:.1} |");
        }
    }
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[sorted.len() / 2]
}
