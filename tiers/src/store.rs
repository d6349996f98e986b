//! The seam for colder tiers: what the stack asks of nvme and object.
//!
//! The dram tier is not behind it: bytes arrive in the arena and leave from it, whatever tier they
//! live on, so a colder tier copies from a [`Payload`] and fills a [`BlockWriter`], both of which are
//! arena memory, aligned for direct I/O. A tier hands out a [`Location`]; the one map remembers it.
//!
//! Every implementation passes `testing::suite`. Wrappers deny `clippy::missing_trait_methods`.

use std::{
    fmt::Debug,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};

use crate::{
    block::BlockHash,
    error::Result,
    namespace::{Namespace, NamespaceId},
    tier::Tier,
};
pub use crate::{
    description::Description,
    dram::{BlockWriter, Payload},
    map::{Checksums, Location},
};

/// A future that can be sent between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Who waits for a block to be on a colder tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Urgency {
    /// A client does: it was promised that the block outlives this process.
    Durable,
    /// Nobody: the block is copied ahead of its eviction.
    Background,
}

/// A sealed block on its way to a colder tier. Holding it keeps the bytes in memory.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Its namespace.
    pub namespace: Arc<Namespace>,
    /// Its hash.
    pub hash: BlockHash,
    /// Its bytes.
    pub payload: Payload,
    /// The checksums of its parts; the tier stores them and verifies against them.
    pub checksums: Checksums,
    /// Who waits for it.
    pub urgency: Urgency,
    /// Whether it has been read since it was put, which is the best sign that it will be again.
    pub reused: bool,
}

/// A block on a colder tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Its hash.
    pub hash: BlockHash,
    /// Where the tier said it is.
    pub location: Location,
}

/// The outcome of reading a block. "Busy" is another fact than "I do not have it".
#[derive(Debug)]
pub enum Load {
    /// The writer holds the block's bytes.
    Hit(BlockWriter),
    /// The tier has it but cannot read it now; try again after the delay.
    Busy(Duration),
    /// It is not there, or not with the length asked for. The caller drops the location.
    Miss,
}

/// What a colder tier holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// Bytes it may hold; 0 if it has no bound of its own.
    pub capacity_bytes: u64,
    /// Bytes it holds, as its medium counts them.
    pub used_bytes: u64,
    /// Blocks it holds.
    pub blocks: u64,
    /// Blocks that left since the start because room was needed.
    pub evicted_blocks: u64,
}

/// What keeps a tier from doing all that it is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ailment {
    /// Its medium is full and nothing could be reclaimed; it tries again.
    Full,
    /// Writes failed a moment ago; it tries again.
    Failing,
    /// It takes no writes: nvme until the restart, an object store while this node may not write there.
    ReadOnly,
    /// So many requests failed in a row that none are sent for now.
    Away,
}

/// A block that a colder tier found on its medium when it started.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its namespace.
    pub namespace: Arc<Namespace>,
    /// Its hash.
    pub hash: BlockHash,
    /// Its bytes.
    pub len: u32,
    /// The checksums of its parts.
    pub checksums: Checksums,
    /// Where it is.
    pub location: Location,
    /// Whether this is its newer place, if the map has the block on this tier already.
    pub replaces: bool,
}

/// Names a run of a tier that [`Runs`]. Later runs have higher numbers; none is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId(pub u64);

/// A block that lies in a run.
#[derive(Debug, Clone)]
pub struct RunBlock {
    /// Its namespace.
    pub namespace: Arc<Namespace>,
    /// Its hash.
    pub hash: BlockHash,
    /// Where the tier that has the run keeps it.
    pub location: Location,
    /// Its bytes.
    pub len: u32,
    /// The checksums of its parts.
    pub checksums: Checksums,
}

impl RunBlock {
    /// The block at its place.
    #[must_use]
    pub fn wanted(&self) -> Wanted {
        Wanted { namespace: *self.namespace.id(), hash: self.hash, location: self.location }
    }
}

/// A tier whose blocks lie in runs, in the order of their puts, that can be copied as they are.
///
/// A run that is sealed does not change any more, but blocks of it may be removed or moved, and the
/// whole run may leave at any moment: what is gone is not found, and that is no error.
pub trait Runs: Debug + Send + Sync + 'static {
    /// The runs that are sealed, oldest first.
    fn sealed(&self) -> Vec<RunId>;

    /// The blocks of a run, in their order; none if it is gone. Some of them may not be current: ask
    /// [`Above::uncopied`] which of them are worth copying.
    fn contents<'a>(&'a self, run: RunId) -> BoxFuture<'a, Result<Vec<RunBlock>>>;

    /// The bytes of a block, verified; `None` if they are not there (any more).
    fn read<'a>(&'a self, block: &'a RunBlock) -> BoxFuture<'a, Result<Option<Vec<u8>>>>;

    /// Waits until a run was sealed since this was last waited for. For one who waits.
    ///
    /// # Cancel safety
    /// Safe.
    fn sealed_more<'a>(&'a self) -> BoxFuture<'a, ()>;

    /// Runs that the tier would give up soon and that were not [offered](Self::offered), oldest first;
    /// none while it has room.
    fn next_to_leave(&self) -> Vec<RunId>;

    /// Whether runs that were not offered should stay a little longer, so that their blocks can be
    /// copied before they leave. Off at first; off again while nothing can be copied.
    fn hold_unoffered(&self, hold: bool);

    /// All of the run was copied that should be: it may leave.
    fn offered(&self, run: RunId);
}

/// A block that one tier has and another lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uncopied {
    /// Its last use on the map's clock of touches; 0 before the first.
    pub age: u64,
    /// Whether it has been read since it was put, as far as this process knows.
    pub reused: bool,
    /// Whether nobody has read it and it was put in a chain of
    /// [`LONG_CHAIN_TOKENS`](crate::limits::LONG_CHAIN_TOKENS) or more, as far as this process knows.
    pub in_long_chain: bool,
}

/// What a colder tier tells the stack above it, and asks of it. Calls take shard locks for a moment
/// and never wait; the tier holds no lock of its own meanwhile.
pub trait Above: Debug + Send + Sync + 'static {
    /// A block that was there before this process. False: the map does not have it at this place. It
    /// has no room, other bytes, or another place that this one does not replace: the tier should
    /// forget the copy.
    fn found(&self, tier: Tier, block: Found) -> bool;

    /// The tier is about to reclaim these blocks: they are reported as removed and dropped from the
    /// map before this returns. Those that the map has elsewhere by now stay.
    fn leaving(&self, tier: Tier, blocks: &[Wanted]);

    /// The tier has copied one of its blocks from `block.location` to `to`. False: the map does not have
    /// it there any more, the new copy is of no use.
    fn moved(&self, tier: Tier, block: &Wanted, to: Location) -> bool;

    /// The map's clock of touches: what is used from now on has at least this age.
    fn clock(&self) -> u64;

    /// The last use of each block on the map's clock of touches; `None` for what the map does not
    /// have at this place (any more). A copy whose put is under way counts as one that it has: the
    /// tier may say of it that it moves or leaves.
    fn ages(&self, tier: Tier, blocks: &[Wanted]) -> Vec<Option<u64>>;

    /// The age below which the coldest `share` (0 to 1) of the tier's blocks lie, from a sample.
    fn cold_age(&self, tier: Tier, share: f64) -> u64;

    /// Tells `visit` of every block that the map has on the tier: its place, its bytes and its last
    /// use. Walks the whole map, one shard after the other; `visit` must be short.
    fn survey(&self, tier: Tier, visit: &mut dyn FnMut(Location, u32, u64));

    /// What the map says of each block that has a copy on `from` at this place and none on `to`;
    /// `None` for all others. A copy whose put is under way counts as one that `from` has.
    fn uncopied(&self, from: Tier, to: Tier, blocks: &[Wanted]) -> Vec<Option<Uncopied>>;

    /// The tier does not have the copies any more of whose places `is_gone` says so: they are reported
    /// as removed and dropped from the map before this returns. Walks the whole map, one shard after the
    /// other. Returns how many there were.
    fn gone(&self, tier: Tier, is_gone: &mut dyn FnMut(Location) -> bool) -> u64;

    /// What was described of a block, for a tier that [keeps](BlockStore::described) it; none if nothing
    /// was, or the map does not have the block.
    fn description(&self, namespace: NamespaceId, hash: BlockHash) -> Option<Description> {
        let _ = (namespace, hash);
        None
    }

    /// What was described, before this process, of a block that the tier has [found](Self::found). False:
    /// the map does not have it on the tier, which should forget what was described, too.
    fn found_described(
        &self,
        tier: Tier,
        namespace: NamespaceId,
        hash: BlockHash,
        description: Description,
    ) -> bool {
        let _unkept = (tier, namespace, hash, description);
        false
    }

    /// The tier `to` has made a copy of a block, readable from now on, from that at `from`, which may
    /// have moved or left since. False: the map does not have the block any more, or has other bytes
    /// under its key, or another copy on `to` by now; the tier should forget this one.
    fn copied(&self, from: &Wanted, to: Tier, location: Location, checksums: &Checksums) -> bool;
}

/// A colder tier.
///
/// The caller guarantees: one `put` at a time for one block; a location is only passed to the tier
/// that made it. The implementer must: never return bytes of another block or length as a hit (what
/// it cannot vouch for is a `Miss`; the caller verifies the checksums all the same); own every buffer
/// until the I/O on it is over, also when the returned future is dropped; answer every call in
/// bounded time. After an error the tier stays usable for other blocks.
pub trait BlockStore: Debug + Send + Sync + 'static {
    /// Which tier this is: nvme or object.
    fn tier(&self) -> Tier;

    /// Tells the tier who is above it, once, before anything else. A tier whose stack has gone goes on
    /// without telling anybody.
    fn attach(&self, above: Weak<dyn Above>);

    /// Copies a block in. When it returns, the block is readable and, for nvme, synced and indexed, and
    /// stands in for older copies of it, which do not come back with a restart.
    /// A tier that is short of what writing costs it answers `Exhausted` for the blocks that it would
    /// rather not write, see [`crate::admission`], and `Unavailable` while it writes nothing at all.
    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, Result<Location>>;

    /// Reads a block into `into`, whose length is that of the block.
    fn get<'a>(&'a self, wanted: Wanted, into: BlockWriter) -> BoxFuture<'a, Result<Load>>;

    /// The bytes of a block were not the right ones: whether it is damaged for good, so that it is to be
    /// [removed](Self::remove). False where the way to the tier may have been at fault, which ends.
    fn is_damaged(&self, block: &Wanted) -> bool {
        let _ = block;
        true
    }

    /// Forgets blocks, for good: they do not come back with a restart. Absent blocks are a success. It
    /// may forget a block by its hash, wherever it is: no put of it may be under way meanwhile.
    /// When it returns, none of the places can be read. Dropping the future does not stop it.
    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>>;

    /// Blocks were removed, whether or not the map had them, and the copies that it knew are forgotten:
    /// copies that the tier is making, or has and has not [found](Above::found) yet, must not come back.
    /// A tier that has no such copies does nothing.
    fn removed<'a>(
        &'a self,
        namespace: NamespaceId,
        hashes: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<()>> {
        let _ = (namespace, hashes);
        Box::pin(async { Ok(()) })
    }

    /// Blocks that the tier has, or is being given, were described (anew): it may ask for the
    /// [description](Above::description) and tell it with the block after a restart. It may forget it.
    /// Returns at once. A tier that keeps none does nothing.
    fn described(&self, namespace: NamespaceId, hashes: &[BlockHash]) {
        let _ = (namespace, hashes);
    }

    /// Asks the tier to reclaim its coldest part soon, because the map is full of blocks that only
    /// colder tiers have. Returns at once; it may be asked again for every block of a put, and may
    /// call [`Above::leaving`] before it returns.
    fn shed(&self);

    /// What it holds now.
    fn usage(&self) -> StoreUsage;

    /// What is wrong with it now; none if it takes and gives blocks.
    fn ailment(&self) -> Option<Ailment> {
        None
    }

    /// Finishes what was accepted and stops. Later calls fail with `Unavailable`; closing twice is a
    /// success.
    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>>;
}
