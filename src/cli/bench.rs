//! `bench run|compare|clean`: load for a CSI driver, and what it costs.
//!
//! A run never touches a volume that something else uses, nor a path that it did not make:
//! it has a fresh directory below kubelet's, and stages only volumes that it has created
//! itself or that were given to it and are not in use.

mod caller;
mod clean;
mod compare;
mod in_use;
mod mounts;
mod place;
mod process;
mod report;
mod run;
mod samples;
mod session;
#[cfg(test)]
mod testing;
mod volumes;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{answer::Answer, context::Context, error::CliError};

/// Measures a CSI driver with real volumes
#[derive(Args, Debug)]
pub struct Bench {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Run(Box<run::Run>),
    Compare(compare::Compare),
    Clean(clean::Clean),
}

impl Bench {
    /// Runs the command.
    pub async fn run(self, context: &Context) -> Result<BenchAnswer, CliError> {
        Ok(match self.command {
            BenchCommand::Run(run) => BenchAnswer::Report(Box::new(run.run(context).await?)),
            BenchCommand::Compare(compare) => BenchAnswer::Comparison(compare.run()?),
            BenchCommand::Clean(clean) => BenchAnswer::Cleaned(clean.run(context).await?),
        })
    }
}

/// The answer of one of the commands.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum BenchAnswer {
    /// Of a run.
    Report(Box<report::Report>),
    /// Of two runs.
    Comparison(compare::Comparison),
    /// What is gone.
    Cleaned(clean::Cleaned),
}

impl Answer for BenchAnswer {
    fn text(&self) -> String {
        match self {
            Self::Report(report) => report.text(),
            Self::Comparison(comparison) => comparison.text(),
            Self::Cleaned(cleaned) => cleaned.text(),
        }
    }

    fn require_success(self) -> Result<(), CliError> {
        match self {
            Self::Report(report) if !report.left.is_empty() => Err(CliError::Left(report.left)),
            Self::Report(report) if report.failed_calls() > 0 => {
                Err(CliError::CallsFailed(report.failed_calls()))
            }
            Self::Report(report) if report.interrupted => Err(CliError::Interrupted),
            Self::Cleaned(cleaned) if !cleaned.left.is_empty() => Err(CliError::Left(cleaned.left)),
            _ => Ok(()),
        }
    }
}
