//! What appending asks of the kernel, as strace sees it: large writes to segments, each synced before
//! the index learns of it, and few bytes to the index.
//!
//! 128 MiB of blocks, or as many MiB as the variable `KVSTRATA_CALLS_MIB` says: see "System calls" in
//! benches/README.md.

use std::{collections::HashMap, fs, process::Command};

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
/// Bytes in the log of the index for each group, and for each of its blocks: what they are now.
const INDEX_GROUP_BYTES: u64 = 48;
/// See [`INDEX_GROUP_BYTES`].
const INDEX_ENTRY_BYTES: u64 = 97;
/// The namespace in the first group takes as many bytes as so many blocks, or fewer.
const NAMESPACE_BLOCKS: u64 = 4;
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

    fn is_log_write(&self) -> bool {
        self.is_of("/index/") && self.path.ends_with(".log") && self.is_write()
    }

    fn is_of(&self, room: &str) -> bool {
        self.path.contains(room)
    }
}

/// A segment as the disk has it.
#[derive(Debug, Default)]
struct Durable {
    /// Bytes whose writes have ended.
    written: u64,
    /// What of them a sync under way is for, or the last one was.
    syncing: u64,
    /// What of them a sync that has ended was for.
    synced: u64,
}

/// Fails if the log of the index is written to and no sync has ended since it was the last time, or if
/// it then names more blocks than syncs were for: of bytes whose writes had ended when they began.
/// Returns how many writes of the log there were, and how many blocks they named at least.
fn assert_synced_before_indexed(calls: &[Call], events: &[Event]) -> (usize, u64) {
    let mut segments: HashMap<&str, Durable> = HashMap::new();
    let (mut syncs, mut groups, mut named) = (0, 0, 0);
    for event in events {
        let (Event::Begin(number) | Event::End(number)) = event;
        let call = &calls[*number];
        let ends = matches!(event, Event::End(_));
        if call.is_of("/segments/") {
            let segment = segments.entry(call.path.as_str()).or_default();
            match call.name.as_str() {
                "fdatasync" if ends => {
                    syncs += 1;
                    segment.synced = segment.syncing;
                }
                "fdatasync" => segment.syncing = segment.written,
                _ if call.is_write() && ends => segment.written += call.result,
                _ => {}
            }
        } else if call.is_log_write() && !ends && !segments.is_empty() {
            // Before there is a segment, the index writes what it is.
            assert!(syncs > 0, "{call:?} without a sync, {segments:?}");
            syncs = 0;
            groups += 1;
            named += call.result.saturating_sub(INDEX_GROUP_BYTES) / INDEX_ENTRY_BYTES;
            let durable: u64 = segments.values().map(|segment| segment.synced).sum();
            let stored = named.saturating_sub(NAMESPACE_BLOCKS) * BLOCK as u64;
            assert!(stored <= durable, "{call:?} names {named} blocks, {segments:?}");
        }
    }
    (groups, named)
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
    let (groups, named) = assert_synced_before_indexed(&calls, &events);
    show(&format!(
        "{blocks} blocks: {all} bytes to segments in {} writes, {large} in large ones; {groups} \
         groups; {index} bytes to the index",
        segments().count()
    ));
    assert!(index < blocks * INDEX_BYTES_MAX, "{index} bytes of index for {blocks} blocks");
    assert!(groups > 4, "{groups} groups");
    assert!(named * 10 >= blocks * 9, "{named} of {blocks} blocks were seen in the index");
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
