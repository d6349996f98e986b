//! Descriptions: they come back with their blocks, however they were told, and leave with them.

use std::{collections::BTreeSet, time::Duration};

use tokio::task::yield_now;

use super::rig::{Life, MANY, Rig};
use crate::{
    description::Description,
    nvme::index::{Change, IndexKey},
    testing::{
        hash_of,
        index_suite::{Contents, description_of},
    },
    tier::Tier,
};

const BLOCK_TOKENS: u64 = 16;

fn description(number: u64) -> Description {
    let first = u32::try_from(number * BLOCK_TOKENS).unwrap();
    Description {
        parent: number.checked_sub(1).map(hash_of),
        position: u32::try_from(number).unwrap(),
        tokens: (first..).take(16).collect(),
        lora_name: "adapter".to_owned(),
    }
}

/// Describes block `number`; how many of it there are.
fn describe(life: &Life, number: u64) -> u32 {
    life.fixture.describe(&life.namespace, number, &description(number)).unwrap()
}

fn described(life: &Life, number: u64) -> Option<Description> {
    life.fixture.stack.description(&life.namespace, hash_of(number))
}

/// Which of `0..600` are on the tier and described.
fn described_on_nvme(life: &Life) -> Vec<u64> {
    let is_there = |number: &u64| {
        let tiers = life.fixture.stack.tiers_of(&life.namespace, hash_of(*number));
        tiers.contains(&Tier::Nvme) && described(life, *number).is_some()
    };
    (0..600).filter(is_there).collect()
}

/// Waits until so many were written behind their blocks.
async fn kept(life: &Life, count: u64) {
    let all = async {
        while life.metrics().described_blocks.get() < count {
            yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), all).await.unwrap();
}

/// The index has a description of exactly these blocks, each of which it has.
fn assert_index(rig: &Rig, numbers: impl IntoIterator<Item = u64>) {
    let contents = Contents::of(rig.memory.as_ref()).unwrap();
    let blocks: BTreeSet<_> = contents.blocks.iter().map(|(key, _)| *key).collect();
    let all: BTreeSet<_> = contents.descriptions.iter().map(|(key, _)| key.hash).collect();
    assert!(contents.descriptions.iter().all(|(key, _)| blocks.contains(key)), "of no block");
    assert_eq!(all, numbers.into_iter().map(hash_of).collect());
}

#[tokio::test]
async fn what_was_described_before_and_after_its_copy_comes_back() {
    let rig = Rig::new();
    let life = rig.start().await;
    for number in 0..5 {
        life.fixture.put(&life.namespace, &[number]).unwrap();
        assert_eq!(describe(&life, number), 1);
    }
    life.put(0..11).await;
    assert_index(&rig, 0..5);
    (5..10).for_each(|number| assert_eq!(describe(&life, number), 1));
    kept(&life, 5).await;
    // What is known is not written again.
    (0..10).for_each(|number| assert_eq!(describe(&life, number), 1));
    assert_eq!(describe(&life, 99), 0, "it is not there");
    drop(life);

    let life = rig.start().await;
    assert_eq!(life.store.recovered().await.unwrap().described, 10);
    for number in 0..10 {
        assert_eq!(described(&life, number), Some(description(number)), "{number}");
    }
    assert_eq!(described(&life, 10), None, "nobody has described it");
    assert_eq!(life.hits(0..11).await.len(), 11);
    assert_eq!(life.metrics().undescribed_blocks.get(), 0);
    assert_index(&rig, 0..10);
}

#[tokio::test]
async fn a_block_that_is_described_while_it_is_copied_is_described_after_a_restart() {
    let rig = Rig::new();
    let life = rig.start().await;
    for number in 0..200 {
        life.fixture.put(&life.namespace, &[number]).unwrap();
        let copied = life.fixture.stack.demote(&life.namespace, hash_of(number), Tier::Nvme);
        let told = async {
            for _ in 0..number % 23 {
                yield_now().await;
            }
            describe(&life, number)
        };
        let (copied, told) = tokio::join!(copied, told);
        assert!(copied.unwrap() && told == 1);
    }
    use crate::store::BlockStore;
    life.store.close().await.unwrap();
    drop(life);
    assert_index(&rig, 0..200);
    let life = rig.start().await;
    assert!((0..200).all(|number| described(&life, number) == Some(description(number))));
}

#[tokio::test]
async fn what_leaves_takes_its_description_along() {
    let mut rig = Rig::new();
    rig.config.capacity_bytes = 2 << 20;
    let life = rig.start().await;
    // A few times of what fits.
    for number in 0..600 {
        life.put([number]).await;
        describe(&life, number);
    }
    kept(&life, 600).await;
    life.remove(590..595).await;
    let on_nvme = described_on_nvme(&life);
    assert!((50..130).contains(&on_nvme.len()), "{} of 2 MiB", on_nvme.len());
    assert!(!on_nvme.contains(&0) && !on_nvme.contains(&592) && on_nvme.contains(&599));
    assert_index(&rig, on_nvme);
    // The same block again is another one.
    life.put([592]).await;
    assert_eq!(described(&life, 592), None);
    drop(life);
    let life = rig.start().await;
    assert_eq!(described(&life, 592), None);
    assert_eq!(described(&life, 599), Some(description(599)));
    assert_index(&rig, described_on_nvme(&life));
}

#[tokio::test]
async fn a_description_of_no_block_is_dropped_by_the_start() {
    let rig = Rig::new();
    let life = rig.start().await;
    life.put([1]).await;
    let key = |number| IndexKey { namespace: *life.namespace.id(), hash: hash_of(number) };
    let stray = [7, 1].map(|number| Change::Describe(key(number), description_of(number, 3)));
    rig.index.apply(&stray).unwrap();
    drop(life);
    let life = rig.start().await;
    assert_index(&rig, [1]);
    assert_eq!(described(&life, 1), Some(description_of(1, 3)));
    assert_eq!(described(&life, 7), None);
}

#[tokio::test]
async fn a_lost_index_takes_the_descriptions_and_no_block() {
    let rig = Rig::new();
    let life = rig.start().await;
    life.put(0..MANY).await;
    (0..MANY).for_each(|number| assert_eq!(describe(&life, number), 1));
    kept(&life, MANY).await;
    drop(life);
    rig.lose_index();
    let life = rig.start().await;
    assert_eq!(life.lost().await, Vec::<u64>::new());
    assert!((0..MANY).all(|number| described(&life, number).is_none()));
    // From now on they are kept again.
    assert_eq!(describe(&life, 3), 1);
    kept(&life, 1).await;
    drop(life);
    assert_eq!(described(&rig.start().await, 3), Some(description(3)));
}

#[tokio::test]
async fn tokens_are_not_told_where_the_namespace_keeps_none() {
    let rig = Rig::new();
    let life = rig.start().await;
    life.put([0]).await;
    describe(&life, 0);
    kept(&life, 1).await;
    let spec = life.namespace.spec().clone();
    drop(life);
    let life = rig.start_opened(spec, false).await;
    let without = Description { tokens: Vec::new(), ..description(0) };
    assert_eq!(described(&life, 0), Some(without));
}
