//! Every constant limit of the store, with the reason for its value and its relations to others.

use std::time::Duration;

/// Bytes in one kibibyte, mebibyte and gibibyte.
pub const KIB: u64 = 1 << 10;
/// See [`KIB`].
pub const MIB: u64 = 1 << 20;
/// See [`KIB`].
pub const GIB: u64 = 1 << 30;

/// Parts one namespace may declare: TP 16 x PP 8 x two cache groups, with room.
pub const PARTS_MAX: usize = 1024;
/// The longest part, in bytes: a 64-token block of a 70B model without tensor parallelism is 20 MiB.
pub const PART_BYTES_MAX: u64 = 64 * MIB;
/// The longest block (all parts together), in bytes.
pub const BLOCK_BYTES_MAX: u64 = 64 * MIB;
/// The longest identity field, in bytes: model paths and revisions are far shorter.
pub const NAMESPACE_FIELD_BYTES_MAX: usize = 1024;
/// Namespaces one process interns: each costs about 1 KiB and is never dropped.
pub const NAMESPACES_MAX: usize = 65_536;

/// The size of an arena extent when the arena is large enough for many, in bytes.
pub const EXTENT_BYTES_MAX: u64 = 64 * MIB;
/// The smallest extent, in bytes: small arenas are for tests and laptops.
pub const EXTENT_BYTES_MIN: u64 = MIB;
/// Extents that an arena should have at least, so that classes can trade them.
pub const EXTENTS_MIN: u64 = 64;
/// The size of an arena region (one memfd), in bytes.
pub const REGION_BYTES_MAX: u64 = GIB;

/// Shards of the map. More than the cores of a large node; each holds one lock.
pub const SHARDS: usize = 64;
/// The share of dram that one put context may take from others before it has been read: 1 / this.
pub const CONTEXT_SHARE_DIVISOR: u64 = 4;
/// Tokens from which on a chain is long: its blocks are worth storing in an object store although nobody
/// has read them. Computing `n` tokens costs `2N + 2nLd` operations each (`N` parameters, `L` layers,
/// width `d`; Kaplan et al. 2020, 2.1), so that a stored byte of a long chain saves more, by
/// `1 + nLd / N`: twice as much at 61 k tokens of an 8B model, at 107 k of a 70B one. In a conversation
/// trace an unread block was asked for again half as often as one that was read; from here on it is worth
/// about the same (docs/decisions/0008).
pub const LONG_CHAIN_TOKENS: u64 = 65_536;
/// Long chains that are remembered when none of their blocks are in dram any more: with 4 GiB for each,
/// 16 TiB.
pub const LONG_CHAINS_MAX: usize = 4096;
/// How long a client should wait when everything evictable is pinned.
pub const RETRY_AFTER_PINNED: Duration = Duration::from_millis(50);
/// Tenants that have had a quota since the start: whoever makes room asks each of them once for each shard,
/// some tens of nanoseconds each time.
pub const LANES_MAX: usize = 256;
/// How long a client should wait that has used up its tenant's quota: by then it may have removed something.
pub const RETRY_AFTER_QUOTA: Duration = Duration::from_secs(1);
/// Events a shard keeps for a slow reader before it asks for a resync.
pub const SHARD_EVENTS_MAX: usize = 4096;
/// Blocks that wait for demotion: 3 MiB of keys, and a context of 1 M tokens at 16 to a block. What
/// does not fit is found by a sweep.
pub const CLEANER_QUEUE_MAX: usize = 65_536;
/// Demotions that clients wait for and that have not begun. More wait where they came from.
pub const CLEANER_JOBS_MAX: usize = 256;
/// Blocks that are demoted at a time: enough to fill writes of 1 MiB with small blocks.
pub const CLEANER_BLOCKS_MAX: usize = 64;
/// Bytes of dram that demotions may hold, by which evictions are narrowed: 1 / this of dram..
pub const CLEANER_DRAM_DIVISOR: u64 = 8;
/// ..and at most this: a tenth of a second of a fast drive.
pub const CLEANER_BYTES_MAX: u64 = 256 * MIB;
/// The part of the map that should be free before colder tiers are asked to shed: 1 / this.
pub const INDEX_FREE_DIVISOR: usize = 16;
/// Blocks that are named at a time to whoever hands on what is hottest: 6 MiB while they are chosen, and 128 GiB
/// of blocks of 1 MiB.
pub const HOTTEST_BLOCKS_MAX: usize = 131_072;
/// A block is read often every so many uses: once in a prompt that several sessions share, not in one of which
/// every turn is read again once or twice.
pub const POPULAR_USES: u8 = 8;
/// Blocks that are read often and wait for whoever gives them a second holder: a prompt of 1 M tokens at 64 to a
/// block; 600 KiB.
pub const POPULAR_MAX: usize = 16_384;
/// Index bytes set aside for each block, an upper bound that the index bench checks.
pub const INDEX_BYTES_PER_BLOCK: u64 = 200;

const _: () = assert!(EXTENT_BYTES_MAX >= BLOCK_BYTES_MAX, "a block must fit into one extent");
const _: () = assert!(PART_BYTES_MAX <= BLOCK_BYTES_MAX, "a part is a share of a block");
const _: () =
    assert!(REGION_BYTES_MAX.is_multiple_of(EXTENT_BYTES_MAX), "regions hold whole extents");
const _: () = assert!(SHARDS.is_power_of_two(), "shards are picked by hash bits");
