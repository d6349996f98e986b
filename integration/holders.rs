//! The client in a cluster of fakes that say what the test wants: it goes home, and reads what others have from
//! them; where that fails there is a miss, and never an error or a wrong byte.

use std::{ops::Range, time::Duration};

use kvstrata::client::{
    Client, ClientOptions, GetOptions, GetSummary, Handle, HomeMoves, LookupOptions, MissReason,
    PutOutcome,
};
use kvstrata_proto::v1;
use kvstrata_tiers::error::ErrorKind;
use tokio::time::Instant;

use crate::{
    client::{Seen, batch, hashes, namespace, pattern},
    fake::{Fake, Lie},
};

const BLOCK: [u32; 1] = [4096];

fn member(index: u32, endpoint: String) -> v1::Member {
    v1::Member { index, name: format!("node-{index}"), endpoint, ..Default::default() }
}

/// Tells every fake of all, and of itself.
fn introduce(fakes: &[&Fake], epoch: u64) {
    let all = (0..).zip(fakes).map(|(index, fake)| member(index, fake.endpoint()));
    let all: Vec<_> = all.collect();
    for (own, fake) in (0..).zip(fakes) {
        let list = v1::MemberList { epoch, self_: own, members: all.clone() };
        fake.plan().members = Some(list);
    }
}

/// Puts blocks to one fake, and has it forget that anybody has been there.
async fn fill(fake: &Fake, numbers: Range<u32>) {
    let client = Client::connect(&fake.endpoint(), ClientOptions::default()).await.unwrap();
    let handle = client.open(namespace(&BLOCK)).await.unwrap();
    let session = client.session("fill").await.unwrap();
    let batch = batch(numbers.clone(), &BLOCK);
    let report = handle.put(&session, &batch).await.unwrap();
    assert_eq!(report.count(PutOutcome::Stored), u64::from(numbers.end - numbers.start));
    let mut plan = fake.plan();
    (plan.opens, plan.gets, plan.sessions) = (0, 0, 0);
}

/// A says that B has blocks 4 to 8, and C 9 to 11; it has 0 to 3 itself.
struct Three {
    a: Fake,
    b: Fake,
    c: Fake,
    handle: Handle,
}

async fn three() -> Three {
    let [a, b, c] = [(); 3].map(|()| Fake::start(Lie::None));
    for (fake, numbers) in [(&a, 0..4), (&b, 4..9), (&c, 9..12)] {
        fill(fake, numbers).await;
    }
    introduce(&[&a, &b, &c], 1);
    for (at, hash) in (0..).zip(hashes(0..12).iter()) {
        let holder = if at < 4 { continue } else { 1 + u32::from(at >= 9) };
        let hash = bytes::Bytes::copy_from_slice(hash.as_bytes());
        a.plan().placed.insert(hash, holder);
    }
    let handle = open(&a).await;
    Three { a, b, c, handle }
}

async fn open(fake: &Fake) -> Handle {
    let options = ClientOptions { call_deadline: Duration::from_secs(2), ..Default::default() };
    let client = Client::connect(&fake.endpoint(), options).await.unwrap();
    client.open(namespace(&BLOCK)).await.unwrap()
}

async fn find(handle: &Handle) {
    let found = handle.lookup(&hashes(0..12), LookupOptions::default()).await.unwrap();
    assert_eq!(found.prefix_blocks, 12);
}

async fn get(handle: &Handle, options: GetOptions<'_>) -> (GetSummary, Seen) {
    let mut seen = Seen::default();
    let summary = handle.get(&hashes(0..12), options, &mut seen).await.unwrap();
    assert_eq!(summary.blocks(), seen.blocks.len() as u64);
    let missed: u64 = seen.misses.iter().map(|(range, _)| u64::from(range.end - range.start)).sum();
    assert_eq!(summary.missed, missed);
    for (number, block) in &seen.blocks {
        assert_eq!(*block, pattern(*number, 0, 4096), "block {number}");
    }
    let ends: Vec<_> = seen.blocks.iter().map(|(number, _)| *number).collect();
    assert!(ends.is_sorted(), "{ends:?}");
    (summary, seen)
}

#[tokio::test]
async fn blocks_of_other_members_come_from_them_in_the_order_asked() {
    let three = three().await;
    find(&three.handle).await;
    let (summary, seen) = get(&three.handle, GetOptions::default()).await;
    assert_eq!((summary.blocks(), summary.remote, summary.missed), (12, 8, 0));
    assert_eq!(seen.blocks.len(), 12);
    let gets = [&three.a, &three.b, &three.c].map(|fake| fake.plan().gets);
    assert_eq!((gets, three.a.plan().lookups), ([1, 1, 1], 1), "no more calls than it takes");
}

#[tokio::test]
async fn what_another_process_has_looked_up_is_asked_for_once() {
    let three = three().await;
    for lookups in [1, 1] {
        let (summary, _) = get(&three.handle, GetOptions::default()).await;
        assert_eq!((summary.blocks(), summary.remote), (12, 8));
        assert_eq!(three.a.plan().lookups, lookups);
    }
    // Nowhere: a miss, after one question.
    let mut seen = Seen::default();
    let nowhere = three.handle.get(&hashes(8..20), GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!((nowhere.blocks(), nowhere.missed, three.a.plan().lookups), (4, 8, 2));
}

#[tokio::test]
async fn a_holder_that_is_gone_is_a_miss_for_its_blocks_only() {
    let mut three = three().await;
    find(&three.handle).await;
    three.b = Fake::start(Lie::None);
    let (summary, seen) = get(&three.handle, GetOptions::default()).await;
    assert_eq!((summary.blocks(), summary.remote, summary.missed), (7, 3, 5));
    assert_eq!(seen.misses, [(4..9, MissReason::Absent)]);
    // And with the misses told of, nothing after the first of them.
    find(&three.handle).await;
    let options = GetOptions { stop_at_miss: true, ..Default::default() };
    let (summary, seen) = get(&three.handle, options).await;
    assert_eq!((summary.blocks(), seen.misses.len()), (4, 1));
}

#[tokio::test]
async fn a_holder_that_hangs_is_a_miss_within_the_deadline() {
    let three = three().await;
    three.b.plan().hangs = true;
    find(&three.handle).await;
    let deadline = Duration::from_secs(2);
    let begun = Instant::now();
    let options = GetOptions { deadline: Some(deadline), ..Default::default() };
    let (summary, seen) = get(&three.handle, options).await;
    assert!(begun.elapsed() < deadline, "{:?}", begun.elapsed());
    assert_eq!((summary.blocks(), summary.missed), (7, 5));
    assert_eq!(seen.misses, [(4..9, MissReason::Timeout)]);
    // It is not waited for again, for a while.
    find(&three.handle).await;
    let begun = Instant::now();
    let (summary, _) = get(&three.handle, GetOptions::default()).await;
    assert_eq!((summary.blocks(), summary.missed), (7, 5));
    assert!(begun.elapsed() < deadline / 4, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn blocks_that_have_moved_are_misses_and_damaged_ones_never_delivered() {
    let three = three().await;
    for number in [10, 11] {
        let hash = hashes(number..number + 1).packed();
        three.a.plan().placed.insert(hash, 1);
    }
    find(&three.handle).await;
    three.c.lie(Lie::FlippedByte);
    three.b.lie(Lie::FlippedByte);
    let (summary, seen) = get(&three.handle, GetOptions::default()).await;
    // Of B the second block is damaged, C has only one to tell of; the last two are not where they should be.
    assert_eq!((summary.blocks(), summary.corrupt_here, summary.missed), (9, 1, 3));
    let gone: Vec<_> = seen.misses.iter().map(|(range, reason)| (range.start, *reason)).collect();
    let absent = MissReason::Absent;
    assert_eq!(gone, [(5, MissReason::CorruptHere), (10, absent), (11, absent)]);
}

#[tokio::test]
async fn a_holder_that_does_not_know_the_namespace_is_told_of_it() {
    let three = three().await;
    three.b.plan().forgets = true;
    find(&three.handle).await;
    let (summary, _) = get(&three.handle, GetOptions::default()).await;
    assert_eq!((summary.blocks(), summary.remote), (12, 8));
    assert_eq!((three.b.plan().opens, three.c.plan().opens), (1, 0));
}

#[tokio::test]
async fn members_that_have_come_are_learnt_with_a_lookup() {
    let [a, b] = [(); 2].map(|()| Fake::start(Lie::None));
    fill(&a, 0..4).await;
    fill(&b, 4..12).await;
    introduce(&[&a], 1);
    let handle = open(&a).await;
    introduce(&[&a, &b], 2);
    for hash in hashes(4..12).iter() {
        let hash = bytes::Bytes::copy_from_slice(hash.as_bytes());
        a.plan().placed.insert(hash, 1);
    }
    let found = handle.lookup(&hashes(0..12), LookupOptions::default()).await.unwrap();
    assert_eq!((found.prefix_blocks, handle.client().members().list.len()), (12, 2));
    let (summary, _) = get(&handle, GetOptions::default()).await;
    assert_eq!((summary.blocks(), summary.remote), (12, 8));
}

async fn engine(endpoints: &str) -> (Client, Handle) {
    let options = ClientOptions { instance: Some("vllm-0:8000".to_owned()), ..Default::default() };
    let client = Client::connect(endpoints, options).await.unwrap();
    let handle = client.open(namespace(&BLOCK)).await.unwrap();
    (client, handle)
}

/// Stores and gets back, wherever the client is.
async fn works(client: &Client, handle: &Handle) {
    let session = client.session("test").await.unwrap();
    let report = handle.put(&session, &batch(0..4, &BLOCK)).await.unwrap();
    assert_eq!(report.count(PutOutcome::Stored), 4);
    let mut seen = Seen::default();
    let got = handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!((got.blocks(), got.remote), (4, 0));
}

#[tokio::test]
async fn an_engine_goes_home_before_it_has_anything_anywhere() {
    let [a, b] = [(); 2].map(|()| Fake::start(Lie::None));
    introduce(&[&a, &b], 1);
    for fake in [&a, &b] {
        fake.plan().home = Some(1);
    }
    let (client, handle) = engine(&a.endpoint()).await;
    assert_eq!(
        (client.moves(), client.endpoint()),
        (HomeMoves { made: 1, failed: 0 }, b.endpoint())
    );
    assert_eq!(client.members().answering, 1);
    works(&client, &handle).await;
    assert_eq!((a.plan().sessions, b.plan().sessions), (0, 1));
    // Where something is of it, it stays, whatever is said.
    b.plan().home = Some(0);
    client.open(namespace(&[64])).await.unwrap();
    assert_eq!(client.endpoint(), b.endpoint());
    // Whoever is no engine has no home.
    let anybody = Client::connect(&a.endpoint(), ClientOptions::default()).await.unwrap();
    anybody.open(namespace(&BLOCK)).await.unwrap();
    assert_eq!((anybody.endpoint(), anybody.moves()), (a.endpoint(), HomeMoves::default()));
}

#[tokio::test]
async fn members_that_send_an_engine_in_circles_do_not_for_long() {
    let [a, b] = [(); 2].map(|()| Fake::start(Lie::None));
    introduce(&[&a, &b], 1);
    a.plan().home = Some(1);
    b.plan().home = Some(0);
    let (client, handle) = engine(&a.endpoint()).await;
    assert_eq!(client.moves().made, 2);
    assert_eq!((a.plan().opens, b.plan().opens), (2, 1));
    works(&client, &handle).await;
}

#[tokio::test]
async fn a_home_that_is_not_reached_is_done_without() {
    let [a, b] = [(); 2].map(|()| Fake::start(Lie::None));
    introduce(&[&a, &b], 1);
    a.plan().home = Some(1);
    drop(b);
    let (client, handle) = engine(&a.endpoint()).await;
    assert_eq!(
        (client.moves(), client.endpoint()),
        (HomeMoves { made: 0, failed: 1 }, a.endpoint())
    );
    works(&client, &handle).await;
}

#[tokio::test]
async fn of_several_endpoints_the_first_that_answers_is_taken() {
    let [dead, a] = [(); 2].map(|()| Fake::start(Lie::None));
    let gone = dead.endpoint();
    drop(dead);
    // Its kernel takes connections, and nobody answers.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = (mute.local_addr().unwrap().to_string(), mute);
    let begun = Instant::now();
    let endpoints = format!("{gone}, {},{}", mute.0, a.endpoint());
    let (client, handle) = engine(&endpoints).await;
    assert!(begun.elapsed() < ClientOptions::default().connect_deadline, "{:?}", begun.elapsed());
    assert_eq!(client.endpoint(), a.endpoint());
    works(&client, &handle).await;
    assert!(client.is_draining(), "its session was told");
    let options = ClientOptions { connect_deadline: Duration::from_secs(1), ..Default::default() };
    let none = Client::connect(&format!("{gone},{}", mute.0), options).await.unwrap_err();
    assert!(matches!(none.kind(), ErrorKind::Unavailable | ErrorKind::Timeout), "{none}");
}
