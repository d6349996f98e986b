//! `kvstrata router-config`: weights of tiers for routers that know constants only, as loads are now.

use std::fmt::Write;

use clap::ValueEnum;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::{stdout, target::Server};
use crate::{
    client::{
        NamespaceStats, Stats,
        router::messages::{Locality, Tier, TierCost, TierState, WatchTiersRequest},
    },
    score::{LoadCost, break_even_blocks, constant_weight},
};

const EXAMPLES: &str = "\
Examples:
  kvstrata router-config dynamo --prefill-tokens-per-second 12000
  kvstrata router-config llm-d --prefill-tokens-per-second 12000 --hit-tokens 32768 --model qwen3

A weight is what share of a block's prefill a hit saves after loading: 1 - load / prefill. It is right for
hits of the length given and for the speed of now, and for no others: a router that can ask (Lookup, Score)
needs no weights. Take it again after a change of engines, disks or networks.";

/// Tiers, hot to cold.
const NAMES: [(Tier, &str); 3] =
    [(Tier::Dram, "dram"), (Tier::Nvme, "nvme"), (Tier::Object, "object")];

/// Print weights of tiers for a router's configuration, as measured on this node
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The router
    pub router: Router,

    /// Tokens that one engine prefills in a second
    #[arg(long, value_name = "COUNT")]
    pub prefill_tokens_per_second: f64,

    /// Tokens of a usual hit: setup counts the less the longer it is
    #[arg(long, value_name = "COUNT", default_value_t = 8192)]
    pub hit_tokens: u32,

    /// The model, if the server has blocks of several
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,

    /// Where engines are, seen from the node; by default the nearest from which loads were measured
    #[arg(long, value_name = "WHERE")]
    pub from: Option<From>,

    /// Which server.
    #[command(flatten)]
    pub server: Server,
}

/// Whose configuration it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Router {
    /// Flags of the Dynamo router.
    Dynamo,
    /// Of the endpoint picker's precise prefix cache scorer.
    LlmD,
}

/// Where engines are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum From {
    /// On the node's host, by shared memory.
    SharedMemory,
    /// On the node's host, by a socket.
    SameNode,
    /// In its zone.
    SameZone,
    /// Elsewhere.
    Remote,
}

/// What is weighed.
#[derive(Debug)]
struct Measured {
    node: String,
    /// Bytes of a block.
    block_bytes: u64,
    from: Locality,
    /// One for each tier that can be loaded from.
    tiers: Vec<TierCost>,
}

/// A tier and its weight.
#[derive(Debug)]
struct Weighed {
    name: &'static str,
    tier: Tier,
    cost: LoadCost,
    weight: f64,
    break_even: Option<u32>,
    assumed: bool,
}

/// Asks the server and prints what can be pasted.
///
/// # Errors
/// `Invalid` for numbers that are none, or if it is not clear which blocks are meant; whatever keeps the
/// server from answering.
///
/// # Cancel safety
/// Safe: it changes nothing.
pub async fn run(args: Args) -> Result<()> {
    let rate = args.prefill_tokens_per_second;
    if !(rate.is_finite() && rate > 0.0) {
        return Err(Error::invalid(format!(
            "prefill-tokens-per-second: {rate} given, a number above 0 required"
        )));
    }
    let client = args.server.connect().await?;
    let stats = client.stats().await?;
    let (block_tokens, block_bytes) = block_of(&stats, args.model.as_deref())?;
    let costs = client.router_watch_tiers(WatchTiersRequest::default()).await?.next().await?.tiers;
    let from = args.from.map_or_else(|| nearest(&costs), From::locality);
    let usable = |cost: &TierCost| cost.locality() == from && cost.state() != TierState::Down;
    let tiers = costs.into_iter().filter(usable).collect();
    let measured = Measured { node: stats.node, block_bytes, from, tiers };
    let blocks = (args.hit_tokens / block_tokens).max(1);
    let weighed = measured.weigh(blocks, f64::from(block_tokens) / rate * 1e3);
    let mut text = measured.head(&args, blocks);
    let told = table(&mut text, &weighed).and_then(|()| match args.router {
        Router::Dynamo => dynamo(&mut text, &weighed),
        Router::LlmD => llm_d(&mut text, &weighed),
    });
    told.map_err(|error| Error::new(ErrorKind::Internal, "write text").because(error))?;
    stdout::print(&text)
}

/// Tokens and mean bytes of the blocks of a model.
fn block_of(stats: &Stats, model: Option<&str>) -> Result<(u32, u64)> {
    let of_engine = |known: &&NamespaceStats| !known.declared.is_empty() && known.blocks > 0;
    let is_meant = |known: &&NamespaceStats| model.is_none_or(|model| known.model == model);
    let known: Vec<_> = stats.namespaces.iter().filter(of_engine).filter(is_meant).collect();
    let mut models: Vec<&str> = known.iter().map(|known| known.model.as_str()).collect();
    models.sort_unstable();
    models.dedup();
    if models.len() > 1 {
        return Err(Error::invalid(format!(
            "model: none given, but the server has blocks of {}: say which",
            models.join(", ")
        )));
    }
    // Of several layouts of a model the one that has most.
    let Some(namespace) = known.into_iter().max_by_key(|known| known.blocks) else {
        return Err(Error::invalid(format!(
            "model: the server has no blocks of {} yet: try again when engines have used it",
            model.unwrap_or("any engine")
        )));
    };
    let tokens = namespace.declared.get("block_tokens").and_then(|text| text.parse().ok());
    Ok((tokens.unwrap_or(1).max(1), namespace.bytes / namespace.blocks.max(1)))
}

/// The nearest place from which something was measured.
fn nearest(costs: &[TierCost]) -> Locality {
    let measured = costs.iter().filter(|cost| !cost.assumed && cost.tier() == Tier::Dram);
    measured.map(TierCost::locality).min().unwrap_or(Locality::SameNode)
}

impl From {
    fn locality(self) -> Locality {
        match self {
            Self::SharedMemory => Locality::SharedMemory,
            Self::SameNode => Locality::SameNode,
            Self::SameZone => Locality::SameZone,
            Self::Remote => Locality::Remote,
        }
    }
}

impl Measured {
    /// The weights of hits of so many blocks, each of which takes so long to prefill. What waits now is left
    /// out: a constant outlives it.
    fn weigh(&self, blocks: u32, prefill_ms: f64) -> Vec<Weighed> {
        let weigh = |(tier, name): (Tier, &'static str)| {
            let known = self.tiers.iter().find(|cost| cost.tier() == tier)?;
            let block_ms = self.block_bytes as f64 / known.bandwidth * 1e3;
            let cost = LoadCost { queue_ms: 0.0, setup_ms: known.setup_ms, block_ms };
            let weight = constant_weight(blocks, prefill_ms, cost);
            let break_even = break_even_blocks(prefill_ms, cost);
            Some(Weighed { name, tier, cost, weight, break_even, assumed: known.assumed })
        };
        NAMES.into_iter().filter_map(weigh).collect()
    }

    fn head(&self, args: &Args, blocks: u32) -> String {
        let from = self.from.as_str_name().trim_start_matches("LOCALITY_").to_lowercase();
        format!(
            "# {} as loads to {from} are now; hits of {} tokens ({blocks} blocks of {} bytes), {} tokens \
             of prefill a second\n",
            self.node, args.hit_tokens, self.block_bytes, args.prefill_tokens_per_second
        )
    }
}

fn table(text: &mut String, weighed: &[Weighed]) -> std::fmt::Result {
    writeln!(text, "# tier    setup ms  block ms  weight  from blocks")?;
    for Weighed { name, cost, weight, break_even, assumed, .. } in weighed {
        let from = break_even.map_or("never".to_owned(), |blocks| blocks.to_string());
        let note = if *assumed { "  (assumed: nothing was loaded from it yet)" } else { "" };
        let LoadCost { setup_ms, block_ms, .. } = cost;
        writeln!(text, "# {name:<7}{setup_ms:>9.2}{block_ms:>10.3}{weight:>8.2}{from:>13}{note}")?;
    }
    Ok(())
}

/// Dynamo has one weight for disks and for what is external.
fn dynamo(text: &mut String, weighed: &[Weighed]) -> std::fmt::Result {
    let of = |tier| weighed.iter().find(|each| each.tier == tier).map(|each| each.weight);
    let (nvme, object) = (of(Tier::Nvme), of(Tier::Object));
    writeln!(text, "--router-host-cache-hit-weight {:.2}", of(Tier::Dram).unwrap_or(0.0))?;
    writeln!(text, "--router-disk-cache-hit-weight {:.2}", nvme.or(object).unwrap_or(0.0))?;
    if let (Some(nvme), Some(object)) = (nvme, object)
        && object < nvme
    {
        writeln!(
            text,
            "# object hits count {nvme:.2}, too, but are worth {object:.2}: announce long ones only"
        )?;
    }
    Ok(())
}

fn llm_d(text: &mut String, weighed: &[Weighed]) -> std::fmt::Result {
    writeln!(text, "indexerConfig:\n  kvCacheBackendConfigs:\n    - name: gpu\n      weight: 1.0")?;
    for Weighed { name, weight, .. } in weighed {
        writeln!(text, "    - name: {name}\n      weight: {weight:.2}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(tier: Tier, locality: Locality, bandwidth: f64, setup_ms: f64) -> TierCost {
        TierCost {
            tier: tier.into(),
            locality: locality.into(),
            bandwidth,
            setup_ms,
            queue_ms: 500.0,
            ..TierCost::default()
        }
    }

    fn measured() -> Measured {
        Measured {
            node: "a".to_owned(),
            block_bytes: 2_000_000,
            from: Locality::SameNode,
            tiers: vec![
                cost(Tier::Dram, Locality::SameNode, 4e9, 0.0),
                cost(Tier::Nvme, Locality::SameNode, 1e9, 2.0),
                cost(Tier::Object, Locality::SameNode, 5e8, 30.0),
            ],
        }
    }

    #[test]
    fn weights_are_those_of_the_worked_example_whatever_waits_now() {
        let weighed = measured().weigh(10, 8.0);
        let weights: Vec<f64> = weighed.iter().map(|each| each.weight).collect();
        for (weight, expected) in weights.iter().zip([0.9375, 0.725, 0.125]) {
            assert!((weight - expected).abs() < 1e-9, "{weights:?}");
        }
        let break_even: Vec<_> = weighed.iter().map(|each| each.break_even).collect();
        assert_eq!(break_even, [Some(1), Some(1), Some(8)]);
    }

    #[test]
    fn what_is_printed_can_be_pasted() {
        let mut text = String::new();
        dynamo(&mut text, &measured().weigh(10, 8.0)).unwrap();
        assert_eq!(
            text,
            "--router-host-cache-hit-weight 0.94\n--router-disk-cache-hit-weight 0.72\n# object hits \
             count 0.72, too, but are worth 0.12: announce long ones only\n"
        );
        let mut text = String::new();
        llm_d(&mut text, &measured().weigh(10, 8.0)).unwrap();
        assert!(text.contains("    - name: nvme\n      weight: 0.72\n"), "{text}");
        let mut text = String::new();
        table(&mut text, &measured().weigh(10, 8.0)).unwrap();
        assert!(text.lines().all(|line| line.starts_with('#')), "{text}");
    }

    #[test]
    fn the_blocks_meant_are_those_of_one_model() {
        let namespace = |model: &str, blocks, bytes| NamespaceStats {
            model: model.to_owned(),
            blocks,
            bytes,
            declared: [("block_tokens", "16".to_owned())].into(),
            ..NamespaceStats::default()
        };
        let namespaces = vec![namespace("a", 10, 1000), namespace("b", 2, 100)];
        let stats = Stats { namespaces, ..Stats::default() };
        assert_eq!(block_of(&stats, Some("b")).unwrap(), (16, 50));
        let refused = block_of(&stats, None).unwrap_err().to_string();
        assert!(refused.contains("a, b"), "{refused}");
        let refused = block_of(&stats, Some("c")).unwrap_err().to_string();
        assert!(refused.contains("no blocks of c"), "{refused}");
    }
}
