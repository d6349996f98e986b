//! Nodes that are killed at the requests that matter for the bucket: while a pack is uploaded, named,
//! dropped or deleted, while blocks are removed, at a checkpoint of the log and at a start.
//!
//! Two nodes and one ordinal: [`ordinal`].
//!
//! A proxy stops at the request, before the store sees it, or behind that, or so that the store sees it
//! only once the next process serves; then the process gets SIGKILL. After each start: no wrong byte,
//! what was removed stays removed, what the log in the bucket names is served, what was durable and is
//! on the disk, too. At the end every pack in the bucket has a name in the log.

mod ledger;
mod moment;
mod ordinal;

use std::{collections::BTreeMap, time::Duration};

use kvstrata_tiers::{
    object::{bucket::Bucket, names::PackId},
    testing::Draws,
};
use tokio::time::{Instant, timeout};

use self::{
    ledger::{Ledger, named, owner},
    moment::{Moment, Watch},
};
use super::{
    proxy::{Proxy, Stop},
    server::S3Server,
    soon,
    tier::{builder, connect, lose_disk},
};
use crate::{
    harness::{SERVER_WAIT, Server, wait_until},
    nvme::Home,
};

/// The least that packs of 64 MiB need, and the same for all nodes: with less, a bucket that is fuller
/// than it may be takes no packs until enough has left.
const CAPACITY_BYTES: u64 = 320 << 20;
/// Kills of a short run: each kind once.
const KILLS: usize = Moment::ALL.len();
/// How long the traffic may take to cause the request of a kill: a node whose bucket is far too full for
/// it packs nothing until what it drops is deleted.
const MOMENT_WAIT: Duration = Duration::from_secs(90);
/// Says that the packs are in the map.
const FOUND: &str = "object packs found";

/// One kill.
#[derive(Debug, Clone, Copy)]
struct Round {
    moment: Moment,
    stop: Stop,
    /// Requests of the kind that pass before.
    left: u64,
    loses_disk: bool,
}

/// Kills in an order of the seed, each kind as often as the others.
fn rounds(kills: usize, draws: &mut Draws) -> Vec<Round> {
    let mut rounds = Vec::new();
    let mut kinds = Vec::new();
    while rounds.len() < kills {
        if kinds.is_empty() {
            kinds = Moment::ALL.to_vec();
        }
        let at = usize::try_from(draws.below(kinds.len() as u64)).unwrap();
        let moment = kinds.swap_remove(at);
        let stops = [Stop::Before, Stop::After, Stop::Late];
        let stop = stops[(rounds.len() + usize::from(draws.chance(300))) % stops.len()];
        let left = if moment.is_of_starts() { 0 } else { draws.below(3) };
        // The next node has less room on it than one with large segments.
        let loses_disk = moment.is_of_parts() || rounds.len() % 4 == 2;
        rounds.push(Round { moment, stop, left, loses_disk });
    }
    rounds
}

/// A number from the environment.
fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// What all nodes of a run share.
struct Run<'a> {
    home: Home,
    proxy: Proxy,
    watch: Watch,
    bucket: &'a Bucket,
    path: &'a str,
    ledger: Ledger,
    /// Kills by kind, and those that were at no chosen moment.
    kills: BTreeMap<Moment, u64>,
    other_kills: u64,
    /// From the start of a process until its packs are in the map.
    starts: Vec<Duration>,
}

impl Run<'_> {
    /// A node that can be killed at `moment`.
    async fn start(&mut self, moment: Option<Moment>) -> Server {
        let large = moment.is_some_and(Moment::is_of_parts);
        // A pack of more than 40 MiB is uploaded in parts, and these blocks take half of their bytes.
        let (nvme, segment, pack) =
            if large { ("512MiB", "128MiB", "64MiB") } else { ("64MiB", "1MiB", "1MiB") };
        builder(&self.home, self.proxy.address, self.path)
            .dram("16MiB")
            .set("nvme.capacity", nvme)
            .set("nvme.segment_bytes", segment)
            .set("object.pack_bytes", pack)
            .set("object.capacity", &CAPACITY_BYTES.to_string())
            .set("object.delete_grace", "1s")
            .start()
            .await
    }

    /// Lets a node work until it stops at the moment, and kills it there.
    async fn kill_at(&mut self, server: Server, round: Round) {
        let mut wire = connect(&server).await;
        let stopped = timeout(MOMENT_WAIT, self.proxy.stopped());
        let reached = tokio::select! {
            reached = stopped => reached,
            _never = self.ledger.traffic(&mut wire) => unreachable!(),
        };
        let page = if reached.is_err() { server.page("/metrics").await.1 } else { String::new() };
        let log = server.kill();
        let seen = self.watch.seen();
        assert!(reached.is_ok(), "no such request: {round:?}; {seen:?}\n{log}\n{page}");
        assert!(!log.contains("panicked"), "{log}");
        *self.kills.entry(round.moment).or_default() += 1;
    }

    /// One kill, the start after it, and what must hold then.
    async fn round(&mut self, server: Server, round: Round, next: Option<Moment>) -> Server {
        if round.moment.is_of_starts() {
            server.kill();
            self.other_kills += 1;
            self.watch.stop_at(round.moment, round.left, round.stop);
            let starting = self.start(None).await;
            self.kill_at(starting, round).await;
        } else {
            self.watch.stop_at(round.moment, round.left, round.stop);
            self.kill_at(server, round).await;
        }
        if round.loses_disk {
            self.lose_disk();
        }
        self.start_and_check(next).await
    }

    fn lose_disk(&mut self) {
        lose_disk(&self.home);
        self.ledger.lose_disk();
    }

    /// Starts a node and waits until its packs are in the map.
    async fn start_found(&mut self, next: Option<Moment>) -> Server {
        let began = Instant::now();
        let server = self.start(next).await;
        let found = async || server.log().contains(FOUND);
        wait_until("the packs are found", SERVER_WAIT, found).await;
        self.starts.push(began.elapsed());
        server
    }

    async fn start_and_check(&mut self, next: Option<Moment>) -> Server {
        let nothing = async || self.proxy.under_way() == 0;
        wait_until("the store has answered", SERVER_WAIT, nothing).await;
        let named = named(self.bucket).await;
        let server = self.start_found(next).await;
        // What the one before has sent arrives now.
        self.proxy.deliver().await;
        let mut wire = connect(&server).await;
        self.ledger.check(&mut wire, self.bucket, &named).await;
        for counter in ["lost_packs", "wrong_blocks"] {
            let series = format!("kvstrata_object_{counter}_total");
            assert_eq!(server.metric(&series).await, 0.0, "{counter}");
        }
        server
    }

    /// What a run was like.
    fn figures(&self, took: Duration) -> String {
        let (kills, mut starts) = (self.kills.values().sum::<u64>(), self.starts.clone());
        starts.sort_unstable();
        let (half, last) = (starts[starts.len() / 2], starts[starts.len() - 1]);
        let (others, checked, seen) = (self.other_kills, &self.ledger.checked, self.watch.seen());
        format!(
            "{kills} kills at chosen requests and {others} others in {took:.1?}\n\
             packs found after {half:.2?} (p50), {last:.2?} (max)\n\
             {checked:?}\nrequests: {seen:?}\nkills: {:?}",
            self.kills
        )
    }
}

/// What is in the bucket has a name in the log, and what the log keeps is bounded.
async fn check_bucket(bucket: &Bucket) {
    let list = async |prefix: String| bucket.list(&prefix, soon()).await.unwrap();
    wait_until("every pack in the bucket has a name", SERVER_WAIT, async || {
        let listed = list(owner().cluster.packs_prefix()).await;
        let there = listed.iter().map(|object| PackId::parse(&object.name).unwrap().1);
        let mut there: Vec<PackId> = there.collect();
        there.sort_unstable();
        let said = named(bucket).await;
        let names: Vec<PackId> = said.packs.iter().map(|pack| pack.id).collect();
        there == names && said.adopted == 0 && said.leftovers.is_empty()
    })
    .await;
    let epochs = list(owner().epochs_prefix()).await.len();
    assert!(epochs <= 10, "{epochs} objects of epochs");
    let manifests = list(owner().manifests_prefix()).await.len();
    assert!(manifests <= 400, "{manifests} objects of the log");
}

#[tokio::test]
async fn kills_at_every_kind_of_request_lose_nothing_that_the_log_names() {
    let test = "kills_at_every_kind_of_request_lose_nothing_that_the_log_names";
    let Some(s3) = S3Server::of_all_tests(test).await else { return };
    let began = Instant::now();
    let (kills, seed) =
        (setting("KVSTRATA_BUCKET_KILLS", KILLS), setting("KVSTRATA_BUCKET_KILLS_SEED", 1));
    let mut draws = Draws::new(seed as u64);
    let rounds = rounds(kills, &mut draws);
    let (proxy, bucket) = (Proxy::start(s3.s3), s3.bucket(test));
    let mut run = Run {
        home: Home::new(),
        watch: Watch::on(&proxy, owner()),
        proxy,
        bucket: &bucket,
        path: test,
        ledger: Ledger::new(draws.draw()),
        kills: BTreeMap::new(),
        other_kills: 0,
        starts: Vec::new(),
    };
    let mut server = run.start_found(rounds.first().map(|round| round.moment)).await;
    for (at, round) in rounds.iter().enumerate() {
        let next = rounds.get(at + 1).map(|round| round.moment);
        let began = Instant::now();
        server = run.round(server, *round, next).await;
        println!("{at}: {round:?} {:.1?}", began.elapsed());
    }
    // Once more from the bucket alone; what came late is found by this start at the latest.
    server.kill();
    run.lose_disk();
    let server = run.start_and_check(None).await;
    check_bucket(run.bucket).await;
    println!("{}", run.figures(began.elapsed()));
    assert_eq!(run.kills.values().sum::<u64>(), kills as u64);
    assert!(run.ledger.checked.named >= 100 * kills, "{:?}", run.ledger.checked);
    assert!(run.ledger.checked.removed >= 10 * kills, "{:?}", run.ledger.checked);
    server.stop(&[]).await;
}
