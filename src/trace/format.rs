//! The published trace formats: one JSON object a line.
//!
//! | format | recognised by | blocks | tokens in a block | time |
//! |---|---|---|---|---|
//! | run-length | `hash_ranges` | `[[first, count], ...]` | 64 | ms |
//! | Qwen-Bailian | `chat_id` | `hash_ids` | 16 | s |
//! | Mooncake | `hash_ids` | `hash_ids` | 512 | ms |
//!
//! Other fields are passed over. Fields are taken from the parsed object one by one and not through
//! a derived reader, because a message must name the field, the value and what is allowed.

use std::{collections::HashMap, fmt};

use kvstrata_tiers::error::{Error, Result};
use serde_json::{Map, Value};

use super::{BLOCKS_PER_REQUEST_MAX, Head, intern::FileRange};

/// A published trace format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `hash_ids`, one id for each started block.
    Mooncake,
    /// `hash_ranges`, runs of ids.
    RunLength,
    /// `hash_ids` with `chat_id` and `parent_chat_id`.
    QwenBailian,
}

impl Format {
    /// The format of a trace whose first line is `first`.
    pub(super) fn detect(first: &Map<String, Value>) -> Result<Self> {
        if first.contains_key("hash_ranges") {
            Ok(Self::RunLength)
        } else if first.contains_key("chat_id") {
            Ok(Self::QwenBailian)
        } else if first.contains_key("hash_ids") {
            Ok(Self::Mooncake)
        } else {
            Err(Error::invalid(
                "no block ids: one of the fields hash_ids (Mooncake, Qwen-Bailian) and hash_ranges \
                 (run-length) is required",
            ))
        }
    }

    /// Tokens in one block unless the caller says otherwise.
    #[must_use]
    pub fn block_tokens(self) -> u32 {
        match self {
            Self::Mooncake => 512,
            Self::RunLength => 64,
            Self::QwenBailian => 16,
        }
    }

    /// The unit of `timestamp` unless the caller says otherwise.
    #[must_use]
    pub fn time_unit(self) -> TimeUnit {
        match self {
            Self::Mooncake | Self::RunLength => TimeUnit::Milliseconds,
            Self::QwenBailian => TimeUnit::Seconds,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mooncake => "Mooncake",
            Self::RunLength => "run-length",
            Self::QwenBailian => "Qwen-Bailian",
        })
    }
}

/// The unit of a trace's timestamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    /// Milliseconds.
    Milliseconds,
    /// Seconds, with or without a fraction.
    Seconds,
}

/// Turns lines of one format into requests.
#[derive(Debug)]
pub(super) struct Parser {
    format: Format,
    time_unit: TimeUnit,
    /// The file's session, or for Qwen-Bailian its chat, to our session number.
    sessions: HashMap<i128, u32>,
    sessions_count: u32,
}

impl Parser {
    pub(super) fn new(format: Format, time_unit: TimeUnit) -> Self {
        Self { format, time_unit, sessions: HashMap::new(), sessions_count: 0 }
    }

    /// Sessions seen so far.
    pub(super) fn sessions(&self) -> u32 {
        self.sessions_count
    }

    /// Reads one request; its blocks are appended to `ranges`.
    ///
    /// # Errors
    /// `Invalid`, naming field, value and what is allowed.
    pub(super) fn parse(
        &mut self,
        line: &Map<String, Value>,
        ranges: &mut Vec<FileRange>,
    ) -> Result<Head> {
        let mut blocks = Blocks { ranges, count: 0 };
        match self.format {
            Format::RunLength => blocks.add_ranges(line)?,
            Format::Mooncake | Format::QwenBailian => blocks.add_ids(line)?,
        }
        Ok(Head {
            timestamp_ms: timestamp_ms(line, self.time_unit)?,
            session: self.session(line)?,
            input_tokens: tokens(line, "input_length")?,
            output_tokens: tokens(line, "output_length")?,
        })
    }

    fn session(&mut self, line: &Map<String, Value>) -> Result<Option<u32>> {
        match self.format {
            Format::Mooncake | Format::RunLength => match line.get("session") {
                None | Some(Value::Null) => Ok(None),
                Some(value) => {
                    let named = integer("session", value)?;
                    Ok(Some(self.number(named, None)))
                }
            },
            Format::QwenBailian => {
                let chat = integer("chat_id", required(line, "chat_id")?)?;
                let parent = match line.get("parent_chat_id") {
                    None | Some(Value::Null) => None,
                    Some(value) => {
                        let parent = integer("parent_chat_id", value)?;
                        self.sessions.get(&parent).copied()
                    }
                };
                Ok(Some(self.number(chat, parent)))
            }
        }
    }

    /// Our number for a session or chat: its own if it has one, else `inherited`, else a new one.
    fn number(&mut self, named: i128, inherited: Option<u32>) -> u32 {
        if let Some(number) = self.sessions.get(&named) {
            return *number;
        }
        let number = inherited.unwrap_or_else(|| {
            let new = self.sessions_count;
            self.sessions_count = new.saturating_add(1);
            new
        });
        self.sessions.insert(named, number);
        number
    }
}

/// The blocks of one request.
struct Blocks<'a> {
    ranges: &'a mut Vec<FileRange>,
    count: u32,
}

impl Blocks<'_> {
    fn add_ids(&mut self, line: &Map<String, Value>) -> Result<()> {
        for value in array("hash_ids", required(line, "hash_ids")?)? {
            self.add("hash_ids", integer("hash_ids", value)?, 1)?;
        }
        Ok(())
    }

    fn add_ranges(&mut self, line: &Map<String, Value>) -> Result<()> {
        for value in array("hash_ranges", required(line, "hash_ranges")?)? {
            let [first, count] = array("hash_ranges", value)?.as_slice() else {
                return Err(refuse("hash_ranges", value, "pairs [first id, count]"));
            };
            let first = integer("hash_ranges first id", first)?;
            let allowed =
                || refuse("hash_ranges count", count, format!("1 to {BLOCKS_PER_REQUEST_MAX}"));
            let count = count.as_u64().and_then(|count| u32::try_from(count).ok());
            let count = count.filter(|count| *count > 0).ok_or_else(allowed)?;
            self.add("hash_ranges", first, count)?;
        }
        Ok(())
    }

    fn add(&mut self, field: &str, first: i128, count: u32) -> Result<()> {
        self.count = self.count.saturating_add(count);
        if self.count > BLOCKS_PER_REQUEST_MAX {
            return Err(Error::invalid(format!(
                "{field}: at least {} blocks in one request, at most {BLOCKS_PER_REQUEST_MAX} \
                 allowed",
                self.count
            )));
        }
        match self.ranges.last_mut() {
            Some(last) if last.first.saturating_add(i128::from(last.count)) == first => {
                last.count = last.count.saturating_add(count);
            }
            _ => self.ranges.push(FileRange { first, count }),
        }
        Ok(())
    }
}

fn required<'a>(line: &'a Map<String, Value>, field: &str) -> Result<&'a Value> {
    line.get(field).ok_or_else(|| Error::invalid(format!("{field}: missing, required")))
}

fn array<'a>(field: &str, value: &'a Value) -> Result<&'a Vec<Value>> {
    value.as_array().ok_or_else(|| refuse(field, value, "an array"))
}

fn integer(field: &str, value: &Value) -> Result<i128> {
    let signed = value.as_i64().map(i128::from);
    signed
        .or_else(|| value.as_u64().map(i128::from))
        .ok_or_else(|| refuse(field, value, "integers of 64 bits"))
}

fn tokens(line: &Map<String, Value>, field: &str) -> Result<u32> {
    let value = required(line, field)?;
    value
        .as_u64()
        .and_then(|tokens| u32::try_from(tokens).ok())
        .ok_or_else(|| refuse(field, value, format!("0 to {}", u32::MAX)))
}

/// The largest timestamp, in milliseconds: 285,000 years, exact in a double.
const TIMESTAMP_MS_MAX: f64 = 9_007_199_254_740_992.0;

fn timestamp_ms(line: &Map<String, Value>, unit: TimeUnit) -> Result<u64> {
    let value = required(line, "timestamp")?;
    let scale = match unit {
        TimeUnit::Milliseconds => 1.0,
        TimeUnit::Seconds => 1000.0,
    };
    let ms = value.as_f64().map(|time| (time * scale).round());
    let ms = ms.filter(|ms| (0.0..=TIMESTAMP_MS_MAX).contains(ms));
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "whole and between 0 and 2^53: checked above"
    )]
    ms.map(|ms| ms as u64)
        .ok_or_else(|| refuse("timestamp", value, format!("0 to {}", TIMESTAMP_MS_MAX / scale)))
}

/// Characters of a refused value that a message shows.
const SHOWN_CHARS_MAX: usize = 60;

fn refuse(field: &str, value: &Value, allowed: impl fmt::Display) -> Error {
    let text = value.to_string();
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push_str("...");
    }
    Error::invalid(format!("{field}: {shown} given, {allowed} allowed"))
}
