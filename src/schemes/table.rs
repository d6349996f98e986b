//! The names of the blocks of one namespace in one scheme. No I/O, no clock; bounded by a [`Room`].
//!
//! What a table holds follows from what the map says of a block, and is made anew for each block that somebody
//! says something of ([`Table::look`]): in whatever order that comes, and however often, every block that
//! can be read and whose chain can be read from its root on is found in the end. A name of tokens takes
//! that of the block before; a block whose predecessor has none yet waits for it. Where the engine's hash can be made here, too, a block whose hash is of more than its tokens (a
//! salt, a picture) gets no name, nor does what is behind it: others would take it for another prompt's.
//!
//! Two blocks of one name: the one that was said something of last has it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvstrata_tiers::{block::BlockHash, namespace::Identity, stack::Description};

use super::{Algorithm, Lora, Prompt, Scheme};

/// Memory that a block takes in a table of parts of hashes, at most: a pair of 40 bytes in a hash table that
/// has just grown.
const PART_BYTES: u64 = 96;
/// The same in a table of names of tokens: its place, and its name, or that it waits for another one's.
const TOKENS_BYTES: u64 = 384;
/// Bytes of a hash on the heap.
const HASH_BYTES: usize = 48;

/// What the map says of a block.
#[derive(Debug)]
pub(super) enum Known {
    /// It cannot be read.
    Gone,
    /// It can, and there is no more to say, or nobody wanted to know.
    There,
    /// It can, and this is known of it.
    Described(Description),
}

/// The one who knows.
pub(super) trait Blocks {
    /// What is known of a block, with its description only if that is wanted.
    fn known(&self, hash: BlockHash, describe: bool) -> Known;
}

/// Memory that all tables share.
#[derive(Debug)]
pub(super) struct Room {
    used: AtomicU64,
    most: u64,
}

impl Room {
    pub(super) fn new(most: u64) -> Self {
        Self { used: AtomicU64::new(0), most }
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        // Relaxed: a bound, nothing is published by it.
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// An eighth of it is free.
    pub(super) fn is_easy(&self) -> bool {
        self.used() <= self.most / 8 * 7
    }
}

/// What could not be indexed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unindexed {
    /// There was no room.
    pub(super) full: u64,
    /// Their hashes are of more than their tokens.
    pub(super) unlike: u64,
}

impl std::ops::AddAssign for Unindexed {
    fn add_assign(&mut self, more: Self) {
        self.full += more.full;
        self.unlike += more.unlike;
    }
}

/// Where a block of a table of tokens is.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Named(u64),
    /// Until this one has a name.
    Waits(Box<BlockHash>),
    /// That one has, and it is to be looked at.
    Due,
    /// It has none, nor what is behind it.
    Unlike,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Table {
    scheme: Scheme,
    model: String,
    block_tokens: usize,
    hash_bytes: usize,
    cache_salt: Vec<u8>,
    algorithm: Option<Algorithm>,
    room: Arc<Room>,
    names: HashMap<u64, BlockHash>,
    /// Of a scheme of tokens only.
    places: HashMap<BlockHash, Place>,
    waiting: HashMap<BlockHash, Vec<BlockHash>>,
    /// Blocks that need not wait any more.
    due: Vec<BlockHash>,
}

impl Table {
    pub(super) fn new(
        scheme: Scheme,
        identity: &Identity,
        algorithm: Option<Algorithm>,
        room: Arc<Room>,
    ) -> Self {
        let number = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        Self {
            scheme,
            model: identity.model.clone(),
            block_tokens: number(identity.block_tokens),
            hash_bytes: number(identity.hash_bytes),
            cache_salt: identity.cache_salt.clone(),
            algorithm,
            room,
            names: HashMap::new(),
            places: HashMap::new(),
            waiting: HashMap::new(),
            due: Vec::new(),
        }
    }

    /// The block of this name.
    pub(super) fn block(&self, name: u64) -> Option<&BlockHash> {
        self.names.get(&name)
    }

    /// The name of a block.
    pub(super) fn name(&self, hash: &BlockHash) -> Option<u64> {
        if self.scheme.is_of_tokens() {
            return match self.places.get(hash)? {
                Place::Named(name) => Some(*name),
                Place::Waits(_) | Place::Due | Place::Unlike => None,
            };
        }
        let name = self.scheme.of_hash(self.whole(hash))?;
        (self.names.get(&name) == Some(hash)).then_some(name)
    }

    /// Blocks in it, those that wait for a name, too.
    pub(super) fn len(&self) -> usize {
        if self.scheme.is_of_tokens() { self.places.len() } else { self.names.len() }
    }

    /// Bytes that it has allocated, about.
    pub(super) fn bytes(&self) -> usize {
        fn of<K, V>(map: &HashMap<K, V>) -> usize {
            (map.capacity() * 8).div_ceil(7) * (size_of::<(K, V)>() + 1)
        }
        // Each that waits is in a list, and has the one that it waits for at its place.
        let waiting: usize = self.waiting.values().map(|list| list.capacity() + list.len()).sum();
        let due = self.due.capacity() * size_of::<BlockHash>();
        of(&self.names) + of(&self.places) + of(&self.waiting) + waiting * HASH_BYTES + due
    }

    /// All blocks in it.
    pub(super) fn blocks(&self) -> Vec<BlockHash> {
        if self.scheme.is_of_tokens() {
            self.places.keys().copied().collect()
        } else {
            self.names.values().copied().collect()
        }
    }

    /// Makes what is known of a block so. Those that have waited for it are [due](Self::is_due) then.
    pub(super) fn look(&mut self, hash: BlockHash, blocks: &impl Blocks) -> Unindexed {
        let mut unindexed = Unindexed::default();
        match blocks.known(hash, self.scheme.is_of_tokens()) {
            Known::Gone => self.forget(&hash),
            Known::There if !self.scheme.is_of_tokens() => self.note(hash, &mut unindexed),
            // It was put again since it was described: it has the name that it had, or waits for none.
            Known::There => match self.places.get(&hash) {
                Some(Place::Waits(_) | Place::Due) => self.forget(&hash),
                Some(Place::Named(_) | Place::Unlike) | None => {}
            },
            Known::Described(description) => {
                if self.place(hash, &description, &mut unindexed) {
                    let waited = self.waiting.remove(&hash).unwrap_or_default();
                    for child in waited {
                        self.places.insert(child, Place::Due);
                        self.due.push(child);
                    }
                }
            }
        }
        unindexed
    }

    /// Whether blocks are to be looked at that have waited.
    pub(super) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Looks at no more than `most` of these.
    pub(super) fn go_on(&mut self, most: usize, blocks: &impl Blocks) -> Unindexed {
        let mut unindexed = Unindexed::default();
        for _ in 0..most {
            let Some(hash) = self.due.pop() else { break };
            unindexed += self.look(hash, blocks);
        }
        unindexed
    }

    /// Gives back memory that many blocks needed which have gone.
    pub(super) fn shrink(&mut self) {
        if self.len() < self.names.capacity().max(self.places.capacity()) / 4 {
            self.names.shrink_to_fit();
            self.places.shrink_to_fit();
            self.waiting.shrink_to_fit();
            self.due.shrink_to_fit();
        }
    }

    /// Notes a block by its hash alone.
    fn note(&mut self, hash: BlockHash, unindexed: &mut Unindexed) {
        let Some(name) = self.scheme.of_hash(self.whole(&hash)) else { return };
        if self.names.contains_key(&name) || self.room.take(PART_BYTES) {
            self.names.insert(name, hash);
        } else {
            unindexed.full += 1;
        }
    }

    /// Puts a block at its place by its tokens; whether those that wait for it can go on.
    fn place(
        &mut self,
        hash: BlockHash,
        description: &Description,
        unindexed: &mut Unindexed,
    ) -> bool {
        let is_root = description.parent.is_none();
        if description.tokens.len() != self.block_tokens || is_root != (description.position == 0) {
            return false;
        }
        let parent = description.parent.as_ref().map(|parent| (parent, self.places.get(parent)));
        let place = match parent {
            None => self.name_behind(None, &hash, description),
            Some((_, Some(Place::Named(name)))) => {
                self.name_behind(Some(*name), &hash, description)
            }
            Some((_, Some(Place::Unlike))) => Place::Unlike,
            Some((parent, Some(Place::Waits(_) | Place::Due) | None)) => {
                Place::Waits(Box::new(*parent))
            }
        };
        let before = self.places.get(&hash);
        if before == Some(&place) {
            if let Place::Named(name) = place {
                // Another of that name may have had it, and left.
                self.names.entry(name).or_insert(hash);
            }
            return false;
        }
        let is_new = before.is_none();
        if is_new && !self.room.take(TOKENS_BYTES) {
            unindexed.full += 1;
            return false;
        }
        self.take_out(&hash);
        let can_go_on = match &place {
            Place::Named(name) => {
                self.names.insert(*name, hash);
                true
            }
            Place::Waits(parent) => {
                let list = self.waiting.entry(**parent).or_insert_with(|| Vec::with_capacity(1));
                list.push(hash);
                false
            }
            Place::Unlike => {
                unindexed.unlike += 1;
                true
            }
            // No description says so.
            Place::Due => false,
        };
        self.places.insert(hash, place);
        can_go_on
    }

    fn name_behind(&self, before: Option<u64>, hash: &BlockHash, said: &Description) -> Place {
        if self.is_of_more(hash, said) {
            return Place::Unlike;
        }
        let root = self.scheme.root(&self.model, &said.lora_name, &self.cache_salt);
        let name = self.scheme.of_tokens(before, &said.tokens, root);
        name.map_or(Place::Unlike, Place::Named)
    }

    /// Whether the hash of a block is certainly not of what was said of it.
    fn is_of_more(&self, hash: &BlockHash, said: &Description) -> bool {
        let Some(algorithm) = &self.algorithm else { return false };
        let name = said.lora_name.as_str();
        let lora = (!name.is_empty()).then_some(Lora { name, path: "" });
        let salt = std::str::from_utf8(&self.cache_salt).unwrap_or_default();
        // The salt of a namespace may be in its hashes, or not.
        ["", salt].iter().all(|cache_salt| {
            let prompt = Prompt { tokens: &said.tokens, lora, cache_salt };
            algorithm.is_of(hash, said.parent.as_ref(), &prompt) == Some(false)
        })
    }

    fn forget(&mut self, hash: &BlockHash) {
        if self.scheme.is_of_tokens() {
            self.take_out(hash);
            if self.places.remove(hash).is_some() {
                self.room.give(TOKENS_BYTES);
            }
            return;
        }
        let Some(name) = self.scheme.of_hash(self.whole(hash)) else { return };
        if self.names.get(&name) == Some(hash) {
            self.names.remove(&name);
            self.room.give(PART_BYTES);
        }
    }

    /// Takes a block out of where its place says that it is.
    fn take_out(&mut self, hash: &BlockHash) {
        match self.places.get(hash) {
            Some(Place::Named(name)) if self.names.get(name) == Some(hash) => {
                self.names.remove(name);
            }
            Some(Place::Waits(parent)) => {
                if let Some(waiting) = self.waiting.get_mut(parent.as_ref()) {
                    waiting.retain(|waits| waits != hash);
                    if waiting.is_empty() {
                        self.waiting.remove(parent.as_ref());
                    }
                }
            }
            Some(Place::Named(_) | Place::Due | Place::Unlike) | None => {}
        }
    }

    fn whole<'a>(&self, hash: &'a BlockHash) -> &'a [u8] {
        hash.as_bytes().get(..self.hash_bytes).unwrap_or_default()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let bytes = if self.scheme.is_of_tokens() { TOKENS_BYTES } else { PART_BYTES };
        self.room.give(u64::try_from(self.len()).unwrap_or(0).saturating_mul(bytes));
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
