//! What is looked at: the server's stats, each way that blocks can take, and this machine.

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    namespace::foreign_hash,
};
use tokio::time::{Instant, timeout};

use super::cluster::{Said, Visited};
use crate::{
    cli::target::Server,
    client::{
        Client, FetchedBlock, GetOptions, GetSink, Handle, HashList, MissReason, NamespaceSpec,
        Path, PutBatch, Stats,
    },
    console::known,
};

/// The namespace of the block that goes there and back.
const NAMESPACE: &str = "kvstrata doctor";
/// Bytes of the block that goes there and back.
const PROBE_BYTES: usize = 64 << 10;
/// Members that are asked at a time.
const VISITS_MAX: usize = 16;
/// How long all steps of one way may take.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// All that was seen.
#[derive(Debug)]
pub(super) struct Observed {
    /// What the server says of itself.
    pub stats: Stats,
    /// It and the other members.
    pub members: Vec<Visited>,
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
    let mut endpoints = server.endpoint.split(',').map(str::trim);
    let first = endpoints.next().unwrap_or_default();
    let server = &Server { endpoint: first.to_owned(), ..server.clone() };
    let said = ask(server).await?;
    let stats = said.stats.clone();
    let members = visit(server, said, endpoints.collect()).await;
    let mut ways = Vec::new();
    for (name, path, optional) in [
        ("gRPC", Path::Grpc, false),
        ("bulk port", Path::Bulk, true),
        ("shared memory", Path::Shm, true),
    ] {
        let tried = timeout(PROBE_DEADLINE, there_and_back(server, path)).await;
        let outcome = match tried {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(_elapsed) => Err(format!("no end within {} s", PROBE_DEADLINE.as_secs())),
        };
        ways.push(Way { name, optional, outcome });
    }
    Ok(Observed { stats, members, ways, shm: shm() })
}

/// What the server says of itself and of the others.
async fn ask(server: &Server) -> Result<Said> {
    let begun = Instant::now();
    let client = server.connect().await?;
    let mut stats = client.stats().await?;
    let took = begun.elapsed();
    stats.namespaces.retain(|namespace| namespace.model != NAMESPACE);
    let listed = client.members();
    let advertised = listed.own().map(|own| own.endpoint.clone()).unwrap_or_default();
    let members = known(&listed);
    let probe =
        client.open(NamespaceSpec::Opaque { name: NAMESPACE.to_owned(), bytes_max: 0 }).await?;
    Ok(Said { took, advertised, stats, members, probe: hex::encode(probe.id().as_bytes()) })
}

/// Asks the members that the first one lists, and these endpoints.
async fn visit(server: &Server, first: Said, further: Vec<&str>) -> Vec<Visited> {
    // Members say where they are without saying how to speak to them: as to the first.
    let scheme = server.endpoint.find("://").and_then(|at| server.endpoint.get(..at + 3));
    let scheme = scheme.unwrap_or_default();
    let itself = first.stats.node.clone();
    let others = first.members.iter().filter(|member| member.name != itself);
    let mut asked: Vec<(String, String)> = others
        .map(|member| (member.name.clone(), format!("{scheme}{}", member.endpoint)))
        .collect();
    for endpoint in further.into_iter().filter(|endpoint| !endpoint.is_empty()) {
        if asked.iter().all(|(_, known)| known != endpoint) {
            asked.push((String::new(), endpoint.to_owned()));
        }
    }
    let visits = stream::iter(asked).map(|(name, endpoint)| async move {
        let server = Server { endpoint: endpoint.clone(), ..server.clone() };
        let outcome = match timeout(PROBE_DEADLINE, ask(&server)).await {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(_elapsed) => Err(format!("no answer within {} s", PROBE_DEADLINE.as_secs())),
        };
        let told = outcome.as_ref().map(|said| said.stats.node.clone()).unwrap_or_default();
        let name = [told, name].into_iter().find(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| endpoint.clone());
        Visited { name, endpoint, outcome }
    });
    let endpoint = server.endpoint.clone();
    let mut visited = vec![Visited { name: itself, endpoint, outcome: Ok(first) }];
    let mut visits = visits.buffered(VISITS_MAX);
    while let Some(visit) = visits.next().await {
        // One that was given by another of its addresses is one all the same.
        let place = |visit: &Visited| Some(visit.outcome.as_ref().ok()?.advertised.clone());
        let is_known = |known: &Visited| known.name == visit.name && place(known) == place(&visit);
        if visit.outcome.is_err() || !visited.iter().any(is_known) {
            visited.push(visit);
        }
    }
    visited
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
