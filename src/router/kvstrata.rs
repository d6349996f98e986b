//! Tiers as kvstrata's router contract tells of them.
//!
//! Engines that kvstrata knows get the answer that is theirs. One that it does not know by its name gets
//! the longest prefix that anybody has, at the cost of whoever is farthest away: less than it could be, and
//! more than nothing.

use std::{sync::OnceLock, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::time::sleep;
use tracing::{debug, info};

use super::tiers::{Found, Piece, Question, Taken, Tiers};
use crate::{
    client::{Client, ClientOptions, Loader, TierAnswer, TierCost, TierRun, TokenPrompt},
    score::LoadCost,
};

/// Between two attempts to reach it the first time; then the client reconnects by itself.
const RETRY: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(super) struct Kvstrata {
    endpoint: String,
    options: ClientOptions,
    deadline: Duration,
    client: OnceLock<Client>,
}

impl Kvstrata {
    /// Not connected yet; asks for answers within `deadline`.
    pub(super) fn new(endpoint: String, options: ClientOptions, deadline: Duration) -> Self {
        Self { endpoint, options, deadline, client: OnceLock::new() }
    }

    /// Connects, however long that takes.
    pub(super) async fn connect(&self) {
        loop {
            match Client::connect(&self.endpoint, self.options.clone()).await {
                Ok(client) => {
                    info!(endpoint = self.endpoint, "kvstrata reached");
                    self.client.set(client).unwrap_or_default();
                    return;
                }
                Err(error) => debug!(endpoint = self.endpoint, %error, "kvstrata not reached"),
            }
            sleep(RETRY).await;
        }
    }

    fn client(&self) -> Result<&Client> {
        let missing = || Error::new(ErrorKind::Unavailable, "kvstrata was not reached yet");
        self.client.get().ok_or_else(missing)
    }
}

impl Tiers for Kvstrata {
    fn lookup<'a>(&'a self, question: Question<'a>) -> BoxFuture<'a, Result<Vec<Found>>> {
        let asking = async move {
            let Question { model, lora, salt, tokens, engines } = question;
            let prompt = TokenPrompt {
                model: model.to_owned(),
                lora: lora.to_owned(),
                salt: salt.to_owned(),
                tokens: tokens.to_vec(),
            };
            let loaders = engines.iter().map(|(instance, node)| Loader {
                instance: (*instance).to_owned(),
                node: (*node).to_owned(),
                // What devices have is left out here: it is counted in other blocks.
                device_blocks: 0,
            });
            let loaders = loaders.collect();
            let answer = self.client()?.prompt_tiers(prompt, loaders, self.deadline).await?;
            Ok(engines.iter().map(|(name, _)| found(&answer, name, tokens.len())).collect())
        };
        asking.boxed()
    }

    fn taken(&self, taken: Taken) -> BoxFuture<'_, Result<()>> {
        let telling = async move {
            let prompt = TokenPrompt {
                model: taken.model,
                lora: taken.lora,
                salt: taken.salt,
                tokens: taken.tokens.to_vec(),
            };
            let loader = Loader {
                instance: taken.instance,
                node: taken.node,
                device_blocks: taken.device_blocks,
            };
            let block_ms = taken.prefill_block_ms;
            self.client()?.expect_load(prompt, loader, block_ms, taken.reserve).await
        };
        telling.boxed()
    }
}

/// What an engine could load.
fn found(answer: &TierAnswer, instance: &str, tokens: usize) -> Found {
    let own = answer.instances.iter().find(|(name, _)| name == instance);
    let runs = match own {
        Some((_, runs)) => runs.as_slice(),
        None => longest(&answer.prefixes),
    };
    let mut sources: Vec<(&str, i32)> = Vec::new();
    let mut pieces = Vec::new();
    let mut end = 0;
    for run in runs {
        let Some(tier) = run.tier.filter(|_| run.start == end && run.end > run.start) else {
            break;
        };
        let Some(cost) = cost_of(run, &answer.costs, own.is_some()) else { break };
        let number = |tier| i32::try_from(tier as usize).unwrap_or(i32::MAX);
        let source = (run.holder.as_str(), number(tier));
        let at = sources.iter().position(|known| *known == source).unwrap_or(sources.len());
        if at == sources.len() {
            sources.push(source);
        }
        let source = u32::try_from(at).unwrap_or(u32::MAX);
        pieces.push(Piece { blocks: run.end - run.start, tier, source, cost });
        end = run.end;
    }
    Found { block_tokens: roundest(tokens, answer.total_blocks), pieces }
}

fn longest(prefixes: &[Vec<TierRun>]) -> &[TierRun] {
    let end = |runs: &[TierRun]| runs.last().map_or(0, |run| run.end);
    prefixes.iter().map(Vec::as_slice).max_by_key(|runs| end(runs)).unwrap_or_default()
}

/// What loading a run costs by the live costs; where there are none for it, what it was said to take.
fn cost_of(run: &TierRun, costs: &[TierCost], known: bool) -> Option<LoadCost> {
    let blocks = f64::from(run.end - run.start);
    let there = costs.iter().filter(|cost| cost.node == run.holder && cost.tier == run.tier);
    let cost = match known {
        true => there.clone().find(|cost| cost.distance == run.distance),
        false => there.max_by_key(|cost| cost.distance),
    };
    match cost {
        Some(cost) if cost.down => None,
        Some(cost) if cost.bandwidth > 0.0 => {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let bytes = run.bytes as f64;
            Some(LoadCost {
                queue_ms: cost.queue_ms,
                setup_ms: cost.setup_ms,
                block_ms: bytes / blocks / cost.bandwidth * 1e3,
            })
        }
        _ if known => {
            Some(LoadCost { queue_ms: 0.0, setup_ms: 0.0, block_ms: run.load_ms / blocks })
        }
        _ => None,
    }
}

/// Tokens in a block, of which so many full ones are in so many tokens: of the numbers that fit, the one that
/// can be halved most often, as block sizes are. 0 if there are no blocks.
fn roundest(tokens: usize, blocks: u32) -> usize {
    let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
    if blocks == 0 || tokens < blocks {
        return 0;
    }
    let (least, most) = (tokens / (blocks + 1) + 1, tokens / blocks);
    let step = (0..usize::BITS).rev().map(|bit| 1_usize << bit);
    let round = |step: usize| most / step * step;
    step.map(round).find(|size| *size >= least).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::tier::Tier;

    use super::*;

    fn run(start: u32, end: u32, tier: Tier, holder: &str, distance: i32) -> TierRun {
        TierRun {
            start,
            end,
            tier: Some(tier),
            holder: holder.to_owned(),
            distance,
            bytes: u64::from(end - start) * 1000,
            load_ms: 7.0,
        }
    }

    fn cost(node: &str, tier: Tier, distance: i32, queue_ms: f64) -> TierCost {
        TierCost {
            node: node.to_owned(),
            tier: Some(tier),
            distance,
            bandwidth: 1e6,
            setup_ms: 2.0,
            queue_ms,
            down: false,
        }
    }

    fn answer() -> TierAnswer {
        TierAnswer {
            total_blocks: 10,
            instances: vec![(
                "a".to_owned(),
                vec![
                    run(0, 2, Tier::Dram, "n", 1),
                    run(2, 4, Tier::Nvme, "n", 1),
                    run(4, 6, Tier::Dram, "n", 1),
                    run(6, 7, Tier::Object, "n", 1),
                ],
            )],
            prefixes: vec![
                vec![run(0, 1, Tier::Dram, "n", 0)],
                vec![run(0, 5, Tier::Nvme, "n", 0)],
            ],
            costs: vec![
                cost("n", Tier::Dram, 1, 0.0),
                cost("n", Tier::Nvme, 1, 5.0),
                cost("n", Tier::Nvme, 4, 50.0),
                cost("other", Tier::Nvme, 9, 500.0),
            ],
        }
    }

    #[test]
    fn an_engine_that_is_known_gets_what_is_said_of_it() {
        let found = found(&answer(), "a", 165);
        assert_eq!(found.block_tokens, 16);
        let pieces: Vec<_> = found.pieces.iter().map(|p| (p.blocks, p.tier, p.source)).collect();
        let expected =
            [(2, Tier::Dram, 0), (2, Tier::Nvme, 1), (2, Tier::Dram, 0), (1, Tier::Object, 2)];
        assert_eq!(pieces, expected);
        let nvme = LoadCost { queue_ms: 5.0, setup_ms: 2.0, block_ms: 1.0 };
        assert_eq!(found.pieces[1].cost, nvme);
        assert_eq!(found.pieces[3].cost.ms(1), 7.0);
    }

    #[test]
    fn an_engine_that_is_not_known_gets_what_anybody_could_load() {
        let found = found(&answer(), "b", 160);
        let far = LoadCost { queue_ms: 50.0, setup_ms: 2.0, block_ms: 1.0 };
        assert_eq!(found.pieces, [Piece { blocks: 5, tier: Tier::Nvme, source: 0, cost: far }]);
    }

    #[test]
    fn what_cannot_be_read_ends_what_can_be_loaded() {
        let mut said = answer();
        said.costs[1].down = true;
        assert_eq!(found(&said, "a", 160).pieces.len(), 1);
        said.instances[0].1.remove(0);
        assert_eq!(found(&said, "a", 160).pieces, []);
        assert_eq!(found(&TierAnswer::default(), "a", 160), Found::default());
    }

    #[test]
    fn block_sizes_are_seen_by_how_many_blocks_there_are() {
        for size in [16, 32, 64, 128, 256, 48, 528] {
            for blocks in [20_usize, 333] {
                for rest in [0, 1, size - 1] {
                    let tokens = size * blocks + rest;
                    let blocks = u32::try_from(blocks).unwrap();
                    let seen = roundest(tokens, blocks);
                    assert_eq!(tokens / seen, usize::try_from(blocks).unwrap());
                    assert!(blocks < 100 || seen == size, "{size}: {tokens} {blocks} {seen}");
                }
            }
        }
        assert_eq!((roundest(100, 0), roundest(3, 4), roundest(100, 1)), (0, 0, 64));
    }
}
