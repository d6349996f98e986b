//! A node whose arena is full stays within its one memory knob, and payload is not on its heap.

use bytes::Bytes;
use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, HashList, MissReason, NamespaceSpec,
    PutBatch,
};
use kvstrata_tiers::{
    namespace::{Identity, PartSpec},
    testing::pack,
};

use crate::harness::Server;

const LIMIT: &str = "256MiB";
const LIMIT_BYTES: u64 = 256 << 20;
/// Blocks put at once, in bytes.
const BATCH_BYTES: u64 = 16 << 20;

fn identity(model: &str, bytes: u32) -> NamespaceSpec {
    NamespaceSpec::Engine(Box::new(Identity {
        model: model.into(),
        engine: "test".into(),
        dtype: "bytes".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes }],
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    }))
}

/// Reads to no end but to have read.
#[derive(Default)]
struct Reader(u64);

impl GetSink for Reader {
    fn block(&mut self, _block: FetchedBlock<'_>) {
        self.0 += 1;
    }

    fn miss(&mut self, _positions: std::ops::Range<u32>, _reason: MissReason) {}
}

#[tokio::test]
async fn a_full_node_stays_within_its_limit_and_keeps_payload_off_the_heap() {
    let server = Server::builder().set("memory.limit", LIMIT).start().await;
    let endpoint = format!("http://{}", server.grpc());
    let client = Client::connect(&endpoint, ClientOptions::default()).await.unwrap();
    let session = client.session("memory").await.unwrap();
    let capacity = client.stats().await.unwrap().tiers[0].capacity_bytes;
    for (model, bytes) in [("large", 1 << 20), ("small", 16 << 10), ("large again", 1 << 20)] {
        let handle = client.open(identity(model, bytes)).await.unwrap();
        let per_batch = BATCH_BYTES / u64::from(bytes);
        let value = Bytes::from(vec![5; usize::try_from(bytes).unwrap()]);
        let mut reader = Reader::default();
        for start in (0..2 * capacity / u64::from(bytes)).step_by(per_batch.try_into().unwrap()) {
            let numbers: Vec<u64> = (start..start + per_batch).collect();
            let hashes = HashList::of_full(pack(&numbers).into());
            let values = vec![value.clone(); numbers.len()];
            let batch = PutBatch {
                hashes: hashes.clone(),
                parts: Vec::new(),
                values,
                parent: None,
                durable: false,
            };
            handle.put(&session, &batch).await.unwrap();
            handle.get(&hashes, GetOptions::default(), &mut reader).await.unwrap();
        }
        assert!(reader.0 >= 2 * capacity / u64::from(bytes) * 9 / 10, "{} of {model}", reader.0);
        let stats = client.stats().await.unwrap();
        let used = stats.tiers[0].used_bytes;
        assert!(used * 100 >= capacity * 95, "{model}: {used} of {capacity} in use");
        let (all, heap) = (server.status_bytes("VmRSS"), server.status_bytes("RssAnon"));
        assert!(all * 100 <= LIMIT_BYTES * 105, "{model}: {all} bytes resident");
        assert!(heap <= LIMIT_BYTES - capacity, "{model}: {heap} bytes on the heap");
    }
    assert!(server.metric("kvstrata_evicted_blocks_total{reason=\"reclaim\"}").await > 0.0);
    drop((client, session));
    server.stop(&[]).await;
}
