//! The assembler: whole and verified, or a miss; never out of order.

use super::*;

fn namespace() -> NamespaceId {
    NamespaceId::from_bytes([3; 32])
}

#[derive(Default)]
struct Seen {
    blocks: Vec<(u32, Vec<u8>)>,
    misses: Vec<(Range<u32>, MissReason)>,
}

impl GetSink for Seen {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.blocks.push((block.position, block.pieces().concat()));
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        self.misses.push((positions, reason));
    }
}

fn hashes(count: u8) -> HashList {
    let list: Vec<_> = (0..count).map(|n| BlockHash::new(&[n; 32]).unwrap()).collect();
    HashList::of(&list)
}

fn parts() -> Vec<(u32, PartSpec)> {
    let spec = |group, bytes| PartSpec { group, rank: 0, bytes };
    vec![(0, spec(0, 6)), (1, spec(1, 4))]
}

/// The piece of part `part` of block `index` that starts at `offset`.
fn piece(index: u8, part: u32, offset: u32, data: &[u8], whole: &[u8]) -> v1::PartData {
    let hash = BlockHash::new(&[index; 32]).unwrap();
    let checksum = part_checksum(&namespace(), &hash, part, 0, whole);
    let data = Bytes::copy_from_slice(data);
    let part_bytes =
        if data.len() == whole.len() { 0 } else { u32::try_from(whole.len()).unwrap() };
    v1::PartData { index: index.into(), part, offset, data, checksum, part_bytes }
}

fn run(pieces: Vec<v1::PartData>, count: u8) -> (Result<GetSummary>, Seen) {
    let (parts, mut seen) = (parts(), Seen::default());
    let id = namespace();
    let mut assembler = Assembler::new(&id, &parts, (10, hashes(count)));
    for piece in pieces {
        if let Err(error) = assembler.piece(piece, Tier::Dram, &mut seen) {
            return (Err(error), seen);
        }
    }
    (assembler.finish(false), seen)
}

#[test]
fn a_block_is_delivered_when_all_its_parts_are_verified() {
    let (summary, seen) = run(
        vec![
            piece(0, 0, 0, b"abc", b"abcdef"),
            piece(0, 0, 3, b"d", b"abcdef"),
            piece(0, 0, 4, b"ef", b"abcdef"),
            piece(0, 1, 0, b"ghij", b"ghij"),
        ],
        1,
    );
    assert_eq!(seen.blocks, [(10, b"abcdefghij".to_vec())]);
    let summary = summary.unwrap();
    assert_eq!((summary.blocks(), summary.bytes, summary.missed), (1, 10, 0));
}

#[test]
fn a_damaged_part_makes_its_block_a_miss_and_the_next_one_is_delivered() {
    let (summary, seen) = run(
        vec![
            piece(0, 0, 0, b"abcdeX", b"abcdef"),
            piece(0, 1, 0, b"ghij", b"ghij"),
            piece(1, 0, 0, b"klmnop", b"klmnop"),
            piece(1, 1, 0, b"qrst", b"qrst"),
        ],
        2,
    );
    assert_eq!(seen.misses, [(10..11, MissReason::CorruptHere)]);
    assert_eq!(seen.blocks, [(11, b"klmnopqrst".to_vec())]);
    assert_eq!(summary.unwrap().corrupt_here, 1);
}

#[test]
fn the_right_bytes_of_another_block_are_a_miss() {
    let mut swapped = piece(1, 0, 0, b"abcdef", b"abcdef");
    swapped.index = 0;
    let (_, seen) = run(vec![swapped, piece(0, 1, 0, b"ghij", b"ghij")], 1);
    assert_eq!(seen.misses, [(10..11, MissReason::CorruptHere)]);
}

#[test]
fn leaving_the_order_ends_the_get() {
    for bad in [
        piece(1, 0, 0, b"abcdef", b"abcdef"),
        piece(0, 1, 0, b"ghij", b"ghij"),
        piece(0, 0, 1, b"bcdef", b"abcdef"),
        piece(9, 0, 0, b"abcdef", b"abcdef"),
        v1::PartData { part_bytes: 3, ..piece(0, 0, 0, b"abcdef", b"abcdef") },
    ] {
        let (result, seen) = run(vec![bad], 2);
        assert!(result.unwrap_err().to_string().contains("contract"));
        assert!(seen.blocks.is_empty());
    }
}

#[test]
fn a_short_stream_is_an_error_and_not_a_short_answer() {
    let (result, _) = run(vec![piece(0, 0, 0, b"abcdef", b"abcdef")], 1);
    assert!(result.unwrap_err().to_string().contains("ended after 0 of 1"));
}

#[test]
fn a_miss_may_come_in_the_middle_of_a_block() {
    let (parts, mut seen) = (parts(), Seen::default());
    let id = namespace();
    let mut assembler = Assembler::new(&id, &parts, (0, hashes(3)));
    assembler.piece(piece(0, 0, 0, b"abcdef", b"abcdef"), Tier::Nvme, &mut seen).unwrap();
    let miss = v1::GetMiss { start: 0, end: 3, reason: v1::MissReason::Corrupt.into() };
    assembler.miss(&miss, &mut seen).unwrap();
    assert_eq!(seen.misses, [(0..3, MissReason::Corrupt)]);
    assert_eq!(assembler.finish(false).unwrap().missed, 3);
}

#[test]
fn opaque_values_have_any_length() {
    let (parts, mut seen) = ([(0, PartSpec { group: 0, rank: 0, bytes: 0 })], Seen::default());
    let id = namespace();
    let mut assembler = Assembler::new(&id, &parts, (0, hashes(2)));
    for part in [
        piece(0, 0, 0, b"abc", b"abcdef"),
        piece(0, 0, 3, b"def", b"abcdef"),
        piece(1, 0, 0, b"", b""),
    ] {
        assembler.piece(part, Tier::Dram, &mut seen).unwrap();
    }
    assert_eq!(assembler.finish(false).unwrap().blocks(), 2);
    assert_eq!(seen.blocks, [(0, b"abcdef".to_vec()), (1, Vec::new())]);
}
