//! What is told of costs, and what changes it.

use kvstrata_tiers::{
    store::BlockStore,
    testing::{Fixture, MemoryStore},
};
use prometheus_client::registry::Registry;
use tokio::time::advance;

use super::*;
use crate::{
    limits::{RESERVATION_TTL_DEFAULT, RESERVATION_TTL_MAX},
    metrics::TierLabel,
};

mod live;

const MIB: u64 = 1 << 20;
const NEAR: Locality = Locality::SameNode;

/// Costs of a node with dram and nvme.
fn costs() -> (Costs, CostMetrics) {
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme)) as Arc<dyn BlockStore>;
    let stack = Fixture::new(MIB, vec![nvme]).unwrap().stack;
    let metrics = CostMetrics::register(&mut Registry::default());
    let place = Place { node: "n1".into(), zone: "z1".into(), shared_memory: true };
    (Costs::new(stack, place, metrics.clone()), metrics)
}

fn cost_of(costs: &Costs, tier: Tier, locality: Locality) -> TierCost {
    let mut all = costs.snapshot().into_iter();
    all.find(|cost| (cost.tier, cost.locality) == (tier, locality)).unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

#[tokio::test(start_paused = true)]
async fn every_tier_there_is_has_a_cost_for_every_distance_and_farther_is_not_cheaper() {
    let (costs, _) = costs();
    let all = costs.snapshot();
    let expected: Vec<_> = [Tier::Dram, Tier::Nvme]
        .into_iter()
        .flat_map(|tier| Locality::ALL.map(|locality| (tier, locality)))
        .collect();
    assert_eq!(all.iter().map(|c| (c.tier, c.locality)).collect::<Vec<_>>(), expected);
    for cost in &all {
        assert_eq!((cost.node.as_str(), cost.state), ("n1", TierState::Ok));
        assert_eq!((cost.sample_age, cost.queue, cost.queued_bytes), (None, Duration::ZERO, 0));
    }
    for tier in [Tier::Dram, Tier::Nvme] {
        let times = Locality::ALL.map(|locality| costs.estimate(tier, locality, 100 * MIB));
        assert!(times.is_sorted(), "{times:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_score_the_snapshot_and_lookups_say_the_same() {
    let (costs, _) = costs();
    let _load = costs.begin("t", NEAR, [0, 30 * MIB, 0]);
    costs.reserve("t", &[(Tier::Nvme, 10 * MIB)], Duration::ZERO).unwrap();
    for (tier, locality) in [(Tier::Dram, Locality::Remote), (Tier::Nvme, NEAR)] {
        let score = costs.load_cost(tier, locality, 2 * MIB);
        let shown = cost_of(&costs, tier, locality);
        let estimate = costs.estimate(tier, locality, 100 * MIB).as_secs_f64();
        assert!(close(score.ms(50) / 1e3, estimate), "{score:?} {estimate}");
        let shown_secs =
            (shown.setup + shown.queue).as_secs_f64() + (100 * MIB) as f64 / shown.bandwidth;
        assert!(close(shown_secs, estimate), "{shown:?} {estimate}");
    }
    assert_eq!(cost_of(&costs, Tier::Nvme, NEAR).queued_bytes, 40 * MIB);
}

#[tokio::test(start_paused = true)]
async fn what_is_reserved_waits_at_once_until_its_load_begins_or_it_ends() {
    let (costs, _) = costs();
    let queued = |costs: &Costs| cost_of(costs, Tier::Nvme, NEAR).queued_bytes / MIB;
    let alone = costs.estimate(Tier::Nvme, NEAR, MIB);
    let loads = [(Tier::Nvme, 60 * MIB), (Tier::Nvme, 4 * MIB), (Tier::Object, 9 * MIB)];
    let (first, ttl) = costs.reserve("a", &loads, Duration::ZERO).unwrap();
    assert_eq!((queued(&costs), ttl), (64, RESERVATION_TTL_DEFAULT));
    assert!(costs.estimate(Tier::Nvme, NEAR, MIB) > alone + Duration::from_millis(100));
    assert_eq!(costs.reserved(), (1, [0, 64 * MIB, 0]), "there is no object tier");
    costs.reserve("b", &[(Tier::Nvme, MIB)], RESERVATION_TTL_MAX).unwrap();
    let load = costs.begin("a", NEAR, [0, 60 * MIB, 0]);
    assert_eq!(queued(&costs), 65, "the load does not count twice");
    drop(load);
    assert_eq!(queued(&costs), 5);
    costs.release("b", first);
    assert_eq!(queued(&costs), 5, "not its own");
    costs.release("a", first);
    assert_eq!(queued(&costs), 1);
    advance(RESERVATION_TTL_MAX).await;
    assert_eq!((queued(&costs), costs.reserved().0), (0, 0));
    assert_eq!(costs.estimate(Tier::Nvme, NEAR, MIB), alone);
}

#[tokio::test(start_paused = true)]
async fn reports_calibrate_and_are_counted_and_end_what_was_reserved() {
    let (costs, metrics) = costs();
    let alone = costs.estimate(Tier::Nvme, NEAR, 100 * MIB);
    let (id, _) = costs.reserve("a", &[(Tier::Nvme, MIB)], Duration::ZERO).unwrap();
    let report = |predicted: u64, actual: u64, reservation| Report {
        tier: Tier::Nvme,
        locality: NEAR,
        bytes: 100 * MIB,
        predicted: Duration::from_millis(predicted),
        actual: Duration::from_millis(actual),
        reservation,
    };
    assert!(!costs.report("b", &report(0, 10, Some(id))), "says nothing");
    assert!(!costs.report("b", &report(10, 0, None)));
    assert!(!costs.report("b", &Report { tier: Tier::Object, ..report(10, 10, None) }));
    assert_eq!(costs.reserved().0, 1, "it is not its own");
    assert!(costs.report("a", &report(10, 10, Some(id))));
    assert_eq!((costs.reserved().0, costs.estimate(Tier::Nvme, NEAR, 100 * MIB)), (0, alone));
    assert!(costs.report("a", &Report { bytes: 5, ..report(10, 100, None) }));
    assert_eq!(costs.estimate(Tier::Nvme, NEAR, 100 * MIB), alone, "too small");
    // A router that reports what it was told and what it took is told what it takes.
    for _ in 0..40 {
        let told = costs.estimate(Tier::Nvme, NEAR, 100 * MIB);
        let predicted = u64::try_from(told.as_millis()).unwrap();
        assert!(costs.report("a", &report(predicted, 300, None)));
    }
    let told = costs.estimate(Tier::Nvme, NEAR, 100 * MIB).as_millis();
    assert!((280..320).contains(&told), "{told}");
    assert!(costs.estimate(Tier::Nvme, Locality::SharedMemory, 100 * MIB) <= alone);
    assert_eq!(metrics.count(TierLabel::Nvme, Judge::Report), 42);
}

#[tokio::test(start_paused = true)]
async fn an_engine_is_as_far_as_it_says_and_near_ones_go_the_way_of_the_last_load() {
    let (costs, _) = costs();
    let far = [("n2", "z1"), ("n2", "z2"), ("", ""), ("n2", "")];
    let localities = far.map(|(node, zone)| costs.locality(node, zone));
    let remote = Locality::Remote;
    assert_eq!(localities, [Locality::SameZone, remote, remote, remote]);
    assert_eq!(costs.locality("n1", ""), Locality::SharedMemory, "it is offered");
    for (via, seen) in [
        (Via::UnixSocket, Locality::SameNode),
        (Via::Network, Locality::SameNode),
        (Via::SharedMemory, Locality::SharedMemory),
        (Via::Network, Locality::SharedMemory),
    ] {
        costs.note_via(via);
        assert_eq!(costs.locality("n1", "z1"), seen, "{via:?}");
    }
    assert_eq!(costs.locality_of(Via::Network, "n1", ""), Locality::SameNode);
    assert_eq!(costs.locality_of(Via::Network, "n2", "z1"), Locality::SameZone);
    assert_eq!(costs.locality_of(Via::UnixSocket, "", ""), Locality::SameNode);
    assert_eq!(costs.locality_of(Via::SharedMemory, "", ""), Locality::SharedMemory);
}

#[tokio::test(start_paused = true)]
async fn loads_that_take_longer_than_foretold_are_foretold_to_and_a_slow_path_is_one_for_all_tiers()
{
    let (costs, metrics) = costs();
    let bytes = 64 * MIB;
    let foretold = costs.estimate(Tier::Nvme, NEAR, bytes);
    // Nothing was measured of the device: what is wrong is not the bias.
    let mut load = costs.begin("t", NEAR, [0, bytes, 0]);
    load.came(Tier::Nvme, bytes);
    load.took(Tier::Nvme, bytes, foretold * 2);
    assert_eq!(costs.estimate(Tier::Nvme, NEAR, bytes), foretold);
    assert_eq!(metrics.count(TierLabel::Nvme, Judge::Node), 1);
    let path = costs.begin("t", Locality::SameZone, [bytes, 0, 0]);
    path.crossed(bytes, Duration::from_secs(1));
    let shown = cost_of(&costs, Tier::Dram, Locality::SameZone);
    assert!(close(shown.bandwidth, bytes as f64) && shown.sample_age.is_some(), "{shown:?}");
    let over = |locality| cost_of(&costs, Tier::Nvme, locality).bandwidth;
    assert!(close(over(Locality::SameZone), bytes as f64));
    assert!(over(Locality::Remote) <= bytes as f64 * 1.000_001, "not faster than what is nearer");
    assert!(over(NEAR) > bytes as f64 * 2.0);
    let shared = costs.begin("t", Locality::SharedMemory, [MIB, 0, 0]);
    shared.crossed(MIB, Duration::from_nanos(1));
    assert_eq!(cost_of(&costs, Tier::Dram, Locality::SharedMemory).sample_age, None);
}

#[tokio::test(start_paused = true)]
async fn changes_are_told_at_most_ten_times_a_second_and_once_a_second_anyway() {
    let (costs, _) = costs();
    let mut changes = costs.changes();
    let begin = Instant::now();
    changes.next().await;
    assert_eq!(begin.elapsed(), COSTS_SILENCE, "nothing has changed");
    let mut told = 0;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        costs.reserve("t", &[(Tier::Dram, 1)], Duration::ZERO).unwrap();
        if timeout(Duration::from_millis(1), changes.next()).await.is_ok() {
            told += 1;
        }
    }
    assert!((18..=21).contains(&told), "{told}");
    costs.reserve("t", &[(Tier::Dram, 1)], Duration::ZERO).unwrap();
    advance(Duration::from_secs(1)).await;
    let begin = Instant::now();
    changes.next().await;
    assert_eq!(begin.elapsed(), Duration::ZERO, "it has changed meanwhile");
}
