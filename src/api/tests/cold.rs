//! Blocks that only nvme has: removals that it does not note, and prefetches beside gets.

use kvstrata_proto::v1::{PrefetchRequest, RemoveRequest};
use kvstrata_tiers::{
    checksum::part_checksum,
    store::Checksums,
    testing::{Fault, Faulty, MemoryStore, block_bytes, hash_of, pack},
    tier::Tier,
};

use super::*;

const BLOCK_BYTES: usize = 4096;

/// A server with an nvme tier that has found blocks, and a client.
async fn found(numbers: &[u64]) -> (Arc<Node>, Arc<Faulty>, Client) {
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
    let faults = Arc::new(Faulty::new(Arc::clone(&nvme) as Arc<dyn BlockStore>));
    let (node, client) = serve_over(vec![Arc::clone(&faults) as Arc<dyn BlockStore>]).await;
    let client = Client::new(client).await;
    let namespace = node.namespaces.get(&client.offer.namespace_id).unwrap();
    for number in numbers {
        let bytes = block_bytes(&namespace, *number, 0, BLOCK_BYTES);
        let hash = hash_of(*number);
        let sum = part_checksum(namespace.id(), &hash, 0, 0, &bytes);
        assert!(nvme.discover(&namespace, hash, &bytes, Checksums::One(sum)));
    }
    (node, faults, client)
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_nvme_does_not_note_is_unavailable_and_says_what_to_do() {
    let (node, faults, mut client) = found(&[1, 2]).await;
    faults.plan(&[Fault::Error]);
    let request = |number| RemoveRequest {
        namespace_id: client.offer.namespace_id.clone(),
        hashes: pack(&[number]).into(),
    };
    let (first, second) = (request(1), request(2));
    let refused = client.client.remove(first).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    assert!(refused.message().contains("remove them again"), "{refused}");
    assert_eq!(node.stack.usage().index_blocks, 1, "unreadable all the same");
    assert_eq!(client.client.remove(second).await.unwrap().into_inner().removed, 1);
}

#[tokio::test(start_paused = true)]
async fn prefetches_leave_turns_for_gets() {
    let numbers: Vec<u64> = (0..60).collect();
    let (node, faults, mut client) = found(&numbers).await;
    faults.plan(&[Fault::Slow(Duration::from_secs(1)); 60]);
    for numbers in numbers.chunks(20) {
        let request = PrefetchRequest {
            namespace_id: client.offer.namespace_id.clone(),
            hashes: pack(numbers).into(),
        };
        let started = client.client.prefetch(request).await.unwrap().into_inner().started;
        assert_eq!(started, 20);
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let pace = node.stack.pace(Tier::Nvme).unwrap();
    assert_eq!(usize::try_from(pace.loads).unwrap(), PREFETCH_LOADS_MAX, "at a time");
    let planned = node.costs.snapshot().into_iter().find(|cost| cost.tier == Tier::Nvme).unwrap();
    assert_eq!((planned.in_flight, planned.queued_bytes), (3, 60 * BLOCK_BYTES as u64));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(node.stack.usage().dram_blocks, 60, "and all are loaded");
    let planned = node.costs.snapshot().into_iter().find(|cost| cost.tier == Tier::Nvme).unwrap();
    assert_eq!((planned.in_flight, planned.queued_bytes), (0, 0));
}
