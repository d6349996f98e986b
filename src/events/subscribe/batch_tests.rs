//! Batches as engines write them, those of the corpus, and seeded changes of them.
//!
//! The corpus is in `corpus/NAME` beside this file. `good-` batches are read, `bad-` ones are refused. To
//! write it again on purpose:
//!
//! ```text
//! KVSTRATA_REWRITE_CORPUS=1 cargo test -p kvstrata --lib subscribe::batch
//! ```
//! `integration/events.rs` reads what was captured from an engine.

use super::*;
use crate::corpus_tests::{Changes, Corpus};

fn corpus() -> Corpus {
    Corpus::of("events/subscribe")
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
    let expected = Event::Stored(Stored {
        hashes: vec![Published::Short(0xffff_ffff_ffff_fff0), Published::Short(5)],
        parent: Some(Published::Short(0xffff_ffff_ffff_fff0)),
        tokens: vec![1, 2, 256, 3],
        block_size: 2,
        lora_name: "adapter".to_owned(),
        place: Place { medium: "GPU".to_owned(), ..Place::default() },
        ..Stored::default()
    });
    for event in [positional.collect::<Vec<_>>().concat(), named.concat()] {
        let payload =
            batch(&[event.clone(), [vec![0x91], text("AllBlocksCleared")].concat(), event]);
        let read = read(&payload).unwrap();
        assert_eq!(read.events, [expected.clone(), Event::Cleared, expected.clone()]);
        assert_eq!(read.rank, None);
    }
}

#[test]
fn what_is_removed_is_read_with_its_place() {
    let hashes = [&[0x91][..], &BIG].concat();
    let placed = [&[0x94][..], &text("BlockRemoved"), &hashes, &text("CPU"), &[2]].concat();
    let named = [
        &[0x84][..],
        &text("type"),
        &text("BlockRemoved"),
        &text("block_hashes"),
        &hashes,
        &text("medium"),
        &text("CPU"),
        &text("group_idx"),
        &[2],
    ];
    let place = Place { medium: "CPU".to_owned(), group: Some(2), ..Place::default() };
    let expected = Removed { hashes: vec![Published::Short(0xffff_ffff_ffff_fff0)], place };
    for event in [placed, named.concat()] {
        let mut payload = batch(&[event]);
        *payload.last_mut().unwrap() = 3;
        let read = read(&payload).unwrap();
        assert_eq!(read.events, [Event::Removed(expected.clone())]);
        assert_eq!(read.rank, Some(3));
    }
}

#[test]
fn salts_and_whatever_else_a_hash_is_of_are_read() {
    let stored = |rest: &[Vec<u8>]| {
        let count = 0x96 + u8::try_from(rest.len()).unwrap();
        let head = [&[count][..], &text("BlockStored"), &[0x91], &BIG, &[0xc0, 0x91, 1, 1, 0xc0]];
        let payload = batch(&[[head.concat(), rest.concat()].concat()]);
        let Event::Stored(stored) = read(&payload).unwrap().events.remove(0) else { panic!() };
        stored
    };
    let image = [&[0x92][..], &text("image"), &[3]].concat();
    let of_two = [&[0x92][..], &text("adapter"), &text("salt")].concat();
    let keys = [vec![0x94, 0xc0], of_two, [vec![0x91], image].concat(), vec![5]].concat();
    let kind = text("sliding_window");
    let read = stored(&[text("GPU"), text("adapter"), keys, vec![0], kind]);
    let texts = Extras { texts: vec!["adapter".into(), "salt".into()], others: false };
    let others = Extras { texts: vec![], others: true };
    assert_eq!(read.extras, [Extras::default(), texts, others.clone(), others]);
    assert!(read.place.is_device() && !read.place.is_whole());
    // SGLang's way.
    let metadata = [&[0x82][..], &text("other"), &[0x91, 1], &text("cache_salt"), &text("salt")];
    let read = stored(&[text("CPU_PINNED"), metadata.concat()]);
    assert_eq!((read.salt.as_str(), read.lora_name.as_str()), ("salt", ""));
    assert!(!read.place.is_device() && read.place.is_whole());
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
        let Event::Stored(stored) = read(&batch(&[event(tokens)])).unwrap().events.remove(0) else {
            panic!("not stored");
        };
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

fn made() -> Vec<(&'static str, Vec<u8>)> {
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
    vec![
        ("good-nothing", batch(&[])),
        ("good-named", batch(&[removed.concat(), cleared.clone(), named.concat()])),
        ("good-bytes", batch(std::slice::from_ref(&bytes))),
        ("good-placed", batch(&[placed, [vec![0x91], text("AllBlocksCleared")].concat()])),
        ("good-without-rank", [&[0x92, 1, 0x91][..], &cleared].concat()),
        ("bad-kind", batch(&[vec![0x92, 5, 5]])),
        ("bad-cut", bytes),
        ("bad-count", vec![0x92, 1, 0xdd, 0xff, 0xff, 0xff, 0xff]),
    ]
}

#[test]
fn the_corpus_reads_as_its_names_say() {
    corpus().rewrite(made);
    for (name, payload) in corpus().files() {
        let read = read(&payload);
        assert_eq!(read.is_ok(), name.starts_with("good-"), "{name}: {read:?}");
        for cut in 0..payload.len() {
            assert!(super::read(&payload[..cut]).is_err(), "{name} cut at {cut}");
        }
    }
}

#[test]
fn changed_batches_break_nothing() {
    let pool = corpus().files().into_iter().map(|(_, bytes)| bytes).collect();
    let mut changes = Changes::of(pool);
    while let Some(payload) = changes.next() {
        let Ok(read) = read(&payload) else { continue };
        for event in read.events {
            let made = match event {
                Event::Stored(stored) => {
                    stored.hashes.len() + stored.tokens.len() + stored.extras.len()
                }
                Event::Removed(removed) => removed.hashes.len(),
                Event::Cleared => 0,
            };
            assert!(made <= payload.len(), "no more is made than there is");
        }
        changes.note_read(payload);
    }
}
