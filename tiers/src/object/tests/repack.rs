//! What stays of packs that leave, whatever happens meanwhile.

use bytes::BytesMut;
use object_store::ObjectStoreExt as _;

use super::*;
use crate::testing::Trouble;

/// Blocks of a pack.
const PACK_BLOCKS: u64 = 32;

/// A node whose blocks must be used within ten minutes, and its first packs of 60 blocks.
async fn aging() -> (Rig, Node) {
    let mut rig = Rig::new();
    rig.ttl = Some(Duration::from_secs(600));
    let node = rig.start();
    let run = node.seal(0..60).await;
    node.packed(run).await;
    assert_eq!(node.metrics.packs_made.get(), 2);
    (rig, node)
}

/// The first packs of an aging node are too old now; what is hot of them is packed again.
async fn age(rig: &Rig, node: &Node, hot: &[u64]) {
    node.touch(hot);
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(61)).await;
}

fn every(step: usize) -> Vec<u64> {
    (0..60).step_by(step).collect()
}

#[tokio::test(start_paused = true)]
async fn what_was_used_since_its_pack_was_made_outlives_it_once() {
    let (rig, node) = aging().await;
    age(&rig, &node, &every(3)).await;
    assert_eq!(node.stored(0..60), every(3));
    assert_eq!(node.metrics.repacked_blocks.get(), 20);
    assert_eq!(node.metrics.repacked_bytes.get(), 20 * u64::from(LEN), "they do not shrink");
    assert_eq!(node.metrics.dropped_packs.get(), 2);
    assert_eq!(node.metrics.packs_made.get(), 3, "both went into one");
    // Another start finds the same, and nothing needs the old objects.
    drop(node);
    rig.clock.fetch_add(10 * 4_200_000, Ordering::Relaxed);
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    assert_eq!(node.stored(0..60), every(3));
    assert_eq!(node.hits(every(3).into_iter()).await, every(3));
    // What is not used any more leaves.
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    drop(node);
    let node = rig.start_at(empty.path());
    node.found().await;
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(node.stored(0..60).len(), 0);
    rig.clock.fetch_add(10 * 4_200_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert_eq!(rig.listed().await.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn over_the_capacity_the_hot_blocks_of_every_pack_stay_and_the_bucket_is_never_larger() {
    let mut rig = Rig::new();
    rig.capacity_bytes = 16 << 20;
    rig.delete_grace = Duration::from_secs(60);
    let node = rig.start();
    // One in four is used all the time, and they lie in all packs.
    let hot = |until: u64| (0..until).filter(|number| number % 4 == 1).take(60).collect::<Vec<_>>();
    for turn in 0..24 {
        let from = turn * PACK_BLOCKS;
        node.seal(from..from + PACK_BLOCKS).await;
        rig.pass(20).await;
        node.touch(&hot(from));
        rig.pass(20).await;
        let bytes: u64 = rig.listed().await.iter().map(|(_, bytes)| bytes).sum();
        assert!(bytes <= rig.capacity_bytes, "{bytes} in turn {turn}");
    }
    let all = 24 * PACK_BLOCKS;
    assert_eq!(node.stored(hot(all).into_iter()), hot(all));
    assert!(node.metrics.repacked_blocks.get() >= 60);
    let again = node.metrics.repacked_bytes.get();
    assert!(again <= node.metrics.packed_bytes.get() / 2, "{again} packed again");
    let recent = all - 3 * PACK_BLOCKS..all;
    assert_eq!(node.stored(recent.clone()).len() as u64, recent.end - recent.start);
    let (stored, used) = (node.stored(0..all).len() as u64, node.store.usage().used_bytes);
    assert!(used >= 6 << 20, "{used}: not more leaves than must");
    assert!(stored * u64::from(LEN) >= used * 9 / 10, "what is dead does not take room");
    drop(node);
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    assert_eq!(node.hits(hot(all).into_iter()).await, hot(all));
}

#[tokio::test(start_paused = true)]
async fn a_bucket_whose_capacity_was_made_smaller_takes_packs_again_soon() {
    let mut rig = Rig::new();
    (rig.delete_grace, rig.dram_bytes) = (Duration::from_secs(600), 64 << 20);
    let node = rig.start();
    let run = node.seal(0..600).await;
    node.packed(run).await;
    let held = node.store.usage().used_bytes;
    drop(node);
    rig.capacity_bytes = 8 << 20;
    assert!(held > 2 * rig.capacity_bytes, "{held}");
    let node = rig.start();
    node.found().await;
    // No try to pack again what has no place, which would have to fail first.
    rig.pass(62).await;
    assert_eq!(node.metrics.repacked_blocks.get(), 0);
    let left = node.store.usage().used_bytes;
    assert!(left <= rig.capacity_bytes && left >= rig.capacity_bytes / 4, "{left}");
    node.seal(600..640).await;
    rig.pass(800).await;
    assert_eq!(node.stored(600..632).len(), 32, "what is new is in the bucket");
    let listed: u64 = rig.listed().await.iter().map(|(_, bytes)| bytes).sum();
    assert!(listed <= rig.capacity_bytes, "{listed}");
}

#[tokio::test(start_paused = true)]
async fn what_makes_room_does_not_wait_for_what_found_none() {
    let mut rig = Rig::new();
    (rig.delete_grace, rig.capacity_bytes) = (Duration::from_secs(1), 8 << 20);
    rig.dram_bytes = 64 << 20;
    let node = rig.start();
    // Three times what the bucket takes, at once.
    node.seal(0..20 * PACK_BLOCKS).await;
    let mut seconds = 0;
    while node.metrics.named_packs.get() < 20 {
        rig.pass(1).await;
        seconds += 1;
        assert!(seconds < 200, "{} packs", node.metrics.named_packs.get());
    }
    assert!(node.metrics.pack_failures.get() > 0, "it was full");
    assert!(seconds <= 30, "{seconds} s");
}

#[tokio::test(start_paused = true)]
async fn a_pack_that_is_half_empty_is_packed_again_as_a_whole() {
    let mut rig = Rig::new();
    rig.delete_grace = Duration::from_secs(60);
    let node = rig.start();
    let run = node.seal(0..60).await;
    node.packed(run).await;
    assert_eq!(node.remove(&[0, 1, 2]).await, 3);
    rig.pass(61).await;
    assert_eq!(node.metrics.repacked_blocks.get(), 0, "most of it is live");
    let removed: Vec<u64> = (0..20).collect();
    node.remove(&removed).await;
    rig.pass(200).await;
    assert_eq!(node.metrics.repacked_blocks.get(), PACK_BLOCKS - 20, "the live ones of the first");
    assert_eq!(node.stored(0..60), (20..60).collect::<Vec<_>>());
    assert_eq!(rig.listed().await.len(), 2);
    drop(node);
    let node = rig.start();
    node.found().await;
    assert_eq!(node.hits(0..60).await, (20..60).collect::<Vec<_>>());
}

/// Kills a node so many half seconds after the ages of its packs begin to count, with blocks that are
/// removed at the same time; whether by then it had done all there was to do.
async fn killed_after(halves: u64) -> bool {
    let (mut rig, node) = aging().await;
    node.touch(&every(2));
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    rig.objects.set_latency(Duration::from_millis(700));
    // The next look at what is too old is within half a minute.
    tokio::time::sleep(Duration::from_secs(22) + Duration::from_millis(500 * halves)).await;
    let removed = [2, 3, 40];
    let acknowledged = timeout(Duration::from_secs(3), node.remove(&removed)).await.is_ok();
    let done = node.metrics.dropped_packs.get() == 2;
    drop(node);
    rig.objects.set_latency(Duration::ZERO);
    rig.ttl = None;
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    let found = node.hits(0..60).await;
    for number in every(2) {
        let expected = !removed.contains(&number) || !acknowledged;
        if expected && !removed.contains(&number) || acknowledged {
            assert_eq!(found.contains(&number), expected, "block {number} after {halves}");
        }
    }
    // Nothing is left over for good.
    rig.clock.fetch_add(25 * 3_600_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(120)).await;
    rig.clock.fetch_add(3 * 3_600_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(120)).await;
    let listed: u64 = rig.listed().await.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(listed, node.store.usage().used_bytes, "after {halves}");
    done
}

#[tokio::test(start_paused = true)]
async fn a_kill_at_any_moment_loses_nothing_hot_and_brings_nothing_back() {
    let mut done = 0;
    for halves in 0..40 {
        done += u32::from(killed_after(halves).await);
    }
    assert!((5..=35).contains(&done), "kills before, while and after: {done}");
}

#[tokio::test(start_paused = true)]
async fn what_is_removed_while_it_is_packed_again_stays_removed() {
    let (rig, node) = aging().await;
    node.touch(&every(2));
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    rig.objects.set_latency(Duration::from_secs(3));
    tokio::time::sleep(Duration::from_secs(35)).await;
    assert_eq!(node.metrics.dropped_packs.get(), 0, "they are being packed");
    node.remove(&[0, 1, 10]).await;
    rig.objects.set_latency(Duration::ZERO);
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert_eq!(node.metrics.dropped_packs.get(), 2);
    let left: Vec<u64> = every(2).into_iter().filter(|number| ![0, 10].contains(number)).collect();
    assert_eq!(node.stored(0..60), left);
    drop(node);
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    assert_eq!(node.hits(0..60).await, left);
}

#[tokio::test(start_paused = true)]
async fn a_damaged_block_is_left_behind_alone() {
    let (rig, node) = aging().await;
    for (name, _) in rig.listed().await {
        let path = object_store::path::Path::from(name);
        let body = rig.objects.get(&path).await.unwrap().bytes().await.unwrap();
        let mut body = BytesMut::from(body);
        body[usize::try_from(LEN).unwrap() * 2 + 5] ^= 1;
        rig.objects.put(&path, body.freeze().into()).await.unwrap();
    }
    age(&rig, &node, &every(1)).await;
    let damaged = [2, PACK_BLOCKS + 2];
    let left: Vec<u64> = (0..60).filter(|number| !damaged.contains(number)).collect();
    assert_eq!(node.stored(0..60), left);
    assert_eq!(node.metrics.wrong_blocks.get(), 2);
    drop(node);
    let node = rig.start();
    node.found().await;
    assert_eq!(node.hits(0..60).await, left);
}

#[tokio::test(start_paused = true)]
async fn packs_that_cannot_be_read_stay_for_some_tries_and_then_leave_as_they_are() {
    let (rig, node) = aging().await;
    node.touch(&every(2));
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    rig.objects.trouble_always(Trouble::Status(503));
    tokio::time::sleep(Duration::from_secs(45)).await;
    assert_eq!(node.metrics.dropped_packs.get(), 0);
    assert_eq!(node.stored(0..60).len(), 60, "nothing is lost by waiting");
    rig.objects.trouble_always(Trouble::None);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(node.stored(0..60), every(2), "it goes on when the store is back");
    rig.objects.trouble_always(Trouble::Status(403));
    node.touch(&every(2));
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(1200)).await;
    assert_eq!(node.stored(0..60).len(), 0, "a ttl is kept, too");
}
