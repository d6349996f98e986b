//! What engines publish: batches of events, as vLLM and SGLang write them now and have written them.
//!
//! ```text
//! [timestamp, [event, ...], data parallel rank?]
//! event   {"type": "BlockStored", "block_hashes": [...], ...}        by name, or
//!         ["BlockStored", block_hashes, parent, token_ids, block_size, lora_id, medium, lora_name, ...]
//! hash    a number (64 bits of it, signed or not), or its bytes
//! ```
//! Fields and kinds of events that are not known are passed over. A batch is read whole or not at all.

use crate::events::msgpack::{Broken, Reader, Value};

/// Blocks of one event: a prompt of 2 M tokens at 16 to a block.
const BLOCKS_MAX: usize = 131_072;
/// The longest name of a LoRA adapter that is kept.
const LORA_NAME_BYTES_MAX: usize = 256;

/// A block hash as it was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Published {
    /// 64 bits of it.
    Short(u64),
    /// All of it.
    Whole(Vec<u8>),
}

/// Blocks that an engine has, in the order of their chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) hashes: Vec<Published>,
    /// The block before the first one; none at the root.
    pub(super) parent: Option<Published>,
    /// Token ids of all of them, or none.
    pub(super) tokens: Vec<u32>,
    /// Tokens in each; 0 if that is not said.
    pub(super) block_size: usize,
    pub(super) lora_name: String,
}

/// Reads a batch; returns what it says of blocks that were stored.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read(payload: &[u8]) -> Result<Vec<Stored>, Broken> {
    let mut reader = Reader::new(payload);
    let Value::Array(fields @ 2..) = reader.value()? else {
        return Err(Broken("a batch is an array of two or more"));
    };
    reader.skip()?;
    let Value::Array(events) = reader.value()? else {
        return Err(Broken("the events of a batch are an array"));
    };
    let mut stored = Vec::new();
    for _ in 0..events {
        stored.extend(read_event(&mut reader)?);
    }
    for _ in 2..fields {
        reader.skip()?;
    }
    if reader.is_empty() { Ok(stored) } else { Err(Broken("something behind the batch")) }
}

fn read_event(reader: &mut Reader<'_>) -> Result<Option<Stored>, Broken> {
    match reader.value()? {
        Value::Array(fields @ 1..) => read_positions(reader, fields),
        Value::Map(fields) => read_names(reader, fields),
        _ => Err(Broken("an event is an array or a map")),
    }
}

/// The fields of an event by their place.
fn read_positions(reader: &mut Reader<'_>, fields: usize) -> Result<Option<Stored>, Broken> {
    const NAMES: [&[u8]; 7] = [
        b"block_hashes",
        b"parent_block_hash",
        b"token_ids",
        b"block_size",
        b"lora_id",
        b"medium",
        b"lora_name",
    ];
    let Value::Text(kind) = reader.value()? else {
        return Err(Broken("an event begins with its kind"));
    };
    let mut stored = Stored::default();
    for place in 1..fields {
        let name = NAMES.get(place - 1).filter(|_| kind == b"BlockStored");
        stored.take(name.copied().unwrap_or_default(), reader)?;
    }
    Ok((kind == b"BlockStored").then_some(stored))
}

/// The fields of an event by their names, of which its kind may be the last one.
fn read_names(reader: &mut Reader<'_>, fields: usize) -> Result<Option<Stored>, Broken> {
    let mut stored = Stored::default();
    let mut is_stored = false;
    for _ in 0..fields {
        match reader.value()? {
            Value::Text(b"type") => is_stored = reader.value()? == Value::Text(b"BlockStored"),
            Value::Text(name) => stored.take(name, reader)?,
            _ => return Err(Broken("the fields of an event have names")),
        }
    }
    Ok(is_stored.then_some(stored))
}

impl Stored {
    /// Reads a field.
    fn take(&mut self, name: &[u8], reader: &mut Reader<'_>) -> Result<(), Broken> {
        match name {
            b"block_hashes" => self.hashes = list(reader, BLOCKS_MAX, hash)?,
            b"parent_block_hash" => {
                self.parent = match reader.value()? {
                    Value::Nil => None,
                    value => Some(hash(value)?),
                }
            }
            b"token_ids" => self.tokens = tokens(reader)?,
            b"block_size" => {
                self.block_size = match reader.value()? {
                    Value::Int(size) => usize::try_from(size).unwrap_or(0),
                    value => {
                        reader.skip_in(value)?;
                        0
                    }
                }
            }
            b"lora_name" => match reader.value()? {
                Value::Text(text) if text.len() <= LORA_NAME_BYTES_MAX => {
                    self.lora_name = String::from_utf8_lossy(text).into_owned();
                }
                value => reader.skip_in(value)?,
            },
            _ => reader.skip()?,
        }
        Ok(())
    }
}

/// Token ids; those of pairs (as draft models have them) are none that a block can be told by.
fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, Broken> {
    let Value::Array(count) = reader.value()? else { return Ok(Vec::new()) };
    let mut tokens = Vec::new();
    let mut known = true;
    for _ in 0..count {
        match reader.value()? {
            Value::Int(token) => match u32::try_from(token) {
                Ok(token) if known => tokens.push(token),
                Ok(_) | Err(_) => known = false,
            },
            value => {
                known = false;
                reader.skip_in(value)?;
            }
        }
    }
    Ok(if known { tokens } else { Vec::new() })
}

fn list<T>(
    reader: &mut Reader<'_>,
    most: usize,
    one: impl Fn(Value<'_>) -> Result<T, Broken>,
) -> Result<Vec<T>, Broken> {
    let Value::Array(count) = reader.value()? else { return Err(Broken("an array is wanted")) };
    if count > most {
        return Err(Broken("too many blocks"));
    }
    (0..count).map(|_| one(reader.value()?)).collect()
}

fn hash(value: Value<'_>) -> Result<Published, Broken> {
    match value {
        Value::Int(number) => match (u64::try_from(number), i64::try_from(number)) {
            (Ok(number), _) => Ok(Published::Short(number)),
            (Err(_), Ok(number)) => Ok(Published::Short(number.cast_unsigned())),
            (Err(_), Err(_)) => Err(Broken("a hash of more than 64 bits")),
        },
        Value::Bytes(bytes) if (8..=32).contains(&bytes.len()) => {
            Ok(Published::Whole(bytes.to_vec()))
        }
        _ => Err(Broken("a hash is a number, or 8 to 32 bytes")),
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
