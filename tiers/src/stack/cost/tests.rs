//! A device of a given bandwidth and first byte, and what is found out about it.

use tokio::time::advance;

use super::*;

const MIB: u64 = 1 << 20;

/// Loads blocks of 1 MiB of which so many are under way at a time: the device delivers one after
/// another, the first one after `setup`.
async fn load(costs: &Costs, blocks: u64, setup: f64, per_second: f64) {
    let each = Duration::from_secs_f64(MIB as f64 / per_second);
    let mut under_way: Vec<_> = (0..blocks.min(4)).map(|_| costs.begin(Tier::Nvme, MIB)).collect();
    advance(Duration::from_secs_f64(setup)).await;
    for left in (0..blocks).rev() {
        advance(each).await;
        under_way.remove(0).came();
        if left >= 4 {
            under_way.push(costs.begin(Tier::Nvme, MIB));
        }
    }
    assert!(under_way.is_empty());
}

fn pace(costs: &Costs) -> DevicePace {
    costs.pace(Tier::Nvme).unwrap()
}

/// The bandwidth that is known, in shares of what it is.
fn accuracy(costs: &Costs, per_second: f64) -> f64 {
    1.0 / pace(costs).byte_secs / per_second
}

#[tokio::test(start_paused = true)]
async fn bandwidth_and_first_bytes_are_told_apart_by_loads_of_two_sizes() {
    for (setup, per_second) in [(100e-6, 2e9), (5e-3, 1e9), (30e-3, 2e8)] {
        let costs = Costs::default();
        for _ in 0..40 {
            load(&costs, 64, setup, per_second).await;
            load(&costs, 1, setup, per_second).await;
            advance(Duration::from_millis(100)).await;
        }
        let (rate, found) = (accuracy(&costs, per_second), pace(&costs).setup_secs);
        assert!((0.95..1.05).contains(&rate), "{setup} {per_second}: bandwidth {rate}");
        assert!((found - setup).abs() < setup / 2.0 + 1e-4, "{setup} {per_second}: {found}");
    }
}

#[tokio::test(start_paused = true)]
async fn loads_of_one_size_are_foretold_whatever_part_the_first_bytes_have() {
    for (blocks, setup) in [(2, 100e-6), (24, 1e-3), (24, 30e-3), (200, 0.0)] {
        let costs = Costs::default();
        for _ in 0..30 {
            load(&costs, blocks, setup, 1e9).await;
        }
        let DevicePace { setup_secs, byte_secs, .. } = pace(&costs);
        let bytes = (blocks * MIB) as f64;
        let off = (setup_secs + bytes * byte_secs) / (setup + bytes / 1e9);
        assert!((0.9..1.1).contains(&off), "{blocks} blocks after {setup}: {off}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttled_device_is_known_within_half_a_second_and_degraded_and_ok_again() {
    let costs = Costs::default();
    for _ in 0..20 {
        load(&costs, 64, 100e-6, 2e9).await;
    }
    assert_eq!(pace(&costs).state, DeviceState::Ok);
    let begin = Instant::now();
    while accuracy(&costs, 1e8) > 1.25 {
        load(&costs, 8, 100e-6, 1e8).await;
        assert!(begin.elapsed() < Duration::from_millis(500), "{}", accuracy(&costs, 1e8));
    }
    load(&costs, 8, 100e-6, 1e8).await;
    assert_eq!(pace(&costs).state, DeviceState::Degraded);
    for _ in 0..20 {
        load(&costs, 64, 100e-6, 2e9).await;
    }
    assert!((0.8..1.25).contains(&accuracy(&costs, 2e9)));
    assert_eq!(pace(&costs).state, DeviceState::Ok);
}

#[tokio::test(start_paused = true)]
async fn what_is_slow_for_minutes_is_usual() {
    let costs = Costs::default();
    load(&costs, 2000, 0.0, 2e9).await;
    load(&costs, 2000, 0.0, 2e8).await;
    assert_eq!(pace(&costs).state, DeviceState::Degraded);
    load(&costs, 100_000, 0.0, 2e8).await;
    assert_eq!(pace(&costs).state, DeviceState::Ok);
}

#[tokio::test(start_paused = true)]
async fn loads_at_a_time_count_together_and_idle_times_do_not() {
    let costs = Costs::default();
    for _ in 0..20 {
        let loads: Vec<_> = (0..10).map(|_| costs.begin(Tier::Nvme, 10 * MIB)).collect();
        assert_eq!((pace(&costs).loads, pace(&costs).loading_bytes), (10, 100 * MIB));
        advance(Duration::from_millis(100)).await;
        loads.into_iter().for_each(Loading::came);
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!((pace(&costs).loads, pace(&costs).loading_bytes), (0, 0));
    let off = accuracy(&costs, (1000 * MIB) as f64);
    assert!((0.95..1.05).contains(&off), "{off}");
    assert_eq!(pace(&costs).age.unwrap().as_secs(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_fails_or_is_silent_is_down_and_worth_a_try_later() {
    let costs = Costs::default();
    load(&costs, 10, 0.0, 1e9).await;
    (0..2).for_each(|_| costs.begin(Tier::Nvme, MIB).failed());
    assert_eq!(pace(&costs).state, DeviceState::Ok);
    costs.begin(Tier::Nvme, MIB).failed();
    assert_eq!(pace(&costs).state, DeviceState::Down);
    assert_eq!(costs.pace(Tier::Object).unwrap().state, DeviceState::Ok);
    advance(DOWN_INTERVAL).await;
    assert_eq!(pace(&costs).state, DeviceState::Degraded);
    load(&costs, 1, 0.0, 1e9).await;
    assert_eq!(pace(&costs).state, DeviceState::Ok);

    let hangs = costs.begin(Tier::Nvme, MIB);
    let states = [(500, DeviceState::Ok), (1000, DeviceState::Degraded), (4000, DeviceState::Down)];
    for (millis, state) in states {
        advance(Duration::from_millis(millis)).await;
        assert_eq!(pace(&costs).state, state, "after {millis} more");
    }
    assert!(pace(&costs).silence > Duration::from_secs(5));
    drop(hangs);
    assert_eq!((pace(&costs).state, pace(&costs).silence), (DeviceState::Ok, Duration::ZERO));
    let impatient = costs.begin(Tier::Nvme, MIB);
    advance(Duration::from_millis(1)).await;
    impatient.timed_out();
    assert_eq!(pace(&costs).state, DeviceState::Ok);
}

#[tokio::test(start_paused = true)]
async fn nothing_known_is_assumed_and_colder_costs_more() {
    let costs = Costs::default();
    assert!(costs.pace(Tier::Dram).is_none());
    let (nvme, object) = (pace(&costs), costs.pace(Tier::Object).unwrap());
    assert!(nvme.setup_secs < object.setup_secs && nvme.byte_secs < object.byte_secs);
    assert_eq!((nvme.age, nvme.is_settled), (None, false));
    costs.begin(Tier::Dram, MIB).came();
    costs.begin(Tier::Nvme, u64::MAX).came();
    assert_eq!(pace(&costs), nvme, "in no time: says nothing");
}
