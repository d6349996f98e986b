//! Reads batches as routers do: strictly, by name and by place.

use crate::events::msgpack::{Reader, Value};

/// An event as it was read.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) kind: String,
    pub(super) hashes: Vec<u64>,
    pub(super) parent: Option<u64>,
    pub(super) tokens: Vec<u32>,
    pub(super) block_size: usize,
    pub(super) medium: String,
}

/// The events of a batch, and its rank.
pub(super) fn read(payload: &[u8]) -> (Vec<Read>, u64) {
    let mut reader = Reader::new(payload);
    assert_eq!(reader.value(), Ok(Value::Array(3)));
    assert!(matches!(reader.value(), Ok(Value::Float(_))));
    let Ok(Value::Array(count)) = reader.value() else { panic!("no events") };
    let events = (0..count).map(|_| event(&mut reader)).collect();
    let rank = number(&mut reader);
    assert!(reader.is_empty());
    (events, rank)
}

fn event(reader: &mut Reader<'_>) -> Read {
    const PLACES: [&str; 8] = [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ];
    let mut read = Read::default();
    match reader.value().unwrap() {
        Value::Map(fields) => {
            for _ in 0..fields {
                let name = text(reader);
                take(&mut read, &name, reader);
            }
        }
        Value::Array(fields) => {
            read.kind = text(reader);
            let places = if read.kind == "BlockStored" {
                PLACES.to_vec()
            } else {
                vec!["block_hashes", "medium"]
            };
            assert_eq!(fields, places.len() + 1);
            places.into_iter().for_each(|name| take(&mut read, name, reader));
        }
        other => panic!("{other:?}"),
    }
    read
}

fn take(read: &mut Read, name: &str, reader: &mut Reader<'_>) {
    match name {
        "type" => read.kind = text(reader),
        "block_hashes" => read.hashes = list(reader, number),
        "parent_block_hash" => {
            let before = *reader;
            if reader.value() != Ok(Value::Nil) {
                *reader = before;
                read.parent = Some(number(reader));
            }
        }
        "token_ids" => {
            read.tokens = list(reader, |reader| u32::try_from(number(reader)).unwrap());
        }
        "block_size" => read.block_size = usize::try_from(number(reader)).unwrap(),
        "medium" => read.medium = text(reader),
        "lora_id" | "lora_name" | "extra_keys" | "cache_salt" => reader.skip().unwrap(),
        other => panic!("a field that routers may take amiss: {other}"),
    }
}

fn list<T>(reader: &mut Reader<'_>, one: impl Fn(&mut Reader<'_>) -> T) -> Vec<T> {
    let Ok(Value::Array(count)) = reader.value() else { panic!("no list") };
    (0..count).map(|_| one(reader)).collect()
}

fn number(reader: &mut Reader<'_>) -> u64 {
    let Ok(Value::Int(number)) = reader.value() else { panic!("no number") };
    u64::try_from(number).unwrap()
}

fn text(reader: &mut Reader<'_>) -> String {
    let Ok(Value::Text(text)) = reader.value() else { panic!("no text") };
    String::from_utf8(text.to_vec()).unwrap()
}
