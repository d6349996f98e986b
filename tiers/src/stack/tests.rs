//! Stories about one stack. Each block's bytes are made from its number, so any read can be checked.

mod above;
mod chaos;
mod clean;
mod cold;
mod eviction;
mod hottest;
mod object;
mod popular;
mod putting;
mod quotas;
mod removal;

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::*;
use crate::{
    block::BlockKey,
    limits::MIB,
    testing::{Fixture, block_bytes, hash_of, pack},
};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

async fn get(fixture: &Fixture, namespace: &Arc<Namespace>, number: u64) -> Fetch {
    fixture.stack.get(namespace, hash_of(number), &[], soon()).await.unwrap()
}

/// Whether the block is here; panics if it is here with a wrong byte.
async fn has(fixture: &Fixture, namespace: &Arc<Namespace>, number: u64) -> bool {
    match get(fixture, namespace, number).await {
        Fetch::Hit(block) => {
            for (part, spec) in (0..).zip(namespace.layout().parts()) {
                let expected = block_bytes(namespace, number, part, spec.bytes as usize);
                assert!(block.part(part).unwrap().as_ref() == expected, "wrong bytes: {number}");
            }
            true
        }
        Fetch::Miss => false,
        other => panic!("{other:?}"),
    }
}

fn look(fixture: &Fixture, namespace: &Namespace, numbers: &[u64], ask: Ask) -> Answer {
    fixture.stack.lookup(namespace, Hashes::new(&pack(numbers), 32).unwrap(), ask)
}

fn prefix(fixture: &Fixture, namespace: &Namespace, numbers: &[u64]) -> u32 {
    look(fixture, namespace, numbers, Ask::default()).prefix_blocks
}

fn lease(fixture: &Fixture, namespace: &Namespace, numbers: &[u64]) -> Answer {
    look(fixture, namespace, numbers, Ask { sparse: false, pin_bytes_max: Some(u64::MAX) })
}

/// Puts one part of each of `numbers`.
fn put_part(
    fixture: &Fixture,
    namespace: &Arc<Namespace>,
    numbers: &[u64],
    part: u32,
    parent: Option<u64>,
) {
    let packed = pack(numbers);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let parent = parent.map(hash_of);
    let offer = Offer { hashes, parts: &[part], checksums: &[], parent, lengths: &[] };
    let mut batch = fixture.stack.put(namespace, offer).unwrap();
    for (position, number) in (0..).zip(numbers) {
        if batch.claims()[position as usize] == Claim::Wanted {
            fixture.write(&mut batch, namespace, (position, *number), part).unwrap();
        }
    }
    batch.finish();
}

/// Every account says what a walk over the map finds. Only while nobody calls the stack.
fn audit(fixture: &Fixture) {
    let shared = &fixture.stack.shared;
    let (mut entries, mut blocks, mut bytes, mut ages) = (0, 0, 0, 0_u64);
    let mut on_colder = [0_u64; 2];
    let mut of_namespace = std::collections::HashMap::<u32, (u64, u64)>::new();
    let mut of_tenant = std::collections::HashMap::<String, [u64; 2]>::new();
    for number in 0..crate::limits::SHARDS {
        shared.map.with_shard(number, |shard| {
            let mut ordered = 0;
            for (id, entry) in shard.entries() {
                let at = shared.map.hashed(entry.key.namespace, entry.key.hash);
                assert_eq!(shard.find(at), Some(id), "an entry is found by its key");
                let staged = entry.staging.as_ref().is_some_and(|staging| !staging.is_empty());
                assert!(staged != entry.hottest().is_some(), "readable or arriving: {entry:?}");
                let is_ordered = entry.class != crate::map::NO_CLASS;
                assert!(is_ordered || entry.payload.is_none(), "can be evicted: {entry:?}");
                ordered += usize::from(is_ordered);
                entries += 1;
                if let Some(payload) = &entry.payload {
                    blocks += 1;
                    bytes += payload.slot_bytes() as u64;
                    ages = ages.wrapping_add(entry.age);
                }
                let account = shared.namespaces.account_of(entry.key.namespace).unwrap();
                let bytes_on = of_tenant.entry(account.tenant().to_owned()).or_default();
                for ((count, bytes), copy) in on_colder.iter_mut().zip(bytes_on).zip(entry.cold) {
                    *count += u64::from(copy.is_some());
                    *bytes += if copy.is_some() { u64::from(entry.len) } else { 0 };
                }
                if entry.hottest().is_some() {
                    let of = of_namespace.entry(entry.key.namespace).or_default();
                    *of = (of.0 + 1, of.1 + u64::from(entry.len));
                }
            }
            assert_eq!(shard.ordered(), ordered, "the orders hold what the entries say");
        });
    }
    let copies = [Tier::Nvme, Tier::Object].map(|tier| shared.copies(tier));
    assert_eq!(copies, on_colder);
    let usage = fixture.stack.usage();
    assert_eq!((usage.index_blocks, usage.dram_blocks), (entries, blocks));
    assert_eq!(shared.resident_bytes.load(Ordering::Relaxed), bytes);
    assert_eq!(shared.pool.ages(), ages);
    for namespace in fixture.namespaces.list() {
        let counters = namespace.counters();
        let counted = [&counters.blocks, &counters.bytes].map(|c| c.load(Ordering::Relaxed));
        let (blocks, bytes) = of_namespace.remove(&namespace.index()).unwrap_or_default();
        assert_eq!(counted, [blocks, bytes]);
    }
    let mut in_dram = 0;
    for account in fixture.namespaces.accounts().list() {
        let [dram, nvme, object] = account.holding().bytes;
        let colder = of_tenant.remove(account.tenant()).unwrap_or_default();
        assert_eq!([nvme, object], colder, "{}", account.tenant());
        in_dram += dram;
    }
    assert_eq!(in_dram, usage.dram_used_bytes, "every slot in use is somebody's");
}

/// Nothing is pinned, staged or under way.
fn assert_quiet(fixture: &Fixture) {
    assert_eq!(fixture.stack.usage().staging_bytes, 0);
    assert_eq!(fixture.stack.shared.flights.len(), 0);
    assert_eq!(fixture.stack.shared.demotions.len(), 0);
}

#[tokio::test]
async fn what_was_put_is_found_and_read() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[4096, 100]).unwrap();
    assert_eq!(fixture.put(&namespace, &[1, 2, 3]).unwrap(), 3);
    let answer = look(&fixture, &namespace, &[1, 2, 3, 4], Ask::default());
    assert_eq!(answer.prefix_blocks, 3);
    assert_eq!(
        answer.runs,
        [crate::tier::Run { start: 0, end: 3, tier: Tier::Dram, pending: false, bytes: 3 * 4196 }]
    );
    assert_eq!(answer.counts.to_array(), [3, 0, 0, 0, 1]);
    for number in 1..=3 {
        assert!(has(&fixture, &namespace, number).await);
    }
    assert!(!has(&fixture, &namespace, 4).await);
    assert_quiet(&fixture);
}

#[tokio::test]
async fn a_gap_breaks_the_prefix_and_sparse_shows_what_is_behind() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fixture.put(&namespace, &[1, 2, 4, 5]).unwrap();
    let answer = look(&fixture, &namespace, &[1, 2, 3, 4, 5, 6], Ask::default());
    assert_eq!((answer.prefix_blocks, answer.sparse.len()), (2, 0));
    let ask = Ask { sparse: true, pin_bytes_max: None };
    let answer = look(&fixture, &namespace, &[1, 2, 3, 4, 5, 6], ask);
    assert_eq!((answer.sparse[0].start, answer.sparse[0].end), (3, 5));
    assert_eq!(answer.counts.to_array(), [2, 0, 0, 0, 4]);
}

#[tokio::test]
async fn long_lookups_find_prefixes_of_every_length() {
    let fixture = Fixture::new(16 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    let numbers: Vec<u64> = (0..20_000).collect();
    for kept in [0, 1, 255, 256, 257, 1279, 1280, 5000, 20_000] {
        fixture.put(&namespace, &numbers[..kept]).unwrap();
        assert_eq!(prefix(&fixture, &namespace, &numbers), u32::try_from(kept).unwrap());
    }
}

#[tokio::test]
async fn namespaces_share_nothing() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let a = fixture.namespace("a", &[64]).unwrap();
    let b = fixture.namespace("b", &[64]).unwrap();
    fixture.put(&a, &[1]).unwrap();
    assert_eq!((prefix(&fixture, &a, &[1]), prefix(&fixture, &b, &[1])), (1, 0));
    assert!(!has(&fixture, &b, 1).await);
    assert_eq!(fixture.put(&b, &[1]).unwrap(), 1);
    assert!(has(&fixture, &a, 1).await && has(&fixture, &b, 1).await);
}

#[tokio::test]
async fn removed_blocks_are_gone_but_a_holder_reads_on() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    fixture.put(&namespace, &[1, 2]).unwrap();
    let pinned = lease(&fixture, &namespace, &[1]);
    let packed = pack(&[1, 3]);
    let removed =
        fixture.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    assert_eq!((removed, prefix(&fixture, &namespace, &[1])), (1, 0));
    assert_eq!(pinned.pins[0].contents().as_ref(), block_bytes(&namespace, 1, 0, 4096));
    assert_eq!(fixture.stack.usage().staging_bytes, 4096);
    fixture.stack.unpin(pinned.pins);
    assert_quiet(&fixture);
    assert_eq!(fixture.put(&namespace, &[1]).unwrap(), 1);
    let counters = namespace.counters();
    assert_eq!(counters.blocks.load(Ordering::Relaxed), 2);
    assert_eq!(counters.bytes.load(Ordering::Relaxed), 8192);
}

#[tokio::test]
async fn a_damaged_block_is_quarantined_and_reported() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    fixture.put(&namespace, &[1, 2]).unwrap();
    let feed = fixture.stack.subscribe();
    drain(&feed);
    // The sum in the map stands for the bytes: changing either must be noticed.
    let at = fixture.stack.shared.map.hashed(namespace.index(), hash_of(1));
    fixture.stack.shared.map.with(at, |shard| {
        let id = shard.find(at).unwrap();
        shard.get_mut(id).unwrap().checksums = crate::map::Checksums::One(1);
    });
    assert!(matches!(get(&fixture, &namespace, 1).await, Fetch::Corrupt));
    assert!(matches!(get(&fixture, &namespace, 1).await, Fetch::Miss));
    assert!(has(&fixture, &namespace, 2).await);
    let events = drain(&feed);
    assert_eq!(events, [crate::event::TierEvent::Removed { key: at.key, tier: Tier::Dram }]);
    assert_eq!(fixture.stack.usage().corrupt, 1);
    assert_quiet(&fixture);
    assert_eq!(fixture.put(&namespace, &[1]).unwrap(), 1);
    assert!(has(&fixture, &namespace, 1).await);
}

/// All events of all shards; resyncs count as nothing.
fn drain(feed: &EventFeed) -> Vec<crate::event::TierEvent> {
    let shards = 0..feed.shards();
    shards
        .flat_map(|shard| match feed.drain(shard) {
            crate::event::Drained::Events(events) => events,
            crate::event::Drained::Resync(_) => Vec::new(),
        })
        .collect()
}

#[tokio::test]
async fn events_follow_what_happened_and_overflow_asks_for_a_resync() {
    use crate::event::{Drained, TierEvent};
    let fixture = Fixture::new(64 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fixture.put(&namespace, &[1]).unwrap();
    let feed = fixture.stack.subscribe();
    let shards = || 0..feed.shards();
    let first: Vec<_> = shards().map(|shard| feed.drain(shard)).collect();
    let known = first.iter().map(|drained| match drained {
        Drained::Resync(blocks) => blocks.len(),
        Drained::Events(_) => panic!("the first drain is a resync"),
    });
    assert_eq!(known.sum::<usize>(), 1);
    fixture.put(&namespace, &[2]).unwrap();
    let packed = pack(&[2]);
    fixture.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    let key = fixture.stack.shared.map.hashed(namespace.index(), hash_of(2)).key;
    let tier = Tier::Dram;
    let expected = [TierEvent::Stored { key, tier }, TierEvent::Removed { key, tier }];
    assert_eq!(drain(&feed), expected);
    // More than all rings together hold, without reading.
    let many: Vec<u64> = (10..600_000).collect();
    for batch in many.chunks(65_536) {
        fixture.put(&namespace, batch).unwrap();
    }
    let resynced = shards().map(|shard| match feed.drain(shard) {
        Drained::Resync(blocks) => blocks.len(),
        Drained::Events(_) => 0,
    });
    let resynced = resynced.sum::<usize>();
    assert_eq!(resynced as u64, fixture.stack.usage().dram_blocks, "nothing is forgotten");
    assert!(resynced > 500_000, "{resynced}");
}

#[tokio::test]
async fn descriptions_are_kept_as_the_namespace_allows() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fixture.put(&namespace, &[1, 2]).unwrap();
    let packed = pack(&[1, 2, 3]);
    let tokens: Vec<u32> = (0..48).collect();
    let chain = |tokens| Chain {
        hashes: Hashes::new(&packed, 32).unwrap(),
        parent: Some(hash_of(0)),
        position: 7,
        tokens,
        lora_name: "l",
    };
    let feed = fixture.stack.subscribe();
    assert_eq!(drain(&feed), []);
    assert_eq!(fixture.stack.describe(&namespace, chain(&tokens)).unwrap(), 2);
    let told = |number| {
        let key = BlockKey { namespace: namespace.index(), hash: hash_of(number) };
        crate::event::TierEvent::Described { key }
    };
    let events: std::collections::HashSet<_> = drain(&feed).into_iter().collect();
    assert_eq!(events, [told(1), told(2)].into());
    assert_eq!(fixture.stack.describe(&namespace, chain(&tokens)).unwrap(), 2);
    assert_eq!(drain(&feed), [], "nothing new");
    let second = fixture.stack.description(&namespace, hash_of(2)).unwrap();
    assert_eq!((second.parent, second.position), (Some(hash_of(1)), 8));
    assert_eq!(second.tokens, (16..32).collect::<Vec<u32>>());
    let error = fixture.stack.describe(&namespace, chain(&tokens[..5])).unwrap_err();
    assert!(error.to_string().contains("tokens: 5 given, 0 or 48 required"), "{error}");
}

#[tokio::test]
async fn a_full_map_evicts_the_coldest_block_whatever_its_size() {
    let fixture = Fixture::with_index(8 * MIB, 1000, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    let numbers: Vec<u64> = (0..1500).collect();
    for number in &numbers {
        assert_eq!(fixture.put(&namespace, &[*number]).unwrap(), 1);
    }
    assert_eq!(fixture.stack.usage().index_blocks, 1000);
    assert!(!has(&fixture, &namespace, 499).await && has(&fixture, &namespace, 500).await);
}

#[tokio::test]
async fn a_feed_that_replaces_another_is_not_switched_off_with_it() {
    use crate::event::Drained;
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    let old = fixture.stack.subscribe();
    let new = fixture.stack.subscribe();
    let resynced = |feed: &EventFeed| {
        (0..feed.shards()).filter(|s| matches!(feed.drain(*s), Drained::Resync(_))).count()
    };
    assert_eq!((resynced(&old), resynced(&new)), (0, new.shards()), "the latest one is told");
    drop(old);
    fixture.put(&namespace, &[1]).unwrap();
    assert_eq!(drain(&new).len(), 1);
}

#[tokio::test]
async fn positions_beyond_the_range_are_refused() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fixture.put(&namespace, &[1, 2]).unwrap();
    let packed = pack(&[1, 2]);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let chain = |position| Chain { hashes, parent: None, position, tokens: &[], lora_name: "" };
    assert_eq!(fixture.stack.describe(&namespace, chain(u32::MAX - 1)).unwrap(), 2);
    let error = fixture.stack.describe(&namespace, chain(u32::MAX)).unwrap_err();
    assert!(error.to_string().contains("position: 4294967295 given"), "{error}");
    let long = "x".repeat(1025);
    let named = Chain { lora_name: &long, ..chain(0) };
    let error = fixture.stack.describe(&namespace, named).unwrap_err();
    assert!(error.to_string().contains("lora_name: 1025 bytes given"), "{error}");
}
