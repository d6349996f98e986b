//! What a start reads, and how long it takes.

use std::ops::Range;

use super::*;
use crate::object::{format::checksum, names::ClusterName, rebuild::Reads};

/// Opens the next epoch and its log, with a local copy.
async fn open_at(double: &Double, dir: &std::path::Path) -> (ManifestLog, Rebuilt) {
    let bucket = double.bucket();
    let local = Some(Local::new(dir.to_owned()));
    adopt(bucket, (&owner(), Claim::own("a")), local, NOW, soon()).await.unwrap()
}

fn of<'a>(
    room: &'a str,
    reads: &'a [(String, Range<u64>)],
) -> impl Iterator<Item = &'a (String, Range<u64>)> {
    reads.iter().filter(move |(name, _)| name.split('/').nth(2) == Some(room))
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_reads_footers_only_of_packs_without_a_name_and_no_block() {
    let double = Double::over(&Arc::new(InMemory::new()));
    let bucket = double.bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    for number in 0..50 {
        add(&mut log, [number, number + 1000]).await;
    }
    compact(&mut log).await;
    let mut orphans = BTreeMap::new();
    for number in 0..100 {
        let footer = pack(log.next_pack(), [number + 100, number + 200, number + 300]);
        assert!(upload(&bucket, &footer).await);
        orphans.insert(footer.id.name(&owner().cluster), footer);
    }
    double.reads();
    let rebuilt = rebuild(&bucket, &owner(), soon()).await.unwrap();
    assert_eq!((rebuilt.packs.len(), rebuilt.adopted), (150, 100));
    let reads = double.reads();
    let packs: Vec<_> = of("packs", &reads).collect();
    assert_eq!(packs.len(), 200, "a trailer and a footer of each");
    for (name, range) in packs {
        let blocks_end = orphans[name].data_bytes();
        assert!(blocks_end > 0 && range.start >= blocks_end, "{name}: {range:?}");
    }
    assert_eq!(of("manifests", &reads).count(), rebuilt.reads.manifests);
}

#[tokio::test(start_paused = true)]
async fn packs_of_others_and_what_is_no_pack_are_not_looked_at() {
    let double = Double::over(&Arc::new(InMemory::new()));
    let bucket = double.bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    let id = log.next_pack();
    let other = PackId { ordinal: 4, ..id };
    let elsewhere = ClusterName::new("other").unwrap();
    for name in [other.name(&owner().cluster), id.name(&elsewhere)] {
        bucket.put(&name, vec!["x".into()], soon()).await.unwrap();
    }
    // Of this ordinal, and no packs: too short, no trailer, another's.
    let names = [(); 3].map(|()| log.next_pack().name(&owner().cluster));
    bucket.put(&names[0], vec!["x".into()], soon()).await.unwrap();
    bucket.put(&names[1], vec![vec![7; 5000].into()], soon()).await.unwrap();
    assert!(upload(&bucket, &pack(id, [1])).await);
    let bytes = bucket.get_whole(&id.name(&owner().cluster), 1 << 20, soon()).await.unwrap();
    bucket.put(&names[2], vec![bytes], soon()).await.unwrap();
    let rebuilt = rebuild(&bucket, &owner(), soon()).await.unwrap();
    assert_eq!(blocks(&rebuilt), expected([(id, &[1])]));
    assert_eq!(rebuilt.leftovers.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn packs_of_a_newer_version_are_left_alone() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    let id = log.next_pack();
    assert!(upload(&bucket, &pack(id, [1])).await);
    let name = id.name(&owner().cluster);
    let mut newer = bucket.get_whole(&name, 1 << 20, soon()).await.unwrap().to_vec();
    let trailer_at = newer.len() - 64;
    newer[trailer_at + 8] += 1;
    let sum = checksum(&newer[trailer_at..trailer_at + 56]).to_le_bytes();
    newer[trailer_at + 56..].copy_from_slice(&sum);
    bucket.put(&name, vec![newer.into()], soon()).await.unwrap();
    for _ in 0..2 {
        let (mut log, rebuilt) = open(&bucket, "a", NOW).await.unwrap();
        assert_eq!((rebuilt.packs.len(), rebuilt.leftovers), (0, vec![]));
        assert_eq!(log.sweep(NOW, soon()).await.unwrap(), []);
        assert_eq!(log.dropped.len(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_with_a_copy_reads_only_what_is_newer() {
    let dir = tempfile::tempdir().unwrap();
    let double = Double::over(&Arc::new(InMemory::new()));
    let (mut log, _) = open_at(&double, dir.path()).await;
    for number in 0..20 {
        add(&mut log, [number]).await;
    }
    double.reads();
    let (log, rebuilt) = open_at(&double, dir.path()).await;
    assert_eq!(rebuilt.packs.len(), 20);
    assert_eq!(rebuilt.reads, Reads { manifests: 0, cached: 21, footers: 0 });
    assert_eq!(of("manifests", &double.reads()).count(), 0);
    drop(log);
    // Somebody else adopted the ordinal, and gave it back.
    let (mut other, _) = open(&double.bucket(), "b", NOW + LONG_MS).await.unwrap();
    add(&mut other, [100]).await;
    let now = NOW + 2 * LONG_MS;
    let local = Some(Local::new(dir.path().to_owned()));
    let back = adopt(double.bucket(), (&owner(), Claim::own("a")), local, now, soon()).await;
    let (_log, rebuilt) = back.unwrap();
    assert_eq!(rebuilt.packs.len(), 21);
    // New are what closed the second epoch, and the first object and the pack of the third.
    assert_eq!(rebuilt.reads, Reads { manifests: 3, cached: 23, footers: 0 });
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_is_damaged_or_of_another_bucket_is_read_from_the_bucket() {
    let dir = tempfile::tempdir().unwrap();
    let double = Double::over(&Arc::new(InMemory::new()));
    let (mut log, _) = open_at(&double, dir.path()).await;
    let mut packs = Vec::new();
    for number in 0..5 {
        packs.push((add(&mut log, [number]).await, BTreeSet::from([number])));
    }
    let there: BTreeMap<_, _> = packs.into_iter().collect();
    std::fs::write(dir.path().join("0000000001-0000000003"), "damaged").unwrap();
    std::fs::remove_file(dir.path().join("0000000001-0000000004")).unwrap();
    let (_log, rebuilt) = open_at(&double, dir.path()).await;
    assert_eq!((blocks(&rebuilt), rebuilt.reads.manifests), (there.clone(), 2));
    let (_log, rebuilt) = open_at(&double, dir.path()).await;
    assert_eq!((blocks(&rebuilt), rebuilt.reads.manifests), (there, 0), "the copy is whole again");
    // The same names in another bucket, with other contents.
    let emptied = Double::over(&Arc::new(InMemory::new()));
    let (mut log, _) = open(&emptied.bucket(), "a", NOW + 1).await.unwrap();
    let other = add(&mut log, [77]).await;
    let (_log, rebuilt) = open_at(&emptied, dir.path()).await;
    assert_eq!(blocks(&rebuilt), expected([(other, &[77])]));
    assert_eq!(rebuilt.reads.cached, 0);
}

#[tokio::test(start_paused = true)]
async fn the_copy_holds_no_more_than_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let double = Double::over(&Arc::new(InMemory::new()));
    let (mut log, _) = open_at(&double, dir.path()).await;
    for number in 0..30 {
        add(&mut log, [number]).await;
    }
    compact(&mut log).await;
    log.collect(NOW + GRACE_MS, GRACE, soon()).await.unwrap();
    let files = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(files, 1 + log.window.len());
    let (_log, rebuilt) = open_at(&double, dir.path()).await;
    assert_eq!((rebuilt.packs.len(), rebuilt.reads.manifests), (30, 0));
}

/// 4,000 packs of 250 blocks: 128 GiB of blocks of 128 KiB. From footers it is the log that is lost.
#[tokio::test(start_paused = true)]
async fn a_large_ordinal_is_rebuilt_from_its_log_and_from_footers() {
    let double = Double::over(&Arc::new(InMemory::new()));
    let bucket = double.bucket();
    let (mut log, _) =
        adopt(Arc::clone(&bucket), (&owner(), Claim::own("a")), None, NOW, soon()).await.unwrap();
    for number in 0..4000 {
        let footer = pack(log.next_pack(), number * 250..(number + 1) * 250);
        assert!(upload(&bucket, &footer).await);
    }
    let clock = || std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let began = clock();
    let rebuilt = rebuild(&bucket, &owner(), soon()).await.unwrap();
    let from_footers = clock() - began;
    assert_eq!((rebuilt.packs.len(), rebuilt.reads.footers), (4000, 4000));
    let began = clock();
    let (mut log, adopted) =
        adopt(Arc::clone(&bucket), (&owner(), Claim::own("a")), None, NOW, soon()).await.unwrap();
    let adopting = clock() - began;
    assert_eq!(adopted.adopted, 4000);
    let began = clock();
    compact(&mut log).await;
    let compacting = clock() - began;
    let began = clock();
    let rebuilt = rebuild(&bucket, &owner(), soon()).await.unwrap();
    let from_log = clock() - began;
    assert_eq!((rebuilt.packs.len(), rebuilt.reads.footers), (4000, 0));
    assert_eq!(blocks(&rebuilt), blocks(&adopted));
    eprintln!(
        "4000 packs of 250 blocks: from footers {from_footers:?}, adopted {adopting:?}, compacted \
         {compacting:?}, from {} manifests {from_log:?}",
        rebuilt.reads.manifests
    );
}
