//! What is sent to each port: what a client might say, changed, and what nobody should believe.

use std::{fs, path::Path};

use kvstrata_tiers::testing::Mutator;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// What opens a connection of HTTP/2.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Kinds of its frames.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Frames of a flood: more than any client has a reason for.
const FLOOD: u32 = 5000;

/// A port, and what may be said to it.
pub(super) struct Port {
    pub(super) name: &'static str,
    pub(super) address: String,
    /// What a client might say.
    pub(super) good: Vec<Vec<u8>>,
    /// What is said as it is.
    pub(super) bad: Vec<Vec<u8>>,
}

impl Port {
    /// The next thing that is said here.
    pub(super) fn next(&self, choose: &mut Mutator) -> Vec<u8> {
        let pick = |choose: &mut Mutator, of: &[Vec<u8>]| of[choose.below(of.len())].clone();
        match choose.below(10) {
            0 => (0..choose.below(4000)).map(|_| random(choose)).collect(),
            1..=3 => pick(choose, &self.bad),
            4 => {
                // Right to begin with, and then anything.
                let mut said = pick(choose, &self.good);
                said.extend((0..choose.below(4000)).map(|_| random(choose)).collect::<Vec<_>>());
                said
            }
            _ => {
                let (mut said, other) = (pick(choose, &self.good), pick(choose, &self.good));
                for _ in 0..=choose.below(3) {
                    choose.mutate(&mut said, &other);
                }
                said
            }
        }
    }
}

fn random(choose: &mut Mutator) -> u8 {
    u8::try_from(choose.below(256)).unwrap()
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Headers of a call, each written out.
fn headers(path: &str) -> Vec<u8> {
    let pairs = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "test"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    pairs.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

fn begun() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

/// A whole call with one message of these bytes.
fn call(path: &str, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[0], &length[..], message].concat();
    let opened = frame(HEADERS, END_HEADERS, 1, &headers(path));
    [begun(), opened, frame(DATA, END_STREAM, 1, &body)].concat()
}

/// Calls, whose messages are right as far as they go.
pub(super) fn calls(paths: &[&str]) -> Vec<Vec<u8>> {
    let hashes = [&[0x0a, 32][..], &[9; 32], &[0x12, 64], &[7; 64]].concat();
    let calls = paths.iter().flat_map(|path| [call(path, &hashes), call(path, &[])]);
    calls.collect()
}

/// What no client of HTTP/2 says.
pub(super) fn bad_calls(path: &str) -> Vec<Vec<u8>> {
    let opened = |stream| frame(HEADERS, END_HEADERS, stream, &headers(path));
    let after = |frames: Vec<Vec<u8>>| [begun(), frames.concat()].concat();
    let long_frame = [begun(), vec![0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1]].concat();
    let long_message =
        after(vec![opened(1), frame(DATA, 0, 1, &[0, 0xff, 0xff, 0xff, 0xff, 1, 2, 3])]);
    let compressed = after(vec![opened(1), frame(DATA, END_STREAM, 1, &[1, 0, 0, 0, 1, 0])]);
    // A name whose length has no end, and one of 2 GiB.
    let long_name = after(vec![frame(HEADERS, END_HEADERS, 1, &[&[0][..], &[0xff; 64]].concat())]);
    let giant = [0, 0x7f, 0x80, 0xff, 0xff, 0xff, 0x07];
    let long_value = after(vec![frame(HEADERS, END_HEADERS, 1, &giant)]);
    let resets = (0..FLOOD).flat_map(|number| {
        let stream = number * 2 + 1;
        [opened(stream), frame(RESET, 0, stream, &[0, 0, 0, 8])]
    });
    let pings = (0..FLOOD).map(|_| frame(PING, 0, 0, &[7; 8])).collect();
    let settings = (0..FLOOD).map(|_| frame(SETTINGS, 0, 0, &[0, 1, 0xff, 0xff, 0xff, 0xff]));
    let begun_headers = frame(HEADERS, 0, 1, &headers(path));
    let more = (0..FLOOD).map(|_| frame(CONTINUATION, 0, 1, &[0x00, 1, b'a', 1, b'b']));
    let window = frame(WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]);
    let streams = (0..FLOOD).map(|number| opened(number * 2 + 1)).collect();
    vec![
        long_frame,
        long_message,
        compressed,
        long_name,
        long_value,
        after(resets.collect()),
        after(pings),
        after(settings.collect()),
        after(std::iter::once(begun_headers).chain(more).collect()),
        after(vec![window.clone(), window]),
        after(streams),
        PREFACE[..10].to_vec(),
    ]
}

/// Requests for pages and of routers.
pub(super) fn pages() -> Vec<Vec<u8>> {
    let body = r#"{"prompts":[{"model":"test","tokens":[1,2,3]}]}"#;
    let post = |path: &str| {
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n");
        format!("{head}Content-Length: {length}\r\n\r\n{body}").into_bytes()
    };
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").into_bytes();
    vec![
        post("/v1/router/lookup"),
        post("/v1/router/score"),
        post("/check_blocks"),
        get("/metrics"),
        get("/console/state"),
        get("/"),
    ]
}

pub(super) fn bad_pages() -> Vec<Vec<u8>> {
    let post = "POST /v1/router/lookup HTTP/1.1\r\nHost: x\r\n";
    let nested = "[".repeat(200_000);
    let length = nested.len();
    vec![
        format!("{post}Content-Length: 18446744073709551615\r\n\r\n{{").into_bytes(),
        format!("{post}Content-Length: -1\r\n\r\n").into_bytes(),
        format!("{post}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n{{").into_bytes(),
        format!("{post}Content-Length: {length}\r\n\r\n{nested}").into_bytes(),
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20)).into_bytes(),
        format!("GET / HTTP/1.1\r\n{}", "a: b\r\n".repeat(50_000)).into_bytes(),
        format!("GET / HTTP/1.1\r\na: {}", "b".repeat(2 << 20)).into_bytes(),
        "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(200).into_bytes(),
    ]
}

/// Inputs that are kept beside a decoder and are right.
fn corpus(room: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(room).join("corpus");
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    let good = files.filter(|file| file.file_name().to_string_lossy().starts_with("good-"));
    good.map(|file| fs::read(file.path()).unwrap()).filter(|bytes| !bytes.is_empty()).collect()
}

/// A frame of the bulk port that is what it says, but for the lengths, which are of no body.
fn bulk_frame(kind: u8, body_bytes: u32, payload_bytes: u32) -> Vec<u8> {
    let mut header = vec![b'K', b'B', kind, 0, 1, 0, 0, 0];
    header.extend_from_slice(&body_bytes.to_le_bytes());
    header.extend_from_slice(&payload_bytes.to_le_bytes());
    let sum = xxh3_64_with_seed(&[], xxh3_64(&header));
    header.extend_from_slice(&sum.to_le_bytes());
    header
}

pub(super) fn frames() -> Vec<Vec<u8>> {
    corpus("bulk")
}

pub(super) fn bad_frames() -> Vec<Vec<u8>> {
    let kinds = (0..=u8::MAX).step_by(3);
    let long = kinds.flat_map(|kind| {
        [bulk_frame(kind, u32::MAX, 0), bulk_frame(kind, 0, u32::MAX), bulk_frame(kind, 1 << 20, 0)]
    });
    let credits = bulk_frame(7, 4, 0).repeat(FLOOD as usize);
    long.chain([credits, b"GET / HTTP/1.1\r\n\r\n".to_vec()]).collect()
}

pub(super) fn commands() -> Vec<Vec<u8>> {
    corpus("resp")
}

pub(super) fn bad_commands() -> Vec<Vec<u8>> {
    let key = format!("$1000\r\n{}\r\n", "k".repeat(1000));
    vec![
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$500000000\r\nxxxxxxxx".to_vec(),
        b"*1\r\n$999999999999999999999\r\n".to_vec(),
        b"*2147483647\r\n".to_vec(),
        format!("*513\r\n$4\r\nMGET\r\n{key}").into_bytes(),
        "*1\r\n$4\r\nPING\r\n".repeat(FLOOD as usize).into_bytes(),
        vec![b'a'; 1 << 20],
    ]
}
