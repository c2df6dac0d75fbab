//! How long each call took, and the errors that were answered.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tonic::Status;

use crate::proto::code_name;

/// What is timed, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    CreateVolume,
    NodeGetCapabilities,
    NodeStageVolume,
    NodePublishVolume,
    NodeGetVolumeStats,
    NodeUnpublishVolume,
    NodeUnstageVolume,
    /// All calls of a cycle, one after another.
    Cycle,
    DeleteVolume,
}

impl Call {
    /// Whether it is made in the cycles, and not before or after them.
    fn is_of_a_cycle(self) -> bool {
        !matches!(self, Self::CreateVolume | Self::DeleteVolume)
    }
}

/// Samples of all calls. Their number is bounded by that of the cycles, so they are all
/// kept, and the percentiles are exact.
#[derive(Debug, Default)]
pub struct Samples {
    took: BTreeMap<Call, Vec<Duration>>,
    errors: BTreeMap<(Call, &'static str), (u64, String)>,
}

impl Samples {
    /// Adds a call that succeeded.
    pub fn succeeded(&mut self, call: Call, took: Duration) {
        self.took.entry(call).or_default().push(took);
    }

    /// Adds a call that failed. Its time is not kept: percentiles are those of calls that
    /// did their work.
    pub fn failed(&mut self, call: Call, status: &Status) {
        let message = || status.message().to_owned();
        match self.errors.entry((call, code_name(status.code()))) {
            Entry::Occupied(known) => known.into_mut().0 += 1,
            Entry::Vacant(new) => _ = new.insert((1, message())),
        }
    }

    /// Adds those of another caller.
    pub fn merge(&mut self, other: Self) {
        for (call, took) in other.took {
            self.took.entry(call).or_default().extend(took);
        }
        for (key, (count, message)) in other.errors {
            self.errors.entry(key).or_insert((0, message)).0 += count;
        }
    }

    /// How often a call succeeded.
    pub fn count(&self, call: Call) -> usize {
        self.took.get(&call).map_or(0, Vec::len)
    }

    /// A line for each call; the cycles took `wall` together.
    pub fn summarize(mut self, wall: Duration) -> Vec<CallSummary> {
        for (call, _) in self.errors.keys() {
            self.took.entry(*call).or_default();
        }
        let summary = |(call, mut took): (Call, Vec<Duration>)| {
            took.sort_unstable();
            let errors = self.errors.iter().filter(|((of, _), _)| *of == call);
            let errors = errors.map(|((_, code), (count, message))| CallError {
                code: (*code).to_owned(),
                count: *count,
                first_message: message.clone(),
            });
            #[allow(clippy::cast_precision_loss)]
            let per_second = took.len() as f64 / wall.as_secs_f64();
            CallSummary {
                call: format!("{call:?}"),
                succeeded: took.len(),
                errors: errors.collect(),
                per_second: call.is_of_a_cycle().then_some(per_second),
                milliseconds: Times::of(&took),
            }
        };
        self.took.into_iter().map(summary).collect()
    }
}

/// The calls of one name.
#[derive(Debug, Deserialize, Serialize)]
pub struct CallSummary {
    pub call: String,
    pub succeeded: usize,
    pub errors: Vec<CallError>,
    /// Those that succeeded, by the time of all cycles.
    pub per_second: Option<f64>,
    /// None where none succeeded.
    pub milliseconds: Option<Times>,
}

/// Answers with the same code.
#[derive(Debug, Deserialize, Serialize)]
pub struct CallError {
    pub code: String,
    pub count: u64,
    pub first_message: String,
}

/// The distribution of a call's times, in milliseconds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Times {
    pub min: f64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Times {
    fn of(sorted: &[Duration]) -> Option<Self> {
        let count = u32::try_from(sorted.len()).ok()?;
        let mean = sorted.iter().sum::<Duration>().checked_div(count)?;
        let at = |permille| percentile(sorted, permille).map(milliseconds);
        Some(Self {
            min: milliseconds(*sorted.first()?),
            mean: milliseconds(mean),
            p50: at(500)?,
            p90: at(900)?,
            p99: at(990)?,
            p999: at(999)?,
            max: milliseconds(*sorted.last()?),
        })
    }
}

/// The smallest sample that at least `permille` of a thousand samples do not exceed (the
/// nearest rank).
fn percentile(sorted: &[Duration], permille: usize) -> Option<Duration> {
    let rank = (sorted.len() * permille).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of_millis(times: impl IntoIterator<Item = u64>) -> Samples {
        let mut samples = Samples::default();
        for time in times {
            samples.succeeded(Call::NodeStageVolume, Duration::from_millis(time));
        }
        samples
    }

    #[test]
    fn percentiles_are_samples_of_the_nearest_rank() {
        let samples = of_millis((1..=200).rev());
        let summary = samples.summarize(Duration::from_secs(2)).remove(0);
        assert_eq!(summary.call, "NodeStageVolume");
        assert_eq!(summary.succeeded, 200);
        assert_eq!(summary.per_second, Some(100.0));
        let times = Times {
            min: 1.0,
            mean: 100.5,
            p50: 100.0,
            p90: 180.0,
            p99: 198.0,
            p999: 200.0,
            max: 200.0,
        };
        assert_eq!(summary.milliseconds, Some(times));
    }

    #[test]
    fn one_sample_is_every_percentile() {
        let times = Times::of(&[Duration::from_millis(7)]).unwrap();
        let every = Times {
            min: 7.0,
            mean: 7.0,
            p50: 7.0,
            p90: 7.0,
            p99: 7.0,
            p999: 7.0,
            max: 7.0,
        };
        assert_eq!(times, every);
        assert_eq!(Times::of(&[]), None);
    }

    #[test]
    fn errors_are_counted_by_code_and_not_timed() {
        let mut samples = of_millis([5]);
        samples.failed(Call::NodeStageVolume, &Status::aborted("first"));
        let mut other = Samples::default();
        other.failed(Call::NodeStageVolume, &Status::aborted("second"));
        other.failed(Call::DeleteVolume, &Status::not_found("none"));
        samples.merge(other);
        let summaries = samples.summarize(Duration::from_secs(1));
        let [stage, delete] = &summaries[..] else {
            panic!("{summaries:?}");
        };
        assert_eq!(stage.succeeded, 1);
        assert_eq!(stage.errors[0].code, "ABORTED");
        assert_eq!(stage.errors[0].count, 2);
        assert_eq!(stage.errors[0].first_message, "first");
        assert!(delete.milliseconds.is_none() && delete.per_second.is_none());
    }

    proptest! {
        #[test]
        fn a_percentile_has_its_share_of_samples_at_or_below(
            mut nanos in proptest::collection::vec(0_u64..1000, 1..300),
            permille in 0_usize..=1000,
        ) {
            nanos.sort_unstable();
            let sorted: Vec<_> = nanos.iter().copied().map(Duration::from_nanos).collect();
            let found = percentile(&sorted, permille).unwrap();
            let within = sorted.iter().filter(|time| **time <= found).count();
            let below = sorted.iter().filter(|time| **time < found).count();
            prop_assert!(within * 1000 >= sorted.len() * permille);
            prop_assert!(below == 0 || below * 1000 < sorted.len() * permille);
        }
    }
}
