//! Who gets an ordinal, and who is told that it is over.

use std::sync::Arc;

use object_store::memory::InMemory;
use tokio::sync::Semaphore;

use super::*;
use crate::object::rig_tests::{Double, LONG_MS, NOW, owner, soon};

async fn open(bucket: &Bucket, holder: &str, now: u64) -> Result<Ownership, OwnerError> {
    open_epoch(bucket, &owner(), Claim::own(holder), now, soon()).await
}

fn store() -> Arc<InMemory> {
    Arc::new(InMemory::new())
}

#[test]
fn calls_can_move_between_threads() {
    fn assert_send<T: Send>(_: &T) {}
    let bucket = Double::over(&store()).bucket();
    let (owner, now) = (owner(), std::future::pending::<Instant>());
    let call = async { open_epoch(&bucket, &owner, Claim::own("a"), NOW, now.await).await };
    assert_send(&call);
}

#[tokio::test(start_paused = true)]
async fn epochs_count_up_and_the_same_holder_may_come_back_at_once() {
    let bucket = Double::over(&store()).bucket();
    let first = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!((first.epoch, first.record.adopted_from), (1, None));
    assert!(still_owner(&bucket, &first, soon()).await.unwrap());
    let second = open(&bucket, "a", NOW).await.unwrap();
    assert_eq!((second.epoch, second.record.adopted_from), (2, None));
    assert!(!still_owner(&bucket, &first, soon()).await.unwrap());
    assert!(still_owner(&bucket, &second, soon()).await.unwrap());
    assert!(matches!(
        beat(&bucket, &first, NOW, soon()).await,
        Err(OwnerError::Fenced { ordinal: 3, epoch: 1 })
    ));
    beat(&bucket, &second, NOW, soon()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_second_holder_is_refused_by_name_until_the_first_was_silent_for_long() {
    let bucket = Double::over(&store()).bucket();
    let held = open(&bucket, "node-a", NOW).await.unwrap();
    for (now, age) in [(NOW, 0), (NOW + LONG_MS - 1, 599), (NOW - 5_000_000, 0)] {
        let refused = open(&bucket, "node-b", now).await.unwrap_err();
        let message = refused.to_string();
        assert!(message.contains("\"node-a\"") && message.contains("ordinal 3"), "{message}");
        assert!(message.contains("v1/prod/epochs/00003/alive"), "{message}");
        assert!(matches!(refused, OwnerError::Held { age: told, .. } if told.as_secs() == age));
    }
    beat(&bucket, &held, NOW + LONG_MS, soon()).await.unwrap();
    assert!(open(&bucket, "node-b", NOW + LONG_MS).await.is_err());
    let adopted = open(&bucket, "node-b", NOW + 2 * LONG_MS).await.unwrap();
    assert_eq!((adopted.epoch, adopted.record.adopted_from), (2, Some(1)));
    // The node that comes back is refused as long as the one that adopted is alive.
    let refused = open(&bucket, "node-a", NOW + 2 * LONG_MS).await.unwrap_err();
    assert!(refused.to_string().contains("\"node-b\""), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn the_sign_of_an_epoch_that_is_over_keeps_nobody_out() {
    let bucket = Double::over(&store()).bucket();
    let old = open(&bucket, "a", NOW).await.unwrap();
    open(&bucket, "b", NOW + LONG_MS).await.unwrap();
    // It passed its check before `b` came, and writes after.
    let EpochRecord { cluster, id, holder, .. } = old.record;
    let late = Alive { cluster, id, holder, seen_unix_ms: NOW + 2 * LONG_MS };
    bucket.put(&owner().alive_name(), vec![late.encode().into()], soon()).await.unwrap();
    let third = open(&bucket, "c", NOW + 2 * LONG_MS).await.unwrap();
    assert_eq!(third.record.adopted_from, Some(2));
}

#[tokio::test(start_paused = true)]
async fn of_two_that_race_one_gets_the_ordinal_and_the_other_is_told_by_whom() {
    for seed in 0..300 {
        let inner = store();
        let [a, b] = [2 * seed, 2 * seed + 1].map(|seed| Double::over(&inner).yielding(seed));
        let [a, b] = [a.bucket(), b.bucket()];
        let (a, b) = tokio::join!(open(&a, "node-a", NOW), open(&b, "node-b", NOW));
        let refused = match (a, b) {
            (Ok(_), Err(refused)) => refused.to_string().contains("\"node-a\""),
            (Err(refused), Ok(_)) => refused.to_string().contains("\"node-b\""),
            other => panic!("seed {seed}: {other:?}"),
        };
        assert!(refused, "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn old_epochs_are_forgotten_and_their_numbers_not_used_again() {
    let bucket = Double::over(&store()).bucket();
    let mut held = open(&bucket, "a", NOW).await.unwrap();
    for _ in 0..20 {
        held = open(&bucket, "a", NOW).await.unwrap();
        forget_old_epochs(&bucket, &held, soon()).await.unwrap();
    }
    assert_eq!(epochs(&bucket, &owner(), soon()).await.unwrap(), (13..=21).collect::<Vec<_>>());
    assert!(still_owner(&bucket, &held, soon()).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_slow_newcomer_that_makes_a_forgotten_epoch_again_does_not_take_it_for_the_newest() {
    let inner = store();
    let gate = Arc::new(Semaphore::new(0));
    let bucket = Double::over(&inner).bucket();
    let slow = Double::over(&inner).gated(&gate).bucket();
    open(&bucket, "a", NOW).await.unwrap();
    let meanwhile = async {
        // The slow one has seen epoch 1, and is about to create epoch 2.
        tokio::task::yield_now().await;
        for _ in 0..20 {
            let held = open(&bucket, "a", NOW).await.unwrap();
            forget_old_epochs(&bucket, &held, soon()).await.unwrap();
        }
        assert!(!epochs(&bucket, &owner(), soon()).await.unwrap().contains(&2));
        gate.add_permits(10);
    };
    let (slow, ()) = tokio::join!(open(&slow, "a", NOW), meanwhile);
    assert_eq!(slow.unwrap().epoch, 22);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_cannot_be_written_is_refused() {
    let bucket = Double::over(&store()).bucket();
    for bad in [String::new(), "x".repeat(254)] {
        let refused = open(&bucket, &bad, NOW).await.unwrap_err();
        assert!(refused.to_string().contains("1 to 253"), "{refused}");
    }
}
