//! Batches as engines write them, those of the corpus, and seeded changes of them.
//!
//! The corpus is in `corpus/NAME` beside this file. `good-` batches are read, `bad-` ones are refused. To
//! write it again on purpose:
//!
//! ```text
//! KVSTRATA_REWRITE_CORPUS=1 cargo test -p kvstrata --lib subscribe::batch
//! ```
//! `integration/events.rs` reads what was captured from an engine.

use std::{env, fs, path::PathBuf, time::Duration};

use kvstrata_tiers::testing::Mutator;
use tokio::time::Instant;

use super::*;

/// Changed batches that every test run tries.
const ROUNDS: u64 = 20_000;

fn corpus() -> Vec<(String, Vec<u8>)> {
    let home = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/events/subscribe/corpus");
    let files = fs::read_dir(home).unwrap().map(|file| file.unwrap());
    let mut files: Vec<_> = files
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    files.sort();
    files
}

fn text(text: &str) -> Vec<u8> {
    [&[0xd9, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
}

/// A batch with these events, written already.
fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    let count = u8::try_from(events.len()).unwrap();
    [&[0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90 | count][..], &events.concat(), &[0xc0]].concat()
}

const BIG: [u8; 9] = [0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xf0];
const NEGATIVE: [u8; 9] = [0xd3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xf0];

#[test]
fn by_place_and_by_name_the_same_is_read() {
    let fields: [(&str, Vec<u8>); 7] = [
        ("block_hashes", [&[0x92][..], &BIG, &[5]].concat()),
        ("parent_block_hash", NEGATIVE.to_vec()),
        ("token_ids", vec![0x94, 1, 2, 0xcd, 1, 0, 3]),
        ("block_size", vec![2]),
        ("lora_id", vec![0xc0]),
        ("medium", text("GPU")),
        ("lora_name", text("adapter")),
    ];
    let positional = [vec![0x98], text("BlockStored")].into_iter();
    let positional = positional.chain(fields.iter().map(|(_, value)| value.clone()));
    let mut named = vec![vec![0x89]];
    named.extend(fields.iter().flat_map(|(name, value)| [text(name), value.clone()]));
    named.extend([text("a new field"), vec![0x81, 1, 0x91, 2], text("type"), text("BlockStored")]);
    let expected = Stored {
        hashes: vec![Published::Short(0xffff_ffff_ffff_fff0), Published::Short(5)],
        parent: Some(Published::Short(0xffff_ffff_ffff_fff0)),
        tokens: vec![1, 2, 256, 3],
        block_size: 2,
        lora_name: "adapter".to_owned(),
    };
    for event in [positional.collect::<Vec<_>>().concat(), named.concat()] {
        let payload =
            batch(&[event.clone(), [vec![0x91], text("AllBlocksCleared")].concat(), event]);
        assert_eq!(read(&payload).unwrap(), [expected.clone(), expected.clone()]);
    }
}

#[test]
fn hashes_may_be_bytes_parents_missing_and_tokens_none_or_odd() {
    let whole = [&[0xc4, 32][..], &[7; 32]].concat();
    let event = |tokens: &[u8]| {
        [&[0x95], &text("BlockStored")[..], &[0x91], &whole, &[0xc0], tokens, &[4]].concat()
    };
    for (tokens, expected) in [
        (&[0x90][..], vec![]),
        (&[0xc0], vec![]),
        (&[0x91, 0xff], vec![]),
        (&[0x92, 1, 0x92, 1, 2], vec![]),
        (&[0x91, 9], vec![9]),
    ] {
        let stored = read(&batch(&[event(tokens)])).unwrap().remove(0);
        assert_eq!(stored.hashes, [Published::Whole(vec![7; 32])]);
        assert_eq!((stored.parent, stored.tokens, stored.block_size), (None, expected, 4));
    }
}

#[test]
fn what_is_no_batch_is_refused() {
    let short = [&[0x92], &text("BlockStored")[..], &[0x91, 0xc4, 2, 1, 2]].concat();
    let number = [&[0x92], &text("BlockStored")[..], &[5]].concat();
    let behind = [batch(&[]), vec![1]].concat();
    for payload in [
        vec![],
        vec![5],
        vec![0x91, 1],
        vec![0x92, 1, 5],
        vec![0x92, 1, 0x91, 5],
        vec![0x92, 1, 0x91, 0x91, 5],
        batch(&[short]),
        batch(&[number]),
        behind,
    ] {
        assert!(read(&payload).is_err(), "{payload:x?}");
    }
}

fn rewrite() {
    let whole = |byte| [&[0xc4, 32][..], &[byte; 32]].concat();
    let field = |name: &str, value: &[u8]| [text(name), value.to_vec()].concat();
    let hashes = [&[0x92][..], &BIG, &[5]].concat();
    let named = [
        vec![0x89],
        field("type", &text("BlockStored")),
        field("block_hashes", &hashes),
        field("parent_block_hash", &[0xc0]),
        field("token_ids", &[0x94, 1, 2, 0xcd, 1, 0, 3]),
        field("block_size", &[2]),
        field("lora_id", &[0xc0]),
        field("medium", &text("GPU")),
        field("lora_name", &[0xc0]),
        field("extra_keys", &[0x92, 0xc0, 0x91, 0xa1, b's']),
    ];
    let removed =
        [vec![0x82], field("type", &text("BlockRemoved")), field("block_hashes", &hashes)];
    let cleared = [vec![0x81], field("type", &text("AllBlocksCleared"))].concat();
    let bytes = [vec![0x95], text("BlockStored"), [vec![0x91], whole(7)].concat(), whole(8)];
    let bytes = [bytes.concat(), vec![0x92, 1, 2, 2]].concat();
    let placed = [vec![0x98], text("BlockStored"), [&[0x91][..], &NEGATIVE].concat(), vec![0xc0]];
    let placed = [placed.concat(), vec![0x91, 4, 1, 0xc0], text("CPU_PINNED"), vec![0x80]].concat();
    let files = [
        ("good-nothing", batch(&[])),
        ("good-named", batch(&[removed.concat(), cleared.clone(), named.concat()])),
        ("good-bytes", batch(std::slice::from_ref(&bytes))),
        ("good-placed", batch(&[placed, [vec![0x91], text("AllBlocksCleared")].concat()])),
        ("good-without-rank", [&[0x92, 1, 0x91][..], &cleared].concat()),
        ("bad-kind", batch(&[vec![0x92, 5, 5]])),
        ("bad-cut", bytes),
        ("bad-count", vec![0x92, 1, 0xdd, 0xff, 0xff, 0xff, 0xff]),
    ];
    let home = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/events/subscribe/corpus");
    fs::create_dir_all(&home).unwrap();
    for (name, bytes) in files {
        fs::write(home.join(name), bytes).unwrap();
    }
}

#[test]
fn the_corpus_reads_as_its_names_say() {
    if env::var_os("KVSTRATA_REWRITE_CORPUS").is_some() {
        rewrite();
    }
    let files = corpus();
    assert!(files.iter().filter(|(name, _)| name.starts_with("good-")).count() > 2);
    for (name, payload) in files {
        let read = read(&payload);
        assert_eq!(read.is_ok(), name.starts_with("good-"), "{name}: {read:?}");
        for cut in 0..payload.len() {
            assert!(super::read(&payload[..cut]).is_err(), "{name} cut at {cut}");
        }
    }
}

#[test]
fn changed_batches_break_nothing() {
    let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let mut mutator = Mutator::new(number("KVSTRATA_FUZZ_SEED").unwrap_or(1));
    let pool: Vec<_> = corpus().into_iter().map(|(_, bytes)| bytes).collect();
    let (mut rounds, mut good) = (0, 0);
    let started = Instant::now();
    let long = number("KVSTRATA_FUZZ_SECONDS").map(Duration::from_secs);
    while rounds < ROUNDS || long.is_some_and(|long| started.elapsed() < long) {
        let mut payload = pool[mutator.below(pool.len())].clone();
        let other = mutator.below(pool.len());
        mutator.mutate(&mut payload, &pool[other]);
        rounds += 1;
        let read = read(&payload);
        good += u64::from(read.is_ok());
        for stored in read.into_iter().flatten() {
            let made = stored.hashes.len() + stored.tokens.len();
            assert!(made <= payload.len(), "no more is made than there is");
        }
    }
    println!("{rounds} batches, {good} of them read");
    assert!(good > 100 && good < rounds, "{good} of {rounds} tells nothing");
}
