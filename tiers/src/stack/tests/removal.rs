//! Removals beside copies that are being made, other removals, and tiers that fail.

use super::{
    cold::{Tiers, tiers},
    *,
};
use crate::testing::Fault;

async fn remove(tiers: &Tiers, number: u64) -> crate::error::Result<u32> {
    let packed = pack(&[number]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await
}

#[tokio::test(start_paused = true)]
async fn a_removal_is_answered_when_the_copy_that_was_being_made_is_off_its_tier() {
    let tiers = tiers();
    tiers.fixture.put(&tiers.namespace, &[1]).unwrap();
    tiers.nvme.plan(&[Fault::Slow(Duration::from_secs(1))]);
    let demoting = tiers.fixture.stack.demote(&tiers.namespace, hash_of(1), Tier::Nvme);
    let removing = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let started = Instant::now();
        let removed = tokio::join!(remove(&tiers, 1), async {
            assert_eq!(tiers.tier_of(1), None, "unreadable at once");
        });
        // Else a kill between the copy and its removal would bring the block back.
        assert!(started.elapsed() >= Duration::from_millis(500));
        (removed.0.unwrap(), tiers.nvme.usage().blocks)
    };
    let (demoted, removed) = tokio::join!(demoting, removing);
    assert_eq!((demoted.unwrap(), removed), (false, (1, 0)));
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_a_tier_does_not_note_is_an_error_and_the_block_is_unreadable() {
    let tiers = Tiers::with_cold_block().await;
    tiers.nvme.plan(&[Fault::Error]);
    let error = remove(&tiers, 1).await.unwrap_err();
    assert_eq!(error.kind(), crate::error::ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("1 blocks") && error.to_string().contains("as planned"),
        "{error}"
    );
    assert!(matches!(tiers.get(1).await, Fetch::Miss));
    assert_eq!(tiers.object.usage().blocks, 0, "the other tier was told");
    // Of the copy that was being made, too, whoever removes it.
    tiers.fixture.put(&tiers.namespace, &[3]).unwrap();
    tiers.nvme.plan(&[Fault::Slow(Duration::from_secs(1)), Fault::Error]);
    let demoting = tiers.fixture.stack.demote(&tiers.namespace, hash_of(3), Tier::Nvme);
    let removing = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        tokio::join!(remove(&tiers, 3), remove(&tiers, 3))
    };
    let (demoted, (first, second)) = tokio::join!(demoting, removing);
    assert!(demoted.is_err() && first.is_err() && second.is_err());
    assert!(remove(&tiers, 100_000).await.is_ok());
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn a_block_that_is_put_again_while_its_removal_is_under_way_stays_on_its_tier() {
    let tiers = tiers();
    tiers.nvme.forget_by_hash();
    tiers.fixture.put(&tiers.namespace, &[1, 2]).unwrap();
    tiers.demote(1, Tier::Nvme).await;
    tiers.demote(2, Tier::Nvme).await;
    tiers.nvme.plan(&[Fault::Slow(Duration::from_secs(1))]);
    let again = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        tiers.fixture.put(&tiers.namespace, &[1]).unwrap();
        tiers.demote(1, Tier::Nvme).await;
    };
    let (removed, ()) = tokio::join!(remove(&tiers, 1), again);
    assert_eq!(removed.unwrap(), 1);
    assert_eq!(tiers.nvme.usage().blocks, 2);
    tiers.press();
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    // A damaged copy is forgotten, and not what was put instead of it meanwhile.
    tiers.press();
    tiers.nvme.plan(&[Fault::SlowFlip(Duration::from_secs(1))]);
    let again = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        remove(&tiers, 2).await.unwrap();
        tiers.fixture.put(&tiers.namespace, &[2]).unwrap();
        tiers.demote(2, Tier::Nvme).await;
    };
    let (damaged, ()) = tokio::join!(tiers.get(2), again);
    assert!(matches!(damaged, Fetch::Hit(_)), "the later copy: {damaged:?}");
    assert_eq!(tiers.fixture.stack.usage().corrupt, 1);
    drop(damaged);
    assert_eq!(tiers.nvme.usage().blocks, 2);
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
}
