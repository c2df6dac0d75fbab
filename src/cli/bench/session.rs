//! A run from its first volume to the removal of its last: what it makes, measures, and
//! undoes.

use std::{
    cell::Cell,
    pin::Pin,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tonic::{Code, Status};

use super::{
    caller::{Caller, Load},
    place::{Creation, Place, Record, RecordedVolume},
    process::{Process, ProcessUse},
    samples::{Call, Samples},
    volumes::BenchVolume,
};
use crate::cli::{context::Context, error::CliError};

/// Between two attempts to create or delete.
const PAUSE: Duration = Duration::from_millis(500);

/// A run.
pub struct Session<'a> {
    pub context: &'a Context,
    pub load: Load,
    pub callers: usize,
    pub place: Place,
    pub volumes: Vec<BenchVolume>,
    creation: Creation,
    /// Of the calls that create and delete.
    pub samples: Samples,
    /// Whether the directory could not be removed, in a sentence.
    place_left: Option<String>,
}

/// The cycles.
#[derive(Default)]
pub struct Measured {
    pub took: Duration,
    pub samples: Samples,
    pub failed_cycles: u64,
    pub own_cpu_seconds: f64,
    /// Of the driver's process, or why it is not known.
    pub process: Option<Result<ProcessUse, String>>,
}

/// What one caller has done.
#[derive(Default)]
struct Ended {
    samples: Samples,
    failed_cycles: u64,
    error: Option<CliError>,
}

/// Of one type for all kinds of work, or `join_all` would be compiled for each.
fn boxed<'f>(work: impl Future<Output = Ended> + 'f) -> Pin<Box<dyn Future<Output = Ended> + 'f>> {
    Box::pin(work)
}

impl<'a> Session<'a> {
    pub fn new(
        context: &'a Context,
        load: Load,
        callers: usize,
        place: Place,
        volumes: Vec<BenchVolume>,
        creation: Creation,
    ) -> Self {
        Self {
            context,
            load,
            callers,
            place_left: Some(place.path().display().to_string()),
            place,
            volumes,
            creation,
            samples: Samples::default(),
        }
    }

    /// Writes down which volumes the run uses.
    fn record(&self) -> Result<(), CliError> {
        let volumes = self.volumes.iter().map(|volume| RecordedVolume {
            handle: volume.handle.clone(),
            created_as: volume.created_as.clone(),
        });
        self.place.record(&Record {
            node_endpoint: self.load.endpoint.to_string(),
            controller_endpoint: self.context.controller_socket.endpoint.to_string(),
            volumes: volumes.collect(),
            creation: self.creation.clone(),
        })
    }

    /// Creates the volumes that have a name; all callers do, each its own.
    pub async fn begin(&mut self) -> Result<(), CliError> {
        self.record()?;
        let (context, load, how) = (self.context, &self.load, &self.creation);
        let work = shares(&mut self.volumes, self.callers)
            .into_iter()
            .map(|volumes| {
                boxed(async move {
                    let mut ended = Ended::default();
                    for volume in volumes {
                        if load.is_interrupted.get() {
                            break;
                        }
                        let samples = &mut ended.samples;
                        if let Err(error) = create_one(context, load, how, volume, samples).await {
                            ended.error = Some(error);
                            break;
                        }
                    }
                    ended
                })
            });
        let mut created = Ok(());
        for ended in join_all(work).await {
            self.samples.merge(ended.samples);
            created = created.and(ended.error.map_or(Ok(()), Err));
        }
        self.record()?;
        created?;
        // An interrupt leaves some that do not exist.
        self.volumes.retain(|volume| !volume.handle.is_empty());
        Ok(())
    }

    /// Makes the cycles of all callers.
    pub async fn measure(&mut self, driver: Result<Process, String>) -> Measured {
        let own = Process::own();
        let begun = Instant::now();
        let load = &self.load;
        let cycles = shares(&mut self.volumes, self.callers)
            .into_iter()
            .map(|volumes| {
                boxed(async move {
                    let mut caller = Caller::new(load);
                    caller.run(volumes).await;
                    Ended {
                        samples: caller.samples,
                        failed_cycles: caller.failed_cycles,
                        error: None,
                    }
                })
            });
        let callers = join_all(cycles).await;
        let mut measured = Measured {
            took: begun.elapsed(),
            ..Default::default()
        };
        if let (Ok(before), Ok(after)) = (own, Process::own()) {
            measured.own_cpu_seconds = after.since(before).map_or(0.0, |used| used.cpu_seconds);
        }
        measured.process = Some(match (driver, Process::of_socket(&load.endpoint).await) {
            (Ok(before), Ok(after)) => after
                .since(before)
                .ok_or_else(|| "the driver was restarted during the run".to_owned()),
            (Err(why), _) | (_, Err(why)) => Err(why),
        });
        for caller in callers {
            measured.failed_cycles += caller.failed_cycles;
            measured.samples.merge(caller.samples);
        }
        measured
    }

    /// Undoes all that the run may have made, one step after another for each volume, and
    /// stops where a step fails.
    pub async fn clean(&mut self) {
        let (context, load, how) = (self.context, &self.load, &self.creation);
        let work = shares(&mut self.volumes, self.callers)
            .into_iter()
            .map(|volumes| {
                boxed(async move {
                    let mut ended = Ended::default();
                    for volume in volumes {
                        if Caller::new(load).down(volume).await.is_err() {
                            continue;
                        }
                        volume.left = volume.paths.remove().err();
                        if volume.may_be.created && volume.left.is_none() {
                            delete_one(context, load, how, volume, &mut ended.samples).await;
                        }
                    }
                    ended
                })
            });
        for ended in join_all(work).await {
            self.samples.merge(ended.samples);
        }
        // The record stays as long as it may be needed.
        if self
            .volumes
            .iter()
            .all(|volume| volume.what_is_left().is_empty())
        {
            self.place_left = self.place.remove().err();
        }
    }

    /// What may be left, in sentences.
    pub fn what_is_left(&self) -> Vec<String> {
        let volumes = self.volumes.iter().flat_map(BenchVolume::what_is_left);
        volumes.chain(self.place_left.clone()).collect()
    }
}

async fn create_one(
    context: &Context,
    load: &Load,
    how: &Creation,
    volume: &mut BenchVolume,
    samples: &mut Samples,
) -> Result<(), CliError> {
    let Some(name) = volume.created_as.clone() else {
        return Ok(());
    };
    let may_exist = Cell::new(volume.may_be.created);
    let created = repeated(load, Call::CreateVolume, samples, async || {
        volume.may_be.created = true;
        let (usage, origin) = (&how.usage, &how.origin);
        let created = context
            .create_volume(name.clone(), how.size, usage, origin)
            .await;
        if created.as_ref().is_err_and(CliError::is_uncertain) {
            may_exist.set(true);
        }
        created
    })
    .await;
    match created {
        Ok(created) => {
            volume.handle = created.volume_id;
            volume.volume_context = created.volume_context;
            Ok(())
        }
        Err(error) => {
            // After a final code nothing was created, also not by earlier attempts.
            let is_final = matches!(error, CliError::Refused { .. }) && !error.is_uncertain();
            volume.may_be.created = may_exist.get() && !is_final;
            Err(error)
        }
    }
}

/// Deletes a volume that the run has created, by the name that the run gave it.
async fn delete_one(
    context: &Context,
    load: &Load,
    how: &Creation,
    volume: &mut BenchVolume,
    samples: &mut Samples,
) {
    let Some(name) = volume.created_as.clone() else {
        return;
    };
    // CreateVolume was not answered, and the controller may be at work on it: no list has the
    // volume then, so that it is created to the end. Nor do lists name directories of NFS
    // servers.
    if volume.handle.is_empty()
        && let Err(error) = create_one(context, load, how, volume, samples).await
    {
        // A refusal may be about the secrets of this command, which are in no record.
        volume.may_be.created |= is_about_caller(&error);
        return;
    }
    let handle = volume.handle.clone();
    let deleted = repeated(load, Call::DeleteVolume, samples, async || {
        context.delete_volume(&name, handle.clone()).await
    })
    .await;
    volume.may_be.created = deleted.is_err();
}

/// Whether another caller might get another answer.
fn is_about_caller(error: &CliError) -> bool {
    let CliError::Refused { status, .. } = error else {
        return true;
    };
    matches!(
        status.code(),
        Code::FailedPrecondition
            | Code::InvalidArgument
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
    )
}

/// Repeats a call of the controller while its answers are uncertain, for as long as one
/// call may take.
async fn repeated<T>(
    load: &Load,
    call: Call,
    samples: &mut Samples,
    mut make: impl AsyncFnMut() -> Result<T, CliError>,
) -> Result<T, CliError> {
    let until = Instant::now() + load.timeout;
    loop {
        let begun = Instant::now();
        let error = match make().await {
            Ok(answer) => {
                samples.succeeded(call, begun.elapsed());
                return Ok(answer);
            }
            Err(error) => error,
        };
        match &error {
            CliError::Refused { status, .. } => samples.failed(call, status),
            other => samples.failed(call, &Status::new(Code::Unavailable, other.to_string())),
        }
        if !error.is_uncertain() || Instant::now() + PAUSE > until {
            return Err(error);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The volumes of each caller: all of them, and as many for each as possible.
fn shares<T>(mut volumes: &mut [T], callers: usize) -> Vec<&mut [T]> {
    let mut shares = Vec::with_capacity(callers);
    for left in (1..=callers).rev() {
        let (share, rest) = volumes.split_at_mut(volumes.len().div_ceil(left));
        shares.push(share);
        volumes = rest;
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_volume_has_one_caller_and_no_caller_is_idle(
            callers in 1_usize..50, more in 0_usize..100,
        ) {
            let mut volumes: Vec<usize> = (0..callers + more).collect();
            let all = volumes.clone();
            let shares = shares(&mut volumes, callers);
            prop_assert_eq!(shares.len(), callers);
            let sizes = shares.iter().map(|share| share.len());
            let (least, most) = (sizes.clone().min(), sizes.max());
            prop_assert!(least > Some(0) && most <= least.map(|least| least + 1));
            prop_assert_eq!(shares.concat(), all);
        }
    }
}
