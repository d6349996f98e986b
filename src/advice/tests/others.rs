//! What other members have: told with what those say that loading from them costs, and missed by nobody but itself.

use kvstrata_tiers::tier::Run;

use super::*;
use crate::{
    advice::others::Others,
    cluster::{peers::Peer, plan, told::Told},
    costs::{Locality, TierCost, TierState},
    members::{Member, Roster},
};

const MIB: f64 = 1_048_576.0;

fn member(index: u32, host: &str, zone: &str) -> Member {
    Member {
        index,
        name: format!("node-{index}"),
        endpoint: format!("{index}:1"),
        host: host.to_owned(),
        zone: zone.to_owned(),
        ..Member::default()
    }
}

/// What a member tells of its disk and its object store: nearer is faster.
fn told(state: TierState) -> Told {
    let cost = |(tier, (locality, bandwidth))| TierCost {
        node: "node-1".to_owned(),
        tier,
        locality,
        bandwidth,
        setup: Duration::from_millis(2),
        queue: Duration::from_millis(8),
        queued_bytes: 0,
        in_flight: 0,
        state,
        sample_age: None,
    };
    let speeds = [2000.0 * MIB, 1000.0 * MIB, 500.0 * MIB, 100.0 * MIB];
    let of = |tier| Locality::ALL.into_iter().zip(speeds).map(move |speed| cost((tier, speed)));
    Told { costs: [Tier::Nvme, Tier::Object].into_iter().flat_map(of).collect(), ..Told::default() }
}

fn opener(instance: &str, host: &str, zone: &str) -> Opener {
    Opener {
        instance: instance.to_owned(),
        host: host.to_owned(),
        zone: zone.to_owned(),
        client_version: String::new(),
        at: Instant::now(),
    }
}

/// What was found of a prompt of 20 blocks, if members have these `(start, end, tier, holder)` of it.
fn grown(setup: &Setup, runs: &[(u32, u32, Tier, u32)], others: &Others) -> Found {
    let mut found = setup.node.find_prefixes(&Bearer::anyone(), &prompt(0..20)).unwrap();
    let own = |run: &Run| plan::Found { run: *run, holder: Roster::OWN, est_load: Duration::ZERO };
    let mut prefix = plan::Prefix::new(20, found.prefixes[0].runs.iter().map(own).collect());
    let run = |(start, end, tier, holder): (u32, u32, Tier, u32)| plan::Found {
        run: Run {
            start,
            end,
            tier,
            pending: false,
            bytes: u64::from(end - start) * u64::from(BLOCK_BYTES),
        },
        holder,
        est_load: Duration::from_millis(10),
    };
    prefix.extend(runs.iter().copied().map(run));
    found.prefixes[0].take(&prefix, others);
    found.others = others.clone();
    found
}

#[tokio::test(start_paused = true)]
async fn a_piece_of_another_costs_what_that_tells_of_the_distance() {
    let setup = Setup::new();
    let near = Peer::stand_in(member(1, "h1", "z1"), told(TierState::Ok));
    let silent = Peer::stand_in(member(2, "h2", "z2"), Told::default());
    let others = Others::of(vec![near, silent]);
    let found = grown(&setup, &[(12, 18, Tier::Nvme, 1), (18, 20, Tier::Dram, 2)], &others);
    for (name, host, zone) in [("a", "h1", "z1"), ("b", "h9", "z1"), ("c", "h9", "z9")] {
        setup.node.openers.note(setup.namespace.index(), opener(name, host, zone));
    }
    let known = setup.node.known(&found);
    let offer = |name: &str| {
        let prefill = Some(Prefill::linear(BLOCK_MS));
        setup.node.offer(&found, &known, &candidate(name, 2, 0.0), prefill).unwrap()
    };
    let expected = [
        ("a", Locality::SameNode, 1000.0),
        ("b", Locality::SameZone, 500.0),
        ("c", Locality::Remote, 100.0),
    ];
    for (name, locality, speed) in expected {
        let offer = offer(name);
        assert_eq!(offer.blocks(), 18);
        let [_, _, _, piece, last] = &offer.pieces[..] else { panic!("{offer:?}") };
        assert_eq!((piece.start, piece.end, piece.holder), (12, 18, 1));
        assert_eq!(
            (piece.locality, piece.cost.queue_ms, piece.cost.setup_ms),
            (locality, 8.0, 2.0)
        );
        let block_ms = 1e3 * f64::from(BLOCK_BYTES) / (speed * MIB);
        assert!((piece.cost.block_ms - block_ms).abs() < 1e-9, "{piece:?}");
        // Of one that has told nothing it is known what all of it takes.
        assert_eq!((last.holder, last.cost.setup_ms, last.cost.block_ms), (2, 0.0, 5.0));
        // Two disks are two sources: each is waited for.
        let apart: f64 = offer.pieces.iter().map(|piece| piece.cost.ms(piece.blocks())).sum();
        assert!((offer.load_ms() - apart).abs() < 1e-9, "{offer:?}");
    }
    let own = [(Tier::Dram, 2), (Tier::Nvme, 6), (Tier::Object, 2)];
    let own = own.map(|(tier, blocks)| (tier, blocks * u64::from(BLOCK_BYTES)));
    assert_eq!(offer("a").loads(18), own, "what others load is not reserved here");
    assert_eq!(others.name(1), Some("node-1"));
    let holders: Vec<_> = (0..5).map(|run| found.prefixes[0].holder(run)).collect();
    assert_eq!(holders, [0, 0, 0, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn what_a_holder_cannot_load_is_not_told_and_only_what_is_here_is_fetched() {
    let setup = Setup::new();
    let down = Peer::stand_in(member(1, "h1", "z1"), told(TierState::Down));
    let others = Others::of(vec![down]);
    let dram_first = [(12, 14, Tier::Dram, 1), (14, 18, Tier::Nvme, 1), (18, 20, Tier::Dram, 1)];
    let found = grown(&setup, &dram_first, &others);
    assert_eq!(found.prefixes[0].blocks(), 14);
    let strange = grown(&setup, &[(12, 14, Tier::Dram, 7)], &others);
    assert_eq!(strange.prefixes[0].blocks(), 12, "nobody is called that");
    let up = Others::of(vec![Peer::stand_in(member(1, "h1", "z1"), told(TierState::Ok))]);
    let runs = [(12, 14, Tier::Nvme, 1), (14, 16, Tier::Dram, 0), (16, 20, Tier::Dram, 1)];
    let prefix = &grown(&setup, &runs, &up).prefixes[0];
    assert_eq!((prefix.blocks(), prefix.own(0, 20)), (20, vec![0..12, 14..16]));
    assert_eq!((prefix.own(3, 15), prefix.own(16, 20)), (vec![3..12, 14..15], Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn engines_of_other_members_are_known_and_one_that_is_silent_holds_up_nobody() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "h0");
    let of = [(*setup.namespace.id(), vec![opener("b", "h1", "z1"), opener("a", "old", "")])];
    let told = Told { openers: Arc::new(of.into()), ..told(TierState::Ok) };
    let node = &setup.node;
    let own = node.roster.now().list.clone();
    node.roster.replace([own, vec![member(1, "h1", "z1")]].concat());
    node.peers.be(vec![Peer::stand_in(member(1, "h1", "z1"), told)]);
    let begun = Instant::now();
    let mut asked = question(prompt(0..20));
    asked.candidates = vec![candidate("a", 0, 0.0), candidate("b", 0, 0.0)];
    let answer = setup.ask(&asked).await;
    // Its filter is not known, so there may be more.
    assert!(answer.partial && begun.elapsed().is_zero(), "{answer:?}");
    let (found, advised) = &answer.prompts[0];
    assert_eq!(found.prefixes[0].blocks(), 12);
    let hosts: Vec<_> = advised.iter().map(|each| each.offer.host.as_str()).collect();
    assert_eq!(hosts, ["h0", "h1"], "what was said here counts before what was said elsewhere");
    assert!(advised.iter().all(|each| each.credit_blocks > 0.0));
    let both = contest(prompt(0..20), asked.candidates, Mode::Timed);
    let outcome = node.judge(&Bearer::anyone(), &both).await.unwrap();
    assert!(outcome.partial);
    assert!(outcome.scored.iter().all(|each| each.assessment.found_blocks == 12), "{outcome:?}");
    let listed = &setup.ask(&question(prompt(0..20))).await.prompts[0].1;
    assert_eq!(listed.len(), 3, "both, and what one was elsewhere");
    assert_eq!(node.prefix_blocks(&Bearer::anyone(), &prompt(0..20)).await.unwrap(), 12);
    // Of all that, nothing exists for another tenant.
    let answer = node.advise(&stranger(), &question(prompt(0..20))).await.unwrap();
    let (found, advised) = &answer.prompts[0];
    assert!(found.prefixes.is_empty() && advised.is_empty() && !answer.partial, "{answer:?}");
    // What is here whole is asked of nobody.
    assert!(!setup.ask(&question(prompt(0..12))).await.partial);
}

#[tokio::test(start_paused = true)]
async fn loading_pays_from_as_few_blocks_as_at_the_best_holder() {
    let setup = Setup::new();
    setup.opened(&setup.namespace, "a", "h1");
    let others = Others::of(vec![Peer::stand_in(member(1, "h1", "z1"), told(TierState::Ok))]);
    let object = |runs| {
        let found = grown(&setup, runs, &others);
        let known = setup.node.known(&found);
        let prefill = Some(Prefill::linear(BLOCK_MS));
        let advised = setup.node.advised(&found, &known, &candidate("a", 0, 0.0), prefill);
        advised.unwrap().break_even[2]
    };
    assert_eq!(object(&[]), Some(2), "40 ms to the first byte from here");
    assert_eq!(object(&[(12, 20, Tier::Object, 1)]), Some(1), "10 ms from there");
}
