//! `kvstrata stats`: what a server holds and has done.

use std::fmt::{self, Display, Write};

use bytesize::ByteSize;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::{stdout, target::Server};
use crate::{
    client::{Stats, TierTotals},
    numbers::{count, percent},
    sim::ratio,
};

const EXAMPLES: &str = "\
Examples:
  kvstrata stats
  kvstrata stats --endpoint kvstrata-0.kvstrata:9400 --json";

/// Show what a server holds and has done
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

/// Asks the server and prints a table or JSON.
///
/// # Errors
/// Whatever keeps the server from answering.
///
/// # Cancel safety
/// Safe: it changes nothing.
pub async fn run(args: Args) -> Result<()> {
    let stats = args.server.connect().await?.stats().await?;
    let text = if args.json {
        let text = serde_json::to_string_pretty(&stats);
        text.map_err(|error| Error::new(ErrorKind::Internal, "write JSON").because(error))? + "\n"
    } else {
        let mut text = String::new();
        write!(text, "{}", Table(&stats))
            .map_err(|error| Error::new(ErrorKind::Internal, "write text").because(error))?;
        text
    };
    stdout::print(&text)
}

/// The stats as people read them.
struct Table<'a>(&'a Stats);

impl Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.0;
        let uptime =
            humantime::format_duration(std::time::Duration::from_secs(stats.uptime().as_secs()));
        writeln!(f, "{}: kvstrata {}, up {uptime}", stats.node, stats.version)?;
        for warning in &stats.warnings {
            writeln!(f, "WARNING: {warning}")?;
        }
        write_tiers(f, stats)?;
        write_counts(f, stats)?;
        write_namespaces(f, stats)
    }
}

fn write_tiers(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    writeln!(
        f,
        "\n{:<8}{:>12}{:>12}{:>9}{:>14}{:>14}{:>14}",
        "tier", "capacity", "used", "share", "blocks", "evicted", "read"
    )?;
    for tier in &stats.tiers {
        writeln!(
            f,
            "{:<8}{:>12}{:>12}{:>9}{:>14}{:>14}{:>14}",
            tier.tier,
            ByteSize(tier.capacity_bytes).to_string(),
            ByteSize(tier.used_bytes).to_string(),
            percent(ratio(tier.used_bytes, tier.capacity_bytes)),
            count(tier.blocks),
            count(tier.evicted_blocks),
            count(tier.get_blocks),
        )?;
    }
    Ok(())
}

fn write_counts(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    let lookups = &stats.lookups;
    let per_block = stats.index_bytes.checked_div(stats.index_blocks).unwrap_or(0);
    writeln!(f, "\nlookups   {}", Lookups(lookups))?;
    writeln!(
        f,
        "index     {} blocks, {} ({per_block} B each)",
        count(stats.index_blocks),
        ByteSize(stats.index_bytes)
    )?;
    for scheme in stats.schemes.iter().filter(|scheme| scheme.entries > 0) {
        writeln!(
            f,
            "names     {} of {}, {}",
            count(scheme.entries),
            scheme.scheme,
            ByteSize(scheme.bytes)
        )?;
    }
    writeln!(
        f,
        "clients   {} sessions, {} leases over {}, {} of puts in flight",
        count(stats.sessions.into()),
        count(stats.leases.into()),
        ByteSize(stats.leased_bytes),
        ByteSize(stats.staging_bytes)
    )?;
    writeln!(
        f,
        "watch     {} corrupt parts, {} duplicates with other bytes",
        count(stats.corrupt),
        count(stats.duplicate_differs)
    )
}

fn write_namespaces(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    if stats.namespaces.is_empty() {
        return writeln!(f, "\nno namespace is open");
    }
    writeln!(f, "\n{:<10}{:<30}{:>12}{:>12}  lookups", "namespace", "model", "blocks", "bytes")?;
    for namespace in &stats.namespaces {
        writeln!(
            f,
            "{:<10}{:<30}{:>12}{:>12}  {}",
            namespace.namespace_id.get(..8).unwrap_or_default(),
            shortened(&format!("{} ({})", namespace.model, namespace.engine), 28),
            count(namespace.blocks),
            ByteSize(namespace.bytes).to_string(),
            Lookups(&namespace.lookups),
        )?;
    }
    Ok(())
}

fn shortened(text: &str, chars_max: usize) -> String {
    let mut short: String = text.chars().take(chars_max).collect();
    if short.len() < text.len() {
        short.pop();
        short.push('~');
    }
    short
}

/// Totals in one line.
struct Lookups<'a>(&'a TierTotals);

impl Display for Lookups<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let totals = self.0;
        write!(f, "{} blocks asked", count(totals.asked))?;
        for (name, blocks) in [
            ("dram", totals.dram),
            ("nvme", totals.nvme),
            ("object", totals.object),
            ("pending", totals.pending),
            ("miss", totals.miss),
        ] {
            if blocks > 0 {
                write!(f, ", {name} {}", percent(ratio(blocks, totals.asked)))?;
            }
        }
        Ok(())
    }
}
