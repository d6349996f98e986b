//! Damage on the disk: each flipped bit costs what it hits and no more, is counted, is named by the
//! offline check, and keeps nobody from starting or writing.

use std::collections::BTreeSet;

use super::rig::{LEN, MANY, Rig};
use crate::nvme::{
    DamageLabel,
    aligned::PAGE,
    device::{Device, SegmentId},
    format::{Entry, Kind},
    index::IndexKey,
    verify::{Report, What},
};

impl Rig {
    /// From now on a bit of this byte comes back wrong.
    fn flip(&self, segment: SegmentId, page: u64, byte: usize) {
        self.device
            .flip(move |id, offset| (id == segment && offset == page * PAGE).then_some(byte));
    }

    async fn first(&self, kind: Kind) -> (SegmentId, Entry) {
        self.records().await.into_iter().find(|(_, entry)| entry.kind == kind).unwrap()
    }

    /// The last page of the first segment, which is sealed.
    fn trailer(&self) -> (SegmentId, u64) {
        let (id, bytes) = self.device.list().unwrap()[0];
        (id, bytes / PAGE - 1)
    }
}

#[track_caller]
fn assert_named(report: &Report, what: What, blocks: u64) {
    let named = report.problems.iter().any(|p| p.what == what && p.blocks == blocks);
    assert!(named, "{what:?} costing {blocks} in {:#?}", report.problems);
}

#[tokio::test]
async fn a_whole_directory_is_clean() {
    let rig = Rig::filled().await;
    let report = rig.verify().await;
    assert_eq!(report.problems, []);
    assert_eq!((report.live_blocks, report.entries, report.dead_bytes), (MANY, MANY, 0));
    assert!(report.segments >= 4 && report.bytes_read > MANY * u64::from(LEN), "{report:?}");
    let life = rig.start().await;
    life.remove(0..5).await;
    assert_eq!(life.lost().await, [0, 1, 2, 3, 4]);
    drop(life);
    let report = rig.verify().await;
    assert_eq!(report.problems, []);
    assert_eq!((report.live_blocks, report.tombstones), (MANY - 5, 5));
}

#[tokio::test]
async fn a_flipped_bit_of_a_payload_costs_one_block() {
    let rig = Rig::filled().await;
    let (segment, page) = rig.page_of(7).await;
    rig.flip(segment, page + 2, 99);
    assert_named(&rig.verify().await, What::Payload, 1);
    let life = rig.start().await;
    assert_eq!(life.lost().await, [7]);
    assert_eq!(life.fixture.stack.usage().corrupt, 1);
    assert_eq!(
        crate::store::BlockStore::usage(life.store.as_ref()).blocks,
        MANY - 1,
        "it is off the tier"
    );
    rig.device.heal();
    let again = life.works(&rig).await;
    assert_eq!(again.lost().await, [7], "it does not come back");
}

#[tokio::test]
async fn a_flipped_bit_of_a_record_header_costs_one_block() {
    // In the magic, in the fields, in the checksums of parts.
    for byte in [0, 70, 137] {
        let rig = Rig::filled().await;
        let (segment, page) = rig.page_of(7).await;
        rig.flip(segment, page, byte);
        assert_named(&rig.verify().await, What::Record, 1);
        let life = rig.start().await;
        assert_eq!(life.lost().await, [7]);
        assert_eq!(life.metrics().damaged(DamageLabel::Header).get(), 1);
        // The writer has taken it out of the index: the next start does not promise it.
        rig.device.heal();
        let again = life.works(&rig).await;
        assert_eq!(again.lost().await, [7]);
        assert_eq!(again.metrics().damaged(DamageLabel::Header).get(), 0);
    }
}

#[tokio::test]
async fn a_record_that_is_damaged_costs_itself_also_without_index_and_table() {
    // Of a header, of a payload; the table of its segment is damaged, too.
    for (behind, byte) in [(0, 70), (3, 5)] {
        let rig = Rig::filled().await;
        let (segment, page) = rig.page_of(7).await;
        let (_, last) = rig.trailer();
        rig.device.flip(move |id, offset| {
            let hit = id == segment && offset == (page + behind) * PAGE;
            let trailer = id == segment && offset == last * PAGE;
            (hit || trailer).then_some(byte)
        });
        rig.lose_index();
        let life = rig.start().await;
        assert_eq!(life.lost().await, [7]);
        assert_eq!(life.metrics().damaged(DamageLabel::Header).get(), 1);
        life.works(&rig).await;
    }
}

#[tokio::test]
async fn a_flipped_bit_of_a_segment_header_costs_nothing() {
    for lost in [false, true] {
        let rig = Rig::filled().await;
        let (segment, _) = rig.trailer();
        rig.flip(segment, 0, 20);
        assert_named(&rig.verify().await, What::SegmentHeader, 0);
        if lost {
            rig.lose_index();
        }
        let life = rig.start().await;
        assert_eq!(life.lost().await, Vec::<u64>::new(), "index lost: {lost}");
        assert!(life.metrics().damaged(DamageLabel::Segment).get() > 0);
        assert_eq!(life.works(&rig).await.lost().await, Vec::<u64>::new());
    }
}

#[tokio::test]
async fn a_flipped_bit_of_a_table_or_trailer_costs_nothing() {
    for (before, what) in [(1, What::Table), (0, What::Trailer)] {
        let rig = Rig::filled().await;
        let (segment, last) = rig.trailer();
        rig.flip(segment, last - before, 30);
        assert_named(&rig.verify().await, what, 0);
        assert_eq!(rig.start().await.lost().await, Vec::<u64>::new());
        rig.lose_index();
        let life = rig.start().await;
        assert_eq!(life.lost().await, Vec::<u64>::new(), "{what:?}");
        life.works(&rig).await;
    }
}

#[tokio::test]
async fn a_flipped_bit_of_tombstones_or_a_namespace_costs_nothing_while_the_index_is_there() {
    for kind in [Kind::Tombstones, Kind::Namespace] {
        let rig = Rig::filled().await;
        let life = rig.start().await;
        life.remove(0..5).await;
        drop(life);
        let (segment, entry) = rig.first(kind).await;
        rig.flip(segment, u64::from(entry.unit), 200);
        assert_named(&rig.verify().await, What::Record, 0);
        let life = rig.start().await;
        assert_eq!(life.lost().await, [0, 1, 2, 3, 4]);
        let again = life.works(&rig).await;
        assert_eq!(again.lost().await, [0, 1, 2, 3, 4]);
        drop(again);
        // With the index lost, too, the removals are, but nothing else is.
        rig.lose_index();
        let life = rig.start().await;
        assert!(life.hits(5..MANY).await.len() as u64 == MANY - 5, "{kind:?}");
    }
}

#[tokio::test]
async fn an_index_that_cannot_be_decoded_is_made_again() {
    let namespace_key = |id: &[u8]| [&[1], id].concat();
    for case in ["block", "namespace", "newer namespace", "segment", "far segment"] {
        let rig = Rig::filled().await;
        let (_, entry) = rig.first(Kind::Block).await;
        let IndexKey { namespace, hash } = entry.key;
        let (key, value): (Vec<u8>, Vec<u8>) = match case {
            "block" => ([&[3], &namespace.as_bytes()[..], hash.as_bytes()].concat(), vec![9; 40]),
            "namespace" => (namespace_key(namespace.as_bytes()), vec![1, 0, 7, 7]),
            "newer namespace" => (namespace_key(namespace.as_bytes()), vec![2, 0]),
            "segment" => ([&[2], &1_u64.to_be_bytes()[..]].concat(), vec![1, 2, 3]),
            _ => ([&[2], &u64::MAX.to_be_bytes()[..]].concat(), [&[1][..], &[5; 16]].concat()),
        };
        rig.memory.plant(&key, &value);
        if case != "far segment" {
            assert_named(&rig.verify().await, What::Undecodable, 1);
        }
        let life = rig.start().await;
        assert_eq!(life.lost().await, Vec::<u64>::new(), "{case}");
        assert_eq!(life.metrics().index_rebuilds.get(), 1, "{case}");
        let again = life.works(&rig).await;
        assert_eq!(again.metrics().index_rebuilds.get(), 0, "{case}: mended");
        assert_eq!(again.lost().await, Vec::<u64>::new(), "{case}");
    }
}

#[tokio::test]
async fn an_entry_that_names_another_record_or_none_costs_one_block() {
    let key_of =
        |key: &IndexKey| [&[3], &key.namespace.as_bytes()[..], key.hash.as_bytes()].concat();
    // A page within a payload, another block's record, a place behind all records.
    for away in [1_u64, 5, 1000] {
        let rig = Rig::filled().await;
        let (segment, page) = rig.page_of(7).await;
        let records = rig.records().await;
        let at =
            |(id, entry): &&(SegmentId, Entry)| *id == segment && u64::from(entry.unit) == page;
        let key = records.iter().find(at).unwrap().1.key;
        let mut entry = rig.index.get(&key).unwrap().unwrap();
        entry.location.0 = entry.location.0.checked_add(away).unwrap();
        let mut value = vec![1];
        value.extend(entry.location.0.get().to_le_bytes());
        value.extend(entry.generation.to_le_bytes());
        value.extend(entry.len.to_le_bytes());
        value.extend(entry.checksums.get(0).unwrap().to_le_bytes());
        rig.memory.plant(&key_of(&key), &value);
        let what = if away == 1000 { What::Truncated } else { What::Misplaced };
        assert_named(&rig.verify().await, what, 1);
        let life = rig.start().await;
        assert_eq!(life.lost().await, [7]);
        let metrics = life.metrics();
        let counted = metrics.damaged(DamageLabel::Header).get()
            + metrics.damaged(DamageLabel::Index).get()
            + metrics.stale_entries.get();
        assert_eq!(counted, 1);
        assert_eq!(life.works(&rig).await.lost().await, [7]);
    }
}

#[tokio::test]
async fn an_index_that_lacks_a_block_is_named() {
    let rig = Rig::filled().await;
    let (_, entry) = rig.first(Kind::Block).await;
    rig.index.apply(&[crate::nvme::index::Change::Remove(entry.key)]).unwrap();
    assert_named(&rig.verify().await, What::Lacking, 1);
    assert_eq!(rig.start().await.lost().await.len(), 1);
}

#[tokio::test]
async fn random_flips_cost_little_and_never_a_wrong_byte() {
    let mut hits = 0;
    for seed in 0..40 {
        let rig = Rig::filled().await;
        rig.device.flip(move |id, offset| {
            let mut draws = crate::testing::Draws::new(seed ^ (id.0 << 32) ^ offset);
            draws.chance(10).then(|| usize::try_from(draws.below(PAGE)).unwrap())
        });
        if seed % 2 == 0 {
            rig.lose_index();
        }
        let life = rig.start().await;
        let now: BTreeSet<u64> = life.hits(0..MANY).await;
        hits += now.len();
        rig.verify().await;
        rig.device.heal();
        life.works(&rig).await;
    }
    assert!(hits > 40 * 40, "{hits} of {}", 40 * MANY);
}
