//! What engines tell and what is put, joined in one node.

use kvstrata_tiers::{
    namespace::{Identity, PartSpec},
    stack::Description,
};

use super::*;
use crate::{
    api::tests::node,
    auth::{Bearer, ONLY_TENANT},
    flow::{PutAsk, PutFlow},
};

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 2;
const LINE: &str =
    "tcp://h:1,model=m;tcp://h:2,model=m,engine=sglang;tcp://h:3,model=m,tenant=other";

fn listening() -> Node {
    let subscribe = crate::config::Maybe::Given(LINE.parse().unwrap());
    let config = Events { subscribe, ..Events::default() };
    Node { told: Subscriptions::new(&config), ..node(Vec::new()) }
}

fn open(node: &Node, engine: &str, lora: &[u8], keep_tokens: bool) -> Arc<Namespace> {
    let spec = NamespaceSpec::Engine(Box::new(Identity {
        tenant: ONLY_TENANT.to_owned(),
        model: "m".into(),
        engine: engine.into(),
        dtype: "bf16".into(),
        block_tokens: BLOCK_TOKENS,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: 4096 }],
        hash_algorithm: "sha256".into(),
        hash_bytes: 32,
        lora: lora.to_vec(),
        ..Identity::default()
    }));
    node.namespaces.open(spec, keep_tokens).unwrap().namespace
}

fn hash(number: u64) -> Vec<u8> {
    [number + 1000, 5, 5, number * 7 + 3].iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Offers blocks; a claim is as good as a block here.
fn put(node: &Node, namespace: &Namespace, numbers: std::ops::Range<u64>) -> PutFlow {
    let (session, _events) = node.sessions.open("test".into(), Arc::new(Bearer::anyone())).unwrap();
    let ask = PutAsk {
        session: session.session().id(),
        namespace_id: namespace.id().as_bytes(),
        hashes: &numbers.flat_map(hash).collect(),
        parts: &[],
        checksums: &[],
        parent: &[],
        lengths: &[],
        durable: false,
    };
    PutFlow::open(node, &Bearer::anyone(), &ask).unwrap().0
}

fn tell(node: &Node, engine: &str, numbers: std::ops::Range<u64>, whole: bool) -> u64 {
    let model = node.told.models.iter().find(|model| model.engine == engine).unwrap();
    let publish = |number| match whole {
        true => Published::Whole(hash(number)),
        false => Published::Short(model.short(&hash(number))),
    };
    let stored = Stored {
        parent: numbers.start.checked_sub(1).map(publish),
        tokens: numbers.clone().flat_map(tokens).collect(),
        hashes: numbers.map(publish).collect(),
        block_size: 2,
        lora_name: "adapter".to_owned(),
        ..Stored::default()
    };
    model.take(&node.stack, &node.namespaces, &stored)
}

fn tokens(number: u64) -> [u32; 2] {
    let number = u32::try_from(number).unwrap();
    [number * 2, number * 2 + 1]
}

fn description(node: &Node, namespace: &Namespace, number: u64) -> Option<Description> {
    node.stack.description(namespace, BlockHash::new(&hash(number)).unwrap())
}

fn expected(number: u64, keeps: bool) -> Option<Description> {
    let parent = number.checked_sub(1).map(|before| BlockHash::new(&hash(before)).unwrap());
    Some(Description {
        parent,
        position: u32::try_from(number).unwrap(),
        tokens: if keeps { tokens(number).to_vec() } else { Vec::new() },
        lora_name: "adapter".to_owned(),
    })
}

#[tokio::test]
async fn what_is_told_describes_what_is_put_whichever_comes_first() {
    for engine in ["vllm", "sglang"] {
        for whole in [true, false] {
            let node = listening();
            let namespace = open(&node, engine, b"", true);
            tell(&node, engine, 0..3, whole);
            let _first = put(&node, &namespace, 0..5);
            assert_eq!(description(&node, &namespace, 3), None);
            assert_eq!(tell(&node, engine, 3..5, whole), 2, "{engine}");
            for number in 0..5 {
                let found = description(&node, &namespace, number);
                assert_eq!(found, expected(number, true), "{engine} {whole}");
            }
            assert_eq!(node.metrics.events.described_blocks.get(), 3);
        }
    }
}

#[tokio::test]
async fn only_namespaces_of_the_model_are_described_and_tokens_kept_where_that_is_wished() {
    let node = listening();
    let (keeps, forgets) = (open(&node, "vllm", b"", true), open(&node, "vllm", b"x", false));
    let other = open(&node, "sglang", b"", true);
    let _puts = [&keeps, &forgets, &other].map(|namespace| put(&node, namespace, 0..2));
    assert_eq!(tell(&node, "vllm", 0..2, true), 4);
    for number in 0..2 {
        assert_eq!(description(&node, &keeps, number), expected(number, true));
        assert_eq!(description(&node, &forgets, number), expected(number, false));
        assert_eq!(description(&node, &other, number), None);
    }
}

#[tokio::test]
async fn blocks_of_another_length_are_not_described() {
    let node = listening();
    let namespace = open(&node, "vllm", b"", true);
    let _put = put(&node, &namespace, 0..1);
    let model = &node.told.models[0];
    let stored = Stored {
        hashes: vec![Published::Whole(hash(0))],
        tokens: vec![1, 2, 3, 4],
        block_size: 4,
        ..Stored::default()
    };
    assert_eq!(model.take(&node.stack, &node.namespaces, &stored), 0);
    // What is told by one tenant's engine says nothing of another's blocks.
    let theirs = node.told.models.iter().find(|model| model.tenant == "other").unwrap();
    let stored = Stored { tokens: vec![1, 2], block_size: 2, ..stored };
    assert_eq!(theirs.take(&node.stack, &node.namespaces, &stored), 0);
    assert_eq!(model.take(&node.stack, &node.namespaces, &stored), 1);
}
