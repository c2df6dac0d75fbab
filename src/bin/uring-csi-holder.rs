//! The entry point; the program is `uring_csi::program::supervisor`.

use std::process::ExitCode;

use uring_csi::program::supervisor;

fn main() -> ExitCode {
    supervisor::main()
}
