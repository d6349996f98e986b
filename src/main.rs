//! The `kvstrata` binary.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvstrata::cli::{gen_trace, plan};

#[derive(Debug, Parser)]
#[command(name = "kvstrata")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(plan::Args),
    GenTrace(gen_trace::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Plan(args) => plan::run(&args),
        Command::GenTrace(args) => gen_trace::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = format!("{error}\n");
            match std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes()) {
                Ok(()) | Err(_) => ExitCode::FAILURE,
            }
        }
    }
}
