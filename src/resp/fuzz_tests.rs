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

use kvstrata_tiers::error::Result;

use super::{
    input::{Input, Word},
    key::Key,
};
use crate::{
    corpus_tests::{Changes, Corpus},
    limits::RESP_KEY_BYTES_MAX,
};

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

fn corpus() -> Corpus {
    Corpus::of("resp")
}

fn made() -> Vec<(&'static str, Vec<u8>)> {
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
    files.map(|(name, bytes)| (name, bytes.to_vec())).to_vec()
}

#[tokio::test]
async fn the_corpus_reads_as_its_names_say() {
    corpus().rewrite(made);
    for (name, stream) in corpus().files() {
        let read = read(&stream).await;
        assert_eq!(read.is_ok(), name.starts_with("good-"), "{name}: {read:?}");
    }
}

#[tokio::test]
async fn changed_commands_break_nothing() {
    let pool = corpus().files().into_iter().map(|(_, bytes)| bytes).collect();
    let mut changes = Changes::of(pool);
    while let Some(stream) = changes.next() {
        if read(&stream).await.is_ok() {
            changes.note_read(stream);
        }
    }
}
