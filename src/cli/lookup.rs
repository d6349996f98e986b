//! `kvstrata lookup`: says where keys are, without reading them.

use std::fmt::Write;

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use serde::Serialize;

use super::{
    stdout,
    target::{Target, hashes_of},
};
use crate::client::{Locality, Lookup, LookupOptions, Members, Run};

const EXAMPLES: &str = "\
Examples:
  kvstrata lookup greeting
  kvstrata lookup a b c --json

A lookup reads no bytes and protects nothing from being evicted.";

/// Tell which tier of which node holds each key
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The keys
    #[arg(required = true)]
    pub keys: Vec<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Where to look.
    #[command(flatten)]
    pub target: Target,
}

/// One key and where it is.
#[derive(Debug, Serialize)]
struct Found<'a> {
    key: &'a str,
    /// dram, nvme, object, pending or miss.
    place: &'static str,
    /// Name of the node that has it; none for a miss.
    holder: Option<&'a str>,
    /// local: on the node that was asked; or remote; none for a miss.
    locality: Option<&'static str>,
    /// Expected time to load the run of keys that this one is part of, in milliseconds.
    est_load_ms: f64,
}

/// Looks the keys up and prints one line for each.
///
/// # Errors
/// Whatever keeps the server from answering. A key that is not stored is no error.
///
/// # Cancel safety
/// Safe: it changes nothing.
pub async fn run(args: Args) -> Result<()> {
    let handle = args.target.open().await?;
    let options = LookupOptions { sparse: true, ..LookupOptions::default() };
    let answer = handle.lookup(&hashes_of(&args.keys), options).await?;
    let members = handle.client().members();
    let found = args.keys.iter().zip(0..).map(|(key, at)| found(key, at, &answer, &members));
    let found: Vec<_> = found.collect();
    if args.json {
        return stdout::print_json(&found);
    }
    let width = args.keys.iter().map(String::len).max().unwrap_or(0);
    let mut text = String::new();
    for Found { key, place, holder, locality, est_load_ms } in found {
        let line = match (place, holder.zip(locality)) {
            ("miss" | "pending", _) | (_, None) => writeln!(text, "{key:width$}  {place}"),
            (_, Some((holder, locality))) => writeln!(
                text,
                "{key:width$}  {place:<7} loads in {est_load_ms:.2} ms from {holder} ({locality})"
            ),
        };
        line.map_err(|error| Error::new(ErrorKind::Internal, "write text").because(error))?;
    }
    stdout::print(&text)
}

fn found<'a>(key: &'a str, position: u32, answer: &Lookup, members: &'a Members) -> Found<'a> {
    let holds = |run: &&Run| (run.start..run.end).contains(&position);
    let run = answer.runs.iter().chain(&answer.sparse).find(holds);
    let place = match run {
        None => "miss",
        Some(run) if run.pending => "pending",
        Some(run) => run.tier.name(),
    };
    let est_load_ms = run.map_or(0.0, |run| run.est_load.as_secs_f64() * 1e3);
    let holder = run.map(|run| members.member(run.holder).map_or("unknown", |node| &*node.name));
    let locality = run.map(|run| match run.locality {
        Locality::Local => "local",
        Locality::Remote => "remote",
    });
    Found { key, place, holder, locality, est_load_ms }
}
