//! What one router is told, and when: pure, no I/O, no clock.
//!
//! ```text
//! a block changed -> dirty -> what it should be announced as, against what it is (shadow)
//!                                 less: removed, at once           more: pending, until it can be said
//! pending -> its head: the first of its chain that is not announced. Stored, root first, once the block before
//!            the head is announced
//! ```
//! Routers drop a block whose parent they do not know, most of them silently, so that nothing is said before
//! what it stands on. What is dirty is a set: a router that is slow is told less often, not less. What was
//! announced stays so when a block before it leaves: routers stop at the gap by themselves, and it counts
//! again when the gap is filled.
//!
//! There is a limit to what one router is told: what is over it is not announced, until it changes when there is
//! room again.
//!
//! A tier may ask for a length ([`Gates`]): a chain is announced on it from so many blocks on, or as the
//! continuation of what is announced on it.
//!
//! [`resync`](Announcer::resync) withdraws everything and says it again: right for routers that know
//! everything, part of it, or nothing, because withdrawing what was never told does nothing. What was withdrawn
//! a moment ago is withdrawn again, because that may have been lost with a connection: until it is
//! [settled](Announcer::settle).

use std::collections::{HashMap, HashSet, VecDeque};

use kvstrata_tiers::{
    block::{BlockHash, BlockKey},
    tier::Tier,
};

use super::{
    encode::{Event, Stored},
    runs::{Link, Removed, Runs},
    shadow::{Shadow, TierSet, index},
};

/// The blocks as they are.
pub(super) trait Blocks {
    /// The tiers that a block can be read from.
    fn tiers(&self, key: &BlockKey) -> TierSet;
    /// What is known of it: nothing if that is not enough to announce it.
    fn described(&self, key: &BlockKey) -> Option<Described>;
}

/// What is known of a block that can be announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    /// The block before it; none at the root.
    pub(super) parent: Option<BlockHash>,
    /// Its tokens, all of them.
    pub(super) tokens: Vec<u32>,
    /// Name of the LoRA adapter; empty for none.
    pub(super) lora_name: String,
}

/// What is announced of a namespace, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Terms {
    /// Tokens of a block.
    pub(super) block_tokens: u32,
    /// Bytes of a hash.
    pub(super) hash_bytes: usize,
    /// The engine takes the first bits of a hash for a number, not the last ones.
    pub(super) first_bits: bool,
    /// The cache salt; empty for none.
    pub(super) salt: String,
    /// The worker can load its blocks.
    pub(super) open: bool,
}

impl Terms {
    /// The number that engines and routers know a block by.
    pub(super) fn short(&self, hash: BlockHash) -> u64 {
        let bytes = hash.as_bytes().get(..self.hash_bytes).unwrap_or_default();
        let eight = if self.first_bits { bytes.first_chunk() } else { bytes.last_chunk() };
        eight.map_or(0, |eight| u64::from_be_bytes(*eight))
    }
}

/// From how many blocks on a chain is announced on each tier, hot to cold; none: not at all.
pub(super) type Gates = [Option<u32>; 3];

/// What one router is told.
#[derive(Debug, Default)]
pub(super) struct Announcer {
    /// Blocks that may be announced or wait.
    most: usize,
    scope: HashMap<u32, Terms>,
    shadow: Shadow,
    /// What is to be withdrawn before anything else is said.
    leaving: Vec<(u64, TierSet)>,
    /// What was withdrawn since the last settling, and between that and the one before.
    withdrawn: [HashMap<u64, TierSet>; 2],
    dirty: VecDeque<BlockKey>,
    is_dirty: HashSet<BlockKey>,
    /// Blocks that wait to be announced, with their parents.
    pending: HashMap<BlockKey, Option<BlockHash>>,
    /// Those that wait, by their parents.
    waiting: HashMap<BlockKey, Vec<BlockHash>>,
}

/// A block of a chain that is about to be announced.
struct Node {
    key: BlockKey,
    hash: u64,
    parent: Option<u64>,
    /// Its place in the list of nodes.
    above: Option<usize>,
    on: TierSet,
    missing: TierSet,
    /// Blocks from it on that are on each tier, without a gap.
    depths: [u32; 3],
    described: Described,
}

impl Announcer {
    /// One that has told all this before, in another life, and may announce so many blocks.
    pub(super) fn new(told: Vec<(u64, TierSet)>, most: usize) -> Self {
        Self { leaving: told, most, ..Self::default() }
    }

    /// What is announced of a namespace from now on; returns whether that is another thing than before. If it
    /// is, all of its blocks have [changed](Self::changed).
    pub(super) fn set_terms(&mut self, namespace: u32, terms: Terms) -> bool {
        let is_new = self.scope.get(&namespace) != Some(&terms);
        if is_new {
            self.scope.insert(namespace, terms);
        }
        is_new
    }

    /// A block is somewhere else, or more is known of it.
    pub(super) fn changed(&mut self, key: BlockKey) {
        if self.scope.contains_key(&key.namespace) && self.is_dirty.insert(key) {
            self.dirty.push_back(key);
        }
    }

    /// Chains of another length are announced now.
    pub(super) fn reconsider(&mut self) {
        let pending: Vec<_> = self.pending.keys().copied().collect();
        pending.into_iter().for_each(|key| self.changed(key));
    }

    /// Everything is said again: `all` are the blocks that are somewhere.
    pub(super) fn resync(&mut self, all: impl Iterator<Item = BlockKey>) {
        let mut leaving: HashMap<u64, TierSet> = HashMap::new();
        let withdrawn = std::mem::take(&mut self.withdrawn).into_iter().flatten();
        let begun = std::mem::take(&mut self.leaving).into_iter();
        for (hash, tiers) in self.shadow.take().into_iter().chain(withdrawn).chain(begun) {
            let known = leaving.entry(hash).or_default();
            *known = known.with(tiers);
        }
        // Twice: where a withdrawal was lost and what was announced behind it was not, a router counts two.
        for _ in 0..2 {
            self.leaving.extend(leaving.iter().map(|(hash, tiers)| (*hash, *tiers)));
        }
        self.pending.clear();
        self.waiting.clear();
        all.for_each(|key| self.changed(key));
    }

    /// All that was said before the last settling has been heard by whoever listens: what was withdrawn by then
    /// need not be withdrawn again. Returns that, without what is announced again.
    pub(super) fn settle(&mut self) -> Vec<(u64, TierSet)> {
        let [latest, before] = &mut self.withdrawn;
        let settled = std::mem::replace(before, std::mem::take(latest));
        let still = |hash| {
            let later = before.get(&hash).copied().unwrap_or_default();
            self.shadow.tiers_of(hash).with(later)
        };
        let settled = settled.into_iter().map(|(hash, tiers)| (hash, tiers.without(still(hash))));
        settled.filter(|(_, tiers)| !tiers.is_empty()).collect()
    }

    /// Whether more is kept of what was withdrawn than there is room for.
    pub(super) fn must_settle(&self) -> bool {
        self.withdrawn.iter().map(HashMap::len).sum::<usize>() > self.most
    }

    /// Forgets what was to be said: nobody listens. What was said stays written down.
    pub(super) fn pause(&mut self) {
        if !self.is_dirty.is_empty() || !self.pending.is_empty() {
            self.dirty = VecDeque::new();
            self.is_dirty = HashSet::new();
            self.pending = HashMap::new();
            self.waiting = HashMap::new();
        }
    }

    /// Whether there is something to be said, or to be looked at.
    pub(super) fn is_busy(&self) -> bool {
        !self.leaving.is_empty() || !self.dirty.is_empty()
    }

    /// Blocks that are announced.
    pub(super) fn announced(&self) -> usize {
        self.shadow.len()
    }

    /// Blocks that wait for a block before them, or for a longer chain.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// What is to be said next, in order: of about `limit` blocks.
    pub(super) fn step(&mut self, blocks: &impl Blocks, gates: &Gates, limit: usize) -> Vec<Event> {
        let mut removed = Removed::default();
        while removed.count < limit
            && let Some((hash, tiers)) = self.leaving.pop()
        {
            removed.push(hash, tiers);
        }
        // Nothing is stored again before it was withdrawn.
        if !self.leaving.is_empty() {
            self.note_withdrawn(&removed);
            return removed.into_events();
        }
        let mut wanting = Vec::new();
        for _ in removed.count..limit {
            let Some(key) = self.dirty.pop_front() else { break };
            self.is_dirty.remove(&key);
            if self.look_at(key, blocks, gates, &mut removed) {
                wanting.push(key);
            }
        }
        self.note_withdrawn(&removed);
        let mut events = removed.into_events();
        self.store(&wanting, blocks, gates, limit, &mut events);
        events
    }

    fn note_withdrawn(&mut self, removed: &Removed) {
        let [latest, _] = &mut self.withdrawn;
        for (tier, hashes) in Tier::ALL.into_iter().zip(&removed.hashes) {
            for hash in hashes {
                let tiers = latest.entry(*hash).or_default();
                *tiers = tiers.with(TierSet::of(tier));
            }
        }
    }

    /// Withdraws what is not so any more; whether there is something to be announced.
    fn look_at(
        &mut self,
        key: BlockKey,
        blocks: &impl Blocks,
        gates: &Gates,
        removed: &mut Removed,
    ) -> bool {
        let Some(terms) = self.scope.get(&key.namespace) else { return false };
        let hash = terms.short(key.hash);
        let wanted = wanted(terms, &key, blocks, gates);
        let announced = self.shadow.tiers(key.namespace, hash);
        let gone = announced.without(wanted);
        if !gone.is_empty() {
            self.shadow.withdraw(hash, gone);
            removed.push(hash, gone);
        }
        self.stop_waiting(&key);
        if wanted.without(announced).is_empty() || self.shadow.is_taken(key.namespace, hash) {
            return false;
        }
        let is_new = announced.is_empty();
        if is_new && self.shadow.len() + self.pending.len() >= self.most {
            return false;
        }
        let Some(described) = blocks.described(&key) else { return false };
        if let Some(parent) = described.parent {
            let parent = BlockKey { hash: parent, ..key };
            self.waiting.entry(parent).or_default().push(key.hash);
        }
        self.pending.insert(key, described.parent);
        true
    }

    fn stop_waiting(&mut self, key: &BlockKey) {
        let Some(Some(parent)) = self.pending.remove(key) else { return };
        let parent = BlockKey { hash: parent, ..*key };
        if let Some(children) = self.waiting.get_mut(&parent) {
            children.retain(|child| *child != key.hash);
            if children.is_empty() {
                self.waiting.remove(&parent);
            }
        }
    }

    /// Announces what can be, of the chains of these blocks.
    fn store(
        &mut self,
        wanting: &[BlockKey],
        blocks: &impl Blocks,
        gates: &Gates,
        limit: usize,
        events: &mut Vec<Event>,
    ) {
        let mut stuck = HashSet::new();
        let mut left = limit;
        for key in wanting {
            let path = self.path(*key, &mut stuck);
            let mut nodes = self.chain(&path, blocks, gates, &mut left);
            measure(&mut nodes);
            let mut runs = Runs::default();
            let mut stood_on = Vec::new();
            for (place, node) in nodes.iter().enumerate() {
                if self.announce(place, node, gates, &mut runs) {
                    stood_on.push(node.key);
                }
            }
            events.extend(runs.into_events());
            // Those that wait beside this chain can follow.
            for key in stood_on {
                let children = self.waiting.get(&key).cloned().unwrap_or_default();
                children.into_iter().for_each(|hash| self.changed(BlockKey { hash, ..key }));
            }
        }
    }

    /// The blocks that wait, from the first one that can be announced down to this one; none if none can be:
    /// then they are `stuck` for now, and need not be climbed again.
    fn path(&self, from: BlockKey, stuck: &mut HashSet<BlockKey>) -> Vec<BlockKey> {
        let mut path = Vec::new();
        let mut ready = 0;
        let mut next = Some(from);
        while let Some(key) = next.take() {
            let Some(parent) = self.pending.get(&key) else { break };
            // Chains of more blocks than there are go round in circles.
            if stuck.contains(&key) || path.len() > self.pending.len() {
                break;
            }
            path.push(key);
            let parent = parent.map(|hash| BlockKey { hash, ..key });
            if parent.is_none_or(|parent| self.is_announced(&parent)) {
                ready = path.len();
            }
            next = parent;
        }
        if ready == 0 {
            stuck.extend(path);
            return Vec::new();
        }
        path.truncate(ready);
        path.reverse();
        path
    }

    fn is_announced(&self, key: &BlockKey) -> bool {
        self.scope.get(&key.namespace).is_some_and(|terms| {
            !self.shadow.tiers(key.namespace, terms.short(key.hash)).is_empty()
        })
    }

    /// These blocks, and those that wait for the last of them, each behind its parent: `left` of them, the
    /// others later.
    fn chain(
        &mut self,
        path: &[BlockKey],
        blocks: &impl Blocks,
        gates: &Gates,
        left: &mut usize,
    ) -> Vec<Node> {
        let mut nodes: Vec<Node> = Vec::new();
        let Some((last, before)) = path.split_last() else { return nodes };
        for key in before {
            let above = nodes.len().checked_sub(1);
            nodes.extend(self.node(*key, above, blocks, gates));
        }
        let mut next = vec![(*last, nodes.len().checked_sub(1))];
        let mut seen: HashSet<_> = path.iter().copied().collect();
        while let Some((key, above)) = next.pop() {
            if *left == 0 {
                self.changed(key);
                continue;
            }
            *left -= 1;
            let Some(node) = self.node(key, above, blocks, gates) else { continue };
            let place = nodes.len();
            nodes.push(node);
            let children = self.waiting.get(&key).into_iter().flatten();
            let children = children.map(|hash| BlockKey { hash: *hash, ..key });
            next.extend(
                children.filter(|child| seen.insert(*child)).map(|child| (child, Some(place))),
            );
        }
        nodes
    }

    fn node(
        &self,
        key: BlockKey,
        above: Option<usize>,
        blocks: &impl Blocks,
        gates: &Gates,
    ) -> Option<Node> {
        let terms = self.scope.get(&key.namespace)?;
        let described = blocks.described(&key)?;
        let (hash, on) = (terms.short(key.hash), wanted(terms, &key, blocks, gates));
        let missing = on.without(self.shadow.tiers(key.namespace, hash));
        let parent = described.parent.map(|parent| terms.short(parent));
        // What hangs on it already makes it long enough.
        let depths = self.shadow.children(hash).map(|count| if count > 0 { u32::MAX } else { 0 });
        Some(Node { key, hash, parent, above, on, missing, depths, described })
    }

    /// Announces a block where that can be done; whether it is announced anywhere that it was not.
    fn announce(&mut self, place: usize, node: &Node, gates: &Gates, runs: &mut Runs) -> bool {
        let namespace = node.key.namespace;
        let before = node.parent.map(|parent| self.shadow.tiers(namespace, parent));
        let Some(terms) = self.scope.get(&namespace) else { return false };
        if before.is_some_and(TierSet::is_empty) || self.shadow.is_taken(namespace, node.hash) {
            return false;
        }
        // Of chains that go round in circles it may have been announced just now.
        let lacking = node.missing.without(self.shadow.tiers(namespace, node.hash));
        let mut missing = lacking;
        let Node { hash, parent, ref described, .. } = *node;
        let link = Link { hash, parent, described, terms };
        for tier in lacking.iter() {
            let continues = before.is_some_and(|before| before.has(tier));
            let depth = node.depths.get(index(tier)).copied().unwrap_or(0);
            let least = gates.get(index(tier)).copied().flatten().unwrap_or(u32::MAX);
            if continues || depth >= least {
                self.shadow.announce(namespace, node.hash, node.parent, tier);
                runs.push(place, tier, &link);
                missing = missing.without(TierSet::of(tier));
            }
        }
        if missing.is_empty() {
            self.stop_waiting(&node.key);
        }
        missing != lacking
    }
}

/// Where a block should be announced.
fn wanted(terms: &Terms, key: &BlockKey, blocks: &impl Blocks, gates: &Gates) -> TierSet {
    let on = if terms.open { blocks.tiers(key) } else { TierSet::NONE };
    let allowed = Tier::ALL.into_iter().zip(gates).filter(|(_, gate)| gate.is_some());
    allowed.fold(TierSet::NONE, |allowed, (tier, _)| allowed.with(TierSet::of(tier))).both(on)
}

/// How far the chains go that begin at each block.
fn measure(nodes: &mut [Node]) {
    for place in (0..nodes.len()).rev() {
        let Some(node) = nodes.get_mut(place) else { continue };
        for tier in Tier::ALL {
            if let Some(depth) = node.depths.get_mut(index(tier)) {
                *depth = if node.on.has(tier) { depth.saturating_add(1) } else { 0 };
            }
        }
        let (depths, above) = (node.depths, node.above);
        if let Some(above) = above.and_then(|above| nodes.get_mut(above)) {
            for (deepest, depth) in above.depths.iter_mut().zip(depths) {
                *deepest = (*deepest).max(depth);
            }
        }
    }
}

impl Stored {
    /// One block, that others may follow.
    pub(super) fn begin(tier: Tier, parent: Option<u64>, lora_name: &str, terms: &Terms) -> Self {
        Self {
            tier,
            hashes: Vec::new(),
            parent,
            tokens: Vec::new(),
            block_tokens: terms.block_tokens,
            lora_name: lora_name.to_owned(),
            salt: terms.salt.clone(),
        }
    }
}
