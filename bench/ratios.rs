//! How many times longer a case takes than its base, which are bare system calls where the
//! case names no other: the quick run of the
//! tests' build, which CI makes, fails where a case takes 1.5 times what
//! `bench/ratios.txt` says, and where a case of the file was not measured.
//!
//! The two ways alternate, and the lower quartiles of their rounds are compared: other load
//! of the machine makes some rounds slower, and none faster. A case above its limit gets more
//! rounds.

use std::{
    collections::BTreeMap,
    env, fs,
    path::Path,
    time::{Duration, Instant},
};

use crate::faults::is_quick;

/// Rounds of a case at least, and for how long; and for how long one that stays above its
/// limit.
const ROUNDS: usize = 5;
const TIME: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(30);

/// How much worse than its line in the file a ratio may be.
const TOLERANCE: f64 = 1.5;

pub struct Ratios {
    backend: String,
    /// What each case of the backend may have: those of the file.
    known: BTreeMap<String, f64>,
    /// Whether they hold for this run.
    pub guarded: bool,
    measured: BTreeMap<String, f64>,
}

impl Ratios {
    /// Each line of the file is a ratio, the backend that has the case, and the case.
    pub fn load(backend: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/ratios.txt");
        let text = fs::read_to_string(path).expect("bench/ratios.txt");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let known = lines.filter_map(|line| {
            let (ratio, rest) = line.split_once(' ').expect("a ratio");
            let (of, case) = rest.split_once(' ').expect("a backend and a case");
            let ratio = ratio.parse().expect("a ratio");
            (of == backend).then(|| (case.to_owned(), ratio))
        });
        Self {
            backend: backend.to_owned(),
            known: known.collect(),
            guarded: cfg!(debug_assertions)
                && is_quick()
                && env::var("HOST_KERNEL").as_deref() != Ok("1"),
            measured: BTreeMap::new(),
        }
    }

    pub fn measure(
        &mut self,
        case: &str,
        mut ours: impl FnMut() -> Duration,
        mut base: impl FnMut() -> Duration,
    ) {
        let known = self.known.get(case);
        let begun = Instant::now();
        let (mut times, mut base_times) = (Vec::new(), Vec::new());
        let mut until = TIME;
        loop {
            while times.len() < ROUNDS || begun.elapsed() < until {
                times.push(ours());
                base_times.push(base());
            }
            let ratio = lower_quartile(&mut times) / lower_quartile(&mut base_times);
            self.measured.insert(case.to_owned(), ratio);
            let is_within = known.is_some_and(|known| ratio <= known * TOLERANCE);
            if is_within || !self.guarded || begun.elapsed() >= LONGEST {
                break;
            }
            until = begun.elapsed() + TIME;
        }
    }

    /// Prints them, as lines of the file. False if one is above its limit, or in one of the
    /// two only.
    pub fn print(&self) -> bool {
        println!("\nHow many times longer a case takes than its base:");
        let mut within = true;
        for (case, ratio) in &self.measured {
            print!("{ratio:.2} {} {case}", self.backend);
            let verdict = match self.known.get(case) {
                _ if !self.guarded => "",
                None => "  <- not in bench/ratios.txt",
                Some(known) if *ratio > known * TOLERANCE => "  <- far above bench/ratios.txt",
                Some(_) => "",
            };
            println!("{verdict}");
            within &= verdict.is_empty();
        }
        let is_lost = |case: &&String| !self.measured.contains_key(*case);
        for case in self.known.keys().filter(is_lost).filter(|_| self.guarded) {
            println!("{case}  <- in bench/ratios.txt, and not measured");
            within = false;
        }
        within
    }
}

/// In seconds.
fn lower_quartile(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 4].as_secs_f64()
}
