//! What is looked at: the server's stats, each way that blocks can take, and this machine.

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    namespace::foreign_hash,
};
use tokio::time::Instant;

use crate::{
    cli::target::Server,
    client::{
        Client, FetchedBlock, GetOptions, GetSink, Handle, HashList, MissReason, NamespaceSpec,
        Path, PutBatch, Stats,
    },
};

/// The namespace of the block that goes there and back.
const NAMESPACE: &str = "kvstrata doctor";
/// Bytes of the block that goes there and back.
const PROBE_BYTES: usize = 64 << 10;
/// How long all steps of one way may take.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// All that was seen.
#[derive(Debug)]
pub(super) struct Observed {
    /// What the server says of itself.
    pub stats: Stats,
    /// The ways that blocks can take.
    pub ways: Vec<Way>,
    /// Shared memory of this machine, if it has any.
    pub shm: Option<Shm>,
}

/// One way that blocks can take, tried.
#[derive(Debug)]
pub(super) struct Way {
    /// Its name.
    pub name: &'static str,
    /// Whether the cache works without it.
    pub optional: bool,
    /// How long a block took there and back, or why it did not.
    pub outcome: Result<Duration, String>,
}

/// `/dev/shm` of this machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shm {
    /// Its size, in bytes.
    pub total: u64,
    /// What of it is free, in bytes.
    pub free: u64,
}

/// Looks at everything. Its own block is stored and removed again.
///
/// # Errors
/// Whatever keeps the server from answering at all.
///
/// # Cancel safety
/// Safe: a block of 64 KiB may be left behind, which is evicted in time.
pub(super) async fn observe(server: &Server) -> Result<Observed> {
    let mut stats = server.connect().await?.stats().await?;
    stats.namespaces.retain(|namespace| namespace.model != NAMESPACE);
    let mut ways = Vec::new();
    for (name, path, optional) in [
        ("gRPC", Path::Grpc, false),
        ("bulk port", Path::Bulk, true),
        ("shared memory", Path::Shm, true),
    ] {
        let tried = tokio::time::timeout(PROBE_DEADLINE, there_and_back(server, path)).await;
        let outcome = match tried {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(_elapsed) => Err(format!("no end within {} s", PROBE_DEADLINE.as_secs())),
        };
        ways.push(Way { name, optional, outcome });
    }
    Ok(Observed { stats, ways, shm: shm() })
}

async fn there_and_back(server: &Server, path: Path) -> Result<Duration> {
    let client = server.connect_by(path).await?;
    // Its own name: a block of another run must not stand in for one that did not arrive.
    let name = format!("doctor:{}:{path:?}", std::process::id());
    let handle =
        client.open(NamespaceSpec::Opaque { name: NAMESPACE.to_owned(), bytes_max: 0 }).await?;
    let hashes = HashList::of(&[foreign_hash(name.as_bytes())]);
    let value: Bytes = (0..=250_u8).cycle().take(PROBE_BYTES).collect();
    let begun = Instant::now();
    let outcome = round_trip(&client, &handle, &hashes, &value).await;
    let took = begun.elapsed();
    let removed = handle.remove(&hashes).await;
    outcome?;
    removed.map(|_count| took)
}

async fn round_trip(
    client: &Client,
    handle: &Handle,
    hashes: &HashList,
    value: &Bytes,
) -> Result<()> {
    let session = client.session("doctor").await?;
    let batch = PutBatch {
        hashes: hashes.clone(),
        parts: Vec::new(),
        values: vec![value.clone()],
        parent: None,
        durable: false,
    };
    let report = handle.put(&session, &batch).await?;
    let mut arrived = Arrived(None);
    handle.get(hashes, GetOptions::default(), &mut arrived).await?;
    match arrived.0 {
        Some(bytes) if bytes == value.as_ref() => Ok(()),
        Some(_other) => Err(Error::new(ErrorKind::Corrupt, "other bytes came back")),
        None => Err(Error::new(
            ErrorKind::Unavailable,
            format!("a block that was put ({:?}) is not there", report.outcomes),
        )),
    }
}

/// What came back.
struct Arrived(Option<Vec<u8>>);

impl GetSink for Arrived {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.0 = Some(block.pieces().concat());
    }

    fn miss(&mut self, _positions: Range<u32>, _reason: MissReason) {}
}

fn shm() -> Option<Shm> {
    let at = rustix::fs::statvfs("/dev/shm").ok()?;
    Some(Shm { total: at.f_blocks * at.f_frsize, free: at.f_bavail * at.f_frsize })
}
