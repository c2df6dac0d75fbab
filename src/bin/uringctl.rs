//! The entry point of the operator's command line; `uringctl --help` lists its commands.

use std::process::ExitCode;

use clap::Parser;
use uring_csi::cli::Cli;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
