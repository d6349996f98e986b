//! Listens to the events of engines, to know of blocks what a put does not say: the block before them,
//! their places in their chains, their LoRA adapter and, where the namespace keeps them, their tokens.
//!
//! ```text
//! publisher  ->  source: connects again and again, asks for what it missed  ->  batch: reads
//!                                                     table: joins with what is put  ->  describe
//! ```
//! Engines tell of a block when they compute it and put it here later, or the reverse, so what is told
//! waits in a bounded table ([`table`]). Some publish 64 bits of a hash only: a put is what says the
//! rest of it. It is all for information: what is not told, or lost, costs no block.
//!
//! Events are of a model of a tenant: all namespaces of that model and engine are described, because the
//! hash says already which of them a block can be in. What an engine removes from its own memory says
//! nothing about ours.

pub(crate) mod batch;
mod sequence;
mod source;
mod table;

pub(crate) use source::{Endpoint, Listener, follow};

use std::{num::NonZeroUsize, sync::Arc};

use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    namespace::{Namespace, NamespaceSpec, NamespaceTable},
    stack::{Chain, Stack},
};
use parking_lot::Mutex;

use self::{
    batch::{Batch, Event, Published, Stored},
    table::{Described, Table, Told},
};
use crate::{
    config::{EventSource, Events},
    events::FIRST_BITS,
    limits::EVENT_BLOCKS_MAX,
    metrics::EventMetrics,
    node::Node,
};

/// What engines have told; nothing where none is listened to. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Subscriptions {
    models: Arc<[Model]>,
}

/// A model of a tenant, as one engine runs it.
#[derive(Debug)]
struct Model {
    tenant: String,
    model: String,
    engine: String,
    table: Mutex<Table>,
}

impl Subscriptions {
    /// The models of the engines that the configuration names.
    #[must_use]
    pub(crate) fn new(config: &Events) -> Self {
        let sources = config.subscribe.given().map_or(&[][..], |sources| &sources.0);
        let mut models: Vec<Model> = Vec::new();
        for source in sources {
            if !models.iter().any(|model| model.is_of(source)) {
                models.push(Model {
                    tenant: source.tenant.clone(),
                    model: source.model.clone(),
                    engine: source.engine.clone(),
                    table: Mutex::new(Table::new(NonZeroUsize::MIN)),
                });
            }
        }
        let share = NonZeroUsize::new(EVENT_BLOCKS_MAX / models.len().max(1));
        for model in &mut models {
            model.table = Mutex::new(Table::new(share.unwrap_or(NonZeroUsize::MIN)));
        }
        Self { models: models.into() }
    }

    /// Blocks were offered in a put, in the order of their chain.
    pub(crate) fn offered(&self, node: &Node, namespace: &Namespace, hashes: Hashes<'_>) {
        let Some(model) = self.models.iter().find(|model| model.has(namespace)) else { return };
        let mut described = Vec::new();
        {
            let mut table = model.table.lock();
            for hash in hashes.iter() {
                let bytes = hash.as_bytes().get(..namespace.hash_bytes()).unwrap_or_default();
                table.know(model.short(bytes), hash, true, &mut described);
            }
        }
        let blocks: u32 =
            described.iter().map(|block| describe(&node.stack, namespace, block)).sum();
        node.metrics.events.described_blocks.inc_by(u64::from(blocks));
    }
}

impl Model {
    fn is_of(&self, source: &EventSource) -> bool {
        (&self.tenant, &self.model, &self.engine) == (&source.tenant, &source.model, &source.engine)
    }

    fn has(&self, namespace: &Namespace) -> bool {
        match namespace.spec() {
            NamespaceSpec::Engine(identity) => {
                (&self.tenant, &self.model, &self.engine)
                    == (&identity.tenant, &identity.model, &identity.engine)
            }
            NamespaceSpec::Opaque { .. } => false,
        }
    }

    /// The bits of a hash that an engine publishes if it does not publish all of it.
    fn short(&self, hash: &[u8]) -> u64 {
        let bits = if self.engine == FIRST_BITS { hash.first_chunk() } else { hash.last_chunk() };
        bits.map_or(0, |bits| u64::from_be_bytes(*bits))
    }

    fn short_of(&self, hash: &Published) -> u64 {
        match hash {
            Published::Short(short) => *short,
            Published::Whole(bytes) => self.short(bytes),
        }
    }

    /// Takes what an engine says of blocks that it has; returns how many could be described.
    fn take(&self, stack: &Stack, namespaces: &NamespaceTable, stored: &Stored) -> u64 {
        let ours: Vec<_> =
            namespaces.list().into_iter().filter(|namespace| self.has(namespace)).collect();
        let keeps = ours.iter().any(|namespace| namespace.keeps_tokens());
        let complete = stored.tokens.len() == stored.hashes.len().saturating_mul(stored.block_size);
        let mut tokens =
            stored.tokens.chunks(stored.block_size.max(1)).filter(|_| keeps && complete);
        let lora_name: Arc<str> = stored.lora_name.as_str().into();
        let mut parent = stored.parent.as_ref().map(|parent| self.short_of(parent));
        let mut described = Vec::new();
        {
            let mut table = self.table.lock();
            know(&mut table, parent, stored.parent.as_ref(), &mut described);
            for hash in &stored.hashes {
                let short = self.short_of(hash);
                let tokens = tokens.next().unwrap_or_default().into();
                let lora_name = Arc::clone(&lora_name);
                let told = Told { parent, position: None, tokens, lora_name };
                know(&mut table, Some(short), Some(hash), &mut described);
                table.tell(short, told, &mut described);
                parent = Some(short);
            }
        }
        let mut blocks = 0;
        for block in &described {
            let known = ours.iter().map(|namespace| describe(stack, namespace, block));
            blocks += u64::from(known.sum::<u32>());
        }
        blocks
    }
}

/// Takes a hash that was published whole.
fn know(
    table: &mut Table,
    short: Option<u64>,
    hash: Option<&Published>,
    described: &mut Vec<Described>,
) {
    if let (Some(short), Some(Published::Whole(bytes))) = (short, hash)
        && let Ok(whole) = BlockHash::new(bytes)
    {
        table.know(short, whole, false, described);
    }
}

/// Describes a block, if the namespace has it and can have it; returns how many.
fn describe(stack: &Stack, namespace: &Namespace, block: &Described) -> u32 {
    let per_block = usize::try_from(namespace.block_tokens()).unwrap_or(usize::MAX);
    if !block.tokens.is_empty() && block.tokens.len() != per_block {
        return 0;
    }
    let packed = block.hash.as_bytes().get(..namespace.hash_bytes()).unwrap_or_default();
    let Ok(hashes) = Hashes::new(packed, namespace.hash_bytes()) else { return 0 };
    let chain = Chain {
        hashes,
        parent: block.parent,
        position: block.position,
        tokens: &block.tokens,
        lora_name: &block.lora_name,
    };
    stack.describe(namespace, chain).unwrap_or(0)
}

/// Describes what one engine tells of.
struct Describer {
    source: EventSource,
    node: Arc<Node>,
}

impl Listener for Describer {
    fn take(&mut self, batch: &Batch) {
        let Node { stack, namespaces, told, .. } = &*self.node;
        let Some(model) = told.models.iter().find(|model| model.is_of(&self.source)) else {
            return;
        };
        for event in &batch.events {
            let Event::Stored(stored) = event else { continue };
            let described = model.take(stack, namespaces, stored);
            let told = u64::try_from(stored.hashes.len()).unwrap_or(u64::MAX);
            self.metrics().told_blocks.inc_by(told);
            self.metrics().described_blocks.inc_by(described);
        }
    }

    fn lost(&mut self) {}

    fn metrics(&self) -> &EventMetrics {
        &self.node.metrics.events
    }
}

/// Listens to the engines that the configuration names, until the tasks of the node should end.
pub(crate) fn start(config: &Events, node: &Arc<Node>) {
    let sources = config.subscribe.given().map_or(&[][..], |sources| &sources.0);
    for source in sources {
        let endpoint =
            Endpoint { publisher: source.publisher.clone(), replay: source.replay.clone() };
        let describer = Describer { source: source.clone(), node: Arc::clone(node) };
        let stop = node.tasks.stop_token();
        node.tasks.spawn("events", async move {
            stop.run_until_cancelled(follow(endpoint, describer)).await.unwrap_or_default();
        });
    }
}

#[cfg(test)]
mod tests;
