//! `kvstrata doctor`: says in words what is wrong with a live setup, and what to do.
//!
//! It asks the first endpoint in detail, and every member that this one lists.

mod checks;
mod cluster;
mod observe;
#[cfg(test)]
mod tests;

use std::fmt::{self, Display};

use kvstrata_tiers::error::{Error, ErrorKind};

use super::{Failure, stdout, target::Server};
use crate::console::problems::{Finding, Level};

const EXAMPLES: &str = "\
Examples:
  kvstrata doctor
  kvstrata doctor --endpoint kvstrata-0.kvstrata:9400 --json
  kvstrata doctor --endpoint 10.0.0.1:9400,10.0.0.2:9400

It stores one small block each way at the first endpoint and removes it again, and asks every member
that is listed there how it is; further endpoints are asked, too, whether they are listed or not. Where tokens are asked for, one of an
operator sees all of the node, any other its own tenant's. The exit code is 1 if there is a problem.";

/// Say what is wrong with a live setup, and what to do
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Which server.
    #[command(flatten)]
    pub server: Server,
}

/// Looks at the server and at this machine, and prints what there is to say.
///
/// # Errors
/// Whatever keeps the server from answering; that there are problems.
///
/// # Cancel safety
/// Safe: a block of 64 KiB may be left behind, which is evicted in time.
pub async fn run(args: Args) -> Result<(), Failure> {
    let findings = checks::diagnose(&observe::observe(&args.server).await?);
    let text = if args.json {
        let text = serde_json::to_string_pretty(&findings);
        text.map_err(|error| Error::new(ErrorKind::Internal, "write JSON").because(error))? + "\n"
    } else {
        Report(&findings).to_string()
    };
    stdout::print(&text)?;
    match findings.iter().filter(|finding| finding.level == Level::Problem).count() {
        0 => Ok(()),
        1 => Err(Failure::failed("doctor: 1 problem")),
        many => Err(Failure::failed(format!("doctor: {many} problems"))),
    }
}

/// The findings as people read them.
struct Report<'a>(&'a [Finding]);

impl Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Finding { level, what, seen, advice } in self.0 {
            let mark = match level {
                Level::Fine => "ok",
                Level::Note => "note",
                Level::Problem => "PROBLEM",
            };
            writeln!(f, "{mark:<8}{what:<15}{seen}")?;
            if !advice.is_empty() {
                writeln!(f, "{:23}-> {advice}", "")?;
            }
        }
        Ok(())
    }
}
