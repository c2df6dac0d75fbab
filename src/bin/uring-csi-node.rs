//! The entry point; the program is `uring_csi::program::node`.

use std::process::ExitCode;

use uring_csi::program::node;

fn main() -> ExitCode {
    node::main()
}
