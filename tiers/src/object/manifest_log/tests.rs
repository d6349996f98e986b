//! A log with one writer, over a store in memory.

mod kills;
mod races;
mod start;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use object_store::memory::InMemory;

use super::*;
use crate::object::{
    owner::{Claim, beat, open_epoch},
    rebuild::{Rebuilt, rebuild},
    rig_tests::{Double, LONG_MS, NOW, blocks, key, owner, pack, soon, upload},
};

const GRACE: Duration = Duration::from_secs(900);
const GRACE_MS: u64 = GRACE.as_secs() * 1000;

/// Opens the next epoch and its log, in small objects.
async fn open(
    bucket: &Arc<Bucket>,
    holder: &str,
    now: u64,
) -> Result<(ManifestLog, Rebuilt), OwnerError> {
    let held = open_epoch(bucket, &owner(), Claim::own(holder), now, soon()).await?;
    open_held(bucket, held, now).await
}

async fn open_held(
    bucket: &Arc<Bucket>,
    held: Ownership,
    now: u64,
) -> Result<(ManifestLog, Rebuilt), OwnerError> {
    let small = 1024;
    let parts =
        LogParts { object_bytes_max: small, ..LogParts::new(Arc::clone(bucket), held, None) };
    ManifestLog::open(parts, now, soon()).await
}

/// Uploads the next pack, with these blocks, and names it.
async fn add(log: &mut ManifestLog, keys: impl IntoIterator<Item = u64>) -> PackId {
    let footer = pack(log.next_pack(), keys);
    assert!(upload(&log.parts.bucket, &footer).await);
    let id = footer.id;
    log.append(vec![ManifestRecord::Pack(footer)], NOW, soon()).await.unwrap();
    id
}

async fn remove(log: &mut ManifestLog, keys: &[u64]) {
    let removal = log.removal(keys.iter().map(|it| key(*it)).collect());
    log.append(vec![removal], NOW, soon()).await.unwrap();
}

async fn drop_pack(log: &mut ManifestLog, id: PackId) {
    log.append(vec![ManifestRecord::Dropped(id)], NOW, soon()).await.unwrap();
}

async fn compact(log: &mut ManifestLog) -> usize {
    let mut steps = 1;
    while log.compact(NOW, soon()).await.unwrap() {
        steps += 1;
    }
    steps
}

async fn seen(bucket: &Bucket) -> BTreeMap<PackId, BTreeSet<u64>> {
    blocks(&rebuild(bucket, &owner(), soon()).await.unwrap())
}

fn expected<const N: usize>(packs: [(PackId, &[u64]); N]) -> BTreeMap<PackId, BTreeSet<u64>> {
    packs.into_iter().map(|(id, keys)| (id, keys.iter().copied().collect())).collect()
}

#[test]
fn calls_can_move_between_threads() {
    fn assert_send<T: Send>(_: T) {}
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    assert_send(async move {
        let (mut log, _) =
            adopt(bucket, (&owner(), Claim::own("a")), None, NOW, soon()).await.unwrap();
        log.append(Vec::new(), NOW, soon()).await.unwrap();
        log.compact(NOW, soon()).await.unwrap();
        log.collect(NOW, GRACE, soon()).await.unwrap();
        log.sweep(NOW, soon()).await.unwrap();
    });
}

#[tokio::test(start_paused = true)]
async fn what_was_appended_is_there_and_what_was_removed_is_not() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
    assert!(rebuilt.packs.is_empty());
    let first = add(&mut log, [1, 2]).await;
    let second = add(&mut log, [3, 4]).await;
    remove(&mut log, &[2, 3]).await;
    let third = add(&mut log, [3]).await;
    drop_pack(&mut log, second).await;
    let there = expected([(first, &[1]), (third, &[3])]);
    assert_eq!(seen(&bucket).await, there);
    let (_log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!((blocks(&rebuilt), rebuilt.dropped, rebuilt.adopted), (there, vec![second], 0));
}

#[tokio::test(start_paused = true)]
async fn a_compacted_log_says_the_same_and_its_old_objects_go_after_the_grace_time() {
    let inner = Arc::new(InMemory::new());
    let double = Double::over(&inner);
    let bucket = double.bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    let mut packs = Vec::new();
    for number in 0..40 {
        packs.push(add(&mut log, [2 * number, 2 * number + 1]).await);
        if number.is_multiple_of(4) {
            remove(&mut log, &[2 * number]).await;
        }
    }
    for pack in packs.iter().skip(20) {
        drop_pack(&mut log, *pack).await;
    }
    let there = seen(&bucket).await;
    assert_eq!(there.len(), 20);
    assert!(compact(&mut log).await > 3, "the base has several objects");
    assert_eq!(seen(&bucket).await, there);
    let manifests = async || bucket.list(&owner().manifests_prefix(), soon()).await.unwrap().len();
    let before = manifests().await;
    let early = log.collect(NOW + GRACE_MS - 1, GRACE, soon()).await.unwrap();
    assert_eq!((early, manifests().await), (Collected::default(), before));
    let collected = log.collect(NOW + GRACE_MS, GRACE, soon()).await.unwrap();
    assert_eq!((collected.packs.len(), collected.manifests), (20, 71));
    assert_eq!(manifests().await, before - 71);
    assert_eq!(seen(&bucket).await, there);
    // What is removed later still counts for packs in the base, and the base after it.
    remove(&mut log, &[1]).await;
    compact(&mut log).await;
    let (_log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!(blocks(&rebuilt)[&packs[0]], BTreeSet::new());
    assert_eq!(rebuilt.dropped, [], "their objects are gone");
}

#[tokio::test(start_paused = true)]
async fn removals_are_kept_as_long_as_a_pack_may_have_the_block() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    let named = add(&mut log, [1, 2]).await;
    let unnamed = pack(log.next_pack(), [2, 3]);
    remove(&mut log, &[2, 3, 4]).await;
    compact(&mut log).await;
    compact(&mut log).await;
    assert_eq!(log.removed.len(), 3, "the pack without a name may have any of them");
    assert!(upload(&bucket, &unnamed).await);
    assert_eq!(seen(&bucket).await, expected([(named, &[1]), (unnamed.id, &[])]));
    log.append(vec![ManifestRecord::Pack(unnamed.clone())], NOW, soon()).await.unwrap();
    compact(&mut log).await;
    compact(&mut log).await;
    assert_eq!(log.removed.len(), 2, "no pack has 4");
    assert_eq!(seen(&bucket).await, expected([(named, &[1]), (unnamed.id, &[])]));
    drop_pack(&mut log, named).await;
    drop_pack(&mut log, unnamed.id).await;
    compact(&mut log).await;
    assert!(log.removed.is_empty());
    assert!(seen(&bucket).await.is_empty(), "dropped packs that are still there stay dropped");
}

#[tokio::test(start_paused = true)]
async fn uploads_that_nobody_named_are_adopted_once_and_later_ones_are_swept() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    let named = add(&mut log, [1]).await;
    let orphan = pack(log.next_pack(), [2, 3]);
    let late = pack(log.next_pack(), [4]);
    remove(&mut log, &[3]).await;
    assert!(upload(&bucket, &orphan).await);
    let (mut log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!(blocks(&rebuilt), expected([(named, &[1]), (orphan.id, &[2])]));
    assert_eq!((rebuilt.adopted, rebuilt.reads.footers), (1, 1));
    // Still on its way when the next epoch began: removals of what is in it are not kept any more.
    assert!(upload(&bucket, &late).await);
    let next = rebuild(&bucket, &owner(), soon()).await.unwrap();
    assert_eq!((next.packs.len(), next.adopted, next.leftovers), (2, 0, vec![late.id]));
    let building = log.next_pack();
    assert!(upload(&bucket, &pack(building, [5])).await);
    assert_eq!(log.sweep(NOW, soon()).await.unwrap(), [late.id]);
    assert_eq!(log.sweep(NOW, soon()).await.unwrap(), []);
    let collected = log.collect(NOW + GRACE_MS, GRACE, soon()).await.unwrap();
    assert_eq!(collected.packs, [late.id]);
    let listed = bucket.list(&owner().cluster.packs_prefix(), soon()).await.unwrap();
    assert_eq!(listed.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn after_a_failure_records_are_written_in_order_and_once() {
    for how in [crate::object::rig_tests::Cut::Before, crate::object::rig_tests::Cut::After] {
        let inner = Arc::new(InMemory::new());
        let (mut log, _) = open(&Double::over(&inner).bucket(), "a", NOW).await.unwrap();
        let whole =
            std::mem::replace(&mut log.parts.bucket, Double::over(&inner).cut_at(1, how).bucket());
        let [first, second] = [log.next_pack(), log.next_pack()].map(|id| pack(id, [id.seq]));
        for footer in [&first, &second] {
            let record = vec![ManifestRecord::Pack(footer.clone())];
            assert!(log.append(record, NOW, soon()).await.is_err());
        }
        log.parts.bucket = Arc::clone(&whole);
        log.append(Vec::new(), NOW, soon()).await.unwrap();
        assert_eq!(seen(&whole).await, expected([(first.id, &[1]), (second.id, &[2])]));
        let objects = whole.list(&owner().manifests_prefix(), soon()).await.unwrap();
        assert_eq!(objects.len(), 3, "{how:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn large_removals_are_written_in_pieces() {
    let keys = (0..2 * KEYS_MAX as u64 + 1).map(key).collect::<Vec<_>>();
    let before = Seq { epoch: 1, seq: 1 };
    let pieces = divide(ManifestRecord::Removed { keys: keys.clone(), before });
    let again = pieces.iter().flat_map(|record| match record {
        ManifestRecord::Removed { keys, .. } => keys.clone(),
        other => panic!("{other:?}"),
    });
    assert_eq!(again.collect::<Vec<_>>(), keys);
    assert_eq!(pieces.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_damaged_log_is_a_miss_and_is_written_anew() {
    let inner = Arc::new(InMemory::new());
    let bucket = Double::over(&inner).bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    add(&mut log, [1]).await;
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    add(&mut log, [2]).await;
    let damaged = owner().manifest(Seq { epoch: 2, seq: 1 }).name(&owner().cluster);
    bucket.put(&damaged, vec!["no manifest".into()], soon()).await.unwrap();
    let (mut log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!((rebuilt.packs.len(), rebuilt.lost_until), (0, Some(2)));
    assert_eq!((rebuilt.adopted, rebuilt.leftovers.len()), (0, 0), "nothing is guessed");
    let kept = add(&mut log, [3]).await;
    assert!(log.needs_compaction());
    assert_eq!(log.sweep(NOW, soon()).await.unwrap(), []);
    compact(&mut log).await;
    assert!(!log.needs_compaction());
    let (mut log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!((blocks(&rebuilt), rebuilt.lost_until), (expected([(kept, &[3])]), None));
    assert_eq!(rebuilt.leftovers.len(), 2);
    log.collect(NOW + GRACE_MS, GRACE, soon()).await.unwrap();
    assert_eq!(bucket.list(&owner().cluster.packs_prefix(), soon()).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_log_of_a_newer_version_is_left_alone() {
    let inner = Arc::new(InMemory::new());
    let bucket = Double::over(&inner).bucket();
    let (log, _) = open(&bucket, "a", NOW).await.unwrap();
    let id = owner().manifest(Seq { epoch: 1, seq: 2 });
    let mut newer = Manifest { cluster: owner().cluster, id, records: Vec::new() }.encode();
    newer[8] += 1;
    let end = newer.len() - 8;
    let sum = crate::object::format::checksum(&newer[..end]).to_le_bytes();
    newer[end..].copy_from_slice(&sum);
    bucket.put(&id.name(&owner().cluster), vec![newer.into()], soon()).await.unwrap();
    drop(log);
    let before = bucket.list(&owner().manifests_prefix(), soon()).await.unwrap();
    let refused = open(&bucket, "a", NOW).await.unwrap_err();
    assert!(refused.to_string().contains("newer version"), "{refused}");
    assert_eq!(bucket.list(&owner().manifests_prefix(), soon()).await.unwrap(), before);
}
