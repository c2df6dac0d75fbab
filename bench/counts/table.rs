//! The counts of all cases, and the file that has them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::Path,
};

use crate::counters::Count;

/// The counts of one call, by case.
#[derive(Debug, Default)]
pub struct Table(BTreeMap<String, Count>);

const HEAD: &str = "\
# The agent's system calls and context switches in each case: written by
# `make counts UPDATE=1`, compared by `make counts`.
";

impl Table {
    pub fn add(&mut self, case: &str, count: Count) {
        self.0.insert(case.to_owned(), count);
    }

    pub fn read(file: &Path) -> Self {
        let row = |line: &str| {
            let (calls, rest) = line.trim().split_once(' ')?;
            let (switches, case) = rest.trim().split_once(' ')?;
            let count = Count {
                calls: calls.parse().ok()?,
                switches: switches.parse().ok()?,
            };
            Some((case.trim().to_owned(), count))
        };
        let text = fs::read_to_string(file).unwrap_or_default();
        let rows = text.lines().filter(|line| !line.starts_with('#'));
        let rows = rows.map(|line| row(line).unwrap_or_else(|| panic!("not a row: {line:?}")));
        Self(rows.collect())
    }

    pub fn write(&self, file: &Path) {
        fs::write(file, format!("{HEAD}{self}")).expect("a file");
    }

    /// The cases whose counts exceed those of `expected`, or that one of them lacks.
    pub fn differences_from(&self, expected: &Self) -> Vec<String> {
        let cases: BTreeSet<_> = self.0.keys().chain(expected.0.keys()).collect();
        let difference = |case: &&String| {
            let (now, then) = (self.0.get(*case), expected.0.get(*case));
            let is_less = now.zip(then).is_some_and(|(now, then)| !now.exceeds(*then));
            (!is_less).then(|| format!("{case}: {}, and {} in the file", words(now), words(then)))
        };
        cases.iter().filter_map(difference).collect()
    }
}

fn words(count: Option<&Count>) -> String {
    let words = |count: &Count| format!("{} calls, {} switches", count.calls, count.switches);
    count.map_or("nothing".to_owned(), words)
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (case, count) in &self.0 {
            writeln!(f, "{:5} {:5}  {case}", count.calls, count.switches)?;
        }
        Ok(())
    }
}
