//! A cluster whose nodes are replaced, one after the other, by those of another build, while engines go on: members
//! of both builds know one another, every byte is right, and each node comes back with what its disk has.
//!
//! `integration/upgrade.sh OLD_BINARY` begins with an older build; without one all nodes are of this build.

use std::{
    net::{TcpListener, UdpSocket},
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use kvstrata::client::{
    Client, ClientOptions, GetOptions, Handle, LookupOptions, Path as Way, PutBatch, PutOutcome,
    Session,
};
use kvstrata_tiers::error::Result;
use tokio::task::JoinSet;

use crate::{
    client::{Seen, batch, hashes, namespace},
    cluster_drain::{PARTS, assert_right},
    harness::{SERVER_WAIT, Server, cluster_home, wait_until},
};

/// Names the older build.
const VARIABLE: &str = "KVSTRATA_OLD_BINARY";
const NODES: usize = 3;
/// Blocks of a node's own that are on its disk before it is replaced.
const KEPT: u32 = 40;
/// Blocks that an engine puts and reads in a round.
const ROUND: u32 = 8;
/// Blocks of an engine, over and over: so few that no disk has to make room.
const OWN: u32 = 400;
/// Rounds of each engine before the next node is replaced.
const ROUNDS_MIN: u32 = 10;
/// Between rounds: engines should leave some of the machine to nodes that start.
const PAUSE: Duration = Duration::from_millis(5);
/// What nodes say of one another while they come and go.
const EXPECTED: &[&str] = &["member"];

/// Nodes at fixed addresses, each with a disk of its own.
struct Fleet {
    grpc: Vec<String>,
    gossip: Vec<String>,
    disks: Vec<tempfile::TempDir>,
    home: tempfile::TempDir,
    nodes: Vec<Option<Server>>,
}

impl Fleet {
    fn new() -> Self {
        let tcp: Vec<_> = (0..NODES).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let udp: Vec<_> = (0..NODES).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        Self {
            grpc: tcp.iter().map(|io| io.local_addr().unwrap().to_string()).collect(),
            gossip: udp.iter().map(|io| io.local_addr().unwrap().to_string()).collect(),
            disks: (0..NODES).map(|_| tempfile::tempdir().unwrap()).collect(),
            home: cluster_home(),
            nodes: (0..NODES).map(|_| None).collect(),
        }
    }

    /// Starts a node, of the older build or of this one.
    async fn start(&mut self, number: usize, old: Option<&PathBuf>) {
        let disk = self.disks[number].path().to_str().unwrap().to_owned();
        let builder = Server::builder()
            .home(self.home.path())
            .dram("64MiB")
            .set("node.name", &format!("node-{number}"))
            .set("node.host", &format!("host-{number}"))
            .set("server.grpc_listen", &self.grpc[number])
            .set("cluster.listen", &self.gossip[number])
            .set("cluster.seeds", &self.gossip.join(","))
            .set("nvme.path", &disk)
            .set("nvme.capacity", "512MiB")
            .set("server.drain_grace", "20s");
        let builder = match old {
            Some(old) => builder.program(old),
            None => builder,
        };
        self.nodes[number] = Some(builder.start().await);
    }

    /// Replaces a node: it leaves as it is told, and comes back on the same disk.
    async fn replace(&mut self, number: usize, old: Option<&PathBuf>) {
        self.nodes[number].take().unwrap().stop(EXPECTED).await;
        self.start(number, old).await;
        for node in self.nodes.iter().flatten() {
            wait_until("all know one another", SERVER_WAIT, async || {
                node.metric("kvstrata_cluster_members").await == NODES as f64
                    && node.metric("kvstrata_cluster_filter_unknown_members").await == 0.0
            })
            .await;
        }
    }

    /// A client at one node, and nowhere else.
    async fn at(&self, number: usize) -> (Handle, Session) {
        let options = ClientOptions { path: Way::Grpc, ..ClientOptions::default() };
        let client = Client::connect(&self.grpc[number], options).await.unwrap();
        let session = client.session("kept").await.unwrap();
        (client.open(namespace(&PARTS)).await.unwrap(), session)
    }

    /// What a node is known by after it was replaced.
    fn kept(number: usize) -> Range<u32> {
        let first = 1_000_000 + u32::try_from(number).unwrap() * 1000;
        first..first + KEPT
    }

    /// Puts these on the disks.
    async fn keep(&self) {
        for number in 0..NODES {
            let (handle, session) = self.at(number).await;
            let put = PutBatch { durable: true, ..batch(Self::kept(number), &PARTS) };
            let report = handle.put(&session, &put).await.unwrap();
            assert_eq!(report.count(PutOutcome::Stored), u64::from(KEPT));
        }
    }

    /// Every node has on its own disk what was put there; all of it can be read from each.
    async fn assert_kept(&self) {
        for number in 0..NODES {
            let (handle, _session) = self.at(number).await;
            let local = LookupOptions { local: true, ..LookupOptions::default() };
            let asked = hashes(Self::kept(number));
            let found = handle.lookup(&asked, local).await.unwrap();
            assert_eq!(found.prefix_blocks, KEPT, "node {number}");
            for other in 0..NODES {
                let numbers = Self::kept(other);
                wait_until("it is found", SERVER_WAIT, async || {
                    let asked = hashes(numbers.clone());
                    let found = handle.lookup(&asked, LookupOptions::default()).await.unwrap();
                    found.prefix_blocks == KEPT
                })
                .await;
                let mut seen = Seen::default();
                handle
                    .get(&hashes(numbers.clone()), GetOptions::default(), &mut seen)
                    .await
                    .unwrap();
                assert_eq!(assert_right(numbers.start, &seen), KEPT as usize, "{number}, {other}");
            }
        }
    }
}

/// What engines have done.
#[derive(Default)]
struct Done {
    rounds: AtomicU32,
    right: AtomicU32,
    begun_again: AtomicU32,
}

/// Engines that go on until they are told to stop, at whatever node there is.
struct Load {
    engines: Vec<Arc<Done>>,
    stop: Arc<AtomicBool>,
    running: JoinSet<()>,
}

impl Load {
    fn begin(endpoints: &str) -> Self {
        let (stop, mut running) = (Arc::<AtomicBool>::default(), JoinSet::new());
        let mut engines = Vec::new();
        for number in 0..4 {
            let (done, stop, endpoints) =
                (Arc::<Done>::default(), Arc::clone(&stop), endpoints.to_owned());
            engines.push(Arc::clone(&done));
            running.spawn(async move {
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) {
                    // A node that leaves or is away ends it, and then it begins at another one.
                    let _ended = engine(&endpoints, number, &mut round, (&done, &stop)).await;
                    done.begun_again.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
        Self { engines, stop, running }
    }

    /// Waits until every engine has done more, and gone on reading.
    async fn goes_on(&mut self, what: &str) {
        let now =
            |done: &Done| (done.rounds.load(Ordering::Relaxed), done.right.load(Ordering::Relaxed));
        let before: Vec<_> = self.engines.iter().map(|done| now(done)).collect();
        wait_until(what, SERVER_WAIT, async || {
            self.engines.iter().zip(&before).all(|(done, (rounds, right))| {
                let (more, read) = now(done);
                more >= rounds + ROUNDS_MIN && read >= right + ROUNDS_MIN * ROUND
            })
        })
        .await;
        assert!(self.running.try_join_next().is_none(), "an engine has ended by itself");
    }

    async fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.running.join_next().await {
            ended.unwrap();
        }
        for done in &self.engines {
            let Done { rounds, right, begun_again } = &**done;
            let [rounds, begun] = [rounds, begun_again].map(|one| one.load(Ordering::Relaxed));
            assert!(begun < rounds, "{rounds} rounds, {right:?} blocks right, begun {begun} times");
        }
    }
}

/// One engine, from its connection until that is of no use any more.
async fn engine(
    endpoints: &str,
    number: u32,
    round: &mut u32,
    (done, stop): (&Done, &AtomicBool),
) -> Result<()> {
    let options = ClientOptions {
        instance: Some(format!("engine-{number}")),
        path: if number.is_multiple_of(2) { Way::Bulk } else { Way::Grpc },
        ..ClientOptions::default()
    };
    let client = Client::connect(endpoints, options).await?;
    let handle = client.open(namespace(&PARTS)).await?;
    let session = client.session("engine").await?;
    while !stop.load(Ordering::Relaxed) && !client.is_draining() {
        let blocks = |round: u32| {
            let first = number * 100_000 + round * ROUND % OWN;
            first..first + ROUND
        };
        handle.put(&session, &batch(blocks(*round), &PARTS)).await?;
        // What it has put here, and a while ago, here or at the node where it was then.
        let earlier = blocks(round.saturating_sub(20));
        for numbers in [blocks(*round), earlier, Fleet::kept(number as usize % NODES)] {
            let mut seen = Seen::default();
            let asked = hashes(numbers.clone());
            handle.lookup(&asked, LookupOptions::default()).await?;
            let got = handle.get(&asked, GetOptions::default(), &mut seen).await;
            let right = assert_right(numbers.start, &seen);
            done.right.fetch_add(u32::try_from(right).unwrap(), Ordering::Relaxed);
            got?;
        }
        *round += 1;
        done.rounds.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_two_builds_are_one_cluster_while_they_replace_one_another() {
    let old = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let mut fleet = Fleet::new();
    for number in 0..NODES {
        fleet.start(number, old.as_ref()).await;
    }
    fleet.keep().await;
    let mut load = Load::begin(&fleet.grpc.join(","));
    load.goes_on("engines have begun").await;
    for number in 0..NODES {
        fleet.replace(number, None).await;
        fleet.assert_kept().await;
        load.goes_on("engines go on").await;
    }
    // And back: what the older build does not know is a miss, and nothing else.
    fleet.replace(0, old.as_ref()).await;
    load.goes_on("engines go on beside the older build").await;
    load.end().await;
    for node in fleet.nodes.into_iter().flatten() {
        assert!(!node.log().contains("panicked"), "{}", node.log());
        node.stop(EXPECTED).await;
    }
}
