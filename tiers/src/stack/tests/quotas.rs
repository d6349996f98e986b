//! What tenants may have, and what others leave them.

use super::*;
use crate::{account::Quota, error::ErrorKind, store::Above, testing::MemoryStore};

const SLOT: u64 = 4096;
/// Blocks of one slot in the memory of these tests.
const ROOM: u64 = 512;

struct Two {
    fixture: Fixture,
    nvme: Arc<MemoryStore>,
    quiet: Arc<Namespace>,
    noisy: Arc<Namespace>,
}

impl Two {
    fn new() -> Self {
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let cold = Arc::clone(&nvme) as Arc<dyn BlockStore>;
        let fixture = Fixture::new(ROOM * SLOT, vec![cold]).unwrap();
        let open = |tenant| fixture.namespace_for(tenant, ("m", &[4096]), 16).unwrap();
        let (quiet, noisy) = (open("quiet"), open("noisy"));
        Self { fixture, nvme, quiet, noisy }
    }

    fn with(quiet: Quota, noisy: Quota) -> Self {
        let two = Self::new();
        two.fixture.stack.set_quotas(&[("quiet", quiet), ("noisy", noisy)]).unwrap();
        two
    }

    /// Puts blocks one by one, so that no context holds any back; how many were stored.
    fn put(&self, namespace: &Arc<Namespace>, numbers: std::ops::Range<u64>) -> usize {
        numbers.map(|number| self.fixture.put(namespace, &[number]).unwrap()).sum()
    }

    /// How many of the blocks are in dram.
    fn found(&self, namespace: &Arc<Namespace>, numbers: std::ops::Range<u64>) -> usize {
        let is_here = |number: &u64| {
            self.fixture.stack.tiers_of(namespace, hash_of(*number)).contains(&Tier::Dram)
        };
        numbers.filter(is_here).count()
    }

    fn has(&self, namespace: &Namespace, tier: usize) -> u64 {
        namespace.account().holding().bytes[tier]
    }
}

fn floor(blocks: u64) -> Quota {
    Quota { dram_floor: blocks * SLOT, ..Quota::default() }
}

fn most(blocks: u64) -> Quota {
    Quota { dram_max: blocks * SLOT, ..Quota::default() }
}

#[tokio::test]
async fn a_noisy_neighbour_cannot_push_another_below_its_floor() {
    let two = Two::with(floor(200), Quota::default());
    assert_eq!(two.put(&two.quiet, 0..300), 300);
    // Ten times the memory: all of it is served.
    assert_eq!(two.put(&two.noisy, 0..10 * ROOM) as u64, 10 * ROOM);
    assert_eq!(two.has(&two.quiet, 0), 200 * SLOT, "what it had beyond its floor has gone");
    assert_eq!(two.found(&two.quiet, 100..300), 200, "and the coldest of it went");
    assert_eq!(two.found(&two.noisy, 10 * ROOM - 312..10 * ROOM), 312);
    audit(&two.fixture);
    // Without the floor the next ones take it.
    two.fixture.stack.set_quotas(&[]).unwrap();
    assert_eq!(two.put(&two.noisy, 20 * ROOM..21 * ROOM) as u64, ROOM);
    assert_eq!(two.has(&two.quiet, 0), 0);
    audit(&two.fixture);
}

#[tokio::test]
async fn a_tenant_gets_its_floor_back_from_whoever_has_more() {
    let two = Two::with(floor(100), Quota::default());
    assert_eq!(two.put(&two.noisy, 0..2 * ROOM) as u64, 2 * ROOM);
    assert_eq!(two.put(&two.quiet, 0..400), 400);
    // Up to its floor it takes from the other, behind it from the coldest of all.
    assert!(two.has(&two.quiet, 0) >= 100 * SLOT);
    assert_eq!(two.put(&two.noisy, 5 * ROOM..6 * ROOM) as u64, ROOM);
    assert_eq!(two.has(&two.quiet, 0), 100 * SLOT);
    assert_eq!(two.found(&two.quiet, 300..400), 100);
    audit(&two.fixture);
}

#[tokio::test]
async fn a_tenant_at_its_most_makes_way_for_itself() {
    let two = Two::with(Quota::default(), most(100));
    assert_eq!(two.put(&two.quiet, 0..400), 400);
    assert_eq!(two.put(&two.noisy, 0..1000), 1000);
    assert_eq!(two.has(&two.noisy, 0), 100 * SLOT);
    assert_eq!((two.found(&two.noisy, 900..1000), two.found(&two.quiet, 0..400)), (100, 400));
    // What is in use cannot make way: then the put is refused, with a delay, and counted.
    let held = lease(&two.fixture, &two.noisy, &(900..1000).collect::<Vec<_>>());
    assert_eq!(held.pins.len(), 100);
    let mut batch = two.fixture.offer(&two.noisy, &[5000], None).unwrap();
    let outcome = two.fixture.write(&mut batch, &two.noisy, (0, 5000), 0).unwrap();
    assert_eq!((outcome, batch.retry_after().is_some()), (Some(PutOutcome::Refused), true));
    drop(batch);
    assert_eq!(two.noisy.account().holding().refused, [1, 0, 0]);
    assert_eq!(two.put(&two.quiet, 1000..1010), 10, "nobody else is refused");
    two.fixture.stack.unpin(held.pins);
    assert_eq!(two.put(&two.noisy, 5000..5001), 1);
    audit(&two.fixture);
}

#[tokio::test]
async fn half_a_block_counts_and_makes_way_too() {
    let two = Two::with(Quota::default(), most(10));
    let halves = two.fixture.namespace_for("noisy", ("halves", &[2048, 2048]), 16).unwrap();
    for number in 0..50 {
        put_part(&two.fixture, &halves, &[number], 0, None);
    }
    assert_eq!(two.has(&two.noisy, 0), 10 * SLOT);
    assert_eq!(two.put(&two.noisy, 0..20), 20);
    assert_eq!(two.has(&two.noisy, 0), 10 * SLOT);
    audit(&two.fixture);
}

#[tokio::test]
async fn memory_of_other_sizes_is_left_alone_as_well() {
    let two = Two::with(floor(200), Quota::default());
    assert_eq!(two.put(&two.quiet, 0..300), 300);
    let large = two.fixture.namespace_for("noisy", ("large", &[1 << 16]), 16).unwrap();
    for number in 0..200 {
        two.fixture.put(&large, &[number]).unwrap();
    }
    assert!(two.has(&two.quiet, 0) >= 200 * SLOT, "{:?}", two.quiet.account());
    assert!(two.found(&large, 180..200) > 0, "the other one is served from what is left");
    audit(&two.fixture);
}

#[tokio::test]
async fn a_full_index_takes_nothing_from_a_floor() {
    let fixture = Fixture::with_index(ROOM * SLOT, 128, Vec::new()).unwrap();
    let open = |tenant| fixture.namespace_for(tenant, ("m", &[4096]), 16).unwrap();
    let (quiet, noisy) = (open("quiet"), open("noisy"));
    fixture.stack.set_quotas(&[("quiet", floor(50))]).unwrap();
    for number in 0..50 {
        fixture.put(&quiet, &[number]).unwrap();
    }
    for number in 0..1000 {
        assert_eq!(fixture.put(&noisy, &[number]).unwrap(), 1);
    }
    assert_eq!(prefix(&fixture, &quiet, &(0..50).collect::<Vec<_>>()), 50);
}

#[tokio::test]
async fn blocks_that_were_there_before_a_quota_keep_their_order() {
    let two = Two::new();
    assert_eq!(two.put(&two.quiet, 0..256), 256);
    assert_eq!(two.put(&two.noisy, 0..256), 256);
    let packed = pack(&[0, 1, 2]);
    assert_eq!(two.fixture.stack.touch(&two.quiet, Hashes::new(&packed, 32).unwrap()), 3);
    two.fixture.stack.set_quotas(&[("quiet", floor(100))]).unwrap();
    audit(&two.fixture);
    assert_eq!(two.put(&two.noisy, 1000..3000), 2000);
    assert_eq!((two.found(&two.quiet, 0..3), two.found(&two.quiet, 159..256)), (3, 97));
    assert_eq!(two.has(&two.quiet, 0), 100 * SLOT);
    audit(&two.fixture);
}

#[tokio::test]
async fn loads_from_colder_tiers_keep_to_the_most_as_well() {
    let two = Two::with(Quota::default(), most(50));
    assert_eq!(two.put(&two.noisy, 0..50), 50);
    for number in 0..50 {
        two.fixture.stack.demote(&two.noisy, hash_of(number), Tier::Nvme).await.unwrap();
    }
    assert_eq!(two.put(&two.noisy, 100..150), 50);
    assert_eq!(two.found(&two.noisy, 0..50), 0);
    for number in 0..50 {
        assert!(has(&two.fixture, &two.noisy, number).await);
        assert!(two.has(&two.noisy, 0) <= 50 * SLOT);
    }
    assert_eq!(two.found(&two.noisy, 0..50), 50);
    audit(&two.fixture);
}

#[tokio::test]
async fn beyond_its_most_nothing_is_copied_to_nvme_and_others_are() {
    let two = Two::with(Quota::default(), Quota { nvme_max: 10 * SLOT, ..Quota::default() });
    assert_eq!((two.put(&two.quiet, 0..100), two.put(&two.noisy, 0..100)), (100, 100));
    let until = tokio::time::sleep(Duration::from_millis(1));
    two.fixture.stack.clean(until).await;
    let flushing = two.fixture.stack.flush(soon());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let cleaning = two.fixture.stack.clean(async move { drop(stopped.await) });
    tokio::join!(cleaning, async {
        assert_eq!(flushing.await, 0);
        drop(stop);
    });
    assert_eq!((two.has(&two.quiet, 1), two.has(&two.noisy, 1)), (100 * SLOT, 10 * SLOT));
    assert_eq!(two.noisy.account().holding().refused[1], 90);
    // Whoever waits for it is told.
    let error = two.fixture.stack.demote(&two.noisy, hash_of(50), Tier::Nvme).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    // With what is removed there is room again.
    let packed = pack(&(0..100).collect::<Vec<_>>());
    two.fixture.stack.remove(&two.noisy, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    assert_eq!(two.has(&two.noisy, 1), 0);
    assert_eq!(two.put(&two.noisy, 50..51), 1);
    assert!(two.fixture.stack.demote(&two.noisy, hash_of(50), Tier::Nvme).await.unwrap());
    audit(&two.fixture);
}

#[tokio::test]
async fn what_reclaiming_should_keep_looks_hot_and_the_rest_does_not() {
    let quota = Quota { nvme_floor: 60 * SLOT, ..Quota::default() };
    let two = Two::with(quota, Quota::default());
    assert_eq!((two.put(&two.quiet, 0..100), two.put(&two.noisy, 0..100)), (100, 100));
    for number in 0..100 {
        for namespace in [&two.quiet, &two.noisy] {
            two.fixture.stack.demote(namespace, hash_of(number), Tier::Nvme).await.unwrap();
        }
    }
    let shared = &two.fixture.stack.shared;
    let copies = two.nvme.copies();
    let now = shared.clock();
    let kept = |namespace: &Namespace| {
        let both = copies.iter().zip(shared.ages(Tier::Nvme, &copies));
        let own = both.filter(|(copy, _)| copy.namespace == *namespace.id());
        own.filter(|(_, age)| *age == Some(now)).count()
    };
    assert_eq!((kept(&two.quiet), kept(&two.noisy)), (60, 0));
    let mut hot = 0;
    shared.survey(Tier::Nvme, &mut |_, _, age| hot += u32::from(age == now));
    assert_eq!(hot, 0, "it has more than is kept for it");
    two.nvme.reclaim(200);
    assert_eq!((two.has(&two.quiet, 1), two.has(&two.noisy, 1)), (0, 0));
    audit(&two.fixture);
}

#[tokio::test]
async fn beyond_its_most_nothing_is_packed_for_the_object_tier() {
    let quota = Quota { object_max: 10 * SLOT, ..Quota::default() };
    let two = Two::with(Quota::default(), quota);
    assert_eq!((two.put(&two.quiet, 0..20), two.put(&two.noisy, 0..20)), (20, 20));
    for number in 0..20 {
        for namespace in [&two.quiet, &two.noisy] {
            two.fixture.stack.demote(namespace, hash_of(number), Tier::Nvme).await.unwrap();
        }
    }
    let copies = two.nvme.copies();
    let asked = two.fixture.stack.shared.uncopied(Tier::Nvme, Tier::Object, &copies);
    let of = |namespace: &Namespace| {
        let both = copies.iter().zip(&asked);
        both.filter(|(copy, asked)| copy.namespace == *namespace.id() && asked.is_some()).count()
    };
    assert_eq!((of(&two.quiet), of(&two.noisy)), (20, 10));
    assert_eq!(two.noisy.account().holding().refused[2], 10);
}

#[tokio::test]
async fn quotas_that_cannot_be_kept_are_refused_by_field_and_range() {
    let two = Two::new();
    let set = |quotas: &[(&str, Quota)]| two.fixture.stack.set_quotas(quotas);
    set(&[("quiet", floor(100))]).unwrap();
    let over = Quota { dram_floor: 2, dram_max: 1, ..Quota::default() };
    let cases = [
        (vec![("a", over)], "tenant a: dram_floor: 2 bytes given, 0 to 1 (dram_max) allowed"),
        (vec![("a", floor(300)), ("b", floor(300))], "2457600 bytes given to all tenants together"),
    ];
    for (quotas, told) in cases {
        let error = set(&quotas).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(told), "{error}");
        assert_eq!(two.quiet.account().quota(), floor(100), "nothing has changed");
    }
    let alone = Fixture::new(MIB, Vec::new()).unwrap();
    let on_nothing = Quota { nvme_floor: 1, ..Quota::default() };
    let error = alone.stack.set_quotas(&[("a", on_nothing)]).unwrap_err().to_string();
    assert!(error.contains("nvme_floor: 1 bytes given") && error.contains("0 to 0"), "{error}");
    let many: Vec<String> = (0..crate::limits::LANES_MAX).map(|n| format!("t{n}")).collect();
    let many: Vec<(&str, Quota)> = many.iter().map(|name| (&**name, floor(0))).collect();
    let error = set(&many).unwrap_err().to_string();
    assert!(error.contains("at most 256 allowed"), "{error}");
}

/// Two tenants with floors, and threads of both that put at the same time.
#[test]
fn floors_hold_while_many_make_room_at_once() {
    let two = Two::with(floor(150), floor(150));
    let third = two.fixture.namespace_for("third", ("m", &[4096]), 16).unwrap();
    two.put(&two.quiet, 0..150);
    two.put(&two.noisy, 0..150);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (two, third) = (&two, &third);
            scope.spawn(move || {
                two.put(third, thread * 10_000..thread * 10_000 + 3000);
                assert!(two.has(&two.quiet, 0) >= 150 * SLOT);
                assert!(two.has(&two.noisy, 0) >= 150 * SLOT);
            });
        }
    });
    assert_eq!((two.found(&two.quiet, 0..150), two.found(&two.noisy, 0..150)), (150, 150));
    assert!(two.has(&third, 0) > 0);
    audit(&two.fixture);
}
