//! The report of a run: the form that `bench compare` reads, and its text.

use std::{collections::BTreeMap, fs, io, path::Path};

use serde::{Deserialize, Serialize};

use super::{process::ProcessUse, samples::CallSummary};
use crate::{
    cli::{
        answer::{Answer, fields, table},
        error::CliError,
    },
    size::human_bytes,
};

/// Of the JSON form. Additions do not change it.
pub const FORMAT: u32 = 1;

/// All that is known of a run.
#[derive(Debug, Deserialize, Serialize)]
pub struct Report {
    pub format: u32,
    pub driver: Driver,
    pub load: LoadShape,
    /// Of the cycles alone, without what was before and after them.
    pub seconds: f64,
    pub cycles: usize,
    pub failed_cycles: u64,
    pub cycles_per_second: f64,
    pub interrupted: bool,
    pub calls: Vec<CallSummary>,
    /// The driver's process.
    pub process: Option<ProcessUse>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_unknown: Option<String>,
    /// uringctl's own: near 1 a second, uringctl is what is measured.
    pub own_cpu_seconds: f64,
    /// What could not be removed.
    pub left: Vec<String>,
}

/// The driver's answer to GetPluginInfo.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct Driver {
    pub name: String,
    pub version: String,
    pub endpoint: String,
}

/// What two runs should have in common to be compared.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct LoadShape {
    pub callers: usize,
    pub volumes: usize,
    pub created: bool,
    pub kept_connection: bool,
    /// `ext4`, `block`; empty for the driver's default. Of the first volume.
    pub access: String,
    /// Sorted. Of the first volume.
    #[serde(default)]
    pub mount_options: Vec<String>,
    pub timeout_seconds: f64,
    /// Of created volumes; none in reports of older releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<OriginShape>,
}

/// How the volumes of a run were created.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct OriginShape {
    pub size_bytes: i64,
    /// Of CreateVolume.
    pub parameters: BTreeMap<String, String>,
    /// The snapshot or the volume that they are copies of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<String>,
}

impl Report {
    /// Reads one that `--json` printed.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let text = fs::read_to_string(path).map_err(|source: io::Error| CliError::Io {
            doing: "read",
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text).map_err(|why| CliError::BadFile {
            path: path.to_owned(),
            why,
        })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let report: Self = serde_json::from_str(text)
            .map_err(|error| format!("no report of `uringctl bench run --json`: {error}"))?;
        if report.format != FORMAT {
            let format = report.format;
            return Err(format!(
                "a report of form {format}; this uringctl reads {FORMAT}"
            ));
        }
        Ok(report)
    }

    /// CPU time of the driver and of its children for each cycle that was made.
    pub fn cpu_ms_per_cycle(&self) -> Option<f64> {
        let process = self.process.as_ref()?;
        let cpu = process.cpu_seconds + process.children_cpu_seconds;
        #[allow(clippy::cast_precision_loss)]
        (self.cycles > 0).then(|| cpu * 1e3 / self.cycles as f64)
    }

    /// How many calls failed.
    pub fn failed_calls(&self) -> u64 {
        let errors = self.calls.iter().flat_map(|call| &call.errors);
        errors.map(|error| error.count).sum()
    }

    fn about_process(&self) -> Vec<(&'static str, String)> {
        let Some(process) = &self.process else {
            let why = self.process_unknown.clone().unwrap_or_default();
            return vec![("driver's process", why)];
        };
        let (before, after) = (&process.before, &process.after);
        let kib = |kib: u64| human_bytes(kib * 1024);
        let cpu = format!(
            "{:.2} s, its children {:.2} s{}",
            process.cpu_seconds,
            process.children_cpu_seconds,
            self.cpu_ms_per_cycle()
                .map_or(String::new(), |ms| format!("; {ms:.2} ms a cycle"))
        );
        let memory = format!(
            "{} resident ({} before; {} at most since its start), {} of its own ({} before)",
            kib(after.resident_kib),
            kib(before.resident_kib),
            kib(after.peak_resident_kib),
            kib(after.anonymous_kib),
            kib(before.anonymous_kib),
        );
        let count = |count: Option<usize>| count.map_or("?".to_owned(), |count| count.to_string());
        let held = format!(
            "{} ({} before); descriptors {} ({} before)",
            after.threads,
            before.threads,
            count(after.descriptors),
            count(before.descriptors),
        );
        vec![
            ("driver's process", process.pid.to_string()),
            ("driver's CPU", cpu),
            ("driver's memory", memory),
            ("driver's threads", held),
        ]
    }
}

impl Answer for Report {
    fn text(&self) -> String {
        let load = &self.load;
        let count = |count: usize, what: &str| match count {
            1 => format!("1 {what}"),
            _ => format!("{count} {what}s"),
        };
        let shape = format!(
            "{}, {} ({}), {}",
            count(load.callers, "caller"),
            count(load.volumes, "volume"),
            if load.access.is_empty() {
                "default file system"
            } else {
                &load.access
            },
            if load.kept_connection {
                "one connection each"
            } else {
                "a connection for each call"
            },
        );
        let result = format!(
            "{} in {:.2} s, {:.2} a second; {} failed{}",
            count(self.cycles, "cycle"),
            self.seconds,
            self.cycles_per_second,
            self.failed_cycles,
            if self.interrupted {
                "; interrupted"
            } else {
                ""
            },
        );
        let driver = &self.driver;
        let mut about = vec![
            (
                "driver",
                format!("{} {} at {}", driver.name, driver.version, driver.endpoint),
            ),
            ("load", shape),
            ("cycles", result),
        ];
        about.extend(self.about_process());
        about.push(("uringctl's CPU", format!("{:.2} s", self.own_cpu_seconds)));

        let rows = self.calls.iter().map(|call| {
            let errors: u64 = call.errors.iter().map(|error| error.count).sum();
            let times = call.milliseconds;
            let cell = |time: Option<f64>| time.map(in_ms).unwrap_or_default();
            [
                call.call.clone(),
                call.succeeded.to_string(),
                errors.to_string(),
                cell(times.map(|times| times.p50)),
                cell(times.map(|times| times.p90)),
                cell(times.map(|times| times.p99)),
                cell(times.map(|times| times.max)),
                call.per_second
                    .map_or(String::new(), |rate| format!("{rate:.1}")),
            ]
        });
        let header = [
            "CALL",
            "OK",
            "ERRORS",
            "P50 ms",
            "P90 ms",
            "P99 ms",
            "MAX ms",
            "PER SECOND",
        ];
        let mut parts = vec![fields(&about), table(header, rows, "no call was made")];
        let errors: Vec<String> = self
            .calls
            .iter()
            .flat_map(|call| {
                call.errors.iter().map(|error| {
                    let (name, code) = (&call.call, &error.code);
                    format!(
                        "{name} {code}, {} times: {}",
                        error.count, error.first_message
                    )
                })
            })
            .collect();
        if !errors.is_empty() {
            parts.push(errors.join("\n"));
        }
        parts.join("\n\n")
    }
}

/// Milliseconds with three or more digits.
pub fn in_ms(milliseconds: f64) -> String {
    let decimals = match milliseconds {
        ..10.0 => 3,
        10.0..100.0 => 2,
        _ => 1,
    };
    format!("{milliseconds:.decimals$}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::testing::sample, *};

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let report = Report::parse(&sample().to_string()).unwrap();
        assert_eq!(serde_json::to_value(&report).unwrap(), sample());
        assert_eq!(report.failed_calls(), 3);
        assert_eq!(report.cpu_ms_per_cycle(), Some(20.0));
    }

    #[test]
    fn other_files_are_no_reports() {
        let mut later = sample();
        later["format"] = json!(2);
        for (text, why) in [
            ("", "bench run --json"),
            ("{}", "bench run --json"),
            (&later.to_string(), "form 2"),
        ] {
            let error = Report::parse(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_text_has_every_call_and_the_first_error() {
        let text = Report::parse(&sample().to_string()).unwrap().text();
        for part in [
            "1 caller, 2 volumes (ext4), a connection for each call",
            "10 cycles in 2.00 s, 5.00 a second; 1 failed",
            "NodeStageVolume  10  3       2.000   3.000   4.000   123.5   5.0",
            "NodeStageVolume ABORTED, 3 times: busy",
            "20.00 ms a cycle",
            "8Mi resident",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
