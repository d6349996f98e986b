//! A start with a million blocks in the bucket, with and without the local copy of its log.

use std::{path::Path, time::Duration};

use tokio::time::Instant;

use super::{
    content::{self, CLUSTER, NODE, PACK_BLOCKS, PACKS},
    harness::{Server, wait_until},
    server::{BUCKET, S3Server},
};

const PATH: &str = "million";
/// Longer than any start takes.
const START_WAIT: Duration = Duration::from_secs(300);
/// Bytes that a start reads besides the log: its epoch, the probe.
const OTHER_BYTES: f64 = 64.0 * 1024.0;
/// Reading requests of a start besides those for the log: the probe, and who holds the ordinal.
const OTHER_GETS: f64 = 16.0;

/// What a start took.
struct Start {
    serving: Duration,
    ready: Duration,
    gets: f64,
    lists: f64,
    writes: f64,
    read_bytes: f64,
    peak_bytes: u64,
}

pub(crate) async fn of_a_million_blocks(server: &S3Server) {
    let bucket = server.bucket(PATH);
    let started = Instant::now();
    content::fill(&bucket).await;
    let written = bucket.metrics();
    println!(
        "{} blocks in {PACKS} packs, made in {:.0} s, {} MiB",
        PACKS * PACK_BLOCKS,
        started.elapsed().as_secs_f64(),
        written.written_bytes.get() >> 20
    );
    let log = log_objects(server).await;
    println!("the log: {} objects, {} MiB", log.0, log.1 >> 20);
    let [data, configuration] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    content::write_secret(configuration.path());
    let empty = tempfile::tempdir().unwrap();
    let (nothing, _) = start(server, (empty.path(), configuration.path()), "nothing", 0).await;
    print("nothing in the bucket", &nothing);
    let homes = (data.path(), configuration.path());
    let (lost, running) = start(server, homes, PATH, PACKS * PACK_BLOCKS).await;
    print("the local disk lost", &lost);
    running.stop(&[]).await;
    let (kept, running) = start(server, homes, PATH, PACKS * PACK_BLOCKS).await;
    print("with the local copy", &kept);
    running.stop(&[]).await;
    // Not one block, nor a footer from its pack: what is read is the log, once.
    let (objects, bytes) = (log.0 as f64, log.1 as f64);
    assert!(lost.read_bytes <= bytes + OTHER_BYTES, "{} bytes read", lost.read_bytes);
    assert!(lost.gets <= objects + OTHER_GETS, "{} requests", lost.gets);
    assert!(kept.read_bytes <= OTHER_BYTES, "{} bytes read with the copy", kept.read_bytes);
    assert!(kept.gets <= OTHER_GETS, "{} requests with the copy", kept.gets);
}

/// Objects of the log and their bytes.
async fn log_objects(server: &S3Server) -> (usize, u64) {
    let prefix = format!("v1/{CLUSTER}/manifests/");
    let listed = server.bucket(PATH).list(&prefix, Instant::now() + START_WAIT).await.unwrap();
    (listed.len(), listed.iter().map(|object| object.bytes).sum())
}

/// Starts a node and waits until it has found so many blocks.
async fn start(
    s3: &S3Server,
    (data, configuration): (&Path, &Path),
    path: &str,
    blocks: u64,
) -> (Start, Server) {
    let environment = S3Server::environment(s3.s3);
    let started = Instant::now();
    let server = Server::builder()
        .home(configuration)
        .wrapped_in(["env".to_owned()].into_iter().chain(environment).collect())
        .dram("64MiB")
        // By it goes how many blocks the map may hold.
        .set("memory.limit", "8GiB")
        .set("node.name", NODE)
        .set("nvme.path", data.to_str().unwrap())
        .set("nvme.capacity", "512MiB")
        .set("object.url", &format!("s3://{BUCKET}/{path}"))
        .set("cluster.name", CLUSTER)
        .set("object.ttl", "none")
        .start()
        .await;
    let serving = started.elapsed();
    wait_until("blocks are found", START_WAIT, async || {
        server.metric("kvstrata_object_blocks").await >= blocks as f64
    })
    .await;
    let ready = started.elapsed();
    let sum = async |series: &str| {
        let (_, page) = server.page("/metrics").await;
        let lines = page.lines().filter(|line| line.starts_with(series));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    let requests =
        async |op: &str| sum(&format!("kvstrata_object_requests_total{{op=\"{op}\"")).await;
    let start = Start {
        serving,
        ready,
        gets: requests("get").await,
        lists: requests("list").await,
        writes: requests("put").await + requests("create").await,
        read_bytes: sum("kvstrata_object_read_bytes_total").await,
        peak_bytes: server.status_bytes("VmHWM"),
    };
    (start, server)
}

fn print(name: &str, start: &Start) {
    println!(
        "{name}: serving after {:.2} s, all blocks after {:.2} s; {} GET, {} LIST, {} writes, \
         {:.1} MiB read; peak memory {} MiB",
        start.serving.as_secs_f64(),
        start.ready.as_secs_f64(),
        start.gets,
        start.lists,
        start.writes,
        start.read_bytes / 1_048_576.0,
        start.peak_bytes >> 20
    );
}
