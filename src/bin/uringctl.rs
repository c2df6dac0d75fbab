//! The entry point of the operator's command line; `uringctl --help` lists its commands.

use std::process::ExitCode;

use uring_csi::cli;

fn main() -> ExitCode {
    cli::main()
}
