//! Decoders against inputs of all kinds: those of the corpus, and as many seeded changes of them as
//! there is time for.
//!
//! The corpus is in `corpus/KIND/NAME` beside this file. What is `good-` must be read, what is `bad-`
//! must be refused; `good-v1` is what version 1 wrote and stays as it is: a later version adds its own
//! beside it. An input that once broke a decoder is added by hand. To write the made ones again on
//! purpose, while version 1 is not released:
//!
//! ```text
//! KVSTRATA_REWRITE_CORPUS=1 cargo test -p kvstrata-tiers object::format::fuzz_tests
//! ```
//! For longer than a moment, with `KVSTRATA_FUZZ_SEED` for other changes:
//!
//! ```text
//! KVSTRATA_FUZZ_SECONDS=600 cargo test -p kvstrata-tiers changed_inputs -- --nocapture
//! ```

use std::{env, fs, path::PathBuf, time::Duration};

use tokio::time::Instant;

use super::{
    tests::{alive, cluster_name, epoch, footer, manifest, pack, payload, reseal, whole},
    *,
};
use crate::{
    object::{
        codec::{self, Coding},
        names::{EpochId, ManifestId, PackId, Seq},
    },
    testing::Mutator,
};

/// Changes of each kind that every test run tries.
const ROUNDS: u64 = 3000;
/// Changed inputs that are changed further, because they were read.
const POOL_MAX: usize = 256;
/// Blocks longer than this are not decoded here: they cost time and show nothing more.
const BLOCK_BYTES_MAX: u32 = 1 << 16;

/// A decoder, and what must be true of it for every input.
struct Kind {
    name: &'static str,
    /// Whether the input was read.
    check: fn(&[u8]) -> bool,
    /// Whether its last 8 bytes are the checksum of the others.
    sealed: bool,
}

const KINDS: [Kind; 8] = [
    Kind { name: "footer", check: check_footer, sealed: true },
    Kind { name: "manifest", check: check_manifest, sealed: true },
    Kind { name: "epoch", check: check_epoch, sealed: true },
    Kind { name: "alive", check: check_alive, sealed: true },
    Kind { name: "pack", check: check_pack, sealed: false },
    Kind { name: "stored", check: check_stored, sealed: false },
    Kind { name: "block", check: check_block, sealed: false },
    Kind { name: "name", check: check_name, sealed: false },
];

fn check_footer(bytes: &[u8]) -> bool {
    let Ok(footer) = Footer::decode(bytes) else { return false };
    assert_eq!(footer.encode(), bytes, "there is one way to write it");
    assert_eq!(footer.footer_bytes(), bytes.len() as u64);
    let mut end = 0;
    for entry in &footer.entries {
        assert_eq!(entry.range().start, end);
        end = entry.range().end;
        assert!(entry.stored <= entry.len && !entry.sums.is_empty());
    }
    assert_eq!(footer.data_bytes(), end);
    assert!(footer.entries.capacity() * 56 <= bytes.len(), "no more is made than there is");
    true
}

fn check_manifest(bytes: &[u8]) -> bool {
    let Ok(manifest) = Manifest::decode(bytes) else { return false };
    assert_eq!(manifest.encode(), bytes, "there is one way to write it");
    true
}

fn check_epoch(bytes: &[u8]) -> bool {
    let Ok(record) = EpochRecord::decode(bytes) else { return false };
    assert_eq!(record.encode(), bytes, "there is one way to write it");
    true
}

fn check_alive(bytes: &[u8]) -> bool {
    let Ok(alive) = Alive::decode(bytes) else { return false };
    assert_eq!(alive.encode(), bytes, "there is one way to write it");
    true
}

fn check_pack(bytes: &[u8]) -> bool {
    let Ok(trailer) = PackTrailer::decode(bytes, bytes.len() as u64) else { return false };
    assert!(bytes.ends_with(&trailer.encode()), "there is one way to write it");
    let at = |at: u64| usize::try_from(at).unwrap();
    let range = trailer.footer_range();
    let Ok(footer) = trailer.footer(&bytes[at(range.start)..at(range.end)]) else { return false };
    assert_eq!(footer.object_bytes(), bytes.len() as u64);
    let mut all = true;
    for entry in footer.entries.iter().filter(|entry| entry.len <= BLOCK_BYTES_MAX) {
        let stored = &bytes[at(entry.range().start)..at(entry.range().end)];
        all &= decodes(entry.coding, stored, at(entry.len.into())).is_some();
    }
    all
}

/// What is decoded: all of it was written, whatever was in the memory before.
fn decodes(coding: Coding, stored: &[u8], len: usize) -> Option<Vec<u8>> {
    let (mut zeros, mut ones) = (vec![0; len], vec![0xff; len]);
    let decoded = codec::decode(coding, stored, &mut zeros);
    assert_eq!(codec::decode(coding, stored, &mut ones), decoded);
    decoded.ok()?;
    assert_eq!(zeros, ones);
    Some(zeros)
}

/// The input: a coding, the length of the block (u32), and what is stored.
fn check_stored(bytes: &[u8]) -> bool {
    let Some((head, stored)) = bytes.split_first_chunk::<5>() else { return false };
    let Ok(coding) = Coding::of(head[0]) else { return false };
    let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]).min(BLOCK_BYTES_MAX);
    decodes(coding, stored, usize::try_from(len).unwrap()).is_some()
}

/// The input is the block.
fn check_block(bytes: &[u8]) -> bool {
    for element in [1, 2] {
        let (coding, stored) = codec::encode(bytes, element);
        assert!(stored.len() <= bytes.len());
        assert_eq!(decodes(coding, &stored, bytes.len()).as_deref(), Some(bytes));
    }
    true
}

fn check_name(bytes: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(bytes) else { return false };
    let names = [
        PackId::parse(name).map(|(cluster, id)| id.name(&cluster)),
        ManifestId::parse(name).map(|(cluster, id)| id.name(&cluster)),
        EpochId::parse(name).map(|(cluster, id)| id.name(&cluster)),
    ];
    let read: Vec<_> = names.into_iter().flatten().collect();
    assert!(read.len() <= 1 && read.iter().all(|read| read == name));
    read.len() == 1
}

fn home() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/object/format/corpus")
}

/// The inputs of a kind, in the order of their names.
fn corpus(kind: &Kind) -> Vec<(String, Vec<u8>)> {
    let directory = home().join(kind.name);
    let files = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{directory:?}: {error}"));
    let mut inputs: Vec<_> = files
        .map(|file| {
            let file = file.unwrap();
            (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap())
        })
        .collect();
    inputs.sort();
    inputs
}

#[test]
fn the_corpus_is_read_and_refused_as_its_names_say() {
    if env::var_os("KVSTRATA_REWRITE_CORPUS").is_some() {
        write_again();
    }
    for kind in &KINDS {
        let inputs = corpus(kind);
        assert!(inputs.iter().any(|(name, _)| name == "good-v1"), "{}", kind.name);
        for (name, bytes) in inputs {
            let good = name.starts_with("good-");
            assert!(good || name.starts_with("bad-"), "{name} says neither");
            assert_eq!((kind.check)(&bytes), good, "{}/{name}", kind.name);
        }
    }
}

#[test]
fn what_version_1_wrote_means_what_it_did() {
    let read = |kind| fs::read(home().join(kind).join("good-v1")).unwrap();
    let raw = pack(5, CodingPolicy::Raw);
    assert_eq!(read("pack"), whole(&raw));
    assert_eq!(Footer::decode(&read("footer")), Ok(raw.footer));
    assert_eq!(Manifest::decode(&read("manifest")), Ok(raw_manifest()));
    assert_eq!(EpochRecord::decode(&read("epoch")), Ok(epoch()));
    assert_eq!(Alive::decode(&read("alive")), Ok(alive()));
    for name in ["good-v1", "good-zstd", "good-odd"] {
        let bytes = fs::read(home().join("stored").join(name)).unwrap();
        let len = usize::from(u16::from_le_bytes([bytes[1], bytes[2]]));
        let found = decodes(Coding::of(bytes[0]).unwrap(), &bytes[5..], len);
        assert_eq!(found, Some(payload(1, len)), "{name}");
    }
}

/// As [`manifest`], with a pack whose bytes do not depend on what zstd makes of them.
fn raw_manifest() -> Manifest {
    let mut manifest = manifest();
    manifest.records[0] = ManifestRecord::Pack(pack(5, CodingPolicy::Raw).footer);
    manifest
}

/// An input with a change, and a checksum that is right.
fn changed(mut bytes: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
    bytes[at..at + with.len()].copy_from_slice(with);
    reseal(&mut bytes);
    bytes
}

fn stored(len: usize, element_bytes: u8) -> Vec<u8> {
    let payload = payload(1, len);
    let (coding, stored) = codec::encode(&payload, element_bytes);
    let len = u32::try_from(len).unwrap().to_le_bytes();
    [&[coding.number()][..], &len, &stored].concat()
}

fn write_again() {
    let raw = pack(5, CodingPolicy::Raw);
    let (footer_v1, manifest_v1) = (raw.footer.encode(), raw_manifest().encode());
    let cluster = cluster_name();
    let at = Seq { epoch: 7, seq: 2 };
    let bomb = zstd::bulk::compress(&vec![0; 16 << 20], 19).unwrap();
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("footer/bad-version", changed(footer_v1.clone(), 8, &[2])),
        ("footer/bad-entries", changed(footer_v1.clone(), 44, &[0xff; 4])),
        ("footer/bad-namespaces", changed(footer_v1.clone(), 40, &[0xff; 4])),
        ("footer/bad-sum", [&footer_v1[..footer_v1.len() - 1], &[0]].concat()),
        ("footer/good-v1", footer_v1),
        ("footer/good-compressed", footer().encode()),
        ("footer/good-empty", pack(0, CodingPolicy::Raw).footer.encode()),
        ("manifest/bad-version", changed(manifest_v1.clone(), 8, &[2])),
        ("manifest/bad-kind", changed(manifest_v1.clone(), 46, &[9])),
        ("manifest/bad-length", changed(manifest_v1.clone(), 50, &[0xff; 4])),
        ("manifest/bad-count", changed(manifest_v1.clone(), 32, &[0xff; 4])),
        ("manifest/good-v1", manifest_v1),
        ("manifest/good-compressed", manifest().encode()),
        ("epoch/bad-version", changed(epoch().encode(), 8, &[2])),
        ("epoch/bad-role", changed(epoch().encode(), 42, &[4])),
        ("epoch/good-v1", epoch().encode()),
        ("epoch/good-ward", EpochRecord { role: Role::Ward, ..epoch() }.encode()),
        ("epoch/good-empty", EpochRecord { role: Role::Empty, ..epoch() }.encode()),
        ("alive/bad-role", changed(alive().encode(), 42, &[1])),
        ("alive/bad-holder", changed(alive().encode(), 40, &[0xff; 2])),
        ("alive/good-v1", alive().encode()),
        ("pack/bad-cut", whole(&raw)[1..].to_vec()),
        ("pack/good-v1", whole(&raw)),
        ("pack/good-compressed", whole(&pack(5, CodingPolicy::Compressed))),
        ("stored/bad-bomb", [&[2, 0, 16, 0, 0][..], &bomb].concat()),
        ("stored/bad-planes-bomb", [&[3, 0, 16, 0, 0][..], &[0; 2048], &bomb].concat()),
        ("stored/bad-short", [&[3, 0, 16, 0, 0][..], &[0; 100]].concat()),
        ("stored/good-v1", stored(4096, 2)),
        ("stored/good-odd", stored(4097, 2)),
        ("stored/good-zstd", stored(4096, 1)),
        ("block/good-v1", payload(1, 9001)),
        ("block/good-empty", Vec::new()),
        ("name/good-v1", raw.footer.id.name(&cluster).into_bytes()),
        ("name/good-manifest", ManifestId { ordinal: 3, at }.name(&cluster).into_bytes()),
        ("name/good-epoch", EpochId { ordinal: 3, epoch: 7 }.name(&cluster).into_bytes()),
        ("name/bad-alive", b"v1/prod-1/epochs/00003/alive".to_vec()),
    ];
    for (name, bytes) in files {
        let path = home().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

/// Says which input broke a decoder.
struct Trial<'a> {
    kind: &'a Kind,
    round: u64,
    input: &'a [u8],
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let path = env::temp_dir().join(format!("kvstrata-fuzz-{}", self.kind.name));
            let written = fs::write(&path, self.input).is_ok();
            let (round, kind) = (self.round, self.kind.name);
            eprintln!("round {round} of {kind} failed; input in {path:?}: {written}");
        }
    }
}

/// Changes of one kind of input; what is read joins what is changed next.
struct Campaign<'a> {
    kind: &'a Kind,
    mutator: Mutator,
    pool: Vec<Vec<u8>>,
    round: u64,
    read: u64,
}

impl<'a> Campaign<'a> {
    fn new(kind: &'a Kind, seed: u64) -> Self {
        let pool = corpus(kind).into_iter().map(|(_, bytes)| bytes).collect();
        Self { kind, mutator: Mutator::new(seed), pool, round: 0, read: 0 }
    }

    fn step(&mut self) {
        let mut input = self.pool[self.mutator.below(self.pool.len())].clone();
        let other = self.mutator.below(self.pool.len());
        self.mutator.mutate(&mut input, &self.pool[other]);
        if self.kind.sealed && self.mutator.chance(750) {
            reseal(&mut input);
        }
        self.round += 1;
        let trial = Trial { kind: self.kind, round: self.round, input: &input };
        let read = (self.kind.check)(trial.input);
        drop(trial);
        if read {
            self.read += 1;
            if self.pool.len() < POOL_MAX {
                self.pool.push(input);
            } else if self.mutator.chance(10) {
                let place = self.mutator.below(POOL_MAX);
                self.pool[place] = input;
            }
        }
    }
}

#[test]
fn changed_inputs_break_nothing() {
    let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = number("KVSTRATA_FUZZ_SEED").unwrap_or(1);
    let mut campaigns: Vec<_> = KINDS.iter().map(|kind| Campaign::new(kind, seed)).collect();
    let started = Instant::now();
    let long = number("KVSTRATA_FUZZ_SECONDS").map(Duration::from_secs);
    while campaigns[0].round < ROUNDS || long.is_some_and(|long| started.elapsed() < long) {
        for campaign in &mut campaigns {
            (0..100).for_each(|_| campaign.step());
        }
    }
    for Campaign { kind, round, read, .. } in &campaigns {
        println!("{:>10} {round:>12} inputs, {read:>12} read", kind.name);
        assert!(*read > 0 && (kind.name == "block" || read < round), "{} tells nothing", kind.name);
    }
}
