//! Every shape comes back, and nothing damaged or displaced is taken for what it was.

use super::*;
use crate::{block::BlockHash, namespace::NamespaceId, nvme::index::IndexKey};

fn key(number: u8) -> IndexKey {
    IndexKey {
        namespace: NamespaceId::from_array([number; 32]),
        hash: BlockHash::from_array([number + 100; 32]),
    }
}

fn block(sums: usize, payload: &[u8]) -> RecordHeader {
    RecordHeader {
        kind: Kind::Block,
        generation: 77,
        unit: 5,
        key: key(1),
        len: u32::try_from(payload.len()).unwrap(),
        layout: 9,
        payload_sum: checksum(payload),
        parts: sums,
        sums: (0..sums).map(|sum| u64::try_from(sum).unwrap() * 3 + 1).collect(),
    }
}

fn encode(header: &RecordHeader, payload: &[u8]) -> Vec<u8> {
    let frame = header.frame(payload);
    [&frame.head[..], &payload[..frame.whole], &frame.behind].concat()
}

#[test]
fn records_of_every_shape_come_back() {
    for sums in [1, 2, 495, 496, 1024] {
        for len in [1, 100, 3951, 3952, 3953, 4096, 65_536] {
            let payload: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
            let header = block(sums, &payload);
            let bytes = encode(&header, &payload);
            let shape = header.shape();
            assert_eq!(bytes.len(), usize::try_from(shape.bytes()).unwrap(), "{sums} {len}");
            let (mut found, behind) = RecordHeader::decode(&bytes[..PAGE_BYTES], 77, 5).unwrap();
            let found_payload = match found.inline_payload(&bytes[..PAGE_BYTES]) {
                Some(payload) => payload,
                None => &bytes[PAGE_BYTES..PAGE_BYTES + len],
            };
            assert!(found.is_payload(found_payload));
            if behind.count > 0 {
                let start = PAGE_BYTES + len.next_multiple_of(PAGE_BYTES);
                found.sums = behind.read(&bytes[start..]).unwrap();
            }
            assert_eq!(found, header);
        }
    }
}

#[test]
fn no_flipped_bit_of_a_header_goes_unnoticed() {
    let header = block(2, b"payload");
    let bytes = encode(&header, b"payload");
    for bit in 0..(136 + 2 * 8) * 8 {
        let mut page = bytes[..PAGE_BYTES].to_vec();
        page[bit / 8] ^= 1 << (bit % 8);
        let found = RecordHeader::decode(&page, 77, 5);
        assert!(found.is_err(), "bit {bit}: {found:?}");
    }
}

#[test]
fn a_page_of_another_place_or_generation_is_no_record() {
    let bytes = encode(&block(1, b"x"), b"x");
    let decode = |generation, unit| RecordHeader::decode(&bytes, generation, unit).map(drop);
    assert_eq!(decode(77, 5), Ok(()));
    assert_eq!(decode(78, 5), Err(Damage::Misplaced));
    assert_eq!(decode(77, 6), Err(Damage::Misplaced));
    let zeros = [0; PAGE_BYTES];
    assert_eq!(RecordHeader::decode(&zeros, 77, 5).map(drop), Err(Damage::Foreign));
}

#[test]
fn segment_headers_and_trailers_come_back_and_notice_every_bit() {
    let header =
        SegmentHeader { segment: SegmentId(9), generation: 3, store: [4; 16], bytes: 1 << 24 };
    let mut page = [0; PAGE_BYTES];
    header.encode(&mut page);
    assert_eq!(SegmentHeader::decode(&page), Ok(header));
    let trailer = Trailer {
        segment: SegmentId(9),
        generation: 3,
        data_bytes: 8192,
        table_bytes: 100,
        entries: 2,
        table_sum: 5,
    };
    let mut end = [0; PAGE_BYTES];
    trailer.encode(&mut end);
    assert_eq!(Trailer::decode(&end, 8192 + 4096 + 4096), Ok(trailer));
    assert_eq!(Trailer::decode(&end, 8192 + 4096), Err(Damage::Misplaced));
    for bit in 0..64 * 8 {
        let (mut first, mut last) = (page, end);
        first[bit / 8] ^= 1 << (bit % 8);
        last[bit / 8] ^= 1 << (bit % 8);
        assert!(SegmentHeader::decode(&first).is_err(), "bit {bit}");
        assert!(Trailer::decode(&last, 8192 + 4096 + 4096).is_err(), "bit {bit}");
    }
}

#[test]
fn tables_come_back_and_garbage_is_refused() {
    let mut table = EntryTable::default();
    for number in 1..3 {
        let namespace = RecordHeader { kind: Kind::Namespace, ..block(0, b"abc") };
        let id = IndexKey { namespace: key(number).namespace, ..IndexKey::NONE };
        table.push(Entry::of(&RecordHeader { key: id, ..namespace }, b"abc"));
        let header = RecordHeader { key: key(number), ..block(usize::from(number), &[7; 5000]) };
        table.push(Entry::of(&header, &[]));
    }
    let tombstones =
        RecordHeader { kind: Kind::Tombstones, key: IndexKey::NONE, ..block(0, &[1; 144]) };
    table.push(Entry::of(&tombstones, &[]));
    let bytes = table.encode();
    assert_eq!(bytes.len(), table.bytes());
    let back = EntryTable::decode(&bytes, 5).unwrap();
    assert_eq!(back.entries(), table.entries());
    assert!(EntryTable::decode(&bytes, 4).is_err());
    for cut in 0..bytes.len() {
        assert!(EntryTable::decode(&bytes[..cut], 5).is_err(), "cut to {cut}");
    }
}

#[test]
fn tombstones_come_back() {
    let barrier = |unit| Place { segment: SegmentId(3), unit };
    let all: Vec<_> = (0..60_u8)
        .map(|number| Tombstone { key: key(number), barrier: barrier(u32::from(number)) })
        .collect();
    let bytes = Tombstone::encode_all(&all);
    assert_eq!(bytes.len(), 60 * 72);
    assert_eq!(Tombstone::decode_all(&bytes), all);
}

#[test]
fn places_and_locations_are_the_same() {
    for (segment, unit) in [(1, 0), (1, 1), (7, (1 << 18) - 1), ((1 << 46) - 1, 5)] {
        let place = Place { segment: SegmentId(segment), unit };
        assert_eq!(Place::of(place.location().unwrap()), place);
    }
    assert_eq!(Place { segment: SegmentId(1 << 46), unit: 0 }.location(), None);
    assert_eq!(Place { segment: SegmentId(1), unit: 1 << 18 }.location(), None);
    assert_eq!(Place { segment: SegmentId(0), unit: 0 }.location(), None);
}
