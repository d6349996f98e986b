//! The index: which block a name of another scheme means.
//!
//! It finds a block and says nothing of where it is: that, and whether it is there at all, is answered by the
//! one map, which it follows. So it may be behind, and then finds less, or what the map does not have
//! any more; it never says that something is here which is not.
//!
//! Memory is bounded for all namespaces together; what is over is not indexed, and counted.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kvstrata_tiers::{
    block::{BlockHash, BlockKey},
    error::{Error, Result},
    namespace::{Namespace, NamespaceSpec, NamespaceTable},
    stack::Stack,
};
use parking_lot::RwLock;
use tokio::sync::Notify;

use super::{
    Algorithm, Prompt, Scheme, dynamo, llm_d,
    table::{Blocks, Known, Room, Table, Unindexed},
};
use crate::metrics::{SchemeMetrics, UnindexedLabel};

/// The names of the blocks of all namespaces that want them; clones share it.
#[derive(Debug, Clone)]
pub struct Schemes {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// By the index of the namespace.
    namespaces: RwLock<HashMap<u32, Arc<Indexed>>>,
    room: Arc<Room>,
    /// Something was not indexed because there was no room.
    refused: AtomicBool,
    /// A namespace wants names that it did not want before.
    wanted: Notify,
    metrics: SchemeMetrics,
}

/// A namespace that was opened; most have no tables.
#[derive(Debug)]
struct Indexed {
    namespace: Arc<Namespace>,
    /// Finding out which root it is takes a thousand hashes.
    algorithm: Option<Algorithm>,
    tables: Vec<(Scheme, Arc<RwLock<Table>>)>,
}

/// Namespaces with blocks that have waited for others and need not any more.
#[derive(Debug, Default)]
pub(super) struct Due(Vec<Arc<Indexed>>);

impl Due {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What the map of a stack says.
struct OfStack<'a> {
    stack: &'a Stack,
    namespace: &'a Namespace,
}

impl Blocks for OfStack<'_> {
    fn known(&self, hash: BlockHash, describe: bool) -> Known {
        if !self.stack.is_readable(self.namespace, hash) {
            return Known::Gone;
        }
        let description = describe.then(|| self.stack.description(self.namespace, hash)).flatten();
        description.map_or(Known::There, Known::Described)
    }
}

impl Schemes {
    /// An empty index that may take so many bytes.
    #[must_use]
    pub fn new(bytes_max: u64, metrics: SchemeMetrics) -> Self {
        let shared = Shared {
            namespaces: RwLock::default(),
            room: Arc::new(Room::new(bytes_max)),
            refused: AtomicBool::new(false),
            wanted: Notify::new(),
            metrics,
        };
        Self { shared: Arc::new(shared) }
    }

    /// A namespace was opened, or found on the disk: what it wants now is what it gets.
    pub fn opened(&self, namespace: &Arc<Namespace>) {
        let wanted: Vec<_> =
            namespace.hash_schemes().iter().filter_map(|name| Scheme::named(name)).collect();
        let NamespaceSpec::Engine(identity) = namespace.spec() else { return };
        let mut namespaces = self.shared.namespaces.write();
        let known = namespaces.get(&namespace.index()).cloned();
        let has = known.iter().flat_map(|known| &known.tables).map(|(scheme, _)| *scheme);
        let is_news = !has.eq(wanted.iter().copied());
        if known.is_some() && !is_news {
            return;
        }
        let algorithm = Algorithm::of(identity);
        let table = |scheme: &Scheme| {
            let kept = known.as_ref().and_then(|known| known.table(*scheme)).cloned();
            let table = kept.unwrap_or_else(|| {
                let room = Arc::clone(&self.shared.room);
                Arc::new(RwLock::new(Table::new(*scheme, identity, algorithm, room)))
            });
            (*scheme, table)
        };
        let tables = wanted.iter().map(table).collect();
        let indexed = Indexed { namespace: Arc::clone(namespace), algorithm, tables };
        namespaces.insert(namespace.index(), Arc::new(indexed));
        drop(namespaces);
        if is_news {
            self.shared.wanted.notify_one();
        }
    }

    /// As [`opened`](Self::opened), of all that there are: some may have been found on the disk.
    pub fn opened_all(&self, namespaces: &NamespaceTable) {
        namespaces.list().iter().for_each(|namespace| self.opened(namespace));
    }

    /// The engine's hashes, packed, of the longest prefix of `names` that is known.
    ///
    /// In [`Scheme::Dynamo`] they are local hashes, which are chained here.
    ///
    /// # Errors
    /// `Invalid` if the namespace does not have the scheme, with those that it has.
    pub fn resolve(&self, namespace: &Namespace, scheme: Scheme, names: &[u64]) -> Result<Vec<u8>> {
        match scheme {
            Scheme::Dynamo => self.resolve_chained(namespace, scheme, &dynamo::sequences(names)),
            Scheme::VllmU64 | Scheme::SglangI64 | Scheme::LlmD => {
                self.resolve_chained(namespace, scheme, names)
            }
        }
    }

    /// As [`resolve`](Self::resolve), with names as the index has them: sequence hashes in
    /// [`Scheme::Dynamo`].
    ///
    /// # Errors
    /// Those of [`resolve`](Self::resolve).
    pub fn resolve_chained(
        &self,
        namespace: &Namespace,
        scheme: Scheme,
        names: &[u64],
    ) -> Result<Vec<u8>> {
        let indexed = self.indexed(namespace);
        let table = indexed.as_ref().and_then(|indexed| indexed.table(scheme));
        let table = table.ok_or_else(|| without(namespace, scheme))?.read();
        let mut packed = Vec::new();
        for block in names.iter().map_while(|name| table.block(*name)) {
            packed.extend(block.as_bytes().get(..namespace.hash_bytes()).unwrap_or_default());
        }
        Ok(packed)
    }

    /// The engine's hashes, packed, of a prompt's whole blocks: made of its tokens, if the engine makes
    /// them in a way that is known here, and of what is known of it; else those of the longest prefix
    /// that was described with these tokens.
    ///
    /// # Errors
    /// `Invalid` if neither is possible, with what to do.
    pub fn engine_hashes(&self, namespace: &Namespace, prompt: &Prompt<'_>) -> Result<Vec<u8>> {
        let NamespaceSpec::Engine(identity) = namespace.spec() else {
            return Err(Error::invalid("token_ids: given for an opaque namespace, which has none"));
        };
        let indexed = self.indexed(namespace);
        let known = indexed.as_ref().map(|indexed| indexed.algorithm);
        let algorithm = known.unwrap_or_else(|| Algorithm::of(identity));
        let block_tokens = usize::try_from(identity.block_tokens).unwrap_or(usize::MAX);
        if let Some(hashes) = algorithm.and_then(|by| by.hashes(block_tokens, prompt)) {
            return Ok(hashes.concat());
        }
        let lora_name = prompt.lora.map_or("", |lora| lora.name);
        let salt = if prompt.cache_salt.is_empty() {
            identity.cache_salt.as_slice()
        } else {
            prompt.cache_salt.as_bytes()
        };
        let has = |scheme| indexed.as_ref().is_some_and(|known| known.table(scheme).is_some());
        if has(Scheme::Dynamo) {
            let seed = dynamo::seed(lora_name, salt);
            let locals = dynamo::locals(block_tokens, prompt.tokens, seed);
            return self.resolve(namespace, Scheme::Dynamo, &locals);
        }
        // Its keys know of no salt.
        if has(Scheme::LlmD) && prompt.cache_salt.is_empty() {
            let model = if lora_name.is_empty() { &identity.model } else { lora_name };
            let keys = llm_d::keys(model, block_tokens, prompt.tokens);
            return self.resolve(namespace, Scheme::LlmD, &keys);
        }
        Err(Error::invalid(format!(
            "token_ids: hashes of {} {} cannot be made of these tokens; give hashes, or open the \
             namespace with keep_tokens and hash_schemes dynamo",
            identity.engine, identity.hash_algorithm
        )))
    }

    /// The name of a block, as the index has it; none if it has none.
    #[must_use]
    pub fn name_of(&self, namespace: &Namespace, scheme: Scheme, hash: BlockHash) -> Option<u64> {
        self.indexed(namespace)?.table(scheme)?.read().name(&hash)
    }

    /// Blocks and bytes of all tables of a scheme.
    #[must_use]
    pub fn usage(&self, scheme: Scheme) -> (u64, u64) {
        let namespaces: Vec<_> = self.shared.namespaces.read().values().cloned().collect();
        let (mut blocks, mut bytes) = (0, 0);
        for table in namespaces.iter().filter_map(|indexed| indexed.table(scheme)) {
            let table = table.read();
            blocks += table.len();
            bytes += table.bytes();
        }
        let number = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        (number(blocks), number(bytes))
    }

    /// Shows how many there are of each scheme.
    pub fn show(&self) {
        for scheme in Scheme::ALL {
            let (blocks, bytes) = self.usage(*scheme);
            self.shared.metrics.show(*scheme, blocks, bytes);
        }
    }

    /// Whether any namespace wants names.
    pub(super) fn is_wanted(&self) -> bool {
        self.shared.namespaces.read().values().any(|indexed| !indexed.tables.is_empty())
    }

    pub(super) fn is_empty(&self) -> bool {
        let namespaces = self.shared.namespaces.read();
        let mut tables = namespaces.values().flat_map(|indexed| &indexed.tables);
        tables.all(|(_, table)| table.read().len() == 0)
    }

    /// Waits until a namespace wants names that it did not want before.
    pub(super) async fn wanted(&self) {
        self.shared.wanted.notified().await;
    }

    /// Whether blocks were not indexed for want of room that there is by now. Once.
    pub(super) fn has_room_again(&self) -> bool {
        // Relaxed: one task asks.
        self.shared.room.is_easy() && self.shared.refused.swap(false, Ordering::Relaxed)
    }

    /// Something has happened to these blocks: makes the index so, as the map has them now. What is then
    /// [due](Self::go_on) is returned.
    pub(super) fn refresh(
        &self,
        stack: &Stack,
        namespaces: &NamespaceTable,
        keys: &[BlockKey],
    ) -> Due {
        let mut due = Due::default();
        for keys in keys.chunk_by(|a, b| a.namespace == b.namespace) {
            let Some(indexed) = keys.first().and_then(|key| self.met(namespaces, key.namespace))
            else {
                continue;
            };
            let step = |table: &mut Table, blocks: &OfStack<'_>| {
                let mut unindexed = Unindexed::default();
                keys.iter().for_each(|key| unindexed += table.look(key.hash, blocks));
                unindexed
            };
            if self.change(stack, &indexed, step) {
                due.0.push(indexed);
            }
        }
        due
    }

    /// Looks at no more than `most` blocks of each table that have waited for others.
    pub(super) fn go_on(&self, stack: &Stack, due: Due, most: usize) -> Due {
        let mut due = due;
        due.0.retain(|indexed| {
            self.change(stack, indexed, |table, blocks| table.go_on(most, blocks))
        });
        due
    }

    /// What it holds: blocks of each namespace, for [`refresh`](Self::refresh).
    pub(super) fn held(&self) -> Vec<BlockKey> {
        let namespaces: Vec<_> = self.shared.namespaces.read().values().cloned().collect();
        let mut held = Vec::new();
        for indexed in &namespaces {
            let namespace = indexed.namespace.index();
            for (_, table) in &indexed.tables {
                let blocks = table.read().blocks();
                held.extend(blocks.into_iter().map(|hash| BlockKey { namespace, hash }));
            }
        }
        held
    }

    /// Gives back memory that it does not need any more.
    pub(super) fn shrink(&self) {
        let namespaces: Vec<_> = self.shared.namespaces.read().values().cloned().collect();
        namespaces
            .iter()
            .flat_map(|known| &known.tables)
            .for_each(|(_, table)| table.write().shrink());
    }

    /// Takes a step on each table of a namespace; whether blocks are due then.
    fn change(
        &self,
        stack: &Stack,
        indexed: &Indexed,
        step: impl Fn(&mut Table, &OfStack<'_>) -> Unindexed,
    ) -> bool {
        let blocks = OfStack { stack, namespace: &indexed.namespace };
        let mut is_due = false;
        for (scheme, table) in &indexed.tables {
            let mut table = table.write();
            let Unindexed { full, unlike } = step(&mut table, &blocks);
            is_due |= table.is_due();
            if full > 0 {
                self.shared.refused.store(true, Ordering::Relaxed);
            }
            let metrics = &self.shared.metrics;
            metrics.record_unindexed(*scheme, UnindexedLabel::Full, full);
            metrics.record_unindexed(*scheme, UnindexedLabel::Unlike, unlike);
        }
        is_due
    }

    fn indexed(&self, namespace: &Namespace) -> Option<Arc<Indexed>> {
        self.shared.namespaces.read().get(&namespace.index()).cloned()
    }

    /// The tables of a namespace, which may not have been heard of yet.
    fn met(&self, namespaces: &NamespaceTable, index: u32) -> Option<Arc<Indexed>> {
        if let Some(known) = self.shared.namespaces.read().get(&index) {
            return Some(Arc::clone(known));
        }
        let namespace = namespaces.by_index(index).filter(|it| !it.hash_schemes().is_empty())?;
        self.opened(&namespace);
        self.shared.namespaces.read().get(&index).cloned()
    }
}

impl Indexed {
    fn table(&self, scheme: Scheme) -> Option<&Arc<RwLock<Table>>> {
        self.tables.iter().find(|(other, _)| *other == scheme).map(|(_, table)| table)
    }
}

fn without(namespace: &Namespace, scheme: Scheme) -> Error {
    let has = namespace.hash_schemes();
    let has = if has.is_empty() {
        "none".to_owned()
    } else {
        has.into_iter().collect::<Vec<_>>().join(", ")
    };
    Error::invalid(format!(
        "hash_scheme: {} given, but the namespace has {has}; open it with hash_schemes {}",
        scheme.name(),
        scheme.name()
    ))
}
