//! Blocks of 2 MiB against fio, and reads beside writes.

use std::{path::Path, process::Command};

use futures_util::{StreamExt, stream};
use kvstrata_tiers::{Location, nvme::device::Engine, store::Urgency};
use serde_json::Value;
use tokio::time::Instant;

use super::{
    support::{Samples, median},
    tier::{Bench, Sizes, directory},
};

const BLOCK: u32 = 2 << 20;
const BLOCKS: u64 = 512;
const DEPTH: usize = 8;
const ROUNDS: usize = 7;

fn sizes() -> Sizes {
    Sizes { capacity_bytes: 8 << 30, block_bytes: BLOCK, arena_bytes: 512 << 20 }
}

/// One run of fio; GB/s.
fn fio(directory: &Path, engine: Engine, rw: &str) -> f64 {
    let (ioengine, jobs, depth) = match engine {
        Engine::Pread => ("psync", DEPTH as u64, 1),
        Engine::Auto | Engine::Uring => ("io_uring", 1, DEPTH),
    };
    let bytes = BLOCKS * u64::from(BLOCK) / jobs;
    let mut command = Command::new("fio");
    command
        .args(["--name=floor", "--direct=1", "--output-format=json", "--group_reporting"])
        .arg(format!("--directory={}", directory.display()))
        .arg(format!("--ioengine={ioengine}"))
        .arg(format!("--numjobs={jobs}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--bs={BLOCK}"))
        .arg(format!("--size={bytes}"))
        .arg(format!("--rw={rw}"));
    if rw == "write" {
        // As often as a group of ours: one sync for each 16 MiB.
        command.arg(format!("--fdatasync={}", (8 / jobs).max(1)));
    }
    let output = command.output().unwrap_or_else(|error| panic!("run fio (install it): {error}"));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("fio: {error}: {}", String::from_utf8_lossy(&output.stderr))
    });
    let side = if rw == "write" { "write" } else { "read" };
    report["jobs"][0][side]["bw_bytes"].as_f64().unwrap() / 1e9
}

fn drop_caches() {
    // Direct I/O does not need it; metadata and a fallback to buffered I/O do.
    drop(std::fs::write("/proc/sys/vm/drop_caches", "3"));
}

async fn append(bench: &Bench, first: u64, bytes: &[u8]) -> (f64, Vec<Location>) {
    // In memory already, as blocks that leave dram are, and as fio's are.
    let blocks: Vec<_> = (0..DEPTH).map(|_| bench.arena.sealed(bytes).unwrap()).collect();
    let started = Instant::now();
    let puts = (first..first + BLOCKS).zip(blocks.iter().cycle());
    let puts = puts.map(|(number, block)| bench.put(number, block.clone(), Urgency::Durable));
    let places: Vec<Location> = stream::iter(puts).buffered(DEPTH).collect().await;
    let gigabytes = (BLOCKS * u64::from(BLOCK)) as f64 / 1e9;
    (gigabytes / started.elapsed().as_secs_f64(), places)
}

async fn read(bench: &Bench, first: u64, places: &[Location]) -> f64 {
    let started = Instant::now();
    let gets = (first..).zip(places).map(|(number, place)| bench.get(number, *place, BLOCK));
    stream::iter(gets).buffered(DEPTH).collect::<Vec<()>>().await;
    let gigabytes = (BLOCKS * u64::from(BLOCK)) as f64 / 1e9;
    gigabytes / started.elapsed().as_secs_f64()
}

pub(crate) async fn against_fio() {
    println!("blocks of 2 MiB, depth {DEPTH}, 1 GiB a round, medians of {ROUNDS} rounds, GB/s");
    let bytes: Vec<u8> =
        (0..BLOCK).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for engine in [Engine::Auto, Engine::Pread] {
        let (mut ours, mut floor) = ([vec![], vec![]], [vec![], vec![]]);
        for round in 0..ROUNDS as u64 {
            let directory = directory();
            let bench = Bench::start(directory.path(), engine, &sizes());
            floor[0].push(fio(directory.path(), engine, "write"));
            let (speed, places) = append(&bench, round * BLOCKS, &bytes).await;
            ours[0].push(speed);
            drop_caches();
            floor[1].push(fio(directory.path(), engine, "read"));
            ours[1].push(read(&bench, round * BLOCKS, &places).await);
            bench.stop().await;
        }
        for (name, ours, floor) in [("append", &ours[0], &floor[0]), ("read", &ours[1], &floor[1])]
        {
            let (ours, floor) = (median(ours.iter().copied()), median(floor.iter().copied()));
            println!(
                "{engine:?} {name}: fio {floor:.2}, ours {ours:.2}, ratio {:.2}",
                ours / floor
            );
        }
    }
}

pub(crate) async fn reads_beside_demotion() {
    let directory = directory();
    let bench = Bench::start(directory.path(), Engine::Auto, &sizes());
    let bytes = vec![7; BLOCK as usize];
    let (_, places) = append(&bench, 0, &bytes).await;
    drop_caches();
    let alone = latencies(&bench, &places).await;
    let block = bench.arena.sealed(&bytes).unwrap();
    let demotion = async {
        let puts = BLOCKS..BLOCKS * 100;
        let puts = puts.map(|number| bench.put(number, block.clone(), Urgency::Background));
        stream::iter(puts).buffered(DEPTH * 2).for_each(async |_| {}).await;
    };
    let beside = tokio::select! {
        beside = latencies(&bench, &places) => beside,
        () = demotion => panic!("the demotion ended first"),
    };
    println!("one read of 2 MiB at a time: alone {alone}; beside background demotion {beside}");
}

async fn latencies(bench: &Bench, places: &[Location]) -> Samples {
    let mut taken = Vec::new();
    for (number, place) in (0..).zip(places) {
        let started = Instant::now();
        bench.get(number, *place, BLOCK).await;
        taken.push(started.elapsed());
    }
    Samples::from_durations(&taken)
}
