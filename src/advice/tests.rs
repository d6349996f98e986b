//! One node with three tiers: what is told of a prompt, to whom, and at what price.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_tiers::{
    block::Hashes,
    checksum::part_checksum,
    error::ErrorKind,
    namespace::Namespace,
    store::{BlockStore, Checksums},
    testing::{Fixture, MemoryStore, block_bytes, hash_of, pack},
    tier::Tier,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::*;
use crate::{
    api::tests::node,
    auth::{Bearer, Gate},
    metrics::TrustMetrics,
    node::Node,
    openers::Opener,
    score::{Mode, Prefill, Settings, Weights},
};

mod others;
mod watch;

const BLOCK_BYTES: u32 = 4096;
const BLOCK_MS: f64 = 40.0;

/// A node and what a test does to it.
struct Setup {
    node: Arc<Node>,
    namespace: Arc<Namespace>,
    fixture: Fixture,
    nvme: Arc<MemoryStore>,
    object: Arc<MemoryStore>,
}

impl Setup {
    /// Has blocks 0 to 3 in dram, 4 to 9 on nvme, 10 and 11 in the object store.
    fn new() -> Self {
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let object = Arc::new(MemoryStore::new(Tier::Object));
        let cold: Vec<Arc<dyn BlockStore>> =
            vec![Arc::clone(&nvme) as Arc<dyn BlockStore>, Arc::clone(&object) as _];
        let node = Arc::new(node(cold));
        let (stack, namespaces) = (node.stack.clone(), Arc::clone(&node.namespaces));
        let fixture = Fixture { stack, namespaces };
        let namespace = fixture.namespace("m", &[BLOCK_BYTES]).unwrap();
        let setup = Self { node, namespace, fixture, nvme, object };
        assert_eq!(setup.fixture.put(&setup.namespace, &[0, 1, 2, 3]).unwrap(), 4);
        setup.found(&setup.nvme, 4..10);
        setup.found(&setup.object, 10..12);
        setup
    }

    fn found(&self, store: &MemoryStore, numbers: std::ops::Range<u64>) {
        for number in numbers {
            let bytes = block_bytes(&self.namespace, number, 0, BLOCK_BYTES as usize);
            let hash = hash_of(number);
            let sum = part_checksum(self.namespace.id(), &hash, 0, 0, &bytes);
            assert!(store.discover(&self.namespace, hash, &bytes, Checksums::One(sum)));
        }
    }

    fn opened(&self, namespace: &Namespace, instance: &str, host: &str) {
        let opener = Opener {
            instance: instance.to_owned(),
            host: host.to_owned(),
            zone: String::new(),
            client_version: String::new(),
            at: Instant::now(),
        };
        self.node.openers.note(namespace.index(), opener);
    }

    async fn ask(&self, question: &Question) -> Answer {
        self.node.advise(&Bearer::anyone(), question).await.unwrap()
    }
}

fn prompt(numbers: impl IntoIterator<Item = u64>) -> Prompt {
    let packed = pack(&numbers.into_iter().collect::<Vec<_>>()).into();
    Prompt {
        among: Among::Model("m".to_owned()),
        block_tokens: 0,
        asked: Asked::Hashes { packed, hash_bytes: 0 },
        total_blocks: 0,
    }
}

fn question(prompt: Prompt) -> Question {
    Question {
        prompts: vec![prompt],
        candidates: Vec::new(),
        prefill: Some(Prefill::linear(BLOCK_MS)),
        prefetch: false,
        deadline: Instant::now() + Duration::from_secs(10),
    }
}

fn candidate(instance: &str, device_blocks: u32, decode_blocks: f64) -> Candidate {
    Candidate {
        instance: instance.to_owned(),
        node: String::new(),
        zone: String::new(),
        device_blocks,
        decode_blocks,
        queue_ms: 0.0,
        prefill: None,
    }
}

fn contest(prompt: Prompt, candidates: Vec<Candidate>, mode: Mode) -> Contest {
    Contest {
        prompt,
        candidates,
        prefill: Some(Prefill::linear(BLOCK_MS)),
        settings: Settings { mode, ..Settings::default() },
        temperature: 0.0,
        seed: None,
        prefetch: false,
        reserve: Duration::ZERO,
        deadline: Instant::now() + Duration::from_secs(10),
    }
}

/// Somebody else with a valid token.
fn stranger() -> Arc<Bearer> {
    const TOKEN: &str = "a-token-of-at-least-thirty-two-characters";
    let gate = Gate::closed(TrustMetrics::register(&mut Registry::default())).unwrap();
    gate.replace(format!("other {TOKEN}\n").as_bytes()).unwrap();
    gate.admit(crate::metrics::Door::Grpc, Some(TOKEN.as_bytes())).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_instance_is_told_what_is_behind_its_device_from_which_tier() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "far");
    let mut question = question(Prompt { total_blocks: 20, ..prompt(0..15) });
    question.candidates =
        vec![candidate("a", 2, 0.0), candidate("unknown", 0, 0.0), candidate("a", 99, 0.0)];
    let answer = setup.ask(&question).await;
    let [(found, advised)] = &answer.prompts[..] else { panic!("{answer:?}") };
    assert_eq!((found.total_blocks, found.unresolved_blocks, answer.partial), (20, 0, false));
    let runs: Vec<_> =
        found.prefixes[0].runs.iter().map(|run| (run.start, run.end, run.tier)).collect();
    assert_eq!(runs, [(0, 4, Tier::Dram), (4, 10, Tier::Nvme), (10, 12, Tier::Object)]);
    let [behind_two, behind_all] = &advised[..] else { panic!("{advised:?}") };
    let pieces = behind_two.offer.pieces.iter();
    let pieces: Vec<_> = pieces.map(|piece| (piece.start, piece.end, piece.bytes)).collect();
    assert_eq!(pieces, [(2, 4, 8192), (4, 10, 24576), (10, 12, 8192)]);
    assert_eq!(behind_two.offer.by_tier(), [2, 6, 2]);
    assert_eq!((behind_two.offer.prefix, behind_two.offer.host.as_str()), (0, "far"));
    // Object costs 40 ms before the first byte: its two blocks save 80.
    assert_eq!(behind_two.best_blocks, 10);
    assert!(behind_two.saved_ms > 300.0 && behind_two.credit_blocks > 8.0, "{behind_two:?}");
    let [dram, nvme, object] = behind_two.break_even;
    assert_eq!((dram, nvme), (Some(1), Some(1)));
    assert!(object.is_some_and(|blocks| (1..=3).contains(&blocks)), "{object:?}");
    assert_eq!((behind_all.offer.blocks(), behind_all.best_blocks), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn without_candidates_it_is_all_who_opened_and_without_a_prefill_nothing_is_saved() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "b", "x");
    setup.opened(&setup.namespace, "a", "x");
    setup.opened(&setup.namespace, "a", "y");
    let answer = setup.ask(&Question { prefill: None, ..question(prompt(0..6)) }).await;
    let (_, advised) = &answer.prompts[0];
    let named: Vec<_> =
        advised.iter().map(|each| (each.instance.as_str(), each.offer.host.as_str())).collect();
    assert_eq!(named, [("a", "x"), ("a", "y"), ("b", "x")]);
    for each in advised {
        assert_eq!((each.best_blocks, each.saved_ms, each.break_even), (6, 0.0, [None; 3]));
        assert!(each.load_ms > 0.0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_score_is_that_of_the_formula_with_what_loading_costs_here() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "near", "x");
    let candidates =
        || vec![candidate("bare", 9, 0.0), candidate("near", 2, 1.5), candidate("idle", 0, 0.0)];
    let bearer = Bearer::anyone();
    let costs = async |mode| {
        let outcome = setup.node.judge(&bearer, &contest(prompt(0..12), candidates(), mode)).await;
        let outcome = outcome.unwrap();
        let costs: Vec<f64> = outcome.scored.iter().map(|each| each.assessment.cost).collect();
        (outcome.taken, costs)
    };
    // Whoever has not opened it has nothing but its device.
    assert_eq!(costs(Mode::DeviceOnly).await, (0, vec![3.0, 11.5, 12.0]));
    let weights = Weights { dram: 0.75, nvme: 0.25, object: 0.25 };
    let credit = 2.0 * 0.75 + 8.0 * 0.25;
    assert_eq!(costs(Mode::Constants(weights)).await, (0, vec![3.0, 11.5 - credit, 12.0]));
    let (taken, timed) = costs(Mode::Timed).await;
    assert_eq!((taken, timed[0], timed[2]), (1, 3.0, 12.0));
    let lookup = Question { candidates: candidates(), ..question(prompt(0..12)) };
    let (_, advised) = &setup.ask(&lookup).await.prompts[0];
    assert_eq!(advised.len(), 1);
    assert!((timed[1] - (10.0 - advised[0].credit_blocks + 1.5)).abs() < 1e-9, "{timed:?}");
    assert!(timed[1] < 3.0, "{timed:?}");
}

#[tokio::test(start_paused = true)]
async fn of_equals_the_first_by_name_is_taken_and_a_seed_draws_the_same_again() {
    let setup = Setup::new();
    let bearer = Bearer::anyone();
    let names = ["c", "a", "b"];
    let candidates = || names.map(|name| candidate(name, 0, 0.0)).to_vec();
    let even = contest(prompt(0..3), candidates(), Mode::Timed);
    let outcome = setup.node.judge(&bearer, &even).await.unwrap();
    assert_eq!(outcome.taken, 1);
    let shares: Vec<f64> = outcome.scored.iter().map(|each| each.probability).collect();
    assert_eq!(shares, [0.0, 1.0, 0.0]);
    let mut taken = [0; 3];
    for seed in 0..300 {
        let draw = || Contest {
            temperature: 1.0,
            seed: Some(seed),
            ..contest(prompt(0..3), candidates(), Mode::Timed)
        };
        let first = setup.node.judge(&bearer, &draw()).await.unwrap();
        let again = setup.node.judge(&bearer, &draw()).await.unwrap();
        assert_eq!(first.taken, again.taken);
        assert!((first.scored[0].probability - 1.0 / 3.0).abs() < 1e-9);
        taken[first.taken] += 1;
    }
    assert!(taken.iter().all(|count| (70..130).contains(count)), "{taken:?}");
}

#[tokio::test(start_paused = true)]
async fn where_time_decides_it_must_be_known() {
    let setup = Setup::new();
    let bearer = Bearer::anyone();
    let unknown = |mode| Contest {
        prefill: None,
        ..contest(prompt(0..3), vec![candidate("a", 0, 0.0)], mode)
    };
    let refused = setup.node.judge(&bearer, &unknown(Mode::Timed)).await.unwrap_err();
    assert!(refused.to_string().contains("candidates[0].prefill"), "{refused}");
    let outcome = setup.node.judge(&bearer, &unknown(Mode::DeviceOnly)).await.unwrap();
    assert!((outcome.scored[0].assessment.cost - 3.0).abs() < 1e-9);
}

#[tokio::test(start_paused = true)]
async fn another_tenant_finds_nothing_and_is_told_what_everybody_is() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "x");
    let stranger = stranger();
    let answer = setup.node.advise(&stranger, &question(prompt(0..3))).await.unwrap();
    let (found, advised) = &answer.prompts[0];
    assert!(found.prefixes.is_empty() && advised.is_empty(), "{answer:?}");
    let by_id =
        |id: &[u8]| Prompt { among: Among::Namespace(Bytes::copy_from_slice(id)), ..prompt(0..3) };
    let id = *setup.namespace.id().as_bytes();
    let mut refusals = Vec::new();
    for asked in [id, [7; 32]] {
        let refused = setup.node.advise(&stranger, &question(by_id(&asked))).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::UnknownNamespace);
        refusals.push(refused.to_string().replace(&hex::encode(asked), "ID"));
    }
    assert_eq!(refusals[0], refusals[1]);
    let own = setup.node.advise(&Bearer::anyone(), &question(by_id(&id))).await.unwrap();
    assert_eq!(own.prompts[0].0.prefixes[0].blocks(), 3);
    let longer = question(Prompt { block_tokens: 32, ..by_id(&id) });
    let refused = setup.node.advise(&Bearer::anyone(), &longer).await.unwrap_err();
    assert!(refused.to_string().contains("prompt.block_tokens"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn a_prefetch_begins_and_the_next_answer_shows_it() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "x");
    let tiers = async |prefetch| {
        let answer = setup.ask(&Question { prefetch, ..question(prompt(0..12)) }).await;
        answer.prompts[0].1[0].offer.by_tier()
    };
    assert_eq!(tiers(false).await, [4, 6, 2]);
    assert_eq!(tiers(true).await, [4, 6, 2]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(tiers(false).await, [12, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_score_brings_only_what_the_one_that_is_taken_would_load() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "x");
    let mut asked = contest(prompt(0..12), vec![candidate("a", 6, 0.0)], Mode::Timed);
    // A block of prefill takes less than the first byte from the object store.
    (asked.prefill, asked.prefetch) = (Some(Prefill::linear(5.0)), true);
    asked.reserve = Duration::from_secs(5);
    let outcome = setup.node.judge(&Bearer::anyone(), &asked).await.unwrap();
    assert_eq!(outcome.scored[0].assessment.best_blocks, 4);
    assert!(outcome.reserved.is_some());
    assert_eq!(setup.node.costs.reserved(), (0, [0; 3]), "what is brought does not count twice");
    let mut costs = setup.node.costs.snapshot().into_iter();
    let nvme = costs.find(|cost| cost.tier == Tier::Nvme).unwrap();
    assert_eq!(nvme.queued_bytes, 4 * u64::from(BLOCK_BYTES));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let held = |number| setup.node.stack.tiers_of(&setup.namespace, hash_of(number))[0];
    assert_eq!([4, 5].map(held), [Tier::Nvme; 2]);
    assert_eq!([6, 7, 8, 9].map(held), [Tier::Dram; 4]);
    assert_eq!([10, 11].map(held), [Tier::Object; 2]);
}

#[tokio::test(start_paused = true)]
async fn what_there_is_no_time_for_is_left_out_and_said_to_be() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "x");
    let late = Question { deadline: Instant::now(), ..question(prompt(0..3)) };
    let answer = setup.ask(&late).await;
    assert!(answer.partial && answer.prompts.is_empty());
    let mut late = contest(prompt(0..12), vec![candidate("a", 0, 2.0)], Mode::Timed);
    late.deadline = Instant::now();
    let outcome = setup.node.judge(&Bearer::anyone(), &late).await.unwrap();
    assert!(outcome.partial);
    assert!((outcome.scored[0].assessment.cost - 14.0).abs() < 1e-9, "as if it had nothing");
}

#[tokio::test(start_paused = true)]
async fn namespaces_that_differ_are_told_apart_by_what_the_prompt_says() {
    let setup = Setup::new();
    let longer = setup.fixture.namespace_of("m", &[2 * BLOCK_BYTES], 32).unwrap();
    assert_eq!(setup.fixture.put(&longer, &[0, 1]).unwrap(), 2);
    setup.opened(&setup.namespace, "a", "x");
    setup.opened(&longer, "b", "x");
    let answer = setup.ask(&question(prompt(0..4))).await;
    let (found, advised) = &answer.prompts[0];
    assert_eq!(found.prefixes.iter().map(Prefix::blocks).collect::<Vec<_>>(), [4, 2]);
    let blocks: Vec<_> =
        advised.iter().map(|each| (each.offer.prefix, each.offer.blocks())).collect();
    assert_eq!(blocks, [(0, 4), (1, 2)], "each from the namespace that it has opened");
    let only = setup.ask(&question(Prompt { block_tokens: 32, ..prompt(0..4) })).await;
    assert_eq!(only.prompts[0].0.prefixes.len(), 1);
    // Whoever has opened both takes the better one.
    setup.opened(&longer, "a", "x");
    let both = setup.ask(&question(prompt(0..4))).await;
    assert_eq!(both.prompts[0].1[0].offer.prefix, 0);
    let tokens =
        Asked::Tokens { tokens: vec![1; 64], lora_name: String::new(), cache_salt: String::new() };
    let ambiguous = Prompt { asked: tokens, ..prompt(0..1) };
    let refused = setup.node.advise(&Bearer::anyone(), &question(ambiguous)).await.unwrap_err();
    assert!(refused.to_string().contains("prompt.block_tokens: 0 given"), "{refused}");
    let half = Prompt {
        asked: Asked::Hashes { packed: Bytes::from(vec![0; 40]), hash_bytes: 0 },
        ..prompt(0..1)
    };
    let refused = setup.node.advise(&Bearer::anyone(), &question(half)).await.unwrap_err();
    assert!(refused.to_string().contains("a multiple of 32"), "{refused}");
    let short = Prompt { total_blocks: 2, ..prompt(0..4) };
    let refused = setup.node.advise(&Bearer::anyone(), &question(short)).await.unwrap_err();
    assert!(refused.to_string().contains("prompt.total_blocks: 2 given"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn asking_is_no_use_of_a_block_and_no_lookup() {
    let setup = Setup::new();
    setup.ask(&question(prompt(0..12))).await;
    let lookups = &setup.namespace.counters().lookups;
    assert!(lookups.iter().all(|count| count.load(std::sync::atomic::Ordering::Relaxed) == 0));
    let packed = pack(&[0]);
    drop(setup.node.stack.lookup(
        &setup.namespace,
        Hashes::new(&packed, 32).unwrap(),
        kvstrata_tiers::stack::Ask::default(),
    ));
    assert_eq!(lookups[0].load(std::sync::atomic::Ordering::Relaxed), 1);
}
