//! Sizes and moments at the edge.

use std::time::Duration;

use super::rig::{LEN, MANY, Rig, SEGMENT_BYTES};
use crate::{
    block::Hashes,
    store::{BlockStore, Wanted},
    testing::{hash_of, pack},
};

#[tokio::test(start_paused = true)]
async fn more_tombstones_than_a_small_segment_holds() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    let namespace = *life.namespace.id();
    let location = rig.index.get(&rig.records().await[1].1.key).unwrap().unwrap().location;
    let wanted = |number| Wanted { namespace, hash: hash_of(number), location };
    let blocks: Vec<_> = (100_000..110_000).map(wanted).collect();
    let removed = tokio::time::timeout(Duration::from_secs(60), life.store.remove(&blocks)).await;
    removed.unwrap().unwrap();
    // The place was that of a block, which is unreadable now.
    assert_eq!(life.lost().await.len(), 1);
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn tombstones_are_not_written_again_and_again_and_come_to_an_end() {
    let mut rig = Rig::new();
    rig.config.capacity_bytes = 16 * SEGMENT_BYTES;
    let life = rig.start().await;
    life.put(0..MANY).await;
    // The oldest segment keeps a live block; many tombstones are younger.
    for round in 0..6_u64 {
        let numbers: Vec<u64> = (0..2000).map(|n| 100_000 + round * 2000 + n).collect();
        let packed = pack(&numbers);
        assert_eq!(Hashes::new(&packed, 32).unwrap().len(), 2000);
        let location = crate::map::Location(std::num::NonZeroU64::MAX);
        let namespace = *life.namespace.id();
        let blocks = numbers.iter().map(|n| Wanted { namespace, hash: hash_of(*n), location });
        life.store.remove(&blocks.collect::<Vec<_>>()).await.unwrap();
    }
    drop(life);
    let before = rig.verify().await;
    let life = rig.start().await;
    for number in 200..260 {
        life.put([number]).await;
    }
    let reclaimed = life.metrics().reclaimed_segments.get();
    assert!(reclaimed < 30, "{reclaimed} reclaims for 60 blocks");
    assert!(life.hits(200..260).await.len() == 60);
    // Enough new blocks for everything to be written over.
    for number in 1000..1400 {
        life.put([number]).await;
    }
    drop(life);
    let after = rig.verify().await;
    let life = rig.start().await;
    assert_eq!(after.problems, []);
    assert!(
        after.tombstones < before.tombstones / 4,
        "{} of {}",
        after.tombstones,
        before.tombstones
    );
    assert!(life.hits(1300..1400).await.len() > 80);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_parts_and_one_byte() {
    let few = [vec![4096; 16], vec![20_000; 2], vec![1], vec![4095, 1, 4097]];
    for parts in [vec![1; 1024], vec![7; 1000]].into_iter().chain(few) {
        let mut rig = Rig::new();
        rig.parts = parts.clone();
        rig.fill().await;
        let report = rig.verify().await;
        assert_eq!((report.problems, report.live_blocks), (Vec::new(), MANY));
        for lose in [false, true] {
            if lose {
                rig.lose_index();
            }
            assert_eq!(rig.start().await.lost().await, Vec::<u64>::new(), "{} parts", parts.len());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_up_to_the_room_of_a_segment_and_not_beyond() {
    // 256 KiB hold at most 224 KiB - 16 pages, with the page of the header.
    let room = 224 * 1024 - 16 * 4096 - 4096;
    for (len, fits) in [(room, true), (room + 1, false)] {
        let mut rig = Rig::new();
        rig.parts = vec![len];
        let life = rig.start().await;
        for number in 0..3 {
            assert_eq!(life.try_put(number).await, fits, "{len}");
        }
        drop(life);
        let life = rig.start().await;
        assert_eq!(life.hits(0..3).await.len(), if fits { 3 } else { 0 });
    }
}

#[tokio::test(start_paused = true)]
async fn segments_that_became_smaller_reclaim_what_does_not_fit_any_more() {
    let mut rig = Rig::new();
    rig.config.segment_bytes = 4 << 20;
    rig.config.capacity_bytes = 32 << 20;
    rig.parts = vec![1 << 20];
    let life = rig.start().await;
    life.put(0..12).await;
    drop(life);
    rig.config.segment_bytes = SEGMENT_BYTES;
    rig.config.capacity_bytes = 4 * SEGMENT_BYTES;
    let life = rig.start().await;
    assert_eq!(life.hits(0..12).await.len(), 12);
    // Nothing of them fits; small ones do.
    assert!(!life.try_put(100).await);
    let small = life.fixture.namespace("small", &[LEN]).unwrap();
    for number in 200..230 {
        life.fixture.put(&small, &[number]).unwrap();
        let put = life.fixture.stack.demote(&small, hash_of(number), crate::tier::Tier::Nvme);
        let put = tokio::time::timeout(Duration::from_secs(60), put).await.unwrap();
        assert!(put.unwrap(), "block {number}");
    }
    assert!(life.store.metrics().reclaimed_segments.get() > 2);
}

#[tokio::test(start_paused = true)]
async fn four_segments_are_enough_to_go_on_for_ever() {
    let mut rig = Rig::new();
    rig.config.capacity_bytes = 4 * SEGMENT_BYTES;
    for life in 0..6_u64 {
        let tier = rig.start().await;
        for number in 0..60 {
            tier.put([life * 100 + number]).await;
        }
        let last = life * 100 + 40..life * 100 + 60;
        assert!(tier.hits(last).await.len() >= 18);
        assert!(tier.store.usage().blocks >= 20);
    }
    assert_eq!(rig.verify().await.problems, []);
}

#[tokio::test(start_paused = true)]
async fn many_small_segments_of_many_restarts_make_room_in_one_go() {
    let mut rig = Rig::new();
    rig.config.capacity_bytes = 8 * SEGMENT_BYTES;
    for life in 0..80_u64 {
        let tier = rig.start().await;
        tier.put([life]).await;
    }
    let tier = rig.start().await;
    assert!(tier.hits(0..80).await.len() > 40);
    tier.put(1000..1080).await;
    assert!(tier.hits(1000..1080).await.len() > 60);
}

#[tokio::test(start_paused = true)]
async fn a_full_map_of_blocks_sheds_the_oldest() {
    let mut rig = Rig::new();
    rig.config.blocks_max = 30;
    let life = rig.start().await;
    life.put(0..100).await;
    let blocks = life.store.usage().blocks;
    assert!((15..=45).contains(&blocks), "{blocks}");
    assert!(life.hits(80..100).await.len() >= 15);
}

#[tokio::test(start_paused = true)]
async fn a_spent_budget_still_writes_tombstones() {
    let mut rig = Rig::new();
    rig.config.daily_write_bytes = 1;
    rig.config.capacity_bytes = 4 * SEGMENT_BYTES;
    let life = rig.start().await;
    life.put(0..40).await;
    drop(life);
    let life = rig.start().await;
    let there = life.hits(0..40).await;
    assert!(there.len() > 20, "{there:?}");
    life.remove(there.iter().copied().take(5)).await;
    drop(life);
    let life = rig.start().await;
    assert_eq!(life.hits(0..40).await.len(), there.len() - 5);
}

#[tokio::test(start_paused = true)]
async fn a_removed_block_can_be_put_again() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    for _ in 0..3 {
        life.remove(0..10).await;
        assert_eq!(life.lost().await.len(), 10);
        life.put(0..10).await;
        assert_eq!(life.lost().await, Vec::<u64>::new());
    }
    drop(life);
    for lose in [false, true] {
        if lose {
            rig.lose_index();
        }
        assert_eq!(rig.start().await.lost().await, Vec::<u64>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_overtakes_no_put_and_closing_writes_what_is_queued() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    life.fixture.put(&life.namespace, &(100..140).collect::<Vec<_>>()).unwrap();
    let put = (100..140).map(async |number| {
        life.fixture.stack.demote(&life.namespace, hash_of(number), crate::tier::Tier::Nvme).await
    });
    let (put, (), closed) = tokio::join!(
        futures_util::future::join_all(put),
        life.remove(100..110),
        life.store.close()
    );
    closed.unwrap();
    let put = put.into_iter().filter(|put| matches!(put, Ok(true))).count();
    drop(life);
    let again = rig.start().await;
    assert_eq!(again.lost().await, Vec::<u64>::new());
    assert!(again.hits(100..110).await.is_empty(), "removed while they were put");
    assert!(again.hits(110..140).await.len() >= put.min(30));
}
