//! `explain`: what an error message means, and what to do.

use clap::Args;
use serde::Serialize;

use super::{
    answer::{Answer, fields},
    error::CliError,
    messages::{Explanation, explanations},
};

/// Explains an error message, a gRPC code or a health condition, and says what to do
#[derive(Args, Debug)]
#[command(after_help = "\
The text may be a whole event of a pod or line of a log. Needs no agent. Exit code 3: no error
of this version has such a message.

Examples:
  uringctl explain volume data-1: the passphrase does not open /dev/loop3
  uringctl explain ServerAway
  kubectl describe pod web-0 | tail -n 1 | xargs -0 uringctl explain")]
pub struct Explain {
    /// The message
    #[arg(required = true, allow_hyphen_values = true, trailing_var_arg = true)]
    text: Vec<String>,
}

/// What a text says, in its order.
#[derive(Debug, Serialize)]
pub struct Explained {
    found: Vec<Explanation>,
}

impl Answer for Explained {
    fn text(&self) -> String {
        let blocks: Vec<String> = self.found.iter().map(block).collect();
        blocks.join("\n\n")
    }
}

impl Explain {
    /// Runs the command.
    pub fn run(self) -> Result<Explained, CliError> {
        let found = explanations(&self.text.join(" "));
        if found.is_empty() {
            return Err(CliError::Unexplained);
        }
        Ok(Explained { found })
    }
}

fn block(error: &Explanation) -> String {
    let mut rows = vec![("what to do", error.remedy.clone())];
    if !error.cause.is_empty() {
        rows.insert(0, ("cause", error.cause.clone()));
    }
    format!("{}\n{}", error.message, fields(&rows))
}
