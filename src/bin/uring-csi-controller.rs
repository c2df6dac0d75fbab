//! The entry point; the program is `uring_csi::program::controller`.

use std::process::ExitCode;

use uring_csi::program::controller;

fn main() -> ExitCode {
    controller::main()
}
