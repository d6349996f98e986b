//! What engines publish: batches of events, as vLLM and SGLang write them now and have written them.
//!
//! ```text
//! [timestamp, [event, ...], data parallel rank?]
//! event   {"type": "BlockStored", "block_hashes": [...], ...}        by name, or
//!         ["BlockStored", block_hashes, parent, token_ids, block_size, lora_id, medium, lora_name, ...]
//!         BlockRemoved has block_hashes, medium, group_idx; AllBlocksCleared has nothing
//! hash    a number (64 bits of it, signed or not), or its bytes
//! ```
//! Fields and kinds of events that are not known are passed over. A batch is read whole or not at all.

use crate::events::msgpack::{Broken, Reader, Value};

/// Blocks of one event: a prompt of 2 M tokens at 16 to a block.
const BLOCKS_MAX: usize = 131_072;
/// The longest name of a LoRA adapter or a medium, and the longest salt, that is kept.
const TEXT_BYTES_MAX: usize = 256;
/// Kinds of cache groups of which a block is of use by itself, as engines call them.
const WHOLE_KINDS: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];

/// A batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) events: Vec<Event>,
    /// Whose they are, if it is said.
    pub(crate) rank: Option<u32>,
}

/// What has become of blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Stored(Stored),
    Removed(Removed),
    /// The engine has none of its blocks any more.
    Cleared,
}

/// A block hash as it was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Published {
    /// 64 bits of it.
    Short(u64),
    /// All of it.
    Whole(Vec<u8>),
}

/// Blocks that an engine has, in the order of their chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) hashes: Vec<Published>,
    /// The block before the first one; none at the root.
    pub(crate) parent: Option<Published>,
    /// Token ids of all of them, or none.
    pub(crate) tokens: Vec<u32>,
    /// Tokens in each; 0 if that is not said.
    pub(crate) block_size: usize,
    pub(crate) lora_name: String,
    /// What besides tokens the hash of each is of; empty if that is not said.
    pub(crate) extras: Vec<Extras>,
    /// The salt of the chain, of engines that tell it by itself.
    pub(crate) salt: String,
    pub(crate) place: Place,
}

/// Blocks that an engine has no longer at a place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Removed {
    pub(crate) hashes: Vec<Published>,
    pub(crate) place: Place,
}

/// Where blocks are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// As the engine calls it; empty if it says nothing.
    pub(crate) medium: String,
    group: Option<i64>,
    kind: String,
}

/// What besides its tokens the hash of a block is of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Extras {
    /// Names of LoRA adapters, and salts.
    pub(crate) texts: Vec<String>,
    /// Anything else: images, embeddings.
    pub(crate) others: bool,
}

impl Place {
    /// On the device that computes: engines that keep blocks nowhere else say nothing.
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.medium.as_str(), "" | "GPU" | "DEVICE")
    }

    /// Of a cache group of which each block is of use by itself. Those of sliding windows are not: they
    /// come and go while the chain stays.
    pub(crate) fn is_whole(&self) -> bool {
        match self.kind.as_str() {
            "" => self.group.unwrap_or(0) == 0,
            kind => WHOLE_KINDS.contains(&kind),
        }
    }

    /// Reads a field, if it is one of these.
    fn take(&mut self, name: &[u8], reader: &mut Reader<'_>) -> Result<(), Broken> {
        match name {
            b"medium" => self.medium = text(reader)?,
            b"kv_cache_spec_kind" => self.kind = text(reader)?,
            b"group_idx" => {
                self.group = match reader.value()? {
                    Value::Int(group) => i64::try_from(group).ok(),
                    value => reader.skip_in(value).map(|()| None)?,
                }
            }
            _ => reader.skip()?,
        }
        Ok(())
    }
}

/// Reads a batch.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn read(payload: &[u8]) -> Result<Batch, Broken> {
    let mut reader = Reader::new(payload);
    let Value::Array(fields @ 2..) = reader.value()? else {
        return Err(Broken("a batch is an array of two or more"));
    };
    reader.skip()?;
    let Value::Array(count) = reader.value()? else {
        return Err(Broken("the events of a batch are an array"));
    };
    let mut events = Vec::new();
    for _ in 0..count {
        events.extend(read_event(&mut reader)?);
    }
    let mut rank = None;
    for place in 2..fields {
        match reader.value()? {
            Value::Int(number) if place == 2 => rank = u32::try_from(number).ok(),
            value => reader.skip_in(value)?,
        }
    }
    let batch = Batch { events, rank };
    if reader.is_empty() { Ok(batch) } else { Err(Broken("something behind the batch")) }
}

fn read_event(reader: &mut Reader<'_>) -> Result<Option<Event>, Broken> {
    match reader.value()? {
        Value::Array(fields @ 1..) => read_positions(reader, fields),
        Value::Map(fields) => read_names(reader, fields),
        _ => Err(Broken("an event is an array or a map")),
    }
}

/// The fields of an event by their place.
fn read_positions(reader: &mut Reader<'_>, fields: usize) -> Result<Option<Event>, Broken> {
    const STORED: &[&[u8]] = &[
        b"block_hashes",
        b"parent_block_hash",
        b"token_ids",
        b"block_size",
        b"lora_id",
        b"medium",
        b"lora_name",
        b"extra_keys",
        b"group_idx",
        b"kv_cache_spec_kind",
    ];
    const REMOVED: &[&[u8]] = &[b"block_hashes", b"medium", b"group_idx", b"kv_cache_spec_kind"];
    let Value::Text(kind) = reader.value()? else {
        return Err(Broken("an event begins with its kind"));
    };
    let names = match kind {
        b"BlockStored" => STORED,
        b"BlockRemoved" => REMOVED,
        _ => &[],
    };
    let mut read = Stored::default();
    for place in 1..fields {
        read.take(names.get(place - 1).copied().unwrap_or_default(), reader)?;
    }
    Ok(read.into_event(kind))
}

/// The fields of an event by their names, of which its kind may be the last one.
fn read_names(reader: &mut Reader<'_>, fields: usize) -> Result<Option<Event>, Broken> {
    let mut read = Stored::default();
    let mut kind: &[u8] = b"";
    for _ in 0..fields {
        match reader.value()? {
            Value::Text(b"type") => match reader.value()? {
                Value::Text(name) => kind = name,
                value => reader.skip_in(value)?,
            },
            Value::Text(name) => read.take(name, reader)?,
            _ => return Err(Broken("the fields of an event have names")),
        }
    }
    Ok(read.into_event(kind))
}

impl Stored {
    /// The event of this kind with these fields: those of others have a part of them.
    fn into_event(self, kind: &[u8]) -> Option<Event> {
        match kind {
            b"BlockStored" => Some(Event::Stored(self)),
            b"BlockRemoved" => {
                Some(Event::Removed(Removed { hashes: self.hashes, place: self.place }))
            }
            b"AllBlocksCleared" => Some(Event::Cleared),
            _ => None,
        }
    }

    /// Reads a field.
    fn take(&mut self, name: &[u8], reader: &mut Reader<'_>) -> Result<(), Broken> {
        match name {
            b"block_hashes" => self.hashes = list(reader, |reader| hash(reader.value()?))?,
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
                    value => reader.skip_in(value).map(|()| 0)?,
                }
            }
            b"lora_name" => match reader.value()? {
                Value::Map(fields) => self.take_metadata(fields, reader)?,
                value => self.lora_name = text_of(value, reader)?.unwrap_or_default(),
            },
            b"cache_salt" => self.salt = text(reader)?,
            b"extra_keys" => self.extras = extras(reader)?,
            name => self.place.take(name, reader)?,
        }
        Ok(())
    }

    /// SGLang has a map in the place of the name.
    fn take_metadata(&mut self, fields: usize, reader: &mut Reader<'_>) -> Result<(), Broken> {
        for _ in 0..fields {
            match reader.value()? {
                Value::Text(b"cache_salt") => self.salt = text(reader)?,
                name => {
                    reader.skip_in(name)?;
                    reader.skip()?;
                }
            }
        }
        Ok(())
    }
}

/// What the hash of each block is of besides tokens.
fn extras(reader: &mut Reader<'_>) -> Result<Vec<Extras>, Broken> {
    match reader.value()? {
        Value::Array(count) if count <= BLOCKS_MAX => {
            (0..count).map(|_| extras_of_one(reader)).collect()
        }
        value => reader.skip_in(value).map(|()| Vec::new()),
    }
}

fn extras_of_one(reader: &mut Reader<'_>) -> Result<Extras, Broken> {
    let mut extras = Extras::default();
    let count = match reader.value()? {
        Value::Array(count) => count,
        Value::Nil => return Ok(extras),
        value => {
            extras.others = true;
            reader.skip_in(value)?;
            return Ok(extras);
        }
    };
    for _ in 0..count {
        let value = reader.value()?;
        match text_of(value, reader)? {
            Some(text) => extras.texts.push(text),
            None => extras.others = true,
        }
    }
    Ok(extras)
}

fn text(reader: &mut Reader<'_>) -> Result<String, Broken> {
    let value = reader.value()?;
    Ok(text_of(value, reader)?.unwrap_or_default())
}

/// The text that a value is; none if it is something else, or too long.
fn text_of<'a>(value: Value<'a>, reader: &mut Reader<'a>) -> Result<Option<String>, Broken> {
    match value {
        Value::Text(text) if text.len() <= TEXT_BYTES_MAX => {
            Ok(Some(String::from_utf8_lossy(text).into_owned()))
        }
        value => reader.skip_in(value).map(|()| None),
    }
}

/// Token ids; those of pairs (as draft models have them) are none that a block can be told by.
fn tokens(reader: &mut Reader<'_>) -> Result<Vec<u32>, Broken> {
    let count = match reader.value()? {
        Value::Array(count) => count,
        value => return reader.skip_in(value).map(|()| Vec::new()),
    };
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
    one: impl Fn(&mut Reader<'_>) -> Result<T, Broken>,
) -> Result<Vec<T>, Broken> {
    let Value::Array(count) = reader.value()? else { return Err(Broken("an array is wanted")) };
    if count > BLOCKS_MAX {
        return Err(Broken("too many blocks"));
    }
    (0..count).map(|_| one(reader)).collect()
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
