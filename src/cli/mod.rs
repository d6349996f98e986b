//! The command line: what each command is for, and how a failure ends the process.

pub mod adopt;
pub mod doctor;
pub mod drain;
pub mod gen_trace;
pub mod get;
pub mod lookup;
pub mod plan;
mod process;
mod progress;
pub mod put;
pub mod replay;
pub mod router;
pub mod router_config;
pub mod serve;
pub mod settings;
pub mod simulate;
pub mod stats;
mod stdout;
mod svg;
mod table;
pub mod target;
pub mod trace_args;
pub mod verify;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::{Parser, Subcommand};

use kvstrata_tiers::error::ErrorKind;

use crate::config::Problems;

/// Exit code for a command line or configuration that can never work (`EX_USAGE`).
pub const EXIT_USAGE: u8 = 64;

/// A cache tier for the KV-cache blocks of LLM engines.
#[derive(Debug, Parser)]
#[command(name = "kvstrata", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node until SIGTERM or SIGINT, then drain.
    Serve(serve::Args),
    /// Store a file under a key.
    Put(put::Args),
    /// Write the value of a key to standard output or a file.
    Get(get::Args),
    /// Tell which tier holds each key.
    Lookup(lookup::Args),
    /// Run a proxy that sends each prompt to the engine that needs least for it, until SIGTERM or SIGINT.
    Router(router::Args),
    /// Show what a server holds and has done.
    Stats(stats::Args),
    /// Have a node leave: its clients finish, others get its hottest blocks.
    Drain(drain::Args),
    /// Say what is wrong with a live setup, and what to do.
    Doctor(doctor::Args),
    /// Print weights of tiers for a router's configuration, as measured on this node.
    RouterConfig(router_config::Args),
    /// Drive a server with the requests of a trace and check every byte.
    Replay(replay::Args),
    /// Tell what caches of several sizes would hit on a trace.
    Plan(plan::Args),
    /// Compare ways to route the requests of a trace.
    Simulate(simulate::Args),
    /// Check an nvme tier's directory, offline.
    Verify(verify::Args),
    /// Give the packs of a node that is gone to the nodes that are left.
    Adopt(adopt::Args),
    /// Write a trace like those of coding agents.
    GenTrace(gen_trace::Args),
}

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// It can never work as it was given.
    Usage(String),
    /// It was tried and did not work.
    Failed(String),
}

impl Failure {
    /// A failure of something that was tried.
    pub fn failed(why: impl std::fmt::Display) -> Self {
        Self::Failed(why.to_string())
    }
}

impl From<kvstrata_tiers::error::Error> for Failure {
    fn from(error: kvstrata_tiers::error::Error) -> Self {
        match error.kind() {
            ErrorKind::Invalid => Self::Usage(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Self {
        Self::Usage(problems.to_string())
    }
}

/// Parses the arguments of the process and runs the command.
///
/// # Cancel safety
/// Not safe: a server would not drain.
#[expect(clippy::cognitive_complexity, reason = "a table of commands")]
pub async fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(shown) => return show(&shown),
    };
    let result = match cli.command {
        Command::Serve(args) => serve::run(args).await,
        Command::Put(args) => put::run(args).await.map_err(Failure::from),
        Command::Get(args) => get::run(args).await.map_err(Failure::from),
        Command::Lookup(args) => lookup::run(args).await.map_err(Failure::from),
        Command::Router(args) => router::run(args).await,
        Command::Stats(args) => stats::run(args).await.map_err(Failure::from),
        Command::Drain(args) => drain::run(args).await,
        Command::Doctor(args) => doctor::run(args).await,
        Command::RouterConfig(args) => router_config::run(args).await.map_err(Failure::from),
        Command::Replay(args) => Box::pin(replay::run(args)).await.map_err(Failure::from),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args).map_err(Failure::from),
        Command::Verify(args) => verify::run(args).await.map_err(Failure::from),
        Command::Adopt(args) => adopt::run(args).await,
        Command::GenTrace(args) => gen_trace::run(&args).map_err(Failure::from),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(why)) => fail(&why, ExitCode::from(EXIT_USAGE)),
        Err(Failure::Failed(why)) => fail(&why, ExitCode::FAILURE),
    }
}

/// Prints help, version or a usage error.
fn show(shown: &clap::Error) -> ExitCode {
    let code = if shown.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
    // Without a terminal there is nobody to tell.
    shown.print().map_or(ExitCode::FAILURE, |()| code)
}

fn fail(why: &str, code: ExitCode) -> ExitCode {
    // Without standard error the code has to say it all.
    writeln!(io::stderr().lock(), "kvstrata: {why}").map_or(code, |()| code)
}
