//! Engines that go on with their conversations while the network breaks: each asks for what it has put, and for
//! what another one has put, takes what is there, and puts what is missing. All bytes are checked.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, LookupOptions, MissReason,
    Session, SessionState,
};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::client::{batch, hashes, namespace, pattern};

/// Bytes of a block of the load.
pub(crate) const BLOCK_BYTES: u32 = 16 * 1024;
/// The longest that a call may take: its deadline, and a busy machine.
pub(crate) const CALL_MAX: Duration = Duration::from_secs(4);
const CALL_DEADLINE: Duration = Duration::from_secs(2);
/// Conversations of one engine, and their longest.
const CONVERSATIONS: u32 = 4;
const BLOCKS_MAX: u32 = 64;
/// By how much one grows at a time.
const TURN_BLOCKS: u32 = 8;
/// Between two turns of an engine: the machine has other tests to run.
const THINKING: Duration = Duration::from_millis(20);

/// One turn of an engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) ended: Instant,
    /// Blocks that some engine had put and that were asked for.
    pub(crate) expected: u32,
    /// Those of them that came, and were right.
    pub(crate) hit: u32,
    /// Of another engine's conversation.
    pub(crate) foreign: bool,
    /// How long its slowest call took.
    pub(crate) slowest: Duration,
}

/// What all engines have seen.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) turns: Vec<Turn>,
    /// Blocks whose bytes were not those that were put.
    pub(crate) wrong: u64,
    /// Calls that failed, with what they said.
    pub(crate) failures: Vec<String>,
    /// Blocks that each engine has put of each of its conversations.
    lengths: Vec<[u32; CONVERSATIONS as usize]>,
    /// The node that each of them uses now.
    homes: Vec<String>,
}

/// Engines at work; they stop when this is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    told: Arc<Mutex<Told>>,
    stop: CancellationToken,
    engines: JoinSet<()>,
}

/// Counts what comes, and compares it.
#[derive(Debug)]
pub(crate) struct Checked {
    first: u32,
    bytes: u32,
    pub(crate) right: u32,
    pub(crate) wrong: u64,
    pub(crate) missed: u32,
}

impl Checked {
    pub(crate) fn from(first: u32, bytes: u32) -> Self {
        Self { first, bytes, right: 0, wrong: 0, missed: 0 }
    }
}

impl GetSink for Checked {
    fn block(&mut self, block: FetchedBlock<'_>) {
        let put = pattern(self.first + block.position, 0, self.bytes as usize);
        if block.pieces().concat() == put {
            self.right += 1;
        } else {
            self.wrong += 1;
        }
    }

    fn miss(&mut self, positions: Range<u32>, _: MissReason) {
        self.missed += positions.end - positions.start;
    }
}

/// Deadlines short enough to see that they hold.
pub(crate) fn options(instance: &str) -> ClientOptions {
    ClientOptions {
        instance: Some(instance.to_owned()),
        connect_deadline: Duration::from_secs(1),
        call_deadline: CALL_DEADLINE,
        stall_deadline: CALL_DEADLINE,
        transfer_deadline: CALL_DEADLINE,
        ..ClientOptions::default()
    }
}

impl Load {
    /// So many engines, which find a node by any of these endpoints.
    pub(crate) fn start(engines: u32, endpoints: &str) -> Self {
        let told = Told {
            lengths: vec![[0; CONVERSATIONS as usize]; engines as usize],
            homes: vec![String::new(); engines as usize],
            ..Told::default()
        };
        let (told, stop) = (Arc::new(Mutex::new(told)), CancellationToken::new());
        let mut running = JoinSet::new();
        for number in 0..engines {
            let engine = Engine {
                number,
                engines,
                endpoints: endpoints.to_owned(),
                told: Arc::clone(&told),
            };
            let stop = stop.clone();
            running.spawn(async move {
                stop.run_until_cancelled(Box::pin(engine.run())).await.unwrap_or(());
            });
        }
        Self { told, stop, engines: running }
    }

    /// What was seen so far.
    pub(crate) fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    /// Turns that have ended since then.
    pub(crate) fn since(&self, then: Instant) -> Vec<Turn> {
        self.told().turns.iter().filter(|turn| turn.ended >= then).copied().collect()
    }

    /// The share of engines whose home is this node.
    pub(crate) fn share_of(&self, node: &str) -> f64 {
        let told = self.told();
        let there = told.homes.iter().filter(|home| *home == node).count();
        there as f64 / told.homes.len() as f64
    }

    /// Ends all engines.
    pub(crate) async fn stop(mut self) -> Told {
        self.stop.cancel();
        while self.engines.join_next().await.is_some() {}
        std::mem::take(&mut *self.told.lock().unwrap())
    }
}

/// Hits of what was expected; 1 if nothing was.
pub(crate) fn ratio(turns: &[Turn]) -> f64 {
    let expected: u32 = turns.iter().map(|turn| turn.expected).sum();
    let hit: u32 = turns.iter().map(|turn| turn.hit).sum();
    if expected == 0 { 1.0 } else { f64::from(hit) / f64::from(expected) }
}

struct Engine {
    number: u32,
    engines: u32,
    endpoints: String,
    told: Arc<Mutex<Told>>,
}

/// What an engine holds of a node.
struct Link {
    handle: Handle,
    session: Session,
}

impl Engine {
    async fn run(self) {
        let mut link: Option<Link> = None;
        for turn in 0.. {
            tokio::time::sleep(THINKING).await;
            if link.as_ref().is_none_or(|link| link.session.state() != SessionState::Open) {
                link = self.connect().await;
            }
            let Some(open) = &link else { continue };
            if self.turn(open, turn).await.is_none() {
                link = None;
            }
        }
    }

    async fn connect(&self) -> Option<Link> {
        let options = options(&format!("engine-{}", self.number));
        let made = async {
            let client = Client::connect(&self.endpoints, options).await?;
            let handle = client.open(namespace(&[BLOCK_BYTES])).await?;
            let session = handle.client().session("load").await?;
            Ok(Link { handle, session })
        };
        match made.await {
            Ok(link) => {
                let members = link.handle.client().members();
                let home = members.own().map(|own| own.name.clone()).unwrap_or_default();
                self.told.lock().unwrap().homes[self.number as usize] = home;
                Some(link)
            }
            Err(why) => self.failed::<Link>("connect", &why),
        }
    }

    /// One turn of an own conversation, or of another engine's; `None` if the node is lost.
    async fn turn(&self, link: &Link, turn: u32) -> Option<()> {
        let foreign = turn % 3 == 2;
        let engine = if foreign { (self.number + 1) % self.engines } else { self.number };
        let conversation = turn % CONVERSATIONS;
        let first = (engine * CONVERSATIONS + conversation) * BLOCKS_MAX;
        let known = self.told.lock().unwrap().lengths[engine as usize][conversation as usize];
        let began = Instant::now();
        let asked = hashes(first..first + known.max(1));
        let found = link.handle.lookup(&asked, LookupOptions::default()).await;
        let mut slowest = began.elapsed();
        let found = found.map_err(|why| self.failed::<()>("lookup", &why)).ok()?;
        let prefix = found.prefix_blocks.min(known);
        let mut seen = Checked::from(first, BLOCK_BYTES);
        if prefix > 0 {
            let began = Instant::now();
            let wanted = hashes(first..first + prefix);
            let got = link.handle.get(
                &wanted,
                GetOptions { stop_at_miss: true, ..GetOptions::default() },
                &mut seen,
            );
            let got = got.await;
            slowest = slowest.max(began.elapsed());
            self.told.lock().unwrap().wrong += seen.wrong;
            if let Err(why) = got {
                // What is missing is put again.
                self.failed::<()>("get", &why).unwrap_or_default();
            }
        }
        let ended = Instant::now();
        let ended = Turn { ended, expected: known, hit: seen.right, foreign, slowest };
        self.told.lock().unwrap().turns.push(ended);
        if foreign {
            return Some(());
        }
        // What was missing is computed and put, and the conversation goes on.
        let length = (known + TURN_BLOCKS).min(BLOCKS_MAX);
        if seen.right < length {
            let new = batch(first + seen.right..first + length, &[BLOCK_BYTES]);
            let put = link.handle.put(&link.session, &new).await;
            put.map_err(|why| self.failed::<()>("put", &why)).ok()?;
            self.told.lock().unwrap().lengths[engine as usize][conversation as usize] = length;
        }
        Some(())
    }

    fn failed<T>(&self, doing: &str, why: &kvstrata_tiers::error::Error) -> Option<T> {
        self.told.lock().unwrap().failures.push(format!("{doing}: {why}"));
        None
    }
}
