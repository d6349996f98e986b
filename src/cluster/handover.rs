//! Hands what is hottest in this node's dram to other members, before it goes.
//!
//! Each namespace goes to the member that is now the home of the engine that opened it last: there its lookups will
//! go. Chains go hottest first, and of each the head first, so that whatever there is time and room for is a prefix
//! of use. There are two bounds, time and bytes, and no retries: what has not gone by then is computed again, as
//! after a crash. What the members have already is offered and not sent.

use std::{collections::HashMap, sync::Arc};

use futures_util::{StreamExt, future::join_all, stream};
use kvstrata_tiers::{
    block::BlockHash,
    namespace::Namespace,
    stack::{HotChain, Stack},
};
use tokio::time::{Instant, timeout_at};
use tracing::{debug, info};

use super::{
    home::{Asked, Engine, home},
    push::{Door, Place, Pushed, Words},
};
use crate::{
    client::ClientOptions,
    limits::{HANDOVER_BATCH_BLOCKS, HANDOVER_BATCH_BYTES, HANDOVER_STREAMS},
    members::{Member, Roster},
    node::Node,
};

/// Some blocks of one namespace that go together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) namespace: u32,
    /// The block before the first one, where it is known.
    pub(crate) parent: Option<BlockHash>,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) bytes: u64,
}

/// What is to go to one member.
struct Load {
    door: Door,
    batches: Vec<(Arc<Namespace>, Words, Batch)>,
}

/// The other members that stay.
pub(crate) fn staying(node: &Node) -> Vec<Member> {
    let members = node.roster.now();
    let others = members.list.iter().filter(|member| member.index != Roster::OWN);
    others.filter(|member| !member.draining).cloned().collect()
}

/// Hands over up to `bytes_max` of payload until `until`; does nothing in a cluster of one.
///
/// # Cancel safety
/// Safe: what members have taken stays there.
pub(crate) async fn hand_over(
    node: &Arc<Node>,
    options: &ClientOptions,
    bytes_max: u64,
    until: Instant,
) {
    let members = staying(node);
    if members.is_empty() {
        return;
    }
    let loads = share_out(node, &members, options, node.stack.hottest(bytes_max));
    let chosen =
        loads.iter().flat_map(|load| &load.batches).map(|(_, _, batch)| count(batch)).sum();
    node.drain.hands(|handed| handed.chosen = chosen);
    info!(members = members.len(), blocks = chosen, "handing over what is hottest");
    let handing = join_all(loads.into_iter().map(|load| carry(node, load)));
    let in_time = timeout_at(until, handing).await.is_ok();
    let handed = node.drain.progress().handed;
    let (blocks, bytes, present) = (handed.blocks, handed.bytes, handed.present);
    info!(blocks, bytes, present, refused = handed.refused, in_time, "handed over");
}

fn count(batch: &Batch) -> u64 {
    u64::try_from(batch.hashes.len()).unwrap_or(u64::MAX)
}

/// Which member gets what: that of a namespace is asked for once.
fn share_out(
    node: &Node,
    members: &[Member],
    options: &ClientOptions,
    chains: Vec<HotChain>,
) -> Vec<Load> {
    let mut homes: HashMap<u32, Option<(Arc<Namespace>, Words, u32)>> = HashMap::new();
    let mut loads: Vec<Load> = members
        .iter()
        .map(|member| Load {
            door: Door::new(member.clone(), options.clone()),
            batches: Vec::new(),
        })
        .collect();
    for batch in batches(chains) {
        let found = homes.entry(batch.namespace).or_insert_with(|| {
            let namespace = node.namespaces.by_index(batch.namespace)?;
            let words = Words::of(node, &namespace);
            let at = home_of(&words, &namespace, members)?;
            Some((namespace, words, at))
        });
        let Some((namespace, words, at)) = found else { continue };
        let load = loads.iter_mut().find(|load| load.door.member().index == *at);
        if let Some(load) = load {
            load.batches.push((Arc::clone(namespace), words.clone(), batch));
        }
    }
    loads.retain(|load| !load.batches.is_empty());
    loads
}

/// The new home of a namespace's engine; of a namespace that nobody has opened since the start, the one that
/// hashing says.
fn home_of(words: &Words, namespace: &Namespace, members: &[Member]) -> Option<u32> {
    let id = namespace.id().to_string();
    let instance = if words.instance.is_empty() { &id } else { &words.instance };
    home(&Engine { instance, node: &words.host, zone: &words.zone }, members, Asked::Nobody)
}

/// Cuts chains into what goes together, in their order; short ones of one namespace are joined.
pub(crate) fn batches(chains: Vec<HotChain>) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for chain in chains {
        let blocks = u64::try_from(chain.hashes.len()).unwrap_or(u64::MAX).max(1);
        let block_bytes = chain.bytes.div_ceil(blocks);
        let mut parent = chain.parent;
        for hash in chain.hashes {
            let room = |batch: &&mut Batch| {
                batch.namespace == chain.namespace
                    && batch.hashes.len() < HANDOVER_BATCH_BLOCKS
                    && batch.bytes.saturating_add(block_bytes) <= HANDOVER_BATCH_BYTES
            };
            match batches.last_mut().filter(room) {
                Some(batch) => {
                    batch.hashes.push(hash);
                    batch.bytes += block_bytes;
                }
                None => batches.push(Batch {
                    namespace: chain.namespace,
                    parent,
                    hashes: vec![hash],
                    bytes: block_bytes,
                }),
            }
            parent = Some(hash);
        }
    }
    batches
}

/// Takes to one member what is for it, a few batches at a time; one that fails or has no room gets no more.
async fn carry(node: &Arc<Node>, load: Load) {
    let Load { mut door, batches } = load;
    let name = door.member().name.clone();
    let mut places: HashMap<u32, Place> = HashMap::new();
    for (namespace, words, batch) in &batches {
        if places.contains_key(&batch.namespace) {
            continue;
        }
        match door.place(namespace, words).await {
            Ok(place) => {
                places.insert(batch.namespace, place);
            }
            Err(error) => {
                info!(member = name, %error, "a namespace is not handed over");
                node.drain.hands(|handed| handed.refused += count(batch));
            }
        }
    }
    let going =
        batches.iter().filter_map(|(_, _, batch)| Some((places.get(&batch.namespace)?, batch)));
    let mut puts = stream::iter(going)
        .map(|(place, batch)| put(&node.stack, place, batch))
        .buffered(HANDOVER_STREAMS);
    while let Some(put) = puts.next().await {
        match put {
            Ok(pushed) => {
                tally(node, pushed);
                if pushed.refused > 0 {
                    info!(member = name, "a member has no room for more");
                    return;
                }
            }
            Err(error) => {
                info!(member = name, %error, "a member takes no more");
                return;
            }
        }
    }
}

async fn put(stack: &Stack, place: &Place, batch: &Batch) -> kvstrata_tiers::error::Result<Pushed> {
    let pushed = place.put(stack, batch.parent, &batch.hashes).await?;
    debug!(?pushed, "handed over");
    Ok(pushed)
}

fn tally(node: &Node, pushed: Pushed) {
    node.metrics.handover.record_drain(pushed.blocks, pushed.bytes, pushed.present, pushed.refused);
    node.drain.hands(|handed| {
        handed.blocks += pushed.blocks;
        handed.bytes += pushed.bytes;
        handed.present += pushed.present;
        handed.refused += pushed.refused;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u8) -> BlockHash {
        BlockHash::from_array([number; 32])
    }

    fn chain(namespace: u32, numbers: std::ops::Range<u8>, block_bytes: u64) -> HotChain {
        let hashes: Vec<_> = numbers.map(hash).collect();
        let bytes = block_bytes * hashes.len() as u64;
        HotChain { namespace, parent: None, hashes, bytes }
    }

    #[test]
    fn batches_are_bounded_keep_the_order_and_mix_no_namespaces() {
        let half = HANDOVER_BATCH_BYTES / 2;
        let chains = vec![
            chain(1, 0..3, half),
            chain(1, 10..11, 100),
            chain(2, 20..22, 100),
            chain(2, 30..31, 100),
            chain(1, 40..41, 3 * half),
        ];
        let cut = batches(chains);
        let shape: Vec<_> = cut.iter().map(|b| (b.namespace, b.hashes.len(), b.parent)).collect();
        let expected = [(1, 2, None), (1, 2, Some(hash(1))), (2, 3, None), (1, 1, None)];
        assert_eq!(shape, expected);
        assert!(cut.iter().all(|b| b.bytes <= HANDOVER_BATCH_BYTES || b.hashes.len() == 1));
        let many = batches(vec![chain(1, 0..250, 1); 40]);
        assert_eq!(many.iter().map(|b| b.hashes.len()).sum::<usize>(), 10_000);
        assert!(many.iter().all(|b| b.hashes.len() <= HANDOVER_BATCH_BLOCKS));
    }
}
