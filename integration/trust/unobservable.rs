//! What another tenant has cannot be told from what nobody has: not by an answer, and not by its time.

use std::time::Duration;

use kvstrata::client::{Handle, HashList, LookupOptions, Path as Way};
use tokio::time::Instant;

use super::{A, B, Files, connect};
use crate::client::{batch, hashes, namespace};

const PARTS: [u32; 1] = [4096];
/// Lookups of each kind.
const LOOKUPS: usize = 10_000;
/// Blocks of a prefix, and prefixes of each kind.
const BLOCKS: u32 = 16;
const PREFIXES: u32 = 128;
/// How far the area under the curve may be from that of a coin: five times its standard error for so many
/// lookups, which is 0.0041.
const AREA_BAND: f64 = 0.02;

/// Numbers that look random, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 1).unwrap() % count
    }
}

/// The probability that one of the first kind took longer than one of the second, ties counted half.
fn area(first: &[Duration], second: &[Duration]) -> f64 {
    let marked =
        |times: &[Duration], kind| times.iter().map(move |time| (*time, kind)).collect::<Vec<_>>();
    let mut all = [marked(first, true), marked(second, false)].concat();
    all.sort_unstable();
    let (mut rank, mut sum) = (0.0, 0.0);
    for ties in all.chunk_by(|one, other| one.0 == other.0) {
        let of_first = ties.iter().filter(|(_, kind)| *kind).count() as f64;
        sum += of_first * (rank + (ties.len() as f64 + 1.0) / 2.0);
        rank += ties.len() as f64;
    }
    let (m, n) = (first.len() as f64, second.len() as f64);
    (sum - m * (m + 1.0) / 2.0) / (m * n)
}

#[test]
fn the_area_is_that_of_the_curve() {
    let times = |ms: &[u64]| ms.iter().copied().map(Duration::from_millis).collect::<Vec<_>>();
    assert!((area(&times(&[3, 4]), &times(&[1, 2])) - 1.0).abs() < 1e-9);
    assert!((area(&times(&[1, 4]), &times(&[2, 3])) - 0.5).abs() < 1e-9);
    assert!((area(&times(&[1, 1]), &times(&[1, 1, 1])) - 0.5).abs() < 1e-9);
    assert!(area(&times(&[1]), &times(&[2])).abs() < 1e-9);
}

/// Asks for prefixes of both kinds in random order; times, and all different answers, of each kind.
async fn measure(handle: &Handle, kinds: &[Vec<HashList>; 2]) -> [(Vec<Duration>, Vec<String>); 2] {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut measured = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    while measured.iter().any(|(times, _)| times.len() < LOOKUPS) {
        let kind = random.below(2);
        let (times, answers) = &mut measured[kind];
        if times.len() == LOOKUPS {
            continue;
        }
        let prefix = &kinds[kind][random.below(kinds[kind].len())];
        let before = Instant::now();
        let found = handle.lookup(prefix, LookupOptions::default()).await.unwrap();
        times.push(before.elapsed());
        let answer = format!("{found:?}");
        if !answers.contains(&answer) {
            answers.push(answer);
        }
    }
    measured
}

#[tokio::test]
async fn foreign_and_absent_prefixes_cannot_be_told_apart() {
    let files = Files::new();
    let server = files.tokens().start().await;
    let (theirs, ours) =
        (connect(&server, A, Way::Grpc).await, connect(&server, B, Way::Grpc).await);
    let their = theirs.open(namespace(&PARTS)).await.unwrap();
    let session = theirs.session("a").await.unwrap();
    let handle = ours.open(namespace(&PARTS)).await.unwrap();
    let prefixes = |from: u32| -> Vec<HashList> {
        let starts = (0..PREFIXES).map(|prefix| from + prefix * BLOCKS);
        starts.map(|start| hashes(start..start + BLOCKS)).collect()
    };
    let present = PREFIXES * BLOCKS;
    for start in (0..present).step_by(BLOCKS as usize) {
        their.put(&session, &batch(start..start + BLOCKS, &PARTS)).await.unwrap();
    }
    let there = their.lookup(&hashes(0..BLOCKS), LookupOptions::default()).await.unwrap();
    assert_eq!(there.prefix_blocks, BLOCKS, "the other tenant has them");

    let kinds = [prefixes(0), prefixes(present)];
    let [(foreign, said_of_foreign), (absent, said_of_absent)] = measure(&handle, &kinds).await;
    assert_eq!(said_of_foreign, said_of_absent);
    assert_eq!(said_of_foreign.len(), 1, "and all are alike: {said_of_foreign:?}");
    let apart = area(&foreign, &absent);
    assert!((apart - 0.5).abs() <= AREA_BAND, "area {apart}");

    // What there is to be told apart is: the same measure of prefixes that are longer.
    let longer = [prefixes(0), vec![hashes(present..present + 64 * BLOCKS)]];
    let [(short, _), (long, _)] = measure(&handle, &longer).await;
    let control = area(&long, &short);
    assert!(control > 0.5 + 5.0 * AREA_BAND, "area of the control {control}");
    drop((their, session, handle));
    server.stop(&[]).await;
}
