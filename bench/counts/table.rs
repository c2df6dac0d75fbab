//! The counts of all cases, and the file that has them.

use std::{collections::BTreeMap, fmt, fs, path::Path};

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

    /// The cases whose counts are others than those of `expected`, or that one of them lacks.
    pub fn differences_from(&self, expected: &Self) -> Vec<String> {
        let lost = expected.0.keys().filter(|case| !self.0.contains_key(*case));
        let lost = lost.map(|case| format!("{case}: in the file, and not counted"));
        let differs = |now: Count, then| now.exceeds(then) || now.saves_calls(then);
        self.compare(expected, differs).chain(lost).collect()
    }

    /// The cases whose counts exceed those of `expected`, or that it lacks.
    pub fn excesses_over(&self, expected: &Self) -> impl Iterator<Item = String> {
        self.compare(expected, Count::exceeds)
    }

    fn compare(
        &self,
        expected: &Self,
        differs: impl Fn(Count, Count) -> bool,
    ) -> impl Iterator<Item = String> {
        self.0
            .iter()
            .filter_map(move |(case, now)| match expected.0.get(case) {
                None => Some(format!("{case}: {}, and not in the file", words(*now))),
                Some(then) if differs(*now, *then) => Some(format!(
                    "{case}: {}, and {} in the file",
                    words(*now),
                    words(*then)
                )),
                Some(_) => None,
            })
    }
}

fn words(count: Count) -> String {
    format!("{} calls, {} switches", count.calls, count.switches)
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (case, count) in &self.0 {
            writeln!(f, "{:5} {:5}  {case}", count.calls, count.switches)?;
        }
        Ok(())
    }
}
