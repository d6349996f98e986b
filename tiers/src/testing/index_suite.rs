//! The contract of [`Index`], as steps that any implementation can be put through.
//!
//! ```text
//! index_suite::run(&MyIndex::open(dir)?, |index, key, value| index.plant(key, value));
//! ```
#![expect(clippy::panic, reason = "a contract fails by panicking with what was broken")]

use std::{io, num::NonZeroU64};

use super::hash_of;
use crate::{
    description::Description,
    map::{Checksums, Location},
    namespace::NamespaceId,
    nvme::{
        device::SegmentId,
        index::{Change, Index, IndexEntry, IndexKey, Known, codec},
    },
};

/// How to put bytes of any kind into an index, behind its back.
pub type Plant<I> = fn(&I, &[u8], &[u8]);

type Step<I> = fn(&I, Plant<I>) -> io::Result<bool>;

/// Puts an index through all steps; it must be empty, and is afterwards.
///
/// # Panics
/// Where the index breaks the contract.
pub fn run<I: Index>(index: &I, plant: Plant<I>) {
    let steps: [(&str, Step<I>); 8] = [
        ("gets what was put, until it is removed", |index, _| gets_what_was_put(index)),
        ("groups are applied in order", |index, _| groups_are_ordered(index)),
        ("loads everything in order", |index, _| loads_in_order(index)),
        ("a description leaves with its block", |index, _| descriptions_leave(index)),
        ("what cannot be decoded is passed over", passes_over),
        ("a visit that fails ends the load", |index, _| a_failing_visit_ends_the_load(index)),
        ("opened again, everything is there", |index, _| reopening_keeps(index)),
        ("cleared, nothing is there", |index, _| clearing_drops(index)),
    ];
    for (what, step) in steps {
        match step(index, plant).and_then(|good| index.clear().map(|()| good)) {
            Ok(true) => {}
            Ok(false) => panic!("{index:?}: contract broken: {what}"),
            Err(error) => panic!("{index:?}: failed while checking: {what}: {error}"),
        }
    }
}

/// All that an index holds, in the order in which it was visited.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// Namespaces.
    pub namespaces: Vec<(NamespaceId, Vec<u8>)>,
    /// Segments with their generation and how far they are indexed.
    pub segments: Vec<(SegmentId, u64, u64)>,
    /// Blocks.
    pub blocks: Vec<(IndexKey, IndexEntry)>,
    /// Descriptions.
    pub descriptions: Vec<(IndexKey, Description)>,
    /// What could not be decoded.
    pub passed_over: u64,
}

impl Contents {
    /// Loads `index`.
    ///
    /// # Errors
    /// Those of [`Index::load`], and `InvalidData` if kinds or keys are out of order.
    pub fn of(index: &impl Index) -> io::Result<Self> {
        let mut contents = Self::default();
        let mut rank = 0;
        contents.passed_over = index.load(&mut |known| {
            let next = match known {
                Known::Namespace(id, encoded) => {
                    contents.namespaces.push((id, encoded));
                    1
                }
                Known::Indexed { segment, generation, bytes } => {
                    contents.segments.push((segment, generation, bytes));
                    2
                }
                Known::Block(key, entry) => {
                    contents.blocks.push((key, entry));
                    3
                }
                Known::Described(key, description) => {
                    contents.descriptions.push((key, description));
                    4
                }
            };
            if next < std::mem::replace(&mut rank, next) {
                return Err(out_of_order());
            }
            Ok(())
        })?;
        let ascend = contents.namespaces.is_sorted_by(|a, b| a.0 < b.0)
            && contents.segments.is_sorted_by(|a, b| a.0 < b.0)
            && contents.blocks.is_sorted_by(|a, b| a.0 < b.0)
            && contents.descriptions.is_sorted_by(|a, b| a.0 < b.0);
        if ascend { Ok(contents) } else { Err(out_of_order()) }
    }
}

fn out_of_order() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "loaded out of order")
}

/// The key of block `number`. Every fourth is in another namespace.
#[must_use]
pub fn key_of(number: u64) -> IndexKey {
    let namespace = if number % 4 == 3 { [0xee; 32] } else { [0x11; 32] };
    IndexKey { namespace: NamespaceId::from_array(namespace), hash: hash_of(number) }
}

/// The entry of block `number` in its `round`th copy. Every seventh has several parts.
#[must_use]
pub fn entry_of(number: u64, round: u64) -> IndexEntry {
    let sums = if number % 7 == 6 { vec![number, round, u64::MAX] } else { vec![number ^ round] };
    IndexEntry {
        location: Location(NonZeroU64::MIN.saturating_add(number * 1000 + round)),
        generation: round,
        len: 65_536,
        checksums: Checksums::new(sums),
    }
}

/// Puts block `number` in its `round`th copy.
#[must_use]
pub fn put(number: u64, round: u64) -> Change {
    Change::Put(key_of(number), entry_of(number, round))
}

/// What block `number` was described as in its `round`th description.
#[must_use]
pub fn description_of(number: u64, round: u32) -> Description {
    Description {
        parent: (number > 0).then(|| hash_of(number - 1)),
        position: round,
        tokens: vec![round; 16],
        lora_name: "adapter".to_owned(),
    }
}

fn describe(number: u64, round: u32) -> Change {
    Change::Describe(key_of(number), description_of(number, round))
}

fn indexed(segment: u64, generation: u64, bytes: u64) -> Change {
    Change::Indexed { segment: SegmentId(segment), generation, bytes }
}

fn gets_what_was_put(index: &impl Index) -> io::Result<bool> {
    let absent = index.get(&key_of(1))?.is_none();
    let puts: Vec<_> = (0..100).map(|number| put(number, 1)).collect();
    index.apply(&puts)?;
    index.apply(&[])?;
    let mut good = absent;
    for number in 0..100 {
        good &= index.get(&key_of(number))? == Some(entry_of(number, 1));
    }
    let removes: Vec<_> = (0..50).map(|number| Change::Remove(key_of(number))).collect();
    index.apply(&removes)?;
    index.apply(&[Change::Remove(key_of(1000))])?;
    for number in 0..100 {
        good &= index.get(&key_of(number))?.is_some() == (number >= 50);
    }
    let other = IndexKey { namespace: NamespaceId::from_array([0x12; 32]), ..key_of(60) };
    Ok(good && index.get(&other)?.is_none() && Contents::of(index)?.blocks.len() == 50)
}

fn groups_are_ordered(index: &impl Index) -> io::Result<bool> {
    // The last one wins, within a group and across groups.
    index.apply(&[put(1, 1), Change::Remove(key_of(1)), put(1, 2)])?;
    index.apply(&[put(2, 1), Change::Remove(key_of(2))])?;
    index.apply(&[put(3, 1)])?;
    index.apply(&[put(3, 2), indexed(1, 1, 10)])?;
    index.apply(&[indexed(1, 1, 20), Change::Forget(SegmentId(1)), indexed(2, 1, 5)])?;
    let contents = Contents::of(index)?;
    Ok(index.get(&key_of(1))? == Some(entry_of(1, 2))
        && index.get(&key_of(2))?.is_none()
        && index.get(&key_of(3))? == Some(entry_of(3, 2))
        && contents.blocks.len() == 2
        && contents.segments == [(SegmentId(2), 1, 5)])
}

fn loads_in_order(index: &impl Index) -> io::Result<bool> {
    let ids = [[0x11; 32], [0; 32], [0xff; 32]].map(NamespaceId::from_array);
    // Numbers whose order differs from that of their little-endian bytes.
    let segments = [1, 255, 256, 65_536, u64::MAX];
    for number in 0..500 {
        index.apply(&[put(number, number)])?;
    }
    for segment in segments {
        index.apply(&[indexed(segment, segment / 2, segment)])?;
    }
    let named: Vec<_> = ids.iter().map(|id| Change::Namespace(*id, id.as_bytes().into())).collect();
    index.apply(&named)?;
    index.apply(&[Change::Namespace(ids[2], Vec::new())])?;

    let contents = Contents::of(index)?;
    let mut blocks: Vec<_> =
        (0..500).map(|number| (key_of(number), entry_of(number, number))).collect();
    blocks.sort_unstable_by_key(|(key, _)| *key);
    let [middle, first, last] = ids;
    Ok(contents.blocks == blocks
        && contents.segments == segments.map(|segment| (SegmentId(segment), segment / 2, segment))
        && contents.namespaces
            == [(first, vec![0; 32]), (middle, vec![0x11; 32]), (last, Vec::new())]
        && contents.passed_over == 0)
}

fn descriptions_leave(index: &impl Index) -> io::Result<bool> {
    index.apply(&[put(1, 1), Change::Remove(key_of(1))])?;
    index.apply(&[put(1, 1), put(2, 1), put(3, 1), describe(1, 1), describe(2, 1)])?;
    // After the copy, anew, of what is not there.
    index.apply(&[describe(3, 1), describe(1, 2), describe(9, 1)])?;
    // Another copy is the same block; a block that was removed and put again is not.
    index.apply(&[put(1, 2), Change::Remove(key_of(2)), put(2, 2)])?;
    index.apply(&[Change::Undescribe(key_of(9)), Change::Undescribe(key_of(8))])?;
    let before = Contents::of(index)?;
    index.reopen()?;
    let after = Contents::of(index)?;
    let mut expected = vec![(key_of(1), description_of(1, 2)), (key_of(3), description_of(3, 1))];
    expected.sort_unstable_by_key(|(key, _)| *key);
    index.apply(&[Change::Remove(key_of(3)), Change::Remove(key_of(1))])?;
    Ok(before == after
        && before.descriptions == expected
        && before.blocks.len() == 3
        && Contents::of(index)?.descriptions.is_empty())
}

fn passes_over<I: Index>(index: &I, plant: Plant<I>) -> io::Result<bool> {
    index.apply(&[put(1, 1), put(2, 1), indexed(1, 1, 1)])?;
    let block = |number| codec::Key::block(&key_of(number));
    plant(index, block(2).as_ref(), &[2; 29]);
    plant(index, block(3).as_ref(), &[]);
    plant(index, block(4).as_ref(), &[1; 30]);
    plant(index, codec::Key::segment(SegmentId(1)).as_ref(), &[1; 16]);
    plant(index, &[3, 1, 2], &[1; 29]);
    plant(index, &[200], &[1; 29]);
    plant(index, codec::Key::description(&key_of(1)).as_ref(), &[1; 7]);
    let contents = Contents::of(index)?;
    let mut good = contents.passed_over == 7
        && contents.descriptions.is_empty()
        && contents.segments.is_empty();
    good &= contents.blocks == [(key_of(1), entry_of(1, 1))];
    for number in 2..5 {
        good &= index.get(&key_of(number))?.is_none();
    }
    // They are no hindrance to what comes.
    index.apply(&[put(2, 2), Change::Remove(key_of(3))])?;
    Ok(good && index.get(&key_of(2))?.is_some() && Contents::of(index)?.passed_over == 5)
}

fn a_failing_visit_ends_the_load(index: &impl Index) -> io::Result<bool> {
    index.apply(&[put(1, 1), put(2, 1), put(3, 1)])?;
    let mut seen = 0;
    let outcome = index.load(&mut |_| {
        seen += 1;
        if seen == 2 { Err(io::Error::from(io::ErrorKind::Interrupted)) } else { Ok(()) }
    });
    Ok(seen == 2 && outcome.is_err_and(|error| error.kind() == io::ErrorKind::Interrupted))
}

fn reopening_keeps(index: &impl Index) -> io::Result<bool> {
    let id = NamespaceId::from_array([5; 32]);
    let puts: Vec<_> = (0..100).map(|number| put(number, 1)).collect();
    index.apply(&puts)?;
    index.apply(&[indexed(1, 1, 1), Change::Namespace(id, vec![1]), Change::Remove(key_of(7))])?;
    let before = Contents::of(index)?;
    index.reopen()?;
    let after = Contents::of(index)?;
    index.apply(&[put(7, 2)])?;
    Ok(before == after && before.blocks.len() == 99 && index.get(&key_of(7))?.is_some())
}

fn clearing_drops(index: &impl Index) -> io::Result<bool> {
    index.apply(&[put(1, 1), indexed(1, 1, 1), Change::Namespace(key_of(1).namespace, vec![1])])?;
    index.apply(&[describe(1, 1)])?;
    index.clear()?;
    let empty = Contents::of(index)? == Contents::default();
    index.reopen()?;
    let still = Contents::of(index)? == Contents::default();
    index.apply(&[put(2, 1)])?;
    Ok(empty && still && index.get(&key_of(2))?.is_some() && index.get(&key_of(1))?.is_none())
}
