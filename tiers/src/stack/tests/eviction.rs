//! Who leaves: order, pins, sizes, the pollution bound.

use super::*;

const SLOT: u32 = 4096;

/// A stack with room for 256 blocks of one size.
fn small() -> (Fixture, Arc<Namespace>) {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[SLOT]).unwrap();
    (fixture, namespace)
}

/// Puts blocks one by one, so that no context holds any back.
fn fill(fixture: &Fixture, namespace: &Arc<Namespace>, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert_eq!(fixture.put(namespace, &[number]).unwrap(), 1, "block {number}");
    }
}

#[tokio::test]
async fn the_least_recently_used_leaves_first_over_all_shards() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..256);
    let packed = pack(&[0, 1, 2]);
    assert_eq!(fixture.stack.touch(&namespace, Hashes::new(&packed, 32).unwrap()), 3);
    fill(&fixture, &namespace, 1000..1100);
    let left: Vec<u64> =
        (0..256).filter(|number| prefix(&fixture, &namespace, &[*number]) == 1).collect();
    let expected: Vec<u64> = (0..3).chain(103..256).collect();
    assert_eq!(left, expected);
    assert_eq!(fixture.stack.usage().evicted_blocks, 100);
}

#[tokio::test]
async fn leaves_leave_before_their_parents() {
    let (fixture, namespace) = small();
    let chain: Vec<u64> = (0..100).collect();
    assert_eq!(fixture.put(&namespace, &chain).unwrap(), 100);
    fill(&fixture, &namespace, 1000..1156 + 40);
    assert_eq!(prefix(&fixture, &namespace, &chain), 60);
    // A lease that is released touches the chain the same way.
    let held = lease(&fixture, &namespace, &chain);
    assert_eq!((held.pins.len(), held.pinned_bytes), (60, 60 * 4096));
    fixture.stack.unpin(held.pins);
    fill(&fixture, &namespace, 2000..2000 + 196 + 10);
    assert_eq!(prefix(&fixture, &namespace, &chain), 50);
}

#[tokio::test]
async fn a_pinned_block_survives_any_pressure() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..256);
    let held = lease(&fixture, &namespace, &[0, 1, 2, 3]);
    fill(&fixture, &namespace, 1000..3000);
    for (pin, number) in held.pins.iter().zip(0..) {
        assert_eq!(pin.contents().as_ref(), block_bytes(&namespace, number, 0, 4096));
    }
    assert_eq!(prefix(&fixture, &namespace, &[0, 1, 2, 3]), 4);
    fixture.stack.unpin(held.pins);
    fill(&fixture, &namespace, 3000..3256);
    assert_eq!(prefix(&fixture, &namespace, &[0]), 0, "protection ends with the pin");
}

#[tokio::test]
async fn a_lookup_without_lease_protects_nobody() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..256);
    for _ in 0..10 {
        assert_eq!(prefix(&fixture, &namespace, &[0, 1, 2, 3]), 4);
    }
    fill(&fixture, &namespace, 1000..1004);
    assert_eq!(prefix(&fixture, &namespace, &[0]), 0);
}

#[tokio::test]
async fn a_lease_covers_what_its_bytes_allow() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..10);
    let numbers: Vec<u64> = (0..10).collect();
    let ask = Ask { sparse: false, pin_bytes_max: Some(4 * 4096 + 100) };
    let answer = look(&fixture, &namespace, &numbers, ask);
    assert_eq!((answer.prefix_blocks, answer.pins.len()), (10, 4));
}

#[tokio::test]
async fn when_all_is_pinned_a_put_is_refused_with_a_delay() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..256);
    let numbers: Vec<u64> = (0..256).collect();
    let held = lease(&fixture, &namespace, &numbers);
    assert_eq!(held.pins.len(), 256);
    let mut batch = fixture.offer(&namespace, &[1000], None).unwrap();
    assert_eq!(batch.claims(), [Claim::Wanted], "memory is taken when the bytes come");
    let outcome = fixture.write(&mut batch, &namespace, (0, 1000), 0).unwrap();
    assert_eq!(outcome, Some(PutOutcome::Refused));
    assert!(batch.retry_after().is_some());
    batch.finish();
    drop(held);
    fill(&fixture, &namespace, 1000..1001);
}

#[tokio::test]
async fn memory_moves_between_sizes_and_the_coldest_extent_gives_way() {
    let fixture = Fixture::new(8 * MIB, Vec::new()).unwrap();
    let small = fixture.namespace("small", &[SLOT]).unwrap();
    let large = fixture.namespace("large", &[1 << 18]).unwrap();
    fill(&fixture, &small, 0..2048);
    // Half of them stay in use; the large blocks take the memory of the others.
    let hot: Vec<u64> = (1024..2048).collect();
    let packed = pack(&hot);
    fixture.stack.touch(&small, Hashes::new(&packed, 32).unwrap());
    fill(&fixture, &large, 0..16);
    assert_eq!(fixture.stack.usage().reclaimed_extents, 4);
    for number in 0..16 {
        assert!(has(&fixture, &large, number).await);
    }
    assert_eq!(prefix(&fixture, &small, &hot), 1024);
    // And back: a size that is no longer used does not keep its extents.
    fill(&fixture, &small, 10_000..13_000);
    assert!(fixture.stack.usage().reclaimed_extents > 4);
    let small_blocks = small.counters().blocks.load(Ordering::Relaxed);
    assert!(small_blocks >= 7 * 256, "{small_blocks} of 2048");
}

#[tokio::test]
async fn pinned_extents_are_passed_over_when_sizes_trade() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let small = fixture.namespace("small", &[SLOT]).unwrap();
    let large = fixture.namespace("large", &[1 << 19]).unwrap();
    fill(&fixture, &small, 0..1024);
    let held = lease(&fixture, &small, &[0]);
    fill(&fixture, &large, 0..2);
    assert_eq!(held.pins[0].contents().as_ref(), block_bytes(&small, 0, 0, 4096));
    assert!(has(&fixture, &large, 0).await && has(&fixture, &large, 1).await);
}

#[tokio::test]
async fn one_huge_put_leaves_most_of_the_others_resident() {
    let (fixture, other) = small();
    fill(&fixture, &other, 0..256);
    for number in 0..256 {
        assert!(has(&fixture, &other, number).await, "read once more");
    }
    let huge = fixture.namespace("huge", &[SLOT]).unwrap();
    let context: Vec<u64> = (0..2560).collect();
    let stored = fixture.put(&huge, &context).unwrap();
    let left = (0..256).filter(|number| prefix(&fixture, &other, &[*number]) == 1).count();
    assert_eq!((stored, left), (64, 192), "a quarter is the allowance");
    assert_eq!(prefix(&fixture, &huge, &context), 64, "the head of the context stays");
}

#[tokio::test]
async fn a_context_that_comes_in_many_puts_is_one_context() {
    let (fixture, other) = small();
    fill(&fixture, &other, 0..256);
    let huge = fixture.namespace("huge", &[SLOT]).unwrap();
    let context: Vec<u64> = (0..1280).collect();
    let mut parent = None;
    for piece in context.chunks(16) {
        fixture.put_behind(&huge, piece, parent).unwrap();
        parent = piece.last().copied();
    }
    let left = (0..256).filter(|number| prefix(&fixture, &other, &[*number]) == 1).count();
    assert!(left >= 128, "{left} of 256 left");
    // Once it was read, it may grow again.
    let kept = u64::from(prefix(&fixture, &huge, &context));
    assert!(kept >= 64);
    for number in 0..kept {
        assert!(has(&fixture, &huge, number).await);
    }
    assert_eq!(fixture.put_behind(&huge, &[kept], Some(kept - 1)).unwrap(), 1);
}

#[tokio::test]
async fn free_memory_is_anybodys() {
    let (fixture, namespace) = small();
    let context: Vec<u64> = (0..256).collect();
    assert_eq!(fixture.put(&namespace, &context).unwrap(), 256);
}

#[tokio::test]
async fn ranks_that_put_apart_share_one_allowance() {
    let (fixture, other) = small();
    fill(&fixture, &other, 0..256);
    let huge = fixture.namespace("huge", &[2048, 2048]).unwrap();
    let context: Vec<u64> = (0..1280).collect();
    let mut parent = None;
    for piece in context.chunks(16) {
        for part in [0, 1] {
            put_part(&fixture, &huge, piece, part, parent);
        }
        parent = piece.last().copied();
    }
    let left = (0..256).filter(|number| prefix(&fixture, &other, &[*number]) == 1).count();
    assert!(left >= 128, "{left} of 256 left");
}

#[tokio::test]
async fn a_context_that_evicts_itself_gets_no_new_allowance() {
    let (fixture, other) = small();
    fill(&fixture, &other, 0..256);
    let huge = fixture.namespace("huge", &[SLOT]).unwrap();
    let numbers: Vec<u64> = (0..256).collect();
    let mut parent = None;
    for round in 1..12 {
        // The others are in use: first the context's own blocks leave, then some of the others'.
        fixture.stack.touch(&other, Hashes::new(&pack(&numbers), 32).unwrap());
        let piece: Vec<u64> = (1000 * round..1000 * round + 32 * round).collect();
        fixture.put_behind(&huge, &piece, parent).unwrap();
        parent = piece.last().copied();
    }
    let left = (0..256).filter(|number| prefix(&fixture, &other, &[*number]) == 1).count();
    assert!(left >= 192, "{left} of 256 left");
}

#[tokio::test]
async fn reading_gives_back_all_that_was_taken() {
    let fixture = Fixture::new(8 * MIB, Vec::new()).unwrap();
    let other = fixture.namespace("other", &[8192]).unwrap();
    fill(&fixture, &other, 0..1024);
    // Blocks of 4160 bytes lie in slots of 8192: the allowance is 256 of them.
    let huge = fixture.namespace("huge", &[4160]).unwrap();
    let numbers: Vec<u64> = (0..1000).collect();
    assert_eq!(fixture.put(&huge, &numbers[..300]).unwrap(), 256);
    for number in 0..128 {
        assert!(has(&fixture, &huge, number).await);
    }
    assert_eq!(fixture.put_behind(&huge, &numbers[256..], Some(255)).unwrap(), 128);
}

#[tokio::test]
async fn blocks_longer_than_the_allowance_replace_one_another() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[400 << 10]).unwrap();
    fill(&fixture, &namespace, 0..5);
}

#[tokio::test]
async fn a_rank_that_runs_ahead_keeps_to_one_allowance() {
    let (fixture, other) = small();
    fill(&fixture, &other, 0..256);
    let huge = fixture.namespace("huge", &[2048, 2048]).unwrap();
    let context: Vec<u64> = (0..1280).collect();
    let mut parent = None;
    for piece in context.chunks(16) {
        put_part(&fixture, &huge, piece, 0, parent);
        parent = piece.last().copied();
    }
    let left = (0..256).filter(|number| prefix(&fixture, &other, &[*number]) == 1).count();
    assert_eq!(left, 192, "fragments are unread, too");
    parent = None;
    for piece in context.chunks(16) {
        put_part(&fixture, &huge, piece, 1, parent);
        parent = piece.last().copied();
    }
    assert_eq!(prefix(&fixture, &huge, &context), 64);
    fixture.stack.remove(&huge, Hashes::new(&pack(&context), 32).unwrap()).await.unwrap();
    assert_eq!(fixture.stack.shared.contexts.len(), 192, "those of the others");
}

#[tokio::test]
async fn a_cold_pinned_block_does_not_change_who_leaves() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..256);
    let held = lease(&fixture, &namespace, &[0, 1, 2]);
    // The pinned ones are the least recently used after this; the next to leave are 3 to 52.
    let packed = pack(&(3..256).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>());
    fixture.stack.touch(&namespace, Hashes::new(&packed, 32).unwrap());
    fill(&fixture, &namespace, 1000..1050);
    let left: Vec<u64> =
        (0..256).filter(|number| prefix(&fixture, &namespace, &[*number]) == 1).collect();
    let expected: Vec<u64> = (0..3).chain(53..256).collect();
    assert_eq!(left, expected);
    fixture.stack.unpin(held.pins);
}

#[tokio::test]
async fn when_its_own_size_is_pinned_a_put_takes_from_another() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let small = fixture.namespace("small", &[SLOT]).unwrap();
    let large = fixture.namespace("large", &[1 << 18]).unwrap();
    fill(&fixture, &small, 0..768);
    fill(&fixture, &large, 0..4);
    let numbers: Vec<u64> = (0..4).collect();
    let held = lease(&fixture, &large, &numbers);
    // A look at the other size that finds nothing older there.
    fill(&fixture, &small, 1000..1001);
    fill(&fixture, &large, 10..14);
    drop(held);
}

#[tokio::test]
async fn a_full_map_evicts_the_coldest_of_all_sizes() {
    let fixture = Fixture::with_index(64 * MIB, 3000, Vec::new()).unwrap();
    let (a, b) = (fixture.namespace("a", &[64]).unwrap(), fixture.namespace("b", &[128]).unwrap());
    fill(&fixture, &a, 0..1500);
    fill(&fixture, &b, 0..1500);
    let numbers: Vec<u64> = (0..1500).collect();
    fixture.stack.touch(&a, Hashes::new(&pack(&numbers), 32).unwrap());
    fill(&fixture, &a, 2000..2500);
    let left = |of| numbers.iter().filter(|n| prefix(&fixture, of, &[**n]) == 1).count();
    assert_eq!((left(&a), left(&b)), (1500, 1000));
}

#[tokio::test]
async fn claims_alone_do_not_empty_a_full_map() {
    let fixture = Fixture::with_index(8 * MIB, 1000, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fill(&fixture, &namespace, 0..1000);
    let many: Vec<u64> = (5000..9000).collect();
    let batch = fixture.offer(&namespace, &many, None).unwrap();
    let refused = batch.claims().iter().filter(|claim| **claim == Claim::Refused).count();
    drop(batch);
    let left = (0..1000).filter(|number| prefix(&fixture, &namespace, &[*number]) == 1).count();
    assert_eq!((left, refused), (750, 3750), "a quarter of the map is the allowance");
}

#[tokio::test]
async fn a_cold_pinned_extent_does_not_keep_another_size_out() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let small = fixture.namespace("small", &[SLOT]).unwrap();
    let large = fixture.namespace("large", &[1 << 19]).unwrap();
    fill(&fixture, &small, 0..1024);
    let held = lease(&fixture, &small, &[0]);
    let others: Vec<u64> = (1..1024).rev().collect();
    fixture.stack.touch(&small, Hashes::new(&pack(&others), 32).unwrap());
    fill(&fixture, &large, 0..2);
    assert_eq!(held.pins[0].contents().as_ref(), block_bytes(&small, 0, 0, 4096));
    assert!(has(&fixture, &large, 0).await && has(&fixture, &large, 1).await);
    assert!(small.counters().blocks.load(Ordering::Relaxed) >= 513, "nothing left for nothing");
}

#[tokio::test]
async fn a_put_in_flight_does_not_keep_another_size_out() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let small = fixture.namespace("small", &[SLOT]).unwrap();
    let large = fixture.namespace("large", &[1 << 19]).unwrap();
    let odd = fixture.namespace("odd", &[100_000, 100_000]).unwrap();
    let mut open = fixture.offer(&odd, &[1], None).unwrap();
    fixture.write(&mut open, &odd, (0, 1), 0).unwrap();
    fill(&fixture, &small, 0..768);
    fill(&fixture, &large, 0..2);
    assert!(has(&fixture, &large, 0).await && has(&fixture, &large, 1).await);
    fixture.write(&mut open, &odd, (0, 1), 1).unwrap();
    drop(open);
    assert!(has(&fixture, &odd, 1).await);
}

#[tokio::test]
async fn fragments_make_way_for_another_size() {
    let fixture = Fixture::new(2 * MIB, Vec::new()).unwrap();
    let small = fixture.namespace("small", &[2048, 2048]).unwrap();
    let large = fixture.namespace("large", &[1 << 18]).unwrap();
    for number in 0..512 {
        let mut batch = fixture.offer(&small, &[number], None).unwrap();
        fixture.write(&mut batch, &small, (0, number), 0).unwrap();
        if number % 100 != 0 {
            fixture.write(&mut batch, &small, (0, number), 1).unwrap();
        }
        batch.finish();
    }
    fill(&fixture, &large, 0..4);
}

#[tokio::test]
async fn a_lease_touches_only_what_it_covers() {
    let (fixture, namespace) = small();
    fill(&fixture, &namespace, 0..256);
    let ask = Ask { sparse: false, pin_bytes_max: Some(2 * 4096) };
    let held = look(&fixture, &namespace, &[0, 1, 2, 3], ask);
    assert_eq!(held.pins.len(), 2);
    fill(&fixture, &namespace, 1000..1004);
    let left = [0, 1, 2, 3, 4, 5, 6].map(|number| prefix(&fixture, &namespace, &[number]));
    assert_eq!(left, [1, 1, 0, 0, 0, 0, 1]);
}
