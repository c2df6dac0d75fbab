//! `bench compare`: two runs, side by side.

use std::{collections::BTreeSet, path::PathBuf};

use clap::Args;
use serde::Serialize;

use super::report::{LoadShape, OriginShape, Report, in_ms};
use crate::cli::{
    answer::{Answer, table},
    error::CliError,
};

/// Compares two runs
#[derive(Args, Debug)]
#[command(after_help = "\
A ratio is the second run's value divided by the first's: below 1.00 the second is
faster, or takes less.

Examples:
  uringctl bench compare before.json after.json
  uringctl bench compare before.json after.json --json | jq '.rows[] | select(.ratio > 1.1)'")]
pub struct Compare {
    /// Output of `uringctl bench run --json`
    first: PathBuf,
    /// Another one
    second: PathBuf,
}

/// Two runs.
#[derive(Debug, Serialize)]
pub struct Comparison {
    rows: Vec<Row>,
    /// In what the runs differ beside their results, in sentences.
    differences: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Row {
    what: String,
    unit: &'static str,
    first: Option<f64>,
    second: Option<f64>,
    /// None without a value in both, or where the first is zero.
    ratio: Option<f64>,
}

impl Compare {
    /// Runs the command.
    pub fn run(self) -> Result<Comparison, CliError> {
        let first = Report::read(&self.first)?;
        let second = Report::read(&self.second)?;
        Ok(Comparison::of(&first, &second))
    }
}

impl Comparison {
    fn of(first: &Report, second: &Report) -> Self {
        let mut rows = Vec::new();
        let names = first.calls.iter().chain(&second.calls);
        let mut names: Vec<&str> = names.map(|call| call.call.as_str()).collect();
        // The first's order, then what the second alone has.
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(*name));
        for name in names {
            let times = |report: &Report| {
                let call = report.calls.iter().find(|call| call.call == name);
                call.and_then(|call| call.milliseconds)
            };
            let (a, b) = (times(first), times(second));
            for (which, value) in [
                ("p50", (a.map(|it| it.p50), b.map(|it| it.p50))),
                ("p99", (a.map(|it| it.p99), b.map(|it| it.p99))),
            ] {
                rows.push(Row::new(format!("{name} {which}"), "ms", value.0, value.1));
            }
        }
        let mut row = |what: &str, unit, value: fn(&Report) -> Option<f64>| {
            rows.push(Row::new(what.to_owned(), unit, value(first), value(second)));
        };
        row("cycles a second", "", |report| {
            Some(report.cycles_per_second)
        });
        row("driver's CPU a cycle", "ms", Report::cpu_ms_per_cycle);
        row("driver's memory afterwards", "KiB", |report| {
            let process = report.process.as_ref()?;
            #[allow(clippy::cast_precision_loss)]
            Some(process.after.resident_kib as f64)
        });
        #[allow(clippy::cast_precision_loss)]
        row("failed calls", "", |report| {
            Some(report.failed_calls() as f64)
        });
        Self {
            rows,
            differences: differences(first, second),
        }
    }
}

/// A difference of load makes the ratios say little.
fn differences(first: &Report, second: &Report) -> Vec<String> {
    let mut differences = Vec::new();
    let mut check = |what: &str, first: String, second: String| {
        if first != second {
            differences.push(format!("{what}: {first} and {second}"));
        }
    };
    let driver = |report: &Report| format!("{} {}", report.driver.name, report.driver.version);
    check("driver", driver(first), driver(second));
    let (a, b) = (&first.load, &second.load);
    check("callers", a.callers.to_string(), b.callers.to_string());
    check("volumes", a.volumes.to_string(), b.volumes.to_string());
    let made = |created: bool| if created { "created" } else { "given" }.to_owned();
    check("their origin", made(a.created), made(b.created));
    if let (Some(a), Some(b)) = (&a.origin, &b.origin) {
        let size = |of: &OriginShape| format!("{} bytes", of.size_bytes);
        check("size", size(a), size(b));
        let parameters = |of: &OriginShape| format!("{:?}", of.parameters);
        check("parameters", parameters(a), parameters(b));
        let source = |of: &OriginShape| of.copy_of.clone().unwrap_or("nothing".to_owned());
        check("what they copy", source(a), source(b));
    }
    check(
        "access",
        format!("{:?}", a.access),
        format!("{:?}", b.access),
    );
    let options = |load: &LoadShape| format!("{:?}", load.mount_options);
    check("mount options", options(a), options(b));
    let timeout = |load: &LoadShape| format!("{} s", load.timeout_seconds);
    check("timeout", timeout(a), timeout(b));
    let kept = |kept: bool| if kept { "kept" } else { "for each call" }.to_owned();
    check(
        "connections",
        kept(a.kept_connection),
        kept(b.kept_connection),
    );
    let ended = |report: &Report| {
        if report.interrupted {
            "interrupted"
        } else {
            "whole"
        }
    };
    check("end", ended(first).to_owned(), ended(second).to_owned());
    differences
}

impl Row {
    fn new(what: String, unit: &'static str, first: Option<f64>, second: Option<f64>) -> Self {
        let ratio = first
            .zip(second)
            .filter(|(first, _)| *first > 0.0)
            .map(|(first, second)| second / first);
        Self {
            what,
            unit,
            first,
            second,
            ratio,
        }
    }
}

impl Answer for Comparison {
    fn text(&self) -> String {
        let rows = self.rows.iter().map(|row| {
            let cell = |value: Option<f64>| match (value, row.unit) {
                (None, _) => String::new(),
                (Some(value), "ms") => in_ms(value),
                (Some(value), _) if value.fract() == 0.0 => format!("{value:.0}"),
                (Some(value), _) => format!("{value:.2}"),
            };
            let ratio = row.ratio.map(|ratio| format!("{ratio:.2}"));
            [
                row.what.clone(),
                row.unit.to_owned(),
                cell(row.first),
                cell(row.second),
                ratio.unwrap_or_default(),
            ]
        });
        let header = ["WHAT", "UNIT", "FIRST", "SECOND", "RATIO"];
        let mut text = table(header, rows, "nothing to compare");
        for difference in &self.differences {
            text.push_str("\nthe runs differ in ");
            text.push_str(difference);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{super::testing::sample, *};

    fn report(value: Value) -> Report {
        serde_json::from_value(value).unwrap()
    }

    fn row(comparison: &Comparison, what: &str) -> Option<f64> {
        let row = comparison.rows.iter().find(|row| row.what == what);
        row.unwrap_or_else(|| panic!("{what}: {comparison:?}"))
            .ratio
    }

    #[test]
    fn ratios_are_the_second_by_the_first() {
        let mut other = sample();
        other["calls"][0]["milliseconds"]["p50"] = json!(1.0);
        other["cycles_per_second"] = json!(10.0);
        other["process"]["cpu_seconds"] = json!(0.3);
        let comparison = Comparison::of(&report(sample()), &report(other));
        assert_eq!(row(&comparison, "NodeStageVolume p50"), Some(0.5));
        assert_eq!(row(&comparison, "NodeStageVolume p99"), Some(1.0));
        assert_eq!(row(&comparison, "cycles a second"), Some(2.0));
        assert_eq!(row(&comparison, "driver's CPU a cycle"), Some(2.0));
        assert!(comparison.differences.is_empty(), "{comparison:?}");
        let text = comparison.text();
        assert!(
            text.contains("NodeStageVolume p50         ms    2.000  1.000   0.50"),
            "{text}"
        );
    }

    #[test]
    fn a_difference_of_load_is_named() {
        let mut other = sample();
        let load = &mut other["load"];
        load["timeout_seconds"] = json!(60.0);
        load["mount_options"] = json!(["discard"]);
        load["origin"] =
            json!({"size_bytes": 8192, "parameters": {"pool": "fast"}, "copy_of": "v"});
        let text = Comparison::of(&report(sample()), &report(other)).text();
        for difference in [
            "size: 4096 bytes and 8192 bytes",
            r#"parameters: {} and {"pool": "fast"}"#,
            "what they copy: nothing and v",
            r#"mount options: [] and ["discard"]"#,
            "timeout: 120 s and 60 s",
        ] {
            let sentence = format!("the runs differ in {difference}");
            assert!(text.contains(&sentence), "{sentence} is not in\n{text}");
        }
        let mut given = sample();
        given["load"]["created"] = json!(false);
        given["load"].as_object_mut().unwrap().remove("origin");
        let text = Comparison::of(&report(sample()), &report(given)).text();
        assert!(
            text.contains("differ in their origin: created and given"),
            "{text}"
        );
        assert!(!text.contains("size"), "{text}");
    }

    #[test]
    fn what_one_run_lacks_has_no_ratio() {
        let mut other = sample();
        other["calls"][0]["call"] = json!("NodeUnstageVolume");
        other["process"] = Value::Null;
        other["load"]["callers"] = json!(4);
        other["load"]["kept_connection"] = json!(true);
        let comparison = Comparison::of(&report(sample()), &report(other));
        for what in [
            "NodeStageVolume p50",
            "NodeUnstageVolume p50",
            "driver's CPU a cycle",
        ] {
            assert_eq!(row(&comparison, what), None);
        }
        let text = comparison.text();
        assert!(text.contains("differ in callers: 1 and 4"), "{text}");
        assert!(
            text.contains("differ in connections: for each call and kept"),
            "{text}"
        );
        assert!(
            Row::new(String::new(), "", Some(0.0), Some(1.0))
                .ratio
                .is_none()
        );
    }
}
