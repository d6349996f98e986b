//! Clients killed at every step, alone and against each other: nothing is left, and no byte that
//! somebody was promised has changed.

use std::time::Duration;

use proptest::prelude::*;

use crate::{
    harness::Server,
    wire::{BLOCK_BYTES, PutStream, Wire, namespace, payload, wait_nothing_left},
};

/// Longer than any wait here, so that an expired lease cannot pass for a freed one.
const TTL: Duration = Duration::from_secs(300);
/// Blocks that the actions are about: few, so that clients meet.
const BLOCKS: u64 = 24;
/// Blocks that one client is promised throughout.
const PROMISED: [u64; 4] = [0, 1, 2, 3];

/// What a client does next.
#[derive(Debug, Clone)]
enum Step {
    /// Offers blocks from the first on.
    Offer { first: u64, count: u64 },
    /// Sends so many bytes of the next wanted block.
    Send { bytes: usize },
    /// Sends the rest of the next wanted block.
    Complete,
    /// Ends the put.
    Finish,
    /// Looks blocks up with a lease.
    Lease { first: u64, count: u64 },
    /// Begins to read blocks and does not go on.
    Read { first: u64, count: u64 },
    /// Is killed; the next step begins anew.
    Die,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..BLOCKS, 1..8_u64);
    prop_oneof![
        3 => range.clone().prop_map(|(first, count)| Step::Offer { first, count }),
        2 => (1..BLOCK_BYTES).prop_map(|bytes| Step::Send { bytes }),
        6 => Just(Step::Complete),
        2 => Just(Step::Finish),
        3 => range.clone().prop_map(|(first, count)| Step::Lease { first, count }),
        1 => range.prop_map(|(first, count)| Step::Read { first, count }),
        2 => Just(Step::Die),
    ]
}

/// A client that may be killed between any two steps.
struct Actor {
    wire: Wire,
    put: Option<OpenPut>,
    /// The wire stays open while these do.
    reads: Vec<tonic::Streaming<kvstrata_proto::v1::GetResponse>>,
}

struct OpenPut {
    stream: PutStream,
    /// Positions that are wanted, the next one last, with the number of the block.
    wanted: Vec<(u32, u64)>,
    /// Bytes of the next one that were sent.
    sent: usize,
}

impl Actor {
    async fn born(server: &Server) -> Self {
        let wire = Wire::connect(server, namespace("m")).await;
        Self { wire, put: None, reads: Vec::new() }
    }

    async fn act(&mut self, step: Step, server: &Server) {
        match step {
            Step::Offer { first, count } => {
                let offer = self.wire.offer(first..first + count);
                let mut stream = self.wire.put_stream(offer).await.unwrap();
                let wanted = stream.wanted().await.unwrap();
                let wanted = wanted.iter().rev().flat_map(|range| (range.start..range.end).rev());
                let wanted = wanted.map(|index| (index, first + u64::from(index))).collect();
                self.put = Some(OpenPut { stream, wanted, sent: 0 });
            }
            Step::Send { bytes } => self.send(bytes, false).await,
            Step::Complete => self.send(BLOCK_BYTES, true).await,
            Step::Finish => {
                if let Some(put) = self.put.take() {
                    put.stream.finish(16).await.unwrap();
                }
            }
            Step::Lease { first, count } => {
                self.wire.lookup_with_lease(first..first + count, TTL).await.unwrap();
            }
            Step::Read { first, count } => {
                let request = self.wire.get_request(first..first + count);
                self.reads.push(self.wire.client.get(request).await.unwrap().into_inner());
            }
            Step::Die => *self = Self::born(server).await,
        }
    }

    /// Sends up to `bytes` of the next wanted block.
    async fn send(&mut self, bytes: usize, whole: bool) {
        let Some(put) = &mut self.put else { return };
        let Some(&(index, number)) = put.wanted.last() else { return };
        let mut part = self.wire.part(index, number, payload(number));
        let rest = part.data.split_off(put.sent);
        let keep = if whole { rest.len() } else { bytes.min(rest.len() - 1) };
        if keep == 0 {
            return;
        }
        part.offset = u32::try_from(put.sent).unwrap();
        part.data = rest.slice(..keep);
        put.sent += keep;
        put.stream.send(part).await;
        if whole {
            put.wanted.pop();
            put.sent = 0;
        }
    }
}

/// Everything that is readable has its own bytes.
async fn assert_right(observer: &mut Wire) {
    let blocks: Vec<u64> = (0..BLOCKS + 8).collect();
    for (number, block) in blocks.iter().zip(observer.get(&blocks).await) {
        assert!(block.is_none() || block == Some(payload(*number)), "block {number}");
    }
}

#[tokio::test]
async fn a_client_killed_after_each_step_of_its_life_leaves_nothing() {
    let server = Server::builder().dram("16MiB").start().await;
    let mut observer = Wire::without_session(&server, namespace("m")).await;
    let life = [
        Step::Lease { first: 0, count: 4 },
        Step::Offer { first: 0, count: 4 },
        Step::Send { bytes: 100 },
        Step::Complete,
        Step::Complete,
        Step::Lease { first: 0, count: 2 },
        Step::Read { first: 0, count: 4 },
        Step::Complete,
        Step::Complete,
        Step::Finish,
        Step::Lease { first: 0, count: 4 },
    ];
    for steps in 0..=life.len() {
        let mut actor = Actor::born(&server).await;
        for step in &life[..steps] {
            actor.act(step.clone(), &server).await;
        }
        drop(actor);
        wait_nothing_left(&observer).await;
        assert_right(&mut observer).await;
    }
    assert_eq!(observer.lookup(0..4).await.prefix_blocks, 4, "what was acknowledged stays");
    drop(observer);
    server.stop(&[]).await;
}

/// A client that holds a promise over the first blocks all the time.
async fn promised(server: &Server) -> Wire {
    let mut holder = Wire::connect(server, namespace("m")).await;
    holder.put(&PROMISED).await;
    let lease = holder.lookup_with_lease(PROMISED, TTL).await.unwrap().lease.unwrap();
    assert_eq!(lease.blocks, 4);
    holder
}

async fn run(steps: Vec<(usize, Step)>) {
    let server = Server::builder().dram("16MiB").start().await;
    let mut observer = Wire::without_session(&server, namespace("m")).await;
    let mut actors =
        [Actor::born(&server).await, Actor::born(&server).await, Actor::born(&server).await];
    let mut holder = promised(&server).await;
    for (actor, step) in steps {
        actors[actor].act(step, &server).await;
    }
    drop(actors);
    let kept: Vec<_> = PROMISED.iter().map(|number| Some(payload(*number))).collect();
    assert_eq!(holder.get(&PROMISED).await, kept, "a leased byte changed or went away");
    drop(holder);
    wait_nothing_left(&observer).await;
    assert_right(&mut observer).await;
    drop(observer);
    server.stop(&[]).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn clients_killed_at_any_time_leave_nothing(
        steps in prop::collection::vec((0..3_usize, step()), 1..40)
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(run(steps));
    }
}
