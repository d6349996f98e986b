//! Puts: parts, duplicates, races, bad pieces.

use super::*;
use crate::{checksum::part_checksum, error::ErrorKind, namespace::NamespaceSpec};

#[tokio::test]
async fn a_block_is_present_only_when_all_parts_are() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[100, 200, 300]).unwrap();
    let packed = pack(&[1]);
    // Three ranks, each with its own batch, the last one first.
    let mut outcomes = Vec::new();
    for part in [2_u32, 0, 1] {
        let hashes = Hashes::new(&packed, 32).unwrap();
        let offer = Offer { hashes, parts: &[part], checksums: &[], parent: None, lengths: &[] };
        let mut batch = fixture.stack.put(&namespace, offer).unwrap();
        assert_eq!(batch.claims(), [Claim::Wanted]);
        assert_eq!(prefix(&fixture, &namespace, &[1]), 0);
        let answer = look(&fixture, &namespace, &[1], Ask::default());
        assert_eq!(answer.counts.to_array(), [0, 0, 0, 1, 0], "pending while a put is in flight");
        outcomes.push(fixture.write(&mut batch, &namespace, (0, 1), part).unwrap());
        batch.finish();
    }
    use PutOutcome::{PartStored, Stored};
    assert_eq!(outcomes, [Some(PartStored), Some(PartStored), Some(Stored)]);
    assert!(has(&fixture, &namespace, 1).await);
    assert_quiet(&fixture);
}

#[tokio::test]
async fn a_fragment_is_a_miss_and_makes_way() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[2048, 2048]).unwrap();
    let packed = pack(&[1]);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let offer = Offer { hashes, parts: &[0], checksums: &[], parent: None, lengths: &[] };
    let mut batch = fixture.stack.put(&namespace, offer).unwrap();
    fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap();
    batch.finish();
    assert_eq!(look(&fixture, &namespace, &[1], Ask::default()).counts.to_array()[4], 1);
    assert!(!has(&fixture, &namespace, 1).await);
    // 256 slots: without the fragment's memory the last one would be refused.
    let numbers: Vec<u64> = (10..10 + 256).collect();
    assert_eq!(fixture.put(&namespace, &numbers).unwrap(), 256);
    assert_quiet(&fixture);
}

#[tokio::test]
async fn duplicates_are_told_from_blocks_that_differ() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fixture.put(&namespace, &[1]).unwrap();
    let packed = pack(&[1, 2, 2]);
    let sum = part_checksum(namespace.id(), &hash_of(1), 0, 0, &block_bytes(&namespace, 1, 0, 64));
    let claims = |checksums: &[u64]| {
        let hashes = Hashes::new(&packed, 32).unwrap();
        let offer = Offer { hashes, parts: &[], checksums, parent: None, lengths: &[] };
        fixture.stack.put(&namespace, offer).unwrap().claims().to_vec()
    };
    use Claim::{Differs, Duplicate, Pending, Wanted};
    assert_eq!(claims(&[]), [Duplicate, Wanted, Pending]);
    assert_eq!(claims(&[sum, 0, 0]), [Duplicate, Wanted, Pending]);
    assert_eq!(claims(&[sum + 1, 0, 0]), [Differs, Wanted, Pending]);
    assert_eq!(fixture.stack.usage().duplicate_differs, 1);
    assert!(has(&fixture, &namespace, 1).await, "the first bytes stay");
    assert_quiet(&fixture);
}

#[tokio::test]
async fn two_puts_of_one_block_do_not_mix() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    let mut first = fixture.offer(&namespace, &[1], None).unwrap();
    let second = fixture.offer(&namespace, &[1], None).unwrap();
    assert_eq!(second.claims(), [Claim::Pending]);
    drop(second);
    assert!(matches!(get(&fixture, &namespace, 1).await, Fetch::Pending));
    assert!(fixture.write(&mut first, &namespace, (0, 1), 0).unwrap().is_some());
    drop(first);
    assert!(has(&fixture, &namespace, 1).await);
}

/// How long a wait for block 1 takes that begins before `end` does what ends it.
async fn settled_after(
    fixture: &Fixture,
    namespace: &Arc<Namespace>,
    end: impl AsyncFnOnce(),
) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut waiting = std::pin::pin!(fixture.stack.settled(namespace, hash_of(1), deadline));
    let waits = futures_util::poll!(waiting.as_mut()).is_pending();
    end().await;
    if waits {
        waiting.await;
    }
    waits && Instant::now() < deadline
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_for_a_put_is_told_of_its_end_however_it_comes() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64, 64]).unwrap();
    let offer = || fixture.offer(&namespace, &[1], None).unwrap();
    let given_up = offer();
    assert!(settled_after(&fixture, &namespace, async || drop(given_up)).await);
    assert!(!has(&fixture, &namespace, 1).await);

    let removed = offer();
    let packed = pack(&[1]);
    let remove = fixture.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap());
    assert!(settled_after(&fixture, &namespace, async || drop(remove.await)).await);
    drop(removed);

    let mut stored = offer();
    fixture.write(&mut stored, &namespace, (0, 1), 0).unwrap();
    let last = async || {
        let outcome = fixture.write(&mut stored, &namespace, (0, 1), 1).unwrap();
        assert_eq!(outcome, Some(PutOutcome::Stored));
    };
    assert!(settled_after(&fixture, &namespace, last).await);
    assert!(has(&fixture, &namespace, 1).await);
    assert!(!settled_after(&fixture, &namespace, async || {}).await, "nothing is in flight");
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_a_put_ends_with_its_deadline() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    let _batch = fixture.offer(&namespace, &[1], None).unwrap();
    let deadline = Instant::now() + Duration::from_secs(3);
    fixture.stack.settled(&namespace, hash_of(1), deadline).await;
    assert_eq!(Instant::now(), deadline);
    assert!(matches!(get(&fixture, &namespace, 1).await, Fetch::Pending));
}

#[tokio::test]
async fn an_abandoned_put_leaves_nothing() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[100, 100]).unwrap();
    let mut batch = fixture.offer(&namespace, &[1, 2, 3], None).unwrap();
    fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap();
    fixture.write(&mut batch, &namespace, (0, 1), 1).unwrap();
    fixture.write(&mut batch, &namespace, (1, 2), 0).unwrap();
    let half =
        Piece { position: 1, part: 1, offset: 0, data: &[1; 50], checksum: 0, part_bytes: 100 };
    assert_eq!(batch.write(half).unwrap(), None);
    drop(batch);
    assert!(has(&fixture, &namespace, 1).await && !has(&fixture, &namespace, 2).await);
    // Block 2 is a fragment (its first part is there), block 3 is forgotten.
    assert_eq!(fixture.stack.usage().index_blocks, 2);
    assert_eq!(fixture.put(&namespace, &[3]).unwrap(), 1);
}

#[tokio::test]
async fn a_removed_block_does_not_come_back_by_a_put_in_flight() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64, 64]).unwrap();
    let mut batch = fixture.offer(&namespace, &[1], None).unwrap();
    fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap();
    let packed = pack(&[1]);
    fixture.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    let outcome = fixture.write(&mut batch, &namespace, (0, 1), 1).unwrap();
    assert_eq!(outcome, Some(PutOutcome::Refused));
    drop(batch);
    assert!(!has(&fixture, &namespace, 1).await);
    assert_eq!(fixture.stack.usage().index_blocks, 0);
    assert_quiet(&fixture);
}

#[tokio::test]
async fn pieces_make_a_part_and_wrong_sums_are_refused() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[1000]).unwrap();
    let bytes = block_bytes(&namespace, 1, 0, 1000);
    let sum = part_checksum(namespace.id(), &hash_of(1), 0, 0, &bytes);
    for (checksum, expected) in [(sum ^ 1, PutOutcome::Corrupt), (sum, PutOutcome::Stored)] {
        let mut batch = fixture.offer(&namespace, &[1], None).unwrap();
        let mut last = None;
        for (data, offset) in bytes.chunks(300).zip((0_u32..).step_by(300)) {
            let piece = Piece { position: 0, part: 0, offset, data, checksum, part_bytes: 1000 };
            last = batch.write(piece).unwrap();
        }
        assert_eq!(last, Some(expected));
        batch.finish();
        assert_quiet(&fixture);
    }
    assert!(has(&fixture, &namespace, 1).await);
}

#[tokio::test]
async fn bad_pieces_are_named_and_the_batch_goes_on() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[100]).unwrap();
    let mut batch = fixture.offer(&namespace, &[1], None).unwrap();
    let good =
        Piece { position: 0, part: 0, offset: 0, data: &[0; 100], checksum: 0, part_bytes: 0 };
    let cases: [(Piece<'_>, ErrorKind, &str); 6] = [
        (Piece { position: 1, ..good }, ErrorKind::Invalid, "index: 1 given, 0 to 0 allowed"),
        (Piece { part: 1, ..good }, ErrorKind::Invalid, "part: 1 given for index 0"),
        (
            Piece { data: &[0; 99], ..good },
            ErrorKind::LayoutMismatch,
            "part 0 of index 0: 99 bytes given, exactly 100 declared",
        ),
        (Piece { part_bytes: 101, ..good }, ErrorKind::LayoutMismatch, "101 bytes given"),
        (
            Piece { offset: 7, data: &[0; 93], ..good },
            ErrorKind::Invalid,
            "offset: 7 with 93 bytes given for part 0 of index 0, offset 0",
        ),
        (
            Piece { data: &[], part_bytes: 100, ..good },
            ErrorKind::Invalid,
            "offset: 0 with 0 bytes given",
        ),
    ];
    for (piece, kind, text) in cases {
        let error = batch.write(piece).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(text), "{text} is missing in: {error}");
    }
    let done = fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap();
    assert_eq!(done, Some(PutOutcome::Stored));
    let error = fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap_err();
    assert!(error.to_string().contains("not wanted"), "{error}");
}

#[tokio::test]
async fn bad_offers_are_named() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[100, 100]).unwrap();
    let large = fixture.namespace("l", &[2 << 20]).unwrap();
    let packed = pack(&[1, 2]);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let good = Offer { hashes, parts: &[], checksums: &[], parent: None, lengths: &[] };
    let cases = [
        (&namespace, Offer { parts: &[2], ..good }, "parts: 2 given, 0 to 1 declared"),
        (&namespace, Offer { parts: &[1, 0], ..good }, "ascending"),
        (&namespace, Offer { checksums: &[1], ..good }, "checksums: 1 given, 0 or 4 required"),
        (&namespace, Offer { lengths: &[1, 1], ..good }, "lengths: 2 given, 0 required"),
        (&large, good, "lengths: 2097152 bytes given, 1 to 1048576 allowed"),
    ];
    for (namespace, offer, text) in cases {
        let error = fixture.stack.put(namespace, offer).unwrap_err();
        assert!(error.to_string().contains(text), "{text} is missing in: {error}");
    }
    let error = fixture.stack.get(&namespace, hash_of(1), &[5], soon()).await.unwrap_err();
    assert!(error.to_string().contains("parts: 5 given"), "{error}");
}

#[tokio::test]
async fn opaque_values_have_their_own_lengths() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let spec = NamespaceSpec::Opaque { tenant: "t".into(), name: "n".into(), bytes_max: 5000 };
    let namespace = fixture.namespaces.open(spec, false).unwrap().namespace;
    let packed = pack(&[1, 2]);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let offer = |lengths| Offer { hashes, parts: &[], checksums: &[], parent: None, lengths };
    assert!(fixture.stack.put(&namespace, offer(&[1, 0])).is_err());
    assert!(fixture.stack.put(&namespace, offer(&[1, 5001])).is_err());
    let mut batch = fixture.stack.put(&namespace, offer(&[7, 5000])).unwrap();
    for (position, len) in [(0, 7), (1, 5000)] {
        let data = vec![9; len];
        let hash = hash_of(u64::from(position) + 1);
        let checksum = part_checksum(namespace.id(), &hash, 0, 0, &data);
        let piece = Piece { position, part: 0, offset: 0, data: &data, checksum, part_bytes: 0 };
        assert_eq!(batch.write(piece).unwrap(), Some(PutOutcome::Stored));
    }
    batch.finish();
    let Fetch::Hit(block) = get(&fixture, &namespace, 2).await else { panic!("stored") };
    assert_eq!((block.len(), block.part(0).unwrap().as_ref().len()), (5000, 5000));
    // Another length under the same key differs.
    let batch = fixture.stack.put(&namespace, offer(&[8, 5000])).unwrap();
    assert_eq!(batch.claims(), [Claim::Differs, Claim::Duplicate]);
}

#[tokio::test]
async fn a_put_that_was_cut_short_can_be_repeated() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[100, 100]).unwrap();
    let mut batch = fixture.offer(&namespace, &[1], None).unwrap();
    fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap();
    drop(batch);
    // Nobody is putting it: the second try must not be told to wait for the first.
    assert_eq!(fixture.put(&namespace, &[1]).unwrap(), 1);
    assert!(has(&fixture, &namespace, 1).await);
    assert_quiet(&fixture);
}

#[tokio::test]
async fn a_part_from_before_a_removal_does_not_get_into_a_later_put() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[100, 100]).unwrap();
    let bytes = block_bytes(&namespace, 1, 0, 100);
    let checksum = part_checksum(namespace.id(), &hash_of(1), 0, 0, &bytes);
    let half = |offset: u32| {
        let data = &bytes[offset as usize..offset as usize + 50];
        Piece { position: 0, part: 0, offset, data, checksum, part_bytes: 100 }
    };
    let mut old = fixture.offer(&namespace, &[1], None).unwrap();
    assert_eq!(old.write(half(0)).unwrap(), None);
    let packed = pack(&[1]);
    fixture.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    let mut new = fixture.offer(&namespace, &[1], None).unwrap();
    fixture.write(&mut new, &namespace, (0, 1), 1).unwrap();
    assert_eq!(old.write(half(50)).unwrap(), Some(PutOutcome::Refused));
    drop(old);
    assert!(matches!(get(&fixture, &namespace, 1).await, Fetch::Pending));
    let stored = fixture.write(&mut new, &namespace, (0, 1), 0).unwrap();
    assert_eq!(stored, Some(PutOutcome::Stored));
    drop(new);
    assert!(has(&fixture, &namespace, 1).await);
    assert_quiet(&fixture);
}

#[tokio::test]
async fn a_part_that_comes_twice_is_named_and_the_other_still_completes_the_block() {
    let fixture = Fixture::new(4 * MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64, 64]).unwrap();
    let mut batch = fixture.offer(&namespace, &[1], None).unwrap();
    assert_eq!(fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap(), None);
    let error = fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap_err();
    assert!(error.to_string().contains("part: 0 given for index 0, which has come"), "{error}");
    let outcome = fixture.write(&mut batch, &namespace, (0, 1), 1).unwrap();
    assert_eq!(outcome, Some(PutOutcome::Stored));
    batch.finish();
    assert!(has(&fixture, &namespace, 1).await);
}

#[tokio::test]
async fn bytes_may_be_written_where_they_will_stay() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[1000]).unwrap();
    let packed = pack(&[1]);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let offer = Offer { hashes, parts: &[], checksums: &[], parent: None, lengths: &[] };
    let mut batch = fixture.stack.put(&namespace, offer).unwrap();
    let data = block_bytes(&namespace, 1, 0, 1000);
    let checksum = part_checksum(namespace.id(), &hash_of(1), 0, 0, &data);
    let span =
        |offset, bytes| Span { position: 0, part: 0, offset, bytes, checksum, part_bytes: 1000 };
    let mut offset = 0;
    // What a socket has at a time, nothing among it.
    for (step, most) in [0, 1, 300, 0, 699].into_iter().enumerate() {
        let filled = batch.fill(span(offset, 1000 - offset), |room| {
            let from = usize::try_from(offset).unwrap();
            room[..most].copy_from_slice(&data[from..from + most]);
            most
        });
        let filled = filled.unwrap();
        assert_eq!(filled.bytes, most);
        assert_eq!(filled.outcome, (step == 4).then_some(PutOutcome::Stored));
        offset += u32::try_from(most).unwrap();
    }
    let late = batch.fill(span(0, 1000), |_room| panic!("nothing is wanted")).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Invalid);
    batch.finish();
    assert!(has(&fixture, &namespace, 1).await);
    assert_quiet(&fixture);
}
