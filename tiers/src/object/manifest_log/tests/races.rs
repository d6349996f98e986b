//! Two processes that both think that the ordinal is theirs.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_holder_that_was_pushed_aside_writes_and_deletes_nothing_more() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut old, _) = open(&bucket, "a", NOW).await.unwrap();
    let kept = add(&mut old, [1, 2]).await;
    let gone = add(&mut old, [3]).await;
    drop_pack(&mut old, gone).await;
    let held = open_epoch(&bucket, &owner(), Claim::own("b"), NOW + LONG_MS, soon()).await.unwrap();
    // Between the epoch and its beginning the old log is open: what is written to it counts.
    remove(&mut old, &[2]).await;
    let (mut new, found) = open_held(&bucket, held, NOW + LONG_MS).await.unwrap();
    assert_eq!(blocks(&found), expected([(kept, &[1])]));
    let names = async || bucket.list("v1/prod", soon()).await.unwrap();
    let before = names().await;
    let fenced = |error: &OwnerError| matches!(error, OwnerError::Fenced { epoch: 1, .. });
    assert!(fenced(&old.collect(NOW + 2 * GRACE_MS, GRACE, soon()).await.unwrap_err()));
    assert!(fenced(&old.append(Vec::new(), NOW, soon()).await.unwrap_err()));
    assert!(fenced(&old.compact(NOW, soon()).await.unwrap_err()));
    assert!(fenced(&old.sweep(NOW, soon()).await.unwrap_err()));
    assert!(fenced(&beat(&bucket, old.held(), NOW, soon()).await.unwrap_err()));
    assert_eq!(names().await, before);
    let collected = new.collect(NOW + 2 * GRACE_MS, GRACE, soon()).await.unwrap();
    assert_eq!(collected.packs, [gone]);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_slept_is_fenced_by_its_own_log_however_much_was_compacted_since() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut old, _) = open(&bucket, "a", NOW).await.unwrap();
    let first = add(&mut old, [1]).await;
    let (mut new, _) = open(&bucket, "b", NOW + LONG_MS).await.unwrap();
    compact(&mut new).await;
    new.collect(NOW + LONG_MS + GRACE_MS, GRACE, soon()).await.unwrap();
    let (mut newest, _) = open(&bucket, "b", NOW + LONG_MS).await.unwrap();
    compact(&mut newest).await;
    newest.collect(NOW + LONG_MS + GRACE_MS, GRACE, soon()).await.unwrap();
    let removal = old.removal(vec![key(1)]);
    assert!(matches!(
        old.append(vec![removal], NOW, soon()).await,
        Err(OwnerError::Fenced { epoch: 1, .. })
    ));
    assert_eq!(seen(&bucket).await, expected([(first, &[1])]));
}

#[tokio::test(start_paused = true)]
async fn an_epoch_that_never_began_is_closed_too() {
    let bucket = Double::over(&Arc::new(InMemory::new())).bucket();
    let (mut log, _) = open(&bucket, "a", NOW).await.unwrap();
    let first = add(&mut log, [1]).await;
    let slow = open_epoch(&bucket, &owner(), Claim::own("b"), NOW + LONG_MS, soon()).await.unwrap();
    let (_new, found) = open(&bucket, "c", NOW + 2 * LONG_MS).await.unwrap();
    assert_eq!(blocks(&found), expected([(first, &[1])]));
    let late = open_held(&bucket, slow.clone(), NOW + 2 * LONG_MS).await;
    assert!(matches!(late, Err(OwnerError::Fenced { epoch: 2, .. })), "{late:?}");
    // Also if what closed its log is gone, after very many epochs.
    let closing = owner().manifest(Seq { epoch: 2, seq: 1 }).name(&owner().cluster);
    bucket.delete(&closing, soon()).await.unwrap();
    let late = open_held(&bucket, slow, NOW + 2 * LONG_MS).await;
    assert!(matches!(late, Err(OwnerError::Fenced { epoch: 2, .. })), "{late:?}");
    let (_next, found) = open(&bucket, "c", NOW + 2 * LONG_MS).await.unwrap();
    assert_eq!((blocks(&found), found.lost_until), (expected([(first, &[1])]), None));
}

/// Adds packs, removes blocks and compacts until it is fenced; says what it was told.
async fn until_fenced(log: &mut ManifestLog) -> (BTreeMap<PackId, BTreeSet<u64>>, Vec<PackId>) {
    let mut told = BTreeMap::new();
    let mut tried = Vec::new();
    for number in 0.. {
        let id = log.next_pack();
        tried.push(id);
        let footer = pack(id, [2 * number, 2 * number + 1]);
        if log.append(vec![ManifestRecord::Pack(footer)], NOW, soon()).await.is_err() {
            break;
        }
        told.insert(id, BTreeSet::from([2 * number, 2 * number + 1]));
        let removal = log.removal(vec![key(2 * number)]);
        if log.append(vec![removal], NOW, soon()).await.is_err() {
            // Whether it took effect is not known, and does not matter here.
            told.insert(id, BTreeSet::from([2 * number + 1]));
            break;
        }
        told.insert(id, BTreeSet::from([2 * number + 1]));
        if number % 3 == 2 && log.compact(NOW, soon()).await.is_err() {
            break;
        }
        let early = NOW + number * GRACE_MS / 4;
        if log.collect(early, GRACE, soon()).await.is_err() {
            break;
        }
    }
    (told, tried)
}

#[tokio::test(start_paused = true)]
async fn whatever_a_holder_was_told_before_it_was_fenced_is_known_to_the_next() {
    let mut told_some = 0;
    for seed in 0..200 {
        let inner = Arc::new(InMemory::new());
        let bucket = Double::over(&inner).bucket();
        let (mut old, _) = open(&bucket, "a", NOW).await.unwrap();
        for number in 0..seed % 7 {
            add(&mut old, [1000 + number]).await;
        }
        let before = seen(&bucket).await;
        old.parts.bucket = Double::over(&inner).yielding(2 * seed).bucket();
        let newcomer = Double::over(&inner).yielding(2 * seed + 1).bucket();
        let ((told, tried), opened) =
            tokio::join!(until_fenced(&mut old), open(&newcomer, "b", NOW + LONG_MS));
        let (_new, found) = opened.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(old.fenced, "seed {seed}");
        let found = blocks(&found);
        for (id, keys) in before.iter().chain(&told) {
            let there = found.get(id).unwrap_or_else(|| panic!("seed {seed}: {id} is lost"));
            assert!(keys.is_subset(there), "seed {seed}: {id} has {there:?}, not {keys:?}");
        }
        for id in found.keys().filter(|id| !before.contains_key(id)) {
            assert!(tried.contains(id), "seed {seed}: nobody made {id}");
        }
        assert_eq!(seen(&bucket).await, found, "seed {seed}");
        told_some += told.len();
    }
    assert!(told_some > 200, "the race is one: {told_some}");
}
