//! A node of a cluster, of which every port is sent what no client says: random bytes, real words that were changed,
//! lengths of things that never come, floods. A client is served all the while, memory stays bounded, nothing panics, and
//! nobody can make it log line after line. `KVSTRATA_FUZZ_SECONDS` says for how long, if longer than a moment.

mod gossip;
mod words;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use kvstrata::client::{
    Client, ClientOptions, GetOptions, Handle, LookupOptions, Path as Way, Session,
};
use kvstrata_tiers::testing::Mutator;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, timeout},
};

use self::{
    gossip::Insider,
    words::{Port, bad_calls, bad_commands, bad_frames, bad_pages, calls, commands, frames, pages},
};
use crate::{
    client::{Seen, batch, hashes, namespace},
    cluster_drain::{PARTS, assert_right},
    harness::{SERVER_WAIT, Server, cluster_home, wait_until},
};

/// Connections that each port has to meet.
const CONNECTIONS_MIN: u64 = 400;
/// Of these, how many one hostile peer leaves open without a word more.
const SILENT_MAX: usize = 40;
/// For what a hostile peer says, and for what it hears: then it does something else.
const PATIENCE: Duration = Duration::from_millis(500);
/// Rounds of the client that is served meanwhile.
const ROUNDS_MIN: u64 = 30;
/// Its blocks.
const BLOCKS: u32 = 16;
/// What all of it may cost, in bytes that are not the arena's: buffers of those who are connected at a time.
const GROWN_BYTES_MAX: u64 = 128 << 20;
/// For all of it, on a machine that does something else.
const ALL_WAIT: Duration = Duration::from_secs(240);
/// What a node says of it.
const EXPECTED: &[&str] =
    &["member", "message rejected by peer", "remotely-reset pending-accept streams"];

/// What is sent to a node, and how often.
struct Hostile {
    stop: Arc<AtomicBool>,
    counts: Vec<(&'static str, Arc<AtomicU64>)>,
    running: JoinSet<()>,
}

impl Hostile {
    fn begin(ports: Vec<Port>) -> Self {
        let mut hostile =
            Self { stop: Arc::default(), counts: Vec::new(), running: JoinSet::new() };
        for (seed, port) in (1..).zip(ports) {
            let (count, stop) = (Arc::<AtomicU64>::default(), Arc::clone(&hostile.stop));
            hostile.counts.push((port.name, Arc::clone(&count)));
            hostile.running.spawn(async move {
                let (mut choose, mut silent) = (Mutator::new(seed), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    let said = port.next(&mut choose);
                    let io = connection(&port.address, &said).await;
                    count.fetch_add(1, Ordering::Relaxed);
                    silent.extend(io.filter(|_| choose.chance(500)));
                    if silent.len() > SILENT_MAX {
                        silent.swap_remove(choose.below(SILENT_MAX));
                    }
                }
            });
        }
        hostile
    }

    /// Says nonsense as somebody who has the secret, over UDP.
    fn gossip(&mut self, mut insider: Insider) {
        let (count, stop) = (Arc::<AtomicU64>::default(), Arc::clone(&self.stop));
        self.counts.push(("gossip", Arc::clone(&count)));
        self.running.spawn(async move {
            let mut choose = Mutator::new(99);
            while !stop.load(Ordering::Relaxed) {
                let datagram = insider.next(&mut choose);
                // What the kernel has no room for is lost, as anything may be.
                insider.socket.send(&datagram).await.map(drop).unwrap_or_default();
                count.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
    }

    fn fewest(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count.load(Ordering::Relaxed)).min().unwrap()
    }

    async fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.running.join_next().await {
            ended.unwrap();
        }
    }
}

/// Connects, says it, and hears what is answered for a moment; the connection if it is still open.
async fn connection(address: &str, said: &[u8]) -> Option<TcpStream> {
    let mut io = timeout(PATIENCE, TcpStream::connect(address)).await.ok()?.ok()?;
    // A node may close before all of it is said.
    let written = timeout(PATIENCE, io.write_all(said)).await;
    let mut heard = vec![0; 4096];
    let read = timeout(PATIENCE / 20, io.read(&mut heard)).await;
    let is_open = matches!(written, Ok(Ok(()))) && !matches!(read, Ok(Ok(0) | Err(_)));
    is_open.then_some(io)
}

/// A client that is served.
struct Good {
    handle: Handle,
    session: Session,
}

impl Good {
    async fn connect(server: &Server, path: Way) -> Self {
        let options = ClientOptions { path, ..ClientOptions::default() };
        let client = Client::connect(server.grpc(), options).await.unwrap();
        let session = client.session("good").await.unwrap();
        Self { handle: client.open(namespace(&PARTS)).await.unwrap(), session }
    }

    async fn round(&self, first: u32) {
        let put = batch(first..first + BLOCKS, &PARTS);
        self.handle.put(&self.session, &put).await.unwrap();
        let found = self.handle.lookup(&put.hashes, LookupOptions::default()).await.unwrap();
        assert_eq!(found.prefix_blocks, BLOCKS);
        let mut seen = Seen::default();
        self.handle.get(&put.hashes, GetOptions::default(), &mut seen).await.unwrap();
        assert_eq!(assert_right(first, &seen), BLOCKS as usize, "{:?}", seen.misses);
        self.handle.remove(&put.hashes).await.unwrap();
    }
}

async fn node(home: &tempfile::TempDir, name: &str, seeds: Option<&str>) -> Server {
    let builder = Server::builder().home(home.path()).dram("64MiB").set("node.name", name);
    let builder = builder
        .set("cluster.listen", "127.0.0.1:0")
        .set("server.admin_listen", "127.0.0.1:0")
        .set("server.resp_listen", "127.0.0.1:0");
    match seeds {
        Some(seeds) => builder.set("cluster.seeds", seeds).start().await,
        None => builder.start().await,
    }
}

fn ports(server: &Server) -> Vec<Port> {
    const CALLS: [&str; 6] = [
        "/kvstrata.v1.BlockCache/Open",
        "/kvstrata.v1.BlockCache/Lookup",
        "/kvstrata.v1.BlockCache/Put",
        "/kvstrata.v1.BlockCache/Get",
        "/kvstrata.peer.v1.Peer/Filter",
        "/kvstrata.router.v1.Router/Score",
    ];
    const ADMIN: [&str; 1] = ["/kvstrata.admin.v1.Admin/Status"];
    let port =
        |name, address: &str, good, bad| Port { name, address: address.to_owned(), good, bad };
    vec![
        port("grpc", server.grpc(), calls(&CALLS), bad_calls(CALLS[1])),
        port("http", server.http(), pages(), bad_pages()),
        port("bulk", server.bulk(), frames(), bad_frames()),
        port("resp", server.resp(), commands(), bad_commands()),
        port("admin", server.admin(), calls(&ADMIN), bad_calls(ADMIN[0])),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_words_at_every_port_cost_little_and_keep_nobody_out() {
    let home = cluster_home();
    let server = node(&home, "target", None).await;
    let other = node(&home, "other", Some(server.gossip())).await;
    let members = async |count: f64| {
        wait_until("members", SERVER_WAIT, async || {
            server.metric("kvstrata_cluster_members").await == count
                && other.metric("kvstrata_cluster_members").await == count
        })
        .await;
    };
    members(2.0).await;
    let good = [Good::connect(&server, Way::Bulk).await, Good::connect(&server, Way::Grpc).await];
    for client in &good {
        client.round(0).await;
    }
    let before = server.status_bytes("RssAnon");
    let mut hostile = Hostile::begin(ports(&server));
    hostile.gossip(Insider::meet(server.gossip()).await);
    let (start, mut rounds, mut most) = (Instant::now(), 0, before);
    let wanted = std::env::var("KVSTRATA_FUZZ_SECONDS").ok().map(|text| text.parse().unwrap());
    let wanted = Duration::from_secs(wanted.unwrap_or(0));
    while hostile.fewest() < CONNECTIONS_MIN || rounds < ROUNDS_MIN || start.elapsed() < wanted {
        assert!(start.elapsed() < ALL_WAIT + wanted, "{rounds} rounds; {:?}", hostile.counts);
        good[(rounds % 2) as usize].round(100).await;
        rounds += 1;
        most = most.max(server.status_bytes("RssAnon"));
    }
    // Whoever comes is served as well.
    for way in [Way::Bulk, Way::Grpc] {
        Good::connect(&server, way).await.round(200).await;
    }
    hostile.end().await;
    assert!(most - before < GROWN_BYTES_MAX, "grown by {} MiB", (most - before) >> 20);
    assert_eq!(server.page("/livez").await.0, 200);
    assert_eq!(server.metric("kvstrata_request_panics_total").await, 0.0);
    let unread = "kvstrata_cluster_datagrams_total{outcome=\"unread\"}";
    assert!(
        server.metric(unread).await > 100.0,
        "nonsense of one who has the secret is no message"
    );
    // It is a node of its cluster as before.
    members(2.0).await;
    let elsewhere = Good::connect(&other, Way::Auto).await;
    elsewhere.handle.put(&elsewhere.session, &batch(300..310, &PARTS)).await.unwrap();
    wait_until("what the other has is found", SERVER_WAIT, async || {
        let asked = hashes(300..310);
        let found = good[0].handle.lookup(&asked, LookupOptions::default()).await.unwrap();
        found.prefix_blocks == 10
    })
    .await;
    drop((good, elsewhere));
    let log = server.stop(EXPECTED).await;
    assert!(!log.contains("panicked"), "{log}");
    other.stop(EXPECTED).await;
}
