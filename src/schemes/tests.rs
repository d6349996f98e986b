//! The index over a real stack, fed by its changes.

use std::{sync::Arc, time::Duration};

use kvstrata_tiers::{
    block::Hashes,
    namespace::{Identity, Namespace, NamespaceSpec, PartSpec, Wishes},
    stack::{Chain, Offer, Piece},
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{api::tests::node, node::Node};

const BLOCK_TOKENS: usize = 4;
const LEN: u32 = 64;

/// A node with changes and an index that follow it.
struct Following {
    node: Arc<Node>,
    stop: CancellationToken,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn following() -> Following {
    let (node, stop) = (Arc::new(node(Vec::new())), CancellationToken::new());
    let (changes, ends) = (node.changes.clone(), stop.clone());
    node.tasks.spawn("changes", async move { changes.run(ends).await });
    start(&node);
    Following { node, stop }
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::Engine(Box::new(Identity {
        tenant: "default".to_owned(),
        model: "m".to_owned(),
        weights: "1".to_owned(),
        engine: "vllm".to_owned(),
        layout: "l".to_owned(),
        dtype: "u8".to_owned(),
        block_tokens: 4,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: LEN }],
        split: "none".to_owned(),
        hash_algorithm: "sha256".to_owned(),
        hash_bytes: 32,
        ..Identity::default()
    }))
}

impl Following {
    fn open(&self, schemes: &[Scheme]) -> Arc<Namespace> {
        let hash_schemes = schemes.iter().map(|scheme| scheme.name().to_owned()).collect();
        let wishes = Wishes { keep_tokens: true, hash_schemes };
        let namespace = self.node.namespaces.open(spec(), wishes).unwrap().namespace;
        self.node.schemes.opened(&namespace);
        namespace
    }

    /// Puts the blocks of a prompt; returns their hashes, packed.
    fn put(&self, namespace: &Arc<Namespace>, tokens: &[u32]) -> Vec<u8> {
        let packed = hashes_of(tokens).concat();
        let hashes = Hashes::new(&packed, 32).unwrap();
        let offer = Offer { hashes, parts: &[], checksums: &[], parent: None, lengths: &[] };
        let mut batch = self.node.stack.put(namespace, offer).unwrap();
        for (position, hash) in (0..).zip(hashes.iter()) {
            let data = [7; LEN as usize];
            let checksum =
                kvstrata_tiers::checksum::part_checksum(namespace.id(), &hash, 0, 0, &data);
            let piece =
                Piece { position, part: 0, offset: 0, data: &data, checksum, part_bytes: 0 };
            batch.write(piece).unwrap();
        }
        batch.finish();
        packed
    }

    fn describe(&self, namespace: &Arc<Namespace>, packed: &[u8], tokens: &[u32]) {
        let hashes = Hashes::new(packed, 32).unwrap();
        let chain = Chain { hashes, parent: None, position: 0, tokens, lora_name: "" };
        self.node.stack.describe(namespace, chain).unwrap();
    }

    /// Waits until a scheme has so many blocks.
    async fn has(&self, scheme: Scheme, blocks: u64) {
        let there = async {
            while self.node.schemes.usage(scheme).0 != blocks {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(20), there).await.unwrap();
    }

    fn resolve(&self, namespace: &Namespace, scheme: Scheme, names: &[u64]) -> Vec<u8> {
        self.node.schemes.resolve(namespace, scheme, names).unwrap()
    }
}

fn hashes_of(tokens: &[u32]) -> Vec<vllm::Hash> {
    let encoding = vllm::Encoding::Pickle;
    let prompt = Prompt { tokens, ..Prompt::default() };
    vllm::chain(encoding, &vllm::root(encoding, None), BLOCK_TOKENS, &prompt).unwrap()
}

fn locals(tokens: &[u32]) -> Vec<u64> {
    dynamo::locals(BLOCK_TOKENS, tokens, dynamo::seed("", b""))
}

fn short(packed: &[u8]) -> Vec<u64> {
    packed.chunks(32).map(|hash| vllm::event_hash(hash).unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn names_follow_what_is_put_described_and_removed() {
    let following = following();
    let namespace = following.open(&[Scheme::VllmU64, Scheme::Dynamo, Scheme::LlmD]);
    let tokens: Vec<u32> = (1..=40).collect();
    let packed = following.put(&namespace, &tokens);
    following.has(Scheme::VllmU64, 10).await;
    let mut names = short(&packed);
    assert_eq!(following.resolve(&namespace, Scheme::VllmU64, &names), packed);
    assert!(following.resolve(&namespace, Scheme::Dynamo, &locals(&tokens)).is_empty());
    // A prefix ends where a name is not known.
    names[3] ^= 1;
    assert_eq!(following.resolve(&namespace, Scheme::VllmU64, &names), packed[..96]);

    following.describe(&namespace, &packed, &tokens);
    following.has(Scheme::Dynamo, 10).await;
    following.has(Scheme::LlmD, 10).await;
    assert_eq!(following.resolve(&namespace, Scheme::Dynamo, &locals(&tokens)), packed);
    let keys = llm_d::keys("m", BLOCK_TOKENS, &tokens);
    assert_eq!(following.resolve(&namespace, Scheme::LlmD, &keys), packed);
    let sequences = dynamo::sequences(&locals(&tokens));
    let schemes = &following.node.schemes;
    let chained = schemes.resolve_chained(&namespace, Scheme::Dynamo, &sequences).unwrap();
    assert_eq!(chained, packed);
    let last = Hashes::new(&packed, 32).unwrap().get(9).unwrap();
    assert_eq!(schemes.name_of(&namespace, Scheme::Dynamo, last), Some(sequences[9]));

    let gone = Hashes::new(&packed[128..], 32).unwrap();
    following.node.stack.remove(&namespace, gone).await.unwrap();
    following.has(Scheme::Dynamo, 4).await;
    following.has(Scheme::VllmU64, 4).await;
    assert_eq!(following.resolve(&namespace, Scheme::Dynamo, &locals(&tokens)), packed[..128]);
    let (entries, bytes) = schemes.usage(Scheme::Dynamo);
    assert!(entries == 4 && bytes > 4 * 40, "{bytes}");
}

#[tokio::test(start_paused = true)]
async fn what_was_there_before_the_wish_gets_names_and_a_scheme_without_wish_is_refused() {
    let following = following();
    let namespace = following.open(&[]);
    let tokens: Vec<u32> = (1..=40).collect();
    let packed = following.put(&namespace, &tokens);
    following.describe(&namespace, &packed, &tokens);
    let schemes = &following.node.schemes;
    let refused = schemes.resolve(&namespace, Scheme::Dynamo, &locals(&tokens)).unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("dynamo given, but the namespace has none"), "{refused}");
    assert!(refused.contains("open it with hash_schemes dynamo"), "{refused}");

    following.open(&[Scheme::Dynamo]);
    following.has(Scheme::Dynamo, 10).await;
    assert_eq!(following.resolve(&namespace, Scheme::Dynamo, &locals(&tokens)), packed);
    // Another client's wish adds to it, and takes nothing away meanwhile.
    following.open(&[Scheme::VllmU64]);
    assert_eq!(following.resolve(&namespace, Scheme::Dynamo, &locals(&tokens)), packed);
    following.has(Scheme::VllmU64, 10).await;
    assert_eq!(following.resolve(&namespace, Scheme::VllmU64, &short(&packed)), packed);
}

#[tokio::test(start_paused = true)]
async fn what_has_left_while_nobody_was_told_is_pruned() {
    let following = following();
    let namespace = following.open(&[Scheme::VllmU64]);
    let tokens: Vec<u32> = (1..=40).collect();
    let packed = following.put(&namespace, &tokens);
    following.has(Scheme::VllmU64, 10).await;
    // Another feed takes the events: those of the hub get lost, as it is told.
    let taken = following.node.stack.subscribe();
    following.node.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    (0..taken.shards()).for_each(|shard| drop(taken.drain(shard)));
    drop(taken);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(following.node.schemes.usage(Scheme::VllmU64).0, 10, "nobody has told of it");
    following.open(&[Scheme::SglangI64]);
    following.has(Scheme::VllmU64, 0).await;
}

#[tokio::test(start_paused = true)]
async fn tokens_lead_to_hashes_by_the_algorithm_or_by_what_was_described() {
    let following = following();
    let namespace = following.open(&[]);
    let tokens: Vec<u32> = (1..=42).collect();
    let schemes = &following.node.schemes;
    let plain = Prompt { tokens: &tokens, ..Prompt::default() };
    let made = schemes.engine_hashes(&namespace, &plain).unwrap();
    assert_eq!(made, hashes_of(&tokens).concat());
    assert_eq!(made.len(), 320, "whole blocks");
    let lora = Some(Lora { name: "adapter", path: "" });
    let of_adapter = Prompt { lora, ..plain };
    let refused = schemes.engine_hashes(&namespace, &of_adapter).unwrap_err().to_string();
    assert!(refused.contains("token_ids") && refused.contains("hash_schemes dynamo"), "{refused}");

    following.open(&[Scheme::Dynamo]);
    // The engine's hashes of an adapter have its path, too: any hashes may be of it.
    let packed = following.put(&namespace, &(1000..1040).collect::<Vec<_>>());
    let hashes = Hashes::new(&packed, 32).unwrap();
    let of_it = &tokens[..40];
    let chain = Chain { hashes, parent: None, position: 0, tokens: of_it, lora_name: "adapter" };
    following.node.stack.describe(&namespace, chain).unwrap();
    following.has(Scheme::Dynamo, 10).await;
    assert_eq!(schemes.engine_hashes(&namespace, &of_adapter).unwrap(), packed);
    let other = Prompt { cache_salt: "s", ..of_adapter };
    assert!(schemes.engine_hashes(&namespace, &other).unwrap().is_empty());
}
