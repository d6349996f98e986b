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
fn piece(index: u8, part: u32, offset: u32, data: &[u8], whole: &[u8]) -> (Piece, Bytes) {
    let hash = BlockHash::new(&[index; 32]).unwrap();
    let checksum = part_checksum(&namespace(), &hash, part, 0, whole);
    let part_bytes = if data.len() == whole.len() { 0 } else { whole.len() };
    let (index, offset, bytes) = (index.into(), offset as usize, data.len());
    let piece = Piece { index, part, offset, bytes, part_bytes, checksum };
    (piece, Bytes::copy_from_slice(data))
}

fn run(pieces: Vec<(Piece, Bytes)>, count: u8) -> (Result<GetSummary>, Seen) {
    let (parts, mut seen) = (parts(), Seen::default());
    let id = namespace();
    let mut assembler = Assembler::new(&id, &parts, (10, hashes(count)));
    for (piece, data) in pieces {
        if let Err(error) = assembler.piece(&piece, data, Tier::Dram, &mut seen) {
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
    swapped.0.index = 0;
    let (_, seen) = run(vec![swapped, piece(0, 1, 0, b"ghij", b"ghij")], 1);
    assert_eq!(seen.misses, [(10..11, MissReason::CorruptHere)]);
}

#[test]
fn leaving_the_order_ends_the_get() {
    let mut too_long = piece(0, 0, 0, b"abcdef", b"abcdef");
    too_long.0.part_bytes = 3;
    for bad in [
        piece(1, 0, 0, b"abcdef", b"abcdef"),
        piece(0, 1, 0, b"ghij", b"ghij"),
        piece(0, 0, 1, b"bcdef", b"abcdef"),
        piece(9, 0, 0, b"abcdef", b"abcdef"),
        too_long,
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
    let (first, data) = piece(0, 0, 0, b"abcdef", b"abcdef");
    assembler.piece(&first, data, Tier::Nvme, &mut seen).unwrap();
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
    for (part, data) in [
        piece(0, 0, 0, b"abc", b"abcdef"),
        piece(0, 0, 3, b"def", b"abcdef"),
        piece(1, 0, 0, b"", b""),
    ] {
        assembler.piece(&part, data, Tier::Dram, &mut seen).unwrap();
    }
    assert_eq!(assembler.finish(false).unwrap().blocks(), 2);
    assert_eq!(seen.blocks, [(0, b"abcdef".to_vec()), (1, Vec::new())]);
}

/// Has memory for the first parts of blocks only.
#[derive(Default)]
struct Lender {
    memory: [u8; 12],
    places: Vec<PiecePlace>,
    /// Position, length and what came in pieces.
    blocks: Vec<(u32, usize, Vec<u8>)>,
    missed: Vec<u32>,
}

impl GetSink for Lender {
    fn room(&mut self, place: PiecePlace) -> Option<&mut [u8]> {
        self.places.push(place);
        let start = place.position as usize * 6 + place.offset;
        (place.part == 0).then(|| &mut self.memory[start..start + place.bytes])
    }

    fn block(&mut self, block: FetchedBlock<'_>) {
        self.blocks.push((block.position, block.len(), block.pieces().concat()));
    }

    fn miss(&mut self, positions: Range<u32>, _reason: MissReason) {
        self.missed.extend(positions);
    }
}

#[test]
fn bytes_go_to_memory_that_is_lent_and_are_verified_there() {
    let (parts, mut lender) = (parts(), Lender::default());
    let id = namespace();
    let mut assembler = Assembler::new(&id, &parts, (0, hashes(2)));
    for (part, data) in [
        piece(0, 0, 0, b"abcd", b"abcdef"),
        piece(0, 0, 4, b"ef", b"abcdef"),
        piece(0, 1, 0, b"gh", b"ghij"),
        piece(0, 1, 2, b"ij", b"ghij"),
        piece(1, 0, 0, b"klmnoX", b"klmnop"),
        piece(1, 1, 0, b"qrst", b"qrst"),
    ] {
        assembler.piece(&part, data, Tier::Dram, &mut lender).unwrap();
    }
    let summary = assembler.finish(false).unwrap();
    assert_eq!((summary.bytes, summary.corrupt_here), (10, 1));
    assert_eq!(lender.blocks, [(0, 10, b"ghij".to_vec())]);
    assert_eq!((&lender.memory, lender.missed.as_slice()), (b"abcdefklmnoX", &[1][..]));
    let place = PiecePlace { position: 0, part: 0, offset: 4, bytes: 2, part_bytes: 6 };
    assert_eq!(lender.places[1], place);
}
