//! Reads a trace file of any known format, plain or zstd.
//!
//! The first line decides the format. Whatever the file holds, reading ends in a trace or in an
//! error that names file, line, field, value and what is allowed; memory is bounded by the limits
//! of [`trace`](super) and by one line.

use std::{fs::File, io::Read, path::Path};

use kvstrata_tiers::error::{Error, Result};
use serde_json::{Map, Value};

use super::{
    Trace, TraceBuilder,
    format::{Format, Parser, TimeUnit},
    lines::Lines,
};

/// What to read, where the file does not say.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// Tokens in one block; the format's own size if `None`. Other published files of the Mooncake
    /// format differ from it in this.
    pub block_tokens: Option<u32>,
    /// The unit of the timestamps; the format's own if `None`.
    pub time_unit: Option<TimeUnit>,
    /// Stop after this many requests; all if `None`.
    pub requests_max: Option<usize>,
}

/// Reads the trace at `path`.
///
/// # Errors
/// `Invalid` if the file cannot be read or a line is not a request; names file, line, field, value
/// and what is allowed.
///
/// # Blocking
/// Reads the whole file: milliseconds to seconds.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Trace> {
    let shown = path.display().to_string();
    let file = File::open(path)
        .map_err(|source| Error::invalid(format!("open trace {shown}")).because(source))?;
    read_from(file, &shown, options)
}

/// Reads a trace from any source; `name` stands for the file in messages and titles.
///
/// # Errors
/// As [`read`].
///
/// # Blocking
/// Reads until the end of the source.
pub fn read_from(source: impl Read, name: &str, options: &ReadOptions) -> Result<Trace> {
    let mut lines = Lines::new(source)
        .map_err(|source| Error::invalid(format!("read trace {name}")).because(source))?;
    let mut reader: Option<Reader> = None;
    loop {
        let done = reader.as_ref().is_some_and(|reader| {
            options.requests_max.is_some_and(|max| reader.builder.len() >= max)
        });
        let line = if done { Ok(None) } else { lines.next_line() };
        let parsed = match line {
            Ok(None) => break,
            Ok(Some(line)) => object(line),
            Err(source) => Err(Error::invalid("read").because(source)),
        };
        parsed
            .and_then(|object| match &mut reader {
                Some(reader) => reader.add(&object),
                None => reader.insert(Reader::start(&object, name, options)?).add(&object),
            })
            .map_err(|error| {
                Error::invalid(format!("{name}, line {}", lines.number())).because(error)
            })?;
    }
    let reader = reader.ok_or_else(|| Error::invalid(format!("{name}: no request in the file")))?;
    Ok(reader.finish())
}

/// A trace being read, once its format is known.
struct Reader {
    parser: Parser,
    builder: TraceBuilder,
    ranges: Vec<super::intern::FileRange>,
}

impl Reader {
    fn start(first: &Map<String, Value>, name: &str, options: &ReadOptions) -> Result<Self> {
        let format = Format::detect(first)?;
        let block_tokens = options.block_tokens.unwrap_or_else(|| format.block_tokens());
        if block_tokens == 0 {
            return Err(Error::invalid("tokens in one block: 0 given, at least 1 allowed"));
        }
        let title = Path::new(name)
            .file_name()
            .map_or_else(|| name.to_owned(), |file| file.to_string_lossy().into_owned());
        Ok(Self {
            parser: Parser::new(format, options.time_unit.unwrap_or_else(|| format.time_unit())),
            builder: TraceBuilder::new(title, format, block_tokens),
            ranges: Vec::new(),
        })
    }

    fn add(&mut self, line: &Map<String, Value>) -> Result<()> {
        self.ranges.clear();
        let head = self.parser.parse(line, &mut self.ranges)?;
        self.builder.push(head, &self.ranges)
    }

    fn finish(self) -> Trace {
        self.builder.finish(self.parser.sessions())
    }
}

fn object(line: &[u8]) -> Result<Map<String, Value>> {
    serde_json::from_slice(line).map_err(|source| {
        let shown = String::from_utf8_lossy(line.get(..40).unwrap_or(line)).into_owned();
        Error::invalid(format!("{shown:?} is not one JSON object a line")).because(source)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Trace> {
        read_from(text.as_bytes(), "dir/t.jsonl", &ReadOptions::default())
    }

    #[test]
    fn the_three_formats_are_told_apart_by_the_first_line() {
        let mooncake = parse(
            r#"{"timestamp": 5, "input_length": 1024, "output_length": 3, "hash_ids": [9, 10]}"#,
        )
        .unwrap();
        assert_eq!((mooncake.format(), mooncake.block_tokens()), (Format::Mooncake, 512));
        assert_eq!(mooncake.name(), "t.jsonl");

        let runs = parse(
            r#"{"timestamp":7,"session":4,"input_length":300,"output_length":3,"hash_ranges":[[100,3],[7,1]]}"#,
        )
        .unwrap();
        assert_eq!(
            (runs.format(), runs.block_tokens(), runs.references()),
            (Format::RunLength, 64, 4)
        );
        assert_eq!(runs.request(0).unwrap().session, Some(0));

        let qwen = parse(concat!(
            r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 32, "output_length": 1, "type": "text", "turn": 1, "hash_ids": [1, -5]}"#,
            "\n",
            r#"{"chat_id": 160, "parent_chat_id": 159, "timestamp": 61.114, "input_length": 48, "output_length": 1, "type": "text", "turn": 2, "hash_ids": [1, -5, 18446744073709551615]}"#,
            "\n",
            r#"{"chat_id": 161, "timestamp": 61.2, "input_length": 48, "output_length": 1, "hash_ids": []}"#,
        ))
        .unwrap();
        assert_eq!((qwen.format(), qwen.block_tokens()), (Format::QwenBailian, 16));
        let sessions: Vec<_> = qwen.requests().map(|request| request.session).collect();
        assert_eq!(sessions, [Some(0), Some(0), Some(1)]);
        assert_eq!(qwen.request(1).unwrap().timestamp_ms, 61_114);
        assert_eq!((qwen.references(), qwen.blocks_unique()), (5, 3));
    }

    #[test]
    fn options_override_the_format() {
        let line = r#"{"timestamp": 2, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#;
        let text = format!("{line}\n{line}\n{line}");
        let options = ReadOptions {
            block_tokens: Some(32),
            time_unit: Some(TimeUnit::Seconds),
            requests_max: Some(2),
        };
        let trace = read_from(text.as_bytes(), "t", &options).unwrap();
        assert_eq!((trace.len(), trace.block_tokens()), (2, 32));
        assert_eq!(trace.request(0).unwrap().timestamp_ms, 2000);
    }

    #[test]
    fn requests_are_sorted_by_time() {
        let line = |time: u32, id: u32| {
            format!(
                r#"{{"timestamp": {time}, "input_length": 1, "output_length": 1, "hash_ids": [{id}]}}"#
            )
        };
        let trace = parse(&format!("{}\n{}\n{}", line(9, 0), line(3, 1), line(9, 2))).unwrap();
        let ids: Vec<_> = trace.requests().flat_map(|request| request.blocks()).collect();
        assert_eq!(ids, [1, 0, 2]);
    }

    #[test]
    fn bad_lines_are_named_with_field_value_and_range() {
        let good = r#"{"timestamp":1,"input_length":1,"output_length":1,"hash_ranges":[[1,1]]}"#;
        let cases = [
            ("{", "not one JSON object"),
            ("[1]", "not one JSON object"),
            (r#"{"timestamp":1,"input_length":1,"output_length":1}"#, "hash_ranges: missing"),
            (&good.replace("[1,1]", "7"), "hash_ranges: 7 given, an array allowed"),
            (&good.replace("[1,1]", "[1]"), "hash_ranges: [1] given, pairs [first id, count]"),
            (&good.replace("[1,1]", "[1,0]"), "hash_ranges count: 0 given, 1 to 1048576"),
            (&good.replace("[1,1]", "[1,4294967296]"), "4294967296 given, 1 to 1048576"),
            (&good.replace("[1,1]", "[1,1048577]"), "1048577 blocks in one request, at most"),
            (&good.replace("[1,1]", "[1.5,1]"), "first id: 1.5 given, integers of 64 bits"),
            (&good.replace("timestamp\":1", "timestamp\":-1"), "timestamp: -1 given, 0 to"),
            (&good.replace("timestamp\":1", "timestamp\":\"x\""), "timestamp: \"x\" given"),
            (
                &good.replace("input_length\":1", "input_length\":-3"),
                "input_length: -3 given, 0 to",
            ),
            (&good.replace("\"output_length\":1,", ""), "output_length: missing"),
        ];
        for (bad, expected) in cases {
            let error = parse(&format!("{good}\n\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains("dir/t.jsonl, line 3") && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn files_without_requests_are_refused() {
        let error = parse(r#"{"time": 3}"#).unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("hash_ids"), "{error}");
        assert!(parse("\n \n").unwrap_err().to_string().contains("no request"));
        assert!(read(Path::new("/nowhere/x"), &ReadOptions::default()).is_err());
    }

    proptest! {
        #[test]
        fn no_input_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(read_from(&bytes[..], "x", &ReadOptions::default()));
        }

        #[test]
        fn no_change_of_a_good_line_panics(at in 0_usize..70, byte in any::<u8>()) {
            let good = r#"{"timestamp":1,"input_length":1,"output_length":1,"hash_ranges":[[1,1]]}"#;
            let mut bytes = good.as_bytes().to_vec();
            bytes[at] = byte;
            drop(read_from(&bytes[..], "x", &ReadOptions::default()));
        }
    }
}
