//! Tiers as kvstrata's router contract tells of them.

use std::time::Duration;

use futures_util::{FutureExt, future::BoxFuture};
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    tier::Tier,
};
use parking_lot::RwLock;
use tokio::{sync::Notify, time::sleep};
use tracing::{debug, info};

use super::tiers::{Found, Piece, Question, Taken, Tiers};
use crate::{
    client::{
        Client, ClientOptions,
        router::messages::{
            Candidate, InstanceAnswer, LookupRequest, Prefill, Prompt, PromptAnswer, ScoreRequest,
            Segment, Tier as WireTier,
        },
    },
    score::LoadCost,
};

/// Between two attempts to reach one of its nodes.
const RETRY: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(super) struct Kvstrata {
    endpoint: String,
    options: ClientOptions,
    deadline: Duration,
    client: RwLock<Option<Client>>,
    /// The node that was asked does not answer.
    lost: Notify,
}

impl Kvstrata {
    /// Not connected yet; asks for answers within `deadline`.
    pub(super) fn new(endpoint: String, options: ClientOptions, deadline: Duration) -> Self {
        Self { endpoint, options, deadline, client: RwLock::default(), lost: Notify::new() }
    }

    /// Stays connected: to another node of the cluster, if several are given, when the one that was asked
    /// is lost. Never ends.
    pub(super) async fn connect(&self) {
        loop {
            match Client::connect(&self.endpoint, self.options.clone()).await {
                Ok(client) => {
                    info!(endpoint = client.endpoint(), "kvstrata reached");
                    *self.client.write() = Some(client);
                    self.lost.notified().await;
                }
                Err(error) => debug!(endpoint = self.endpoint, %error, "kvstrata not reached"),
            }
            sleep(RETRY).await;
        }
    }

    fn client(&self) -> Result<Client> {
        let missing = || Error::new(ErrorKind::Unavailable, "kvstrata was not reached yet");
        self.client.read().clone().ok_or_else(missing)
    }

    /// Takes note of an answer; returns it.
    fn note<T>(&self, answer: Result<T>) -> Result<T> {
        let is_lost =
            |error: &Error| matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout);
        if answer.as_ref().is_err_and(is_lost) {
            self.lost.notify_one();
        }
        answer
    }
}

impl Tiers for Kvstrata {
    fn lookup<'a>(&'a self, question: Question<'a>) -> BoxFuture<'a, Result<Vec<Found>>> {
        let asking = async move {
            let engines = question.engines;
            // What devices have is left out here: it is counted in other blocks.
            let candidate = |(instance, node): &(&str, &str)| Candidate {
                instance: (*instance).to_owned(),
                node: (*node).to_owned(),
                ..Candidate::default()
            };
            let request = LookupRequest {
                prompts: vec![Prompt {
                    model: question.model.to_owned(),
                    lora_name: question.lora.to_owned(),
                    cache_salt: question.salt.to_owned(),
                    token_ids: question.tokens.to_vec(),
                    ..Prompt::default()
                }],
                instances: engines.iter().map(candidate).collect(),
                deadline_ms: millis(self.deadline),
                ..LookupRequest::default()
            };
            let answer = self.note(self.client()?.router_lookup(request).await)?;
            let answer = answer.answers.into_iter().next().unwrap_or_default();
            Ok(engines.iter().map(|(instance, _)| found(&answer, instance)).collect())
        };
        asking.boxed()
    }

    fn taken(&self, taken: Taken) -> BoxFuture<'_, Result<()>> {
        let telling = async move {
            let prefill = Prefill { linear_ms: taken.prefill_block_ms, quadratic_ms: 0.0 };
            let request = ScoreRequest {
                prompt: Some(Prompt {
                    model: taken.model,
                    lora_name: taken.lora,
                    cache_salt: taken.salt,
                    token_ids: taken.tokens.to_vec(),
                    ..Prompt::default()
                }),
                candidates: vec![Candidate {
                    instance: taken.instance,
                    node: taken.node,
                    device_blocks: taken.device_blocks,
                    ..Candidate::default()
                }],
                prefill: Some(prefill),
                prefetch: true,
                reserve_ms: millis(taken.reserve),
                ..ScoreRequest::default()
            };
            self.note(self.client()?.router_score(request).await).map(drop)
        };
        telling.boxed()
    }
}

/// Whole milliseconds, at least one: none would be the server's default.
fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1)
}

/// What an engine could load: nothing if it is not known, or is known for other blocks than there are.
fn found(answer: &PromptAnswer, instance: &str) -> Found {
    let own = answer.instances.iter().find(|known| known.instance == instance);
    let Some((own, prefix)) = own.and_then(|own| Some((own, answer.prefixes.get(at(own))?))) else {
        return Found::default();
    };
    let mut sources: Vec<(&str, Tier)> = Vec::new();
    let mut pieces = Vec::new();
    let mut end = 0;
    for segment in &own.segments {
        let Some(tier) = tier_of(segment) else { break };
        if segment.start != end || segment.end <= segment.start {
            break;
        }
        let source = (segment.holder.as_str(), tier);
        let at = sources.iter().position(|known| *known == source).unwrap_or(sources.len());
        if at == sources.len() {
            sources.push(source);
        }
        let Segment { queue_ms, setup_ms, block_ms, .. } = *segment;
        pieces.push(Piece {
            blocks: segment.end - segment.start,
            tier,
            source: u32::try_from(at).unwrap_or(u32::MAX),
            cost: LoadCost { queue_ms, setup_ms, block_ms },
        });
        end = segment.end;
    }
    Found { block_tokens: usize::try_from(prefix.block_tokens).unwrap_or(0), pieces }
}

fn at(instance: &InstanceAnswer) -> usize {
    usize::try_from(instance.prefix).unwrap_or(usize::MAX)
}

fn tier_of(segment: &Segment) -> Option<Tier> {
    match segment.tier() {
        WireTier::Dram => Some(Tier::Dram),
        WireTier::Nvme => Some(Tier::Nvme),
        WireTier::Object => Some(Tier::Object),
        WireTier::Unspecified => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::router::messages::Prefix;

    fn segment(start: u32, end: u32, tier: WireTier, holder: &str) -> Segment {
        Segment {
            start,
            end,
            tier: tier.into(),
            holder: holder.to_owned(),
            queue_ms: 5.0,
            setup_ms: 2.0,
            block_ms: 1.0,
            ..Segment::default()
        }
    }

    fn answer(segments: Vec<Segment>) -> PromptAnswer {
        let prefix = |block_tokens| Prefix { block_tokens, ..Prefix::default() };
        let known = InstanceAnswer {
            instance: "a".to_owned(),
            prefix: 1,
            segments,
            ..InstanceAnswer::default()
        };
        PromptAnswer {
            prefixes: vec![prefix(16), prefix(64)],
            instances: vec![known],
            ..PromptAnswer::default()
        }
    }

    #[test]
    fn an_engine_gets_what_is_said_of_it_as_far_as_it_hangs_together() {
        let said = answer(vec![
            segment(0, 2, WireTier::Dram, "n"),
            segment(2, 4, WireTier::Nvme, "n"),
            segment(4, 6, WireTier::Dram, "n"),
            segment(6, 7, WireTier::Dram, "m"),
            segment(8, 9, WireTier::Dram, "m"),
        ]);
        let known = found(&said, "a");
        assert_eq!(known.block_tokens, 64);
        let pieces: Vec<_> = known.pieces.iter().map(|p| (p.blocks, p.tier, p.source)).collect();
        let expected =
            [(2, Tier::Dram, 0), (2, Tier::Nvme, 1), (2, Tier::Dram, 0), (1, Tier::Dram, 2)];
        assert_eq!(pieces, expected);
        assert_eq!(known.pieces[1].cost, LoadCost { queue_ms: 5.0, setup_ms: 2.0, block_ms: 1.0 });
        assert_eq!(found(&said, "b"), Found::default());
        let odd = answer(vec![segment(0, 2, WireTier::Unspecified, "n")]);
        assert_eq!(found(&odd, "a").pieces, []);
    }
}
