//! A process that ends between any two calls to the bucket, and what the next one finds.

use super::*;
use crate::object::rig_tests::Cut;

/// What a process was told, and what it asked for.
#[derive(Debug, Default, Clone)]
struct Ledger {
    /// Packs that the log says it named, and the numbers of their blocks.
    named: BTreeMap<PackId, BTreeSet<u64>>,
    /// Packs that were uploaded.
    uploaded: BTreeSet<PackId>,
    asked_to_drop: BTreeSet<PackId>,
    dropped: BTreeSet<PackId>,
    /// Blocks, and the packs that they are removed from.
    asked_to_remove: BTreeSet<(PackId, u64)>,
    removed: BTreeSet<(PackId, u64)>,
    contents: BTreeMap<PackId, BTreeSet<u64>>,
}

impl Ledger {
    async fn add(&mut self, log: &mut ManifestLog, keys: &[u64]) -> Option<PackId> {
        let footer = pack(log.next_pack(), keys.iter().copied());
        let (id, keys) = (footer.id, keys.iter().copied().collect::<BTreeSet<_>>());
        self.contents.insert(id, keys.clone());
        if !upload(&log.parts.bucket, &footer).await {
            return None;
        }
        self.uploaded.insert(id);
        log.append(vec![ManifestRecord::Pack(footer)], NOW, soon()).await.ok()?;
        self.named.insert(id, keys);
        Some(id)
    }

    async fn remove(&mut self, log: &mut ManifestLog, keys: &[u64]) -> Option<()> {
        let all = self.contents.iter().flat_map(|(id, has)| has.iter().map(|key| (*id, *key)));
        let hit: Vec<_> = all.filter(|(_, key)| keys.contains(key)).collect();
        self.asked_to_remove.extend(&hit);
        let removal = log.removal(keys.iter().map(|it| key(*it)).collect());
        log.append(vec![removal], NOW, soon()).await.ok()?;
        self.removed.extend(hit);
        Some(())
    }

    async fn drop_pack(&mut self, log: &mut ManifestLog, id: PackId) -> Option<()> {
        self.asked_to_drop.insert(id);
        log.append(vec![ManifestRecord::Dropped(id)], NOW, soon()).await.ok()?;
        self.dropped.insert(id);
        Some(())
    }

    /// Checks what was found after a kill.
    fn check(&self, found: &BTreeMap<PackId, BTreeSet<u64>>) {
        for (id, keys) in &self.named {
            if self.asked_to_drop.contains(id) {
                continue;
            }
            let Some(there) = found.get(id) else { panic!("{id} is lost") };
            for key in keys.iter().filter(|key| !self.asked_to_remove.contains(&(*id, **key))) {
                assert!(there.contains(key), "block {key} of {id} is lost");
            }
        }
        for id in self.uploaded.difference(&self.asked_to_drop) {
            assert!(found.contains_key(id), "the upload {id} is not found");
        }
        for (id, keys) in found {
            assert!(!self.dropped.contains(id), "{id} came back");
            for key in keys {
                assert!(!self.removed.contains(&(*id, *key)), "block {key} of {id} came back");
            }
        }
    }
}

/// Everything that a log does, in one life of a process. `None` when it is killed.
async fn life(bucket: &Arc<Bucket>, ledger: &mut Ledger, now: u64) -> Option<()> {
    let holder = format!("node-{now}");
    let (mut log, found) = open(bucket, &holder, now).await.ok()?;
    ledger.check(&blocks(&found));
    let second = youth(&mut log, ledger).await?;
    // A pack that has its number before the compaction, and is uploaded and never named after it.
    let building = log.next_pack();
    ledger.contents.insert(building, BTreeSet::from([20, 21]));
    ledger.remove(&mut log, &[20]).await?;
    busy_compaction(&mut log, ledger, now).await?;
    ledger.drop_pack(&mut log, second).await?;
    old_age(&mut log, ledger, building, now).await
}

/// Adds, removes and drops; says which pack is dropped later.
async fn youth(log: &mut ManifestLog, ledger: &mut Ledger) -> Option<PackId> {
    let first = ledger.add(log, &[1, 2, 3]).await?;
    let second = ledger.add(log, &[2, 4]).await?;
    ledger.add(log, &[5, 6, 7, 8]).await?;
    ledger.remove(log, &[2, 5]).await?;
    ledger.drop_pack(log, first).await?;
    Some(second)
}

/// Compacts, and appends between the steps.
async fn busy_compaction(log: &mut ManifestLog, ledger: &mut Ledger, now: u64) -> Option<()> {
    let mut step = 100;
    while log.compact(now, soon()).await.ok()? {
        ledger.add(log, &[step, step + 1]).await?;
        ledger.remove(log, &[step, 6]).await?;
        step += 10;
    }
    Some(())
}

/// Deletes, looks for what was left, goes on, and leaves an upload without a name.
async fn old_age(
    log: &mut ManifestLog,
    ledger: &mut Ledger,
    building: PackId,
    now: u64,
) -> Option<()> {
    log.collect(now + GRACE_MS, GRACE, soon()).await.ok()?;
    ledger.add(log, &[2, 30]).await?;
    log.sweep(now, soon()).await.ok()?;
    if upload(&log.parts.bucket, &pack(building, [20, 21])).await {
        ledger.uploaded.insert(building);
    }
    beat(&log.parts.bucket, log.held(), now, soon()).await.ok()
}

/// The next process after a kill, twice, and after a compaction.
async fn afterwards(inner: &Arc<InMemory>, ledger: &Ledger, now: u64) {
    let bucket = Double::over(inner).bucket();
    let looked = seen(&bucket).await;
    ledger.check(&looked);
    let (mut log, found) = open(&bucket, "after", now).await.unwrap();
    assert_eq!(blocks(&found), looked);
    for id in looked.keys() {
        bucket.get(&id.name(&owner().cluster), 0..1, soon()).await.unwrap();
    }
    assert_eq!(seen(&bucket).await, looked);
    after_compaction(&bucket, &mut log, &looked, now).await;
}

async fn after_compaction(
    bucket: &Arc<Bucket>,
    log: &mut ManifestLog,
    looked: &BTreeMap<PackId, BTreeSet<u64>>,
    now: u64,
) {
    compact(log).await;
    assert_eq!(seen(bucket).await, *looked);
    log.sweep(now, soon()).await.unwrap();
    log.collect(now + GRACE_MS, GRACE, soon()).await.unwrap();
    let (_log, found) = open(bucket, "after", now).await.unwrap();
    assert_eq!(blocks(&found), *looked);
    assert_eq!((found.adopted, found.leftovers.len(), found.lost_until), (0, 0, None));
}

/// Lives through `lives`, the last of which is cut off at every call, in both ways.
async fn killed_at_every_call(lives: usize) {
    let inner = Arc::new(InMemory::new());
    let mut ledger = Ledger::default();
    let mut now = NOW;
    for _ in 1..lives {
        let bucket = Double::over(&inner).bucket();
        life(&bucket, &mut ledger, now).await.unwrap();
        now += 2 * LONG_MS;
    }
    let mut kills = 0;
    for how in [Cut::Before, Cut::After] {
        for call in 1.. {
            let inner = Arc::new(inner.fork());
            let double = Double::over(&inner).cut_at(call, how);
            let mut ledger = ledger.clone();
            let lived = life(&double.bucket(), &mut ledger, now).await;
            assert_eq!(lived.is_none(), double.was_cut());
            afterwards(&inner, &ledger, now + 2 * LONG_MS).await;
            if lived.is_some() {
                break;
            }
            kills += 1;
        }
    }
    assert!(kills > 60, "{kills} kills");
}

#[tokio::test(start_paused = true)]
async fn a_kill_at_any_call_of_a_first_life_loses_nothing_and_brings_nothing_back() {
    killed_at_every_call(1).await;
}

#[tokio::test(start_paused = true)]
async fn a_kill_at_any_call_of_an_adoption_loses_nothing_and_brings_nothing_back() {
    killed_at_every_call(2).await;
}

#[tokio::test(start_paused = true)]
async fn kill_after_kill_loses_nothing_and_brings_nothing_back() {
    for seed in 0..60 {
        let inner = Arc::new(InMemory::new());
        let mut ledger = Ledger::default();
        let mut draws = crate::testing::Draws::new(seed);
        let mut now = NOW;
        for _ in 0..6 {
            let call = usize::try_from(1 + draws.below(90)).unwrap();
            let how = if draws.chance(500) { Cut::Before } else { Cut::After };
            let bucket = Double::over(&inner).cut_at(call, how).bucket();
            life(&bucket, &mut ledger, now).await;
            now += 2 * LONG_MS;
        }
        afterwards(&inner, &ledger, now).await;
    }
}
