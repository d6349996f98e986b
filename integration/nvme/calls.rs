//! What appending asks of the kernel, as strace sees it: large writes to segments, each synced before
//! the index learns of it, and few bytes to the index.
//!
//! 128 MiB of blocks, or as many MiB as the variable `KVSTRATA_CALLS_MIB` says: see "System calls" in
//! benches/README.md.

use std::{
    collections::{HashMap, HashSet},
    fs,
    process::Command,
};

use super::{Home, store, wait_copied};
use crate::{
    harness::{SERVER_WAIT, wait_until},
    skipped,
    wire::{Wire, namespace_of},
};

const BLOCK: usize = 64 << 10;
/// What is traced: all that changes files.
const CALLS: &str =
    "trace=write,pwrite64,pwritev,pwritev2,fdatasync,fsync,ftruncate,sync_file_range";
/// A large write has at least so many bytes.
const LARGE: u64 = 1 << 20;
/// At least so many of the bytes of segments must be in large writes, in percent.
const LARGE_PERCENT_MIN: u64 = 95;
/// Bytes written to files of the index for each block.
const INDEX_BYTES_MAX: u64 = 300;

/// One call on a file.
#[derive(Debug, Default)]
struct Call {
    name: String,
    path: String,
    result: u64,
}

/// A call begins, or ends.
#[derive(Debug)]
enum Event {
    Begin(usize),
    End(usize),
}

/// All calls on files under `folder`, and the order in which they began and ended.
///
/// A line is `PID name(3<path>, ...) = result`, or, where another thread's came between,
/// `PID name(3<path>, ... <unfinished ...>` and later `PID <... name resumed>...) = result`.
fn parse(trace: &str, folder: &str) -> (Vec<Call>, Vec<Event>) {
    let (mut calls, mut events) = (Vec::new(), Vec::new());
    let mut open: HashMap<&str, usize> = HashMap::new();
    for line in trace.lines() {
        let Some((process, rest)) = line.split_once(' ') else { continue };
        let rest = rest.trim_start();
        let number = if rest.starts_with("<... ") {
            let Some(number) = open.remove(process) else { continue };
            number
        } else {
            let Some((name, arguments)) = rest.split_once('(') else { continue };
            let path = arguments.split_once('<').and_then(|(_, path)| path.split_once('>'));
            let Some((path, _)) = path.filter(|(path, _)| path.starts_with(folder)) else {
                continue;
            };
            calls.push(Call { name: name.to_owned(), path: path.to_owned(), result: 0 });
            events.push(Event::Begin(calls.len() - 1));
            if rest.ends_with("<unfinished ...>") {
                open.insert(process, calls.len() - 1);
                continue;
            }
            calls.len() - 1
        };
        let result = rest.rsplit_once(" = ").unwrap().1;
        let digits = result.split_whitespace().next().unwrap();
        calls[number].result = digits.parse().unwrap_or_else(|_| panic!("it failed: {line}"));
        events.push(Event::End(number));
    }
    (calls, events)
}

impl Call {
    fn is_write(&self) -> bool {
        ["write", "pwrite64", "pwritev", "pwritev2"].contains(&self.name.as_str())
    }

    fn is_of(&self, room: &str) -> bool {
        self.path.contains(room)
    }
}

/// Fails if the log of the index is written to while a segment has bytes that are not synced. Returns
/// how many writes of the log were preceded by a sync.
fn assert_synced_before_indexed(calls: &[Call], events: &[Event]) -> usize {
    let (mut unsynced, mut writing) = (HashSet::new(), HashSet::new());
    let (mut synced, mut indexed) = (false, 0);
    for event in events {
        let (Event::Begin(number) | Event::End(number)) = event;
        let call = &calls[*number];
        let ends = matches!(event, Event::End(_));
        if call.is_of("/segments/") {
            match call.name.as_str() {
                "fdatasync" if ends => {
                    synced = true;
                    unsynced.remove(call.path.as_str());
                }
                "fdatasync" => assert!(!writing.contains(call.path.as_str()), "{call:?}"),
                // What a segment ends with, its table, is not synced: without it the records are read.
                "ftruncate" if ends => drop(unsynced.remove(call.path.as_str())),
                _ if call.is_write() && ends => drop(writing.remove(call.path.as_str())),
                _ if call.is_write() => {
                    writing.insert(call.path.as_str());
                    unsynced.insert(call.path.as_str());
                }
                _ => {}
            }
        } else if call.is_of("/index/") && call.path.ends_with(".log") && call.is_write() && !ends {
            assert!(unsynced.is_empty(), "{call:?} before the sync of {unsynced:?}");
            indexed += usize::from(std::mem::take(&mut synced));
        }
    }
    indexed
}

fn sum<'a>(calls: impl Iterator<Item = &'a Call>) -> u64 {
    calls.map(|call| call.result).sum()
}

/// Whether strace may trace here; says so if not.
pub(super) fn may_trace(test: &str) -> bool {
    match Command::new("strace").args(["-f", "-o", "/dev/null", "true"]).output() {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            skipped::say(test, "no tracing", String::from_utf8_lossy(&output.stderr).trim());
            false
        }
        Err(error) => {
            skipped::say(test, "no strace", &error.to_string());
            false
        }
    }
}

/// Stores so many blocks under strace; returns what it saw.
async fn trace(home: &Home, blocks: u64, durable: bool) -> String {
    let output = home.configuration.path().join("trace");
    let arguments = ["strace", "-D", "-f", "--seccomp-bpf", "-y", "-s", "0", "-e", CALLS, "-o"];
    let mut strace: Vec<String> = arguments.map(str::to_owned).into();
    strace.push(output.to_str().unwrap().to_owned());
    let server = home
        .server()
        .wrapped_in(strace)
        .dram("256MiB")
        .set("memory.limit", "1GiB")
        .set("nvme.capacity", "2GiB")
        .set("nvme.segment_bytes", "auto")
        .set("nvme.engine", "pread")
        .start()
        .await;
    let process = server.process_id();
    let mut wire = Wire::connect(&server, namespace_of("m", BLOCK)).await;
    for start in (0..blocks).step_by(1024) {
        let end = (start + 1024).min(blocks);
        store(&mut wire, start..end, durable).await;
        wait_copied(&server, end as f64).await;
    }
    drop(wire);
    server.stop(&[]).await;
    let process = process.to_string();
    let ended = |line: &str| line.starts_with(&process) && line.ends_with(" +++ exited with 0 +++");
    let read = || fs::read_to_string(&output).unwrap();
    wait_until("the trace is complete", SERVER_WAIT, async || read().lines().any(ended)).await;
    read()
}

#[expect(clippy::print_stdout, reason = "numbers for whoever runs it with --nocapture")]
fn show(text: &str) {
    println!("{text}");
}

/// Stores blocks, and checks all but the size of writes; returns the bytes written to segments, and
/// how many of them in large writes.
async fn large_of_all(test: &str, durable: bool) -> Option<(u64, u64)> {
    if !may_trace(test) {
        return None;
    }
    let mib = std::env::var("KVSTRATA_CALLS_MIB").map_or(128, |mib| mib.parse::<u64>().unwrap());
    let (home, blocks) = (Home::new(), (mib << 20) / BLOCK as u64);
    let trace = trace(&home, blocks, durable).await;
    let (calls, events) = parse(&trace, home.tier().to_str().unwrap());
    let writes = || calls.iter().filter(|call| call.is_write());
    let segments = || writes().filter(|call| call.is_of("/segments/"));
    let (all, large) = (sum(segments()), sum(segments().filter(|call| call.result >= LARGE)));
    assert!(all >= mib << 20, "{all} bytes: not everything was seen");
    let index = sum(writes().filter(|call| call.is_of("/index/")));
    let groups = assert_synced_before_indexed(&calls, &events);
    show(&format!(
        "{blocks} blocks: {all} bytes to segments in {} writes, {large} in large ones; {groups} \
         groups; {index} bytes to the index",
        segments().count()
    ));
    assert!(index < blocks * INDEX_BYTES_MAX, "{index} bytes of index for {blocks} blocks");
    assert!(groups > 4, "{groups} groups");
    Some((large, all))
}

#[tokio::test]
async fn what_nobody_waits_for_is_written_large_and_synced_before_it_is_indexed() {
    let test = "what_nobody_waits_for_is_written_large_and_synced_before_it_is_indexed";
    let Some((large, all)) = large_of_all(test, false).await else { return };
    assert!(large * 100 >= all * LARGE_PERCENT_MIN, "{large} of {all} bytes in large writes");
}

#[tokio::test]
async fn what_somebody_waits_for_is_synced_before_it_is_indexed() {
    let test = "what_somebody_waits_for_is_synced_before_it_is_indexed";
    // It does not wait for company, so that a single client's groups are as large as they happen to be.
    let Some((large, all)) = large_of_all(test, true).await else { return };
    assert!(large > 0, "{large} of {all} bytes in large writes");
}
