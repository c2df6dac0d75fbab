//! The operator's command line; `uringctl --help` says what it can do.

use std::process::ExitCode;

use clap::Parser;
use uring_csi::cli::Cli;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
