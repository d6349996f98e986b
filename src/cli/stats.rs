//! `kvstrata stats`: what a server holds and has done.

use std::fmt::{self, Display, Write};

use bytesize::ByteSize;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::{stdout, target::Server};
use crate::{
    client::{
        Stats, TenantTier, TierTotals,
        router::messages::{Tier, TierCost, WatchTiersRequest},
    },
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
    let client = args.server.connect().await?;
    let stats = client.stats().await?;
    let text = if args.json {
        let text = serde_json::to_string_pretty(&stats);
        text.map_err(|error| Error::new(ErrorKind::Internal, "write JSON").because(error))? + "\n"
    } else {
        let mut text = String::new();
        let ask = WatchTiersRequest::default();
        let loads = client.router_watch_tiers(ask).await?.next().await?.tiers;
        write!(text, "{}", Table(&stats, &loads))
            .map_err(|error| Error::new(ErrorKind::Internal, "write text").because(error))?;
        text
    };
    stdout::print(&text)
}

/// The stats as people read them.
struct Table<'a>(&'a Stats, &'a [TierCost]);

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
        write_loads(f, self.1)?;
        write_counts(f, stats)?;
        write_tenants(f, stats)?;
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

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, to be read")]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

/// What loading costs now, where it was measured.
fn write_loads(f: &mut fmt::Formatter<'_>, loads: &[TierCost]) -> fmt::Result {
    let measured = || loads.iter().filter(|cost| !cost.assumed);
    // A disk is as fast for all: it is shown for those who load.
    let of_dram = measured().filter(|cost| cost.tier() == Tier::Dram);
    let loading: Vec<_> = of_dram.map(TierCost::locality).collect();
    let is_loading = |cost: &&TierCost| loading.contains(&cost.locality());
    let measured: Vec<_> = measured().filter(is_loading).collect();
    if measured.is_empty() {
        return Ok(());
    }
    writeln!(
        f,
        "\n{:<8}{:>16}{:>14}{:>12}{:>12}  state",
        "loads", "to", "a second", "setup", "queue"
    )?;
    for cost in measured {
        let plain = |name: &str, prefix| name.trim_start_matches(prefix).to_lowercase();
        writeln!(
            f,
            "{:<8}{:>16}{:>14}{:>12}{:>12}  {}",
            plain(cost.tier().as_str_name(), "TIER_"),
            plain(cost.locality().as_str_name(), "LOCALITY_"),
            ByteSize(whole(cost.bandwidth)).to_string(),
            format!("{:.2} ms", cost.setup_ms),
            format!("{:.2} ms", cost.queue_ms),
            plain(cost.state().as_str_name(), "TIER_STATE_"),
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

/// What tenants have of what they may have; nothing of whoever has no quota and nothing.
fn write_tenants(f: &mut fmt::Formatter<'_>, stats: &Stats) -> fmt::Result {
    let is_of_interest = |tier: &&TenantTier| {
        tier.used_bytes > 0 || tier.floor_bytes > 0 || tier.max_bytes.is_some()
    };
    if stats.tenants.iter().flat_map(|tenant| &tenant.tiers).any(|tier| is_of_interest(&tier)) {
        let columns = ("tenant", "tier", "used", "floor", "most", "refused");
        let (tenant, tier, used, floor, most, refused) = columns;
        writeln!(f, "\n{tenant:<22}{tier:<8}{used:>12}{floor:>12}{most:>12}{refused:>12}")?;
    }
    for tenant in &stats.tenants {
        let name = shortened(&tenant.tenant, 20);
        for tier in tenant.tiers.iter().filter(is_of_interest) {
            let most = tier.max_bytes.map_or("-".to_owned(), |bytes| ByteSize(bytes).to_string());
            writeln!(
                f,
                "{name:<22}{:<8}{:>12}{:>12}{most:>12}{:>12}",
                tier.tier,
                ByteSize(tier.used_bytes).to_string(),
                ByteSize(tier.floor_bytes).to_string(),
                count(tier.refused_blocks),
            )?;
        }
        if let Some(rate) = tenant.requests_per_second {
            let refused = count(tenant.refused_for_requests);
            writeln!(f, "{name:<22}{} requests a second, {refused} refused", count(rate))?;
        }
        if let Some(rate) = tenant.bytes_per_second {
            let refused = count(tenant.refused_for_bytes);
            writeln!(f, "{name:<22}{} a second, {refused} requests refused", ByteSize(rate))?;
        }
    }
    Ok(())
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
