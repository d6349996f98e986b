//! Everything that is written comes back, and nothing damaged is taken for what it was.

use std::sync::Arc;

use super::*;
use crate::{
    block::BlockHash,
    key::IndexKey,
    namespace::{Identity, Namespace, NamespaceSpec, NamespaceTable, PartSpec, Secret},
    object::{
        codec::Coding,
        names::{EpochId, ManifestId, PackId, Seq},
    },
    testing::Draws,
};

pub(super) fn namespace(model: &str, dtype: &str, parts: &[u32]) -> Arc<Namespace> {
    let identity = Identity {
        tenant: "default".into(),
        model: model.into(),
        dtype: dtype.into(),
        block_tokens: 16,
        parts: (0..)
            .zip(parts)
            .map(|(rank, bytes)| PartSpec { group: 0, rank, bytes: *bytes })
            .collect(),
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    let identity = Identity {
        weights: "1".into(),
        engine: "test".into(),
        layout: "plain".into(),
        split: "none".into(),
        ..identity
    };
    let table = NamespaceTable::new(Secret::new([7; 32]), false);
    table.open(NamespaceSpec::Engine(Box::new(identity)), false).unwrap().namespace
}

pub(super) fn cluster_name() -> ClusterName {
    ClusterName::new("prod-1").unwrap()
}

pub(super) const ID: PackId = PackId { ordinal: 3, epoch: 7, seq: 21 };

fn hash(number: u64) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockHash::from_array(bytes)
}

/// Floats as a cache has them.
pub(super) fn payload(number: u64, bytes: usize) -> Vec<u8> {
    let mut draws = Draws::new(number);
    let mut bytes_of = |at: usize| {
        let drawn = draws.draw().to_le_bytes();
        if at.is_multiple_of(2) { drawn[0] } else { 0x3e + drawn[0] % 3 }
    };
    (0..bytes).map(&mut bytes_of).collect()
}

/// A pack of blocks of two namespaces: halves, whose planes are split, and bytes.
pub(super) fn pack(blocks: u64, policy: CodingPolicy) -> Pack {
    let spaces = [namespace("a", "bf16", &[600, 400]), namespace("b", "u8", &[1000])];
    let mut builder = PackBuilder::new(cluster_name(), 64 << 20, policy);
    for number in 0..blocks {
        let namespace = &spaces[usize::from(number % 3 == 1)];
        let sums: Vec<u64> = (0..).take(namespace.layout().parts().len()).collect();
        let payload = &payload(number, 1000);
        let block = Block { namespace, hash: hash(number), sums: &sums, payload };
        assert_eq!(u64::from(builder.push(&block).unwrap()), number);
    }
    let bytes = builder.bytes();
    let pack = builder.finish(ID, 1_700_000_000_000);
    assert_eq!((pack.bytes(), pack.footer.object_bytes()), (bytes, bytes));
    pack
}

pub(super) fn whole(pack: &Pack) -> Vec<u8> {
    pack.body.concat()
}

pub(super) fn footer() -> Footer {
    pack(5, CodingPolicy::Compressed).footer
}

pub(super) fn manifest() -> Manifest {
    let id = ManifestId { ordinal: 3, at: Seq { epoch: 7, seq: 2 } };
    let key = |number| IndexKey { namespace: *namespace("a", "u8", &[1]).id(), hash: hash(number) };
    let records = vec![
        ManifestRecord::Pack(footer()),
        ManifestRecord::Dropped(ID),
        ManifestRecord::Removed { keys: vec![key(1), key(2)], before: ID.at() },
        ManifestRecord::Removed { keys: Vec::new(), before: Seq { epoch: 1, seq: u64::MAX } },
        ManifestRecord::Base { from: 1 },
    ];
    Manifest { cluster: cluster_name(), id, records }
}

pub(super) fn epoch() -> EpochRecord {
    EpochRecord {
        cluster: cluster_name(),
        id: EpochId { ordinal: 3, epoch: 7 },
        holder: "kvstrata-3.kvstrata".into(),
        role: Role::Own,
        opened_unix_ms: 1_700_000_000_000,
        adopted_from: Some(6),
    }
}

pub(super) fn alive() -> Alive {
    let EpochRecord { cluster, id, holder, .. } = epoch();
    Alive { cluster, id, holder, seen_unix_ms: 1_700_000_060_000 }
}

#[test]
fn a_pack_is_read_back_from_its_end() {
    for policy in [CodingPolicy::Raw, CodingPolicy::Compressed] {
        for blocks in [0, 1, 2, 100] {
            let pack = pack(blocks, policy);
            let bytes = whole(&pack);
            let length = bytes.len() as u64;
            let trailer = PackTrailer::decode(&bytes[bytes.len() - 64..], length).unwrap();
            assert_eq!(PackTrailer::decode(&bytes, length), Ok(trailer));
            let range = trailer.footer_range();
            let at = |at: u64| usize::try_from(at).unwrap();
            let footer = trailer.footer(&bytes[at(range.start)..at(range.end)]).unwrap();
            assert_eq!(footer, pack.footer);
            assert_eq!((footer.id, trailer.id), (ID, ID));
            for (number, entry) in (0..).zip(&footer.entries) {
                let stored = &bytes[at(entry.range().start)..at(entry.range().end)];
                let mut found = vec![0; 1000];
                entry.decode_block(stored, &mut found).unwrap();
                assert_eq!(found, payload(number, 1000), "{number}");
                assert_eq!(entry.key.hash, hash(number));
                assert!(entry.decode_block(&stored[1..], &mut found).is_err());
                assert!(entry.decode_block(stored, &mut found[1..]).is_err());
            }
            let spaces = [namespace("a", "bf16", &[600, 400]), namespace("b", "u8", &[1000])];
            for ((id, encoded), space) in footer.namespaces.iter().zip(&spaces) {
                assert_eq!((id, encoded), (space.id(), &space.encoded()));
            }
        }
    }
}

#[test]
fn the_coding_follows_the_policy_and_the_element_type() {
    let codings = |policy| {
        let footer = pack(3, policy).footer;
        footer.entries.iter().map(|entry| entry.coding).collect::<Vec<_>>()
    };
    assert_eq!(codings(CodingPolicy::Raw), [Coding::Raw; 3]);
    let compressed = [Coding::PlanesZstd, Coding::Zstd, Coding::PlanesZstd];
    assert_eq!(codings(CodingPolicy::Compressed), compressed);
}

#[test]
fn a_builder_says_when_it_is_full_and_an_empty_one_never_is() {
    let namespace = &namespace("a", "u8", &[1000]);
    let payload = &[0; 1000][..];
    let block = Block { namespace, hash: hash(1), sums: &[1], payload };
    let mut builder = PackBuilder::new(cluster_name(), 999, CodingPolicy::Raw);
    assert_eq!(builder.push(&block), Ok(0));
    let before = builder.bytes();
    assert_eq!(builder.push(&block), Err(Refused::Full));
    assert_eq!((builder.bytes(), builder.len()), (before, 1));
    let mut builder = PackBuilder::new(cluster_name(), u64::MAX, CodingPolicy::Raw);
    for bad in [Block { payload: &[], ..block }, Block { sums: &[], ..block }] {
        assert_eq!(builder.push(&bad), Err(Refused::Invalid));
    }
    assert_eq!(builder.push(&Block { sums: &[0; 1025], ..block }), Err(Refused::Invalid));
    let long = vec![0; (64 << 20) + 1];
    assert_eq!(builder.push(&Block { payload: &long, ..block }), Err(Refused::Invalid));
    assert!(builder.is_empty());
    for number in 0..PACK_ENTRIES_MAX {
        let block = Block { payload: &payload[..1], ..block };
        assert_eq!(builder.push(&block), Ok(u32::try_from(number).unwrap()));
    }
    assert_eq!(builder.push(&block), Err(Refused::Full));
    let footer = builder.finish(ID, 1).footer;
    assert_eq!(Footer::decode(&footer.encode()), Ok(footer));
}

#[test]
fn blocks_of_another_pack_are_taken_as_they_are_encoded() {
    let from = pack(5, CodingPolicy::Compressed);
    let namespace = &*namespace("a", "bf16", &[600, 400]);
    let mut builder = PackBuilder::new(cluster_name(), 1 << 20, CodingPolicy::Compressed);
    let bytes_in = |pack: &Pack, entry: &PackEntry| {
        let at = |place: u64| usize::try_from(place).unwrap();
        whole(pack)[at(entry.range().start)..at(entry.range().end)].to_vec()
    };
    let stored = |entry: &PackEntry| bytes_in(&from, entry);
    let ours = |entry: &&PackEntry| entry.key.namespace == *namespace.id();
    let taken: Vec<_> = from.footer.entries.iter().filter(ours).skip(1).cloned().collect();
    assert!(taken.len() >= 2);
    for entry in &taken {
        builder.push_encoded(namespace, entry.clone(), &stored(entry)).unwrap();
    }
    let short = &stored(&taken[0])[1..];
    let refused = builder.push_encoded(namespace, taken[0].clone(), short);
    assert_eq!(refused, Err(Refused::Invalid));
    let again = builder.finish(from.footer.id, 7);
    assert_eq!(again.footer.entries.len(), taken.len());
    for (entry, old) in again.footer.entries.iter().zip(&taken) {
        assert_eq!(bytes_in(&again, entry), stored(old));
        assert_eq!(PackEntry { offset: old.offset, ..entry.clone() }, *old);
    }
    let mut full = PackBuilder::new(cluster_name(), u64::from(taken[0].stored), CodingPolicy::Raw);
    full.push_encoded(namespace, taken[0].clone(), &stored(&taken[0])).unwrap();
    let refused = full.push_encoded(namespace, taken[1].clone(), &stored(&taken[1]));
    assert_eq!(refused, Err(Refused::Full), "by what it takes, not by the block's length");
}

#[test]
fn footers_stay_within_what_is_read() {
    let namespace = &namespace("a", "u8", &[1; 1024]);
    let sums = &[1; 1024][..];
    let block = Block { namespace, hash: hash(1), sums, payload: &[1; 1024] };
    let mut builder = PackBuilder::new(cluster_name(), 64 << 20, CodingPolicy::Raw);
    while builder.push(&block).is_ok() {}
    let footer = builder.finish(ID, 1).footer;
    let encoded = footer.encode();
    let left = usize::try_from(FOOTER_BYTES_MAX).unwrap() - encoded.len();
    assert!(left < 56 + 1024 * 8, "{left} bytes left");
    assert_eq!(encoded.len() as u64, footer.footer_bytes());
    assert_eq!(Footer::decode(&encoded), Ok(footer));
}

#[test]
fn large_bodies_come_in_pieces_of_a_part() {
    let namespace = &namespace("a", "u8", &[3 << 20]);
    let mut builder = PackBuilder::new(cluster_name(), 64 << 20, CodingPolicy::Raw);
    let mut all = Vec::new();
    for number in 0..7 {
        let payload = &vec![u8::try_from(number).unwrap(); 3 << 20];
        all.extend_from_slice(payload);
        builder.push(&Block { namespace, hash: hash(number), sums: &[1], payload }).unwrap();
    }
    let pack = builder.finish(ID, 1);
    let (last, full) = pack.body.split_last().unwrap();
    assert_eq!(full.iter().map(bytes::Bytes::len).collect::<Vec<_>>(), [8 << 20; 2]);
    assert!((5 << 20..8 << 20).contains(&last.len()));
    assert_eq!(whole(&pack)[..all.len()], all);
}

#[test]
fn manifests_and_epochs_come_back() {
    let manifest = manifest();
    let bytes = manifest.encode();
    let records: u64 = manifest.records.iter().map(ManifestRecord::bytes).sum();
    assert_eq!(bytes.len() as u64, Manifest::empty_bytes(&manifest.cluster) + records);
    assert_eq!(Manifest::decode(&bytes), Ok(manifest));
    for adopted_from in [None, Some(0), Some(6)] {
        for role in [Role::Own, Role::Ward, Role::Released, Role::Empty] {
            let record = EpochRecord { adopted_from, role, ..epoch() };
            assert_eq!(EpochRecord::decode(&record.encode()), Ok(record));
        }
    }
    assert_eq!(Alive::decode(&alive().encode()), Ok(alive()));
    for holder in [String::new(), "x".repeat(254)] {
        let alive = Alive { holder, ..alive() };
        assert_eq!(Alive::decode(&alive.encode()), Err(Damage::Misplaced));
    }
    assert_eq!(Alive::decode(&epoch().encode()), Err(Damage::Foreign));
}

/// What a decoder says is wrong.
type Wrong = fn(&[u8]) -> Option<Damage>;

/// Every structure, with what decodes it.
fn structures() -> Vec<(Vec<u8>, Wrong)> {
    let trailer = |bytes: &[u8]| {
        let of = whole(&pack(5, CodingPolicy::Compressed)).len() as u64;
        PackTrailer::decode(bytes, of).err()
    };
    let pack = whole(&pack(5, CodingPolicy::Compressed));
    vec![
        (footer().encode(), |bytes| Footer::decode(bytes).err()),
        (manifest().encode(), |bytes| Manifest::decode(bytes).err()),
        (epoch().encode(), |bytes| EpochRecord::decode(bytes).err()),
        (alive().encode(), |bytes| Alive::decode(bytes).err()),
        (pack[pack.len() - 64..].to_vec(), trailer),
    ]
}

#[test]
fn no_flipped_bit_and_no_cut_goes_unnoticed() {
    for (mut bytes, decode) in structures() {
        assert_eq!(decode(&bytes), None);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bytes).is_some(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for cut in 0..bytes.len() {
            assert!(decode(&bytes[..cut]).is_some(), "cut to {cut}");
        }
    }
}

/// Puts another checksum behind changed bytes, so that what they say is looked at.
pub(super) fn reseal(bytes: &mut [u8]) {
    if let Some((head, sum)) = bytes.split_last_chunk_mut::<8>() {
        *sum = checksum(head).to_le_bytes();
    }
}

#[test]
fn another_version_is_told_from_damage() {
    for (mut bytes, decode) in structures() {
        bytes[8] = 2;
        assert_eq!(decode(&bytes), Some(Damage::Checksum));
        reseal(&mut bytes);
        assert_eq!(decode(&bytes), Some(Damage::Version));
        bytes[0] = b'X';
        assert_eq!(decode(&bytes), Some(Damage::Foreign));
    }
}

/// What a footer says once bytes at a place are others, with a checksum that is right.
fn resealed(at: usize, with: &[u8]) -> Result<Footer, Damage> {
    let mut bytes = footer().encode();
    bytes[at..at + with.len()].copy_from_slice(with);
    reseal(&mut bytes);
    Footer::decode(&bytes)
}

#[test]
fn numbers_that_cannot_be_right_are_refused() {
    let namespaces: usize = footer().namespaces.iter().map(|(_, encoded)| 36 + encoded.len()).sum();
    let entry = 48 + cluster_name().as_str().len() + namespaces;
    let all_ones = [0xff; 4];
    let cases: [(&str, usize, &[u8], Damage); 12] = [
        ("bytes of the name", 10, &[0, 0], Damage::Misplaced),
        ("another name", 48, b"P", Damage::Misplaced),
        ("namespaces", 40, &all_ones, Damage::Misplaced),
        ("entries", 44, &all_ones, Damage::Misplaced),
        ("fewer entries", 44, &[4, 0, 0, 0], Damage::Misplaced),
        ("namespace of an entry", entry + 32, &all_ones, Damage::Misplaced),
        ("nothing stored", entry + 36, &[0; 4], Damage::Misplaced),
        ("more stored than there is", entry + 36, &all_ones, Damage::Misplaced),
        ("a block that is too long", entry + 40, &all_ones, Damage::Misplaced),
        ("no checksums", entry + 52, &[0, 0], Damage::Misplaced),
        ("another coding", entry + 54, &[4], Damage::Version),
        ("what is zero", entry + 55, &[1], Damage::Misplaced),
    ];
    for (what, at, with, damage) in cases {
        assert_eq!(resealed(at, with), Err(damage), "{what}");
    }
    assert!(resealed(32, &[1; 8]).is_ok(), "another time is a right number");
}

#[test]
fn entries_are_bounded_and_namespaces_stand_once() {
    let mut twice = footer();
    twice.namespaces.push(twice.namespaces[0].clone());
    assert_eq!(Footer::decode(&twice.encode()), Err(Damage::Misplaced));
    let mut raw = footer();
    raw.entries[0].coding = Coding::Raw;
    assert_eq!(Footer::decode(&raw.encode()), Err(Damage::Misplaced));
    let mut unknown = footer();
    unknown.entries[4].key.namespace = IndexKey::NONE.namespace;
    assert_eq!(Footer::decode(&unknown.encode()), Err(Damage::Misplaced));
}

#[test]
fn a_trailer_is_that_of_one_pack() {
    let pack = pack(5, CodingPolicy::Compressed);
    let bytes = whole(&pack);
    let trailer = PackTrailer::decode(&bytes, bytes.len() as u64).unwrap();
    for other in [0, 63, bytes.len() as u64 - 1, bytes.len() as u64 + 1, u64::MAX] {
        assert_eq!(PackTrailer::decode(&bytes, other), Err(Damage::Misplaced), "{other}");
    }
    let mut other = pack.footer.clone();
    other.id.seq += 1;
    assert_eq!(trailer.footer(&other.encode()), Err(Damage::Misplaced));
    let huge = PackTrailer { footer_offset: u64::MAX, ..trailer };
    assert_eq!(PackTrailer::decode(&huge.encode(), 64), Err(Damage::Misplaced));
    let long = PackTrailer { footer_bytes: u32::MAX, footer_offset: 0, ..trailer };
    let of = u64::from(u32::MAX) + 64;
    assert_eq!(PackTrailer::decode(&long.encode(), of), Err(Damage::Misplaced));
}
