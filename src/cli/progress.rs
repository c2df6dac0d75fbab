//! Shows the step of a call on a terminal.
//!
//! A stage with a large mkfs takes a while, and a stage of a device that hangs never
//! ends; a copy of a large volume takes a while, too. A spinner on stderr shows the step,
//! which the node agent reports, or the copy's progress, from the controller. Without a
//! terminal, uringctl prints nothing and does not ask.

use std::{pin::pin, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{answer::printable, context::Context, error::CliError};
use crate::proto::admin::HeldVolume;

/// Most calls take less, and get no spinner.
const QUIET: Duration = Duration::from_millis(300);
const ASK_EVERY: Duration = Duration::from_millis(250);

fn spinner() -> Option<ProgressBar> {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if bar.is_hidden() {
        return None;
    }
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
        bar.set_style(style);
    }
    Some(bar)
}

impl Context {
    /// Waits for `work`, showing `label` and the step that the node has under
    /// way for `volume_id`.
    pub async fn showing<T>(
        &self,
        label: &str,
        volume_id: &str,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        let step = async || {
            // If the node does not answer, the spinner shows the label alone.
            let held = self.held().await.unwrap_or_default();
            let volume = held.iter().find(|volume| volume.volume_id == volume_id);
            volume.and_then(under_way)
        };
        self.showing_step(label, step, work).await
    }

    /// Waits for `work`, showing `label` and the `step` under way, if any.
    pub async fn showing_step<T>(
        &self,
        label: &str,
        step: impl AsyncFn() -> Option<String>,
        work: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        let mut work = pin!(work);
        if let Ok(done) = tokio::time::timeout(QUIET, &mut work).await {
            return done;
        }
        let Some(bar) = self.shows_progress.then(spinner).flatten() else {
            return work.await;
        };
        let watch = async {
            loop {
                let message = message(label, step().await);
                bar.set_message(printable(&message).into_owned());
                bar.tick();
                tokio::time::sleep(ASK_EVERY).await;
            }
        };
        let done = tokio::select! {
            done = work => done,
            () = watch => unreachable!("the watch never ends"),
        };
        bar.finish_and_clear();
        done
    }
}

fn message(label: &str, step: Option<String>) -> String {
    match step {
        Some(step) => format!("{label}: {step}"),
        None => label.to_owned(),
    }
}

/// `mkfs for 2.3 s, waiting for …`; None while nothing is under way.
pub fn under_way(volume: &HeldVolume) -> Option<String> {
    if volume.step.is_empty() {
        return None;
    }
    let waits = match volume.waits_for.as_str() {
        "" => String::new(),
        what => format!(", waiting for {what}"),
    };
    Some(format!(
        "{} for {}{waits}",
        volume.step,
        age(volume.step_age_ms)
    ))
}

/// `340 ms`, `2.3 s`, `4 min 10 s`.
pub fn age(milliseconds: u64) -> String {
    match milliseconds {
        0..1000 => format!("{milliseconds} ms"),
        1000..60_000 => format!("{}.{} s", milliseconds / 1000, milliseconds % 1000 / 100),
        _ => format!(
            "{} min {} s",
            milliseconds / 60_000,
            milliseconds % 60_000 / 1000
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_under_way_is_shown() {
        let volume = HeldVolume {
            step: "mkfs".to_owned(),
            step_age_ms: 2345,
            waits_for: "mkfs.ext4 (process 71)".to_owned(),
            ..Default::default()
        };
        assert_eq!(
            message("staging data", under_way(&volume)),
            "staging data: mkfs for 2.3 s, waiting for mkfs.ext4 (process 71)"
        );
        assert_eq!(message("staging data", None), "staging data");
        assert_eq!(under_way(&HeldVolume::default()), None);
    }

    #[test]
    fn ages_are_short() {
        assert_eq!(age(7), "7 ms");
        assert_eq!(age(59_999), "59.9 s");
        assert_eq!(age(250_000), "4 min 10 s");
    }
}
