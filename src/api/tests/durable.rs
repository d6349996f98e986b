//! Durable puts: nothing is acknowledged before nvme has it, and nothing waits for ever.

use kvstrata_proto::v1::{PutData, PutOutcome};
use kvstrata_tiers::{
    admission::Admission,
    block::BlockHash,
    checksum::part_checksum,
    namespace::NamespaceId,
    testing::{Fault, Faulty, MemoryStore, block_bytes, hash_of, pack},
    tier::Tier,
};

use tonic::Status;

use kvstrata_proto::v1 as wire;

use super::*;
use crate::limits::{DURABLE_BLOCKS_AHEAD, DURABLE_DEADLINE};

/// A server with an nvme tier that is held up as planned, its cleaner, and a client.
struct Stage {
    node: Arc<Node>,
    nvme: Arc<MemoryStore>,
    faults: Arc<Faulty>,
    client: Client,
}

impl Stage {
    async fn new() -> Self {
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let faults = Arc::new(Faulty::new(Arc::clone(&nvme) as Arc<dyn BlockStore>));
        let (node, client) = serve_over(vec![Arc::clone(&faults) as Arc<dyn BlockStore>]).await;
        let (stack, stop) = (node.stack.clone(), node.tasks.stop_token());
        node.tasks.spawn("cleaner", async move { stack.clean(stop.cancelled()).await });
        let client = Client::new(client).await;
        Self { node, nvme, faults, client }
    }

    fn slow(&self, delay: Duration, times: usize) {
        self.faults.plan(&vec![Fault::Slow(delay); times]);
    }

    async fn offer(&mut self, numbers: &[u64], durable: bool) -> Put {
        self.client.offer.hashes = pack(numbers).into();
        self.client.offer.durable = durable;
        let (send, mut responses) = self.client.put().await;
        let ranges = wanted(&mut responses).await;
        let id = self.client.offer.namespace_id.clone();
        let namespace = self.node.namespaces.get(&id).unwrap();
        let id = NamespaceId::from_bytes(id.as_ref().try_into().unwrap());
        let part = |index: usize| {
            let (number, index) = (numbers[index], u32::try_from(index).unwrap());
            let data = block_bytes(&namespace, number, 0, 4096);
            let hash: BlockHash = hash_of(number);
            let checksum = part_checksum(&id, &hash, 0, 0, &data);
            let data = data.into();
            wire::PartData { index, data, checksum, part_bytes: 4096, ..wire::PartData::default() }
        };
        if ranges > 0 {
            let parts = (0..numbers.len()).map(part).collect();
            let message = Some(put_request::Message::Data(PutData { parts }));
            send.send(PutRequest { message }).await.unwrap();
        }
        Put { _send: Some(send), responses, outcomes: vec![None; numbers.len()] }
    }

    /// Puts whole blocks; returns their outcomes and how long that took.
    async fn put(&mut self, numbers: &[u64], durable: bool) -> (Vec<PutOutcome>, Duration) {
        let started = Instant::now();
        let outcomes = self.offer(numbers, durable).await.finish().await.unwrap();
        (outcomes, started.elapsed())
    }
}

struct Put {
    _send: Option<mpsc::Sender<PutRequest>>,
    responses: Streaming<PutResponse>,
    outcomes: Vec<Option<PutOutcome>>,
}

impl Put {
    /// Reads results until there is one for every position.
    async fn finish(mut self) -> Result<Vec<PutOutcome>, Status> {
        while self.outcomes.contains(&None) {
            let response = self.responses.message().await?.expect("results for all");
            let Some(put_response::Message::Results(results)) = response.message else {
                panic!("wanted came twice")
            };
            for result in results.results {
                let range = result.start as usize..result.end as usize;
                self.outcomes[range].fill(Some(result.outcome()));
            }
        }
        self._send = None;
        assert!(self.responses.message().await?.is_none(), "and nothing more");
        Ok(self.outcomes.into_iter().flatten().collect())
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_are_acknowledged_when_nvme_has_them() {
    let mut stage = Stage::new().await;
    let blocks: Vec<u64> = (0..100).collect();
    stage.slow(Duration::from_secs(2), 100);
    let (outcomes, elapsed) = stage.put(&blocks, true).await;
    assert_eq!(outcomes, [PutOutcome::Stored; 100]);
    assert_eq!(stage.nvme.usage().blocks, 100);
    let rounds = u32::try_from(100_usize.div_ceil(DURABLE_BLOCKS_AHEAD)).unwrap();
    let one = Duration::from_secs(2);
    assert!(elapsed >= one && elapsed < one * (rounds + 1), "beside each other: {elapsed:?}");
    // Now they are duplicates, and nothing has to be written.
    let (outcomes, elapsed) = stage.put(&blocks, true).await;
    assert_eq!(outcomes, [PutOutcome::Duplicate; 100]);
    assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_only_dram_has_is_made_durable_first() {
    let mut stage = Stage::new().await;
    stage.nvme.admit(Some(Admission::Reused));
    assert_eq!(stage.put(&[1, 2], false).await.0, [PutOutcome::Stored; 2]);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(stage.nvme.usage().blocks, 0, "nobody read them");
    assert_eq!(stage.put(&[1, 2], true).await.0, [PutOutcome::Duplicate; 2]);
    assert_eq!(stage.nvme.usage().blocks, 2);
}

#[tokio::test(start_paused = true)]
async fn what_nvme_does_not_take_is_stored_and_not_durable() {
    let mut stage = Stage::new().await;
    stage.nvme.admit(None);
    let (outcomes, elapsed) = stage.put(&[1, 2, 3], true).await;
    assert_eq!(outcomes, [PutOutcome::NotDurable; 3]);
    assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    assert_eq!(stage.put(&[1, 2, 3], false).await.0, [PutOutcome::Duplicate; 3]);
    assert_eq!(stage.put(&[1, 2, 3], true).await.0, [PutOutcome::NotDurable; 3]);
    stage.nvme.admit(Some(Admission::All));
    assert_eq!(stage.put(&[1, 2, 3], true).await.0, [PutOutcome::Duplicate; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_ends_the_wait_after_one_deadline() {
    let mut stage = Stage::new().await;
    stage.faults.plan(&[Fault::Hang; 64]);
    let blocks: Vec<u64> = (0..200).collect();
    let (outcomes, elapsed) = stage.put(&blocks, true).await;
    assert_eq!(outcomes, [PutOutcome::NotDurable; 200]);
    assert!(elapsed < DURABLE_DEADLINE + Duration::from_secs(2), "{elapsed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_put_that_waits_ends_with_its_session_and_its_copies_go_on() {
    let mut stage = Stage::new().await;
    stage.slow(Duration::from_secs(20), 100);
    let put = stage.offer(&[1, 2, 3], true).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(stage.node.stack.usage().dram_blocks, 3);
    stage.node.sessions.end_all();
    let started = Instant::now();
    let ended = put.finish().await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(1), "{ended}");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(stage.nvme.usage().blocks, 3);
}

#[tokio::test(start_paused = true)]
async fn a_slow_tier_is_not_the_silence_of_the_client() {
    let mut stage = Stage::new().await;
    // Far more than is copied at a time.
    let blocks: Vec<u64> = (0..(10 * DURABLE_BLOCKS_AHEAD as u64)).collect();
    stage.slow(DURABLE_DEADLINE - Duration::from_secs(1), blocks.len());
    let (outcomes, elapsed) = stage.put(&blocks, true).await;
    assert!(outcomes.iter().all(|outcome| *outcome == PutOutcome::Stored), "{outcomes:?}");
    assert!(elapsed > 2 * PUT_IDLE_MAX, "{elapsed:?}");
}

#[tokio::test(start_paused = true)]
async fn without_nvme_a_durable_put_is_not_implemented() {
    let (_node, client) = serve().await;
    let mut client = Client::new(client).await;
    client.offer.durable = true;
    let (_send, mut responses) = client.put().await;
    let refused = responses.message().await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unimplemented, "{refused}");
}
