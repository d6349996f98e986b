//! Prefill and decode on different engines: what one puts the other reads, also while it is still being
//! put.

use std::{ops::Range, time::Duration};

use kvstrata::client::{FetchedBlock, GetOptions, GetSink, HashList, MissReason, Path};
use kvstrata_proto::v1::{GetRequest, Namespace, PutOutcome};
use kvstrata_tiers::block::BlockHash;
use tokio::sync::mpsc;

use crate::{
    bulk::connect,
    harness::Server,
    wire::{self, BLOCK_BYTES, PutStream, Wire, payload},
};

/// The namespace that [`connect`] opens, as the bare client says it.
fn namespace() -> Namespace {
    Namespace {
        model: "test".to_owned(),
        weights: String::new(),
        layout: String::new(),
        hash_algorithm: "sha256".to_owned(),
        hash_root: bytes::Bytes::new(),
        ..wire::namespace("test")
    }
}

/// Blocks of these tests.
const ARRIVALS_MAX: usize = 2;

/// Tells of blocks as they arrive.
struct Arrivals(mpsc::Sender<(u32, Vec<u8>)>, Vec<(Range<u32>, MissReason)>);

impl GetSink for Arrivals {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.0.try_send((block.position, block.pieces().concat())).unwrap();
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        self.1.push((positions, reason));
    }
}

/// Offers blocks 1 and 2, and nothing of them comes yet.
async fn offered(prefill: &mut Wire) -> PutStream {
    let mut put = prefill.put_stream(prefill.offer([1, 2])).await.unwrap();
    assert_eq!(put.wanted().await.unwrap().len(), 1);
    let pending = prefill.lookup([1, 2]).await;
    assert_eq!(pending.counts.unwrap().pending, 2);
    put
}

#[tokio::test]
async fn a_decode_engine_reads_what_is_still_being_put_over_each_path() {
    for path in [Path::Grpc, Path::Bulk] {
        let server =
            Server::builder().dram("64MiB").set("server.bulk_listen", "127.0.0.1:0").start().await;
        let mut prefill = Wire::connect(&server, namespace()).await;
        let mut put = offered(&mut prefill).await;
        let (decode, _session) =
            connect(&server, path, &[u32::try_from(BLOCK_BYTES).unwrap()]).await;
        let hashes: Vec<_> =
            [1, 2].map(|number| BlockHash::new(&wire::hash(number)).unwrap()).into();
        let (arrivals, mut arrived) = mpsc::channel(ARRIVALS_MAX);
        let getting = async {
            let mut sink = Arrivals(arrivals, Vec::new());
            decode.get(&HashList::of(&hashes), GetOptions::default(), &mut sink).await.unwrap();
            sink.1
        };
        let putting = async {
            put.send(prefill.part(0, 1, payload(1))).await;
            assert_eq!(arrived.recv().await, Some((0, payload(1))), "{path:?}");
            put.send(prefill.part(1, 2, payload(2))).await;
            assert_eq!(arrived.recv().await, Some((1, payload(2))), "{path:?}");
            put.finish(2).await.unwrap()
        };
        let (misses, outcomes) = tokio::join!(getting, putting);
        assert_eq!(misses, []);
        assert_eq!(outcomes.len(), 2);
        let series = "kvstrata_get_missed_blocks_total{reason=\"pending\"}";
        assert_eq!(server.metric(series).await, 0.0);
    }
}

#[tokio::test]
async fn a_put_that_is_given_up_is_a_miss_and_one_that_stands_still_one_at_the_deadline() {
    let server = Server::builder().dram("64MiB").start().await;
    let mut prefill = Wire::connect(&server, namespace()).await;
    let mut put = offered(&mut prefill).await;
    let mut decode = Wire::connect(&server, namespace()).await;

    let request = GetRequest { deadline_ms: 50, ..decode.get_request([1]) };
    assert_eq!(decode.read(request, 1).await.unwrap(), [None]);
    let missed = |reason| format!("kvstrata_get_missed_blocks_total{{reason=\"{reason}\"}}");
    assert_eq!(server.metric(&missed("pending")).await, 1.0);

    put.send(prefill.part(0, 1, payload(1))).await;
    let request = decode.get_request([1, 2]);
    let (read, ()) = tokio::join!(decode.read(request, 2), async {
        // Block 1 is readable before the put ends without block 2.
        while prefill.lookup([1]).await.counts.unwrap().dram == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(put);
    });
    assert_eq!(read.unwrap(), [Some(payload(1)), None]);
    assert_eq!(server.metric(&missed("absent")).await, 1.0);
    assert_eq!(decode.put(&[2]).await, [PutOutcome::Stored]);
}
