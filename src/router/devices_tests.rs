//! What engines tell, against what they have.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::router::chain::{Identity, chain};

const SIZE: usize = 4;

/// Blocks `from..to` of a prompt of the tokens `tag, tag, ...`, hashed as an engine might.
fn stored(tag: u32, from: u64, to: u64) -> Stored {
    let hash = |block: u64| Published::Short(u64::from(tag) * 1000 + block + 1);
    let blocks = usize::try_from(to - from).unwrap();
    Stored {
        hashes: (from..to).map(hash).collect(),
        parent: from.checked_sub(1).map(hash),
        tokens: vec![tag; blocks * SIZE],
        block_size: SIZE,
        ..Stored::default()
    }
}

fn removed(tag: u32, block: u64) -> Event {
    let hashes = stored(tag, block, block + 1).hashes;
    Event::Removed(Removed { hashes, ..Removed::default() })
}

fn batch(events: Vec<Event>) -> Batch {
    Batch { events, rank: None }
}

fn prompt(tag: u32, blocks: usize) -> Vec<u64> {
    chain(&vec![tag; blocks * SIZE + 1], SIZE, &Identity::default())
}

#[test]
fn prefixes_are_those_of_each_engine_and_end_at_the_first_gap() {
    let devices = Devices::new(3);
    let took = devices.take(0, &batch(vec![Event::Stored(stored(1, 0, 10))]));
    assert_eq!(took, Took { told: 10, placed: 10 });
    devices.take(2, &batch(vec![Event::Stored(stored(1, 0, 2)), Event::Stored(stored(1, 2, 4))]));
    assert_eq!(devices.prefixes(&prompt(1, 20), 3), [10, 0, 4]);
    assert_eq!(devices.prefixes(&prompt(1, 3), 3), [3, 0, 3]);
    assert_eq!(devices.prefixes(&prompt(2, 20), 3), [0, 0, 0]);
    devices.take(0, &batch(vec![removed(1, 5)]));
    assert_eq!(devices.prefixes(&prompt(1, 20), 3), [5, 0, 4]);
    devices.take(0, &batch(vec![Event::Stored(stored(1, 5, 6))]));
    assert_eq!(devices.prefixes(&prompt(1, 20), 3), [10, 0, 4]);
    devices.take(0, &batch(vec![Event::Cleared]));
    assert_eq!(devices.prefixes(&prompt(1, 20), 3), [0, 0, 4]);
    devices.forget(2);
    assert_eq!(devices.blocks(), [0, 0, 0]);
    assert!(devices.0.read().holders.is_empty());
    assert_eq!(devices.block_tokens(), [SIZE, 0, SIZE]);
}

#[test]
fn what_is_not_on_a_device_or_cannot_be_placed_is_passed_over() {
    let devices = Devices::new(1);
    let place = |medium: &str| {
        let payload = [&b"\x92\x01\x91\x83"[..], b"\xa4type\xabBlockStored"].concat();
        let medium = [
            &[0xa6][..],
            b"medium",
            &[0xa0 | u8::try_from(medium.len()).unwrap()],
            medium.as_bytes(),
        ];
        let payload = [payload, medium.concat(), b"\xacblock_hashes\x90".to_vec()].concat();
        match crate::events::subscribe::batch::read(&payload).unwrap().events.remove(0) {
            Event::Stored(stored) => stored.place,
            other => panic!("{other:?}"),
        }
    };
    for medium in ["CPU", "CPU_PINNED", "STORAGE", "dram", "gpu2"] {
        let stored = Stored { place: place(medium), ..stored(1, 0, 3) };
        assert_eq!(devices.take(0, &batch(vec![Event::Stored(stored)])), Took::default());
    }
    let gpu = Stored { place: place("GPU"), ..stored(1, 0, 3) };
    devices.take(0, &batch(vec![Event::Stored(gpu)]));
    // A removal elsewhere says nothing of the device.
    let Event::Removed(elsewhere) = removed(1, 0) else { panic!() };
    let elsewhere = Removed { place: place("CPU"), ..elsewhere };
    devices.take(0, &batch(vec![Event::Removed(elsewhere)]));
    assert_eq!(devices.prefixes(&prompt(1, 9), 1), [3]);
    // A placeholder without tokens, and a block behind one that nobody told of.
    let bare = Stored { tokens: Vec::new(), block_size: 0, ..stored(1, 3, 5) };
    let orphan = Event::Stored(stored(1, 7, 9));
    let took = devices.take(0, &batch(vec![Event::Stored(bare), orphan]));
    assert_eq!(took, Took { told: 4, placed: 0 });
    assert_eq!(devices.prefixes(&prompt(1, 9), 1), [3]);
}

#[test]
fn adapters_and_salts_keep_prompts_apart() {
    let devices = Devices::new(1);
    let texts = |texts: &[&str]| Extras {
        texts: texts.iter().map(|text| (*text).to_owned()).collect(),
        others: false,
    };
    let salted = Stored {
        extras: vec![texts(&["lora", "salt"]), texts(&["lora"])],
        lora_name: "lora".to_owned(),
        ..stored(1, 0, 2)
    };
    devices.take(0, &batch(vec![Event::Stored(salted)]));
    let salt_apart =
        Stored { salt: "salt".to_owned(), lora_name: "other".to_owned(), ..stored(3, 0, 2) };
    devices.take(0, &batch(vec![Event::Stored(salt_apart)]));
    let of = |tag: u32, lora: &str, salt: &str| {
        let identity = Identity { lora: lora.to_owned(), salt: salt.to_owned() };
        devices.prefixes(&chain(&[tag; 2 * SIZE], SIZE, &identity), 1)[0]
    };
    assert_eq!((of(1, "lora", "salt"), of(3, "other", "salt")), (2, 2));
    for (tag, lora, salt) in [(1, "", ""), (1, "lora", ""), (1, "", "salt"), (3, "other", "")] {
        assert_eq!(of(tag, lora, salt), 0, "{lora} {salt}");
    }
}

/// What an engine does.
#[derive(Debug, Clone)]
enum Act {
    Store(u32, u64),
    Remove(u32, u64),
    Clear,
    /// It starts anew, and is listened to again.
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0_u32..4, 1_u64..8).prop_map(|(tag, blocks)| Act::Store(tag, blocks)),
        4 => (0_u32..4, 0_u64..8).prop_map(|(tag, block)| Act::Remove(tag, block)),
        1 => Just(Act::Clear),
        1 => Just(Act::Restart),
    ]
}

proptest! {
    #[test]
    fn it_is_known_what_engines_have(acts in proptest::collection::vec((0_usize..3, act()), 0..60)) {
        let devices = Devices::new(3);
        let mut truth: BTreeMap<usize, BTreeSet<(u32, u64)>> = BTreeMap::new();
        for (engine, act) in acts {
            let has = truth.entry(engine).or_default();
            match act {
                Act::Store(tag, blocks) => {
                    // Engines tell of what they have computed: behind what they had.
                    let from = (0..blocks).find(|block| !has.contains(&(tag, *block)));
                    let from = from.unwrap_or(blocks);
                    has.extend((from..blocks).map(|block| (tag, block)));
                    devices.take(engine, &batch(vec![Event::Stored(stored(tag, from, blocks))]));
                }
                Act::Remove(tag, block) => {
                    has.remove(&(tag, block));
                    devices.take(engine, &batch(vec![removed(tag, block)]));
                }
                Act::Clear => {
                    has.clear();
                    devices.take(engine, &batch(vec![Event::Cleared]));
                }
                Act::Restart => {
                    has.clear();
                    devices.forget(engine);
                }
            }
        }
        for tag in 0..4 {
            let prefixes = devices.prefixes(&prompt(tag, 8), 3);
            for (engine, prefix) in prefixes.into_iter().enumerate() {
                let has = truth.get(&engine).cloned().unwrap_or_default();
                let expected = (0..8).take_while(|block| has.contains(&(tag, *block))).count();
                prop_assert_eq!(usize::try_from(prefix).unwrap(), expected);
            }
        }
        let blocks: Vec<_> = (0..3).map(|engine| truth.get(&engine).map_or(0, BTreeSet::len)).collect();
        prop_assert_eq!(devices.blocks(), blocks);
    }
}
