//! Commands against inputs of all kinds: those of the corpus, and as many seeded changes of them as
//! there is time for.
//!
//! The corpus is in `corpus/NAME` beside this file: streams of commands. What is `good-` must be read to
//! its end, what is `bad-` must be refused. To write the made ones again on purpose:
//!
//! ```text
//! KVSTRATA_REWRITE_CORPUS=1 cargo test -p kvstrata --lib resp::fuzz_tests
//! ```
//! For longer than a moment, with `KVSTRATA_FUZZ_SEED` for other changes:
//!
//! ```text
//! KVSTRATA_FUZZ_SECONDS=600 cargo test -p kvstrata --lib changed_commands -- --nocapture
//! ```

use std::{env, fs, path::PathBuf, time::Duration};

use kvstrata_tiers::{error::Result, testing::Mutator};
use tokio::time::Instant;

use super::{
    input::{Input, Word},
    key::Key,
};
use crate::limits::RESP_KEY_BYTES_MAX;

/// Changed streams that every test run tries.
const ROUNDS: u64 = 20_000;
/// Changed streams that are changed further, because they were read.
const POOL_MAX: usize = 256;

/// Reads all commands of a stream; returns them as they are written again.
async fn read_stream(stream: &[u8]) -> Result<Vec<u8>> {
    let mut input = Input::new(stream);
    let mut again = Vec::new();
    while input.begin().await? {
        let count = input.count().await?;
        if count > 0 {
            again.extend(format!("*{count}\r\n").bytes());
        }
        for _ in 0..count {
            match input.word(RESP_KEY_BYTES_MAX).await? {
                Word::Short(word) => {
                    assert!(word.capacity() <= RESP_KEY_BYTES_MAX);
                    Key::read(&word);
                    again.extend(format!("${}\r\n", word.len()).bytes());
                    again.extend(word);
                    again.extend(b"\r\n");
                }
                // Its bytes are gone.
                Word::Long => again.extend(b"$0\r\n\r\n"),
            }
        }
    }
    Ok(again)
}

/// What a stream is read as; reading what was written again gives the same.
async fn read(stream: &[u8]) -> Result<()> {
    let again = read_stream(stream).await?;
    assert_eq!(read_stream(&again).await.unwrap(), again);
    Ok(())
}

fn home() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/resp/corpus")
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(home()).unwrap().map(|file| file.unwrap());
    let mut files: Vec<_> = files
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    files.sort();
    files
}

fn rewrite() {
    let long = format!("*2\r\n$3\r\nGET\r\n$2000\r\n{}\r\n", "k".repeat(2000));
    let lmcache = "*3\r\n$3\r\nSET\r\n$27\r\nm@2@1@5a@bfloat16kv_bytes--\r\n$4\r\n\0\r\n\n\r\n";
    let files: [(&str, &[u8]); 12] = [
        ("good-nothing", b""),
        ("good-handshake", b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n"),
        ("good-values", lmcache.as_bytes()),
        ("good-typed", b"PING\r\n  set k   v\n\r\nGET k\r\n*0\r\n"),
        ("good-long-key", long.as_bytes()),
        ("bad-count", b"*9999999999999999999999\r\n"),
        ("bad-length", b"*1\r\n$600000000\r\n"),
        ("bad-negative", b"*1\r\n$-1\r\n"),
        ("bad-kind", b"*1\r\n+PING\r\n"),
        ("bad-end", b"*1\r\n$4\r\nPINGxx"),
        ("bad-cut", b"*2\r\n$3\r\nGET\r\n$10\r\nabc"),
        ("bad-http", b"*1 HTTP/1.1\r\nHost: x\r\n\r\n"),
    ];
    fs::create_dir_all(home()).unwrap();
    for (name, bytes) in files {
        fs::write(home().join(name), bytes).unwrap();
    }
}

#[tokio::test]
async fn the_corpus_reads_as_its_names_say() {
    if env::var_os("KVSTRATA_REWRITE_CORPUS").is_some() {
        rewrite();
    }
    let files = corpus();
    assert!(files.iter().filter(|(name, _)| name.starts_with("good-")).count() > 2);
    assert!(files.iter().filter(|(name, _)| name.starts_with("bad-")).count() > 2);
    for (name, stream) in files {
        let read = read(&stream).await;
        assert_eq!(read.is_ok(), name.starts_with("good-"), "{name}: {read:?}");
    }
}

#[tokio::test]
async fn changed_commands_break_nothing() {
    let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let mut mutator = Mutator::new(number("KVSTRATA_FUZZ_SEED").unwrap_or(1));
    let mut pool: Vec<_> = corpus().into_iter().map(|(_, bytes)| bytes).collect();
    let (mut rounds, mut good) = (0, 0);
    let started = Instant::now();
    let long = number("KVSTRATA_FUZZ_SECONDS").map(Duration::from_secs);
    while rounds < ROUNDS || long.is_some_and(|long| started.elapsed() < long) {
        let mut stream = pool[mutator.below(pool.len())].clone();
        let other = mutator.below(pool.len());
        mutator.mutate(&mut stream, &pool[other]);
        rounds += 1;
        if read(&stream).await.is_ok() {
            good += 1;
            if pool.len() < POOL_MAX {
                pool.push(stream);
            } else if mutator.chance(10) {
                let place = mutator.below(POOL_MAX);
                pool[place] = stream;
            }
        }
    }
    println!("{rounds} streams, {good} of them read");
    assert!(good > 100 && good < rounds, "{good} of {rounds} tells nothing");
}
