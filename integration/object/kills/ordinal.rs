//! Two nodes and one ordinal: the second is refused, unless the first is gone; and one that adopts it
//! may be killed at any step.

use std::{
    process::{Child, Stdio},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::time::timeout;

use super::{
    FOUND, MOMENT_WAIT, check_bucket,
    ledger::owner,
    moment::{Moment, Watch},
};
use crate::{
    harness::{SERVER_WAIT, Server, wait_until},
    nvme::{Home, count_right, remove, store},
    object::{
        adopt::{ADOPTIONS, adopt},
        proxy::{Proxy, Stop},
        server::S3Server,
        soon,
        tier::{SEALED, builder, connect, filled, lose_disk, wait_found},
    },
};

#[tokio::test]
async fn a_second_node_with_the_same_ordinal_is_refused_by_name_and_writes_nothing() {
    let test = "a_second_node_with_the_same_ordinal_is_refused_by_name_and_writes_nothing";
    let Some(s3) = S3Server::of_all_tests(test).await else { return };
    let home = Home::new();
    let other = home.beside();
    let first = builder(&home, s3.s3, test).start().await;
    let found = async || first.log().contains(FOUND);
    wait_until("the first holds the ordinal", SERVER_WAIT, found).await;

    let proxy = Proxy::start(s3.s3);
    let writes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&writes);
    proxy.watch(move |request| {
        let is_write = !matches!(request.method, "GET" | "HEAD");
        if is_write && !request.path.contains("/v1/probes/") {
            seen.lock().push(format!("{} {}", request.method, request.path));
        }
        None
    });
    let second = builder(&other, proxy.address, test).set("node.name", "node-b").start().await;
    let refused = async || second.log().contains("ordinal 0 of the object tier is held by");
    wait_until("the second is refused", SERVER_WAIT, refused).await;
    assert!(second.log().contains("node-a"), "{}", second.log());

    // Both serve, and the first packs.
    for server in [&first, &second] {
        let mut wire = connect(server).await;
        store(&mut wire, 0..320, true).await;
        assert_eq!(count_right(&mut wire, 0..320).await, 320);
    }
    wait_until("the first packs", SERVER_WAIT, async || {
        first.metric("kvstrata_object_named_packs_total").await >= 8.0
    })
    .await;
    assert_eq!(second.metric("kvstrata_object_packs_made_total").await, 0.0);
    assert_eq!(second.metric("kvstrata_object_blocks").await, 0.0);
    second.stop(&["object tier does not start yet"]).await;
    assert!(proxy.requests() > 0);
    assert_eq!(*writes.lock(), Vec::<String>::new());
    first.stop(&[]).await;
}

/// Where an adopter is killed, one kill after the other.
const OF_ADOPTION: [(Moment, Stop); 8] = [
    (Moment::Opening, Stop::Before),
    (Moment::Opening, Stop::After),
    (Moment::Closing, Stop::Before),
    (Moment::Opening, Stop::Late),
    (Moment::Closing, Stop::Late),
    (Moment::Beginning, Stop::After),
    (Moment::Beginning, Stop::Late),
    (Moment::Beat, Stop::Before),
];

/// Gives the ordinal up, as its node is gone, and begins to wait for who takes it.
async fn give_up(s3: &S3Server, path: &str) -> Child {
    let mut adopting = adopt(s3.s3, path, &["--ordinal", "0", "--force"]);
    let adopting = adopting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let bucket = s3.bucket(path);
    wait_until("the ordinal is given up", SERVER_WAIT, async || {
        let listed = bucket.list(&owner().epochs_prefix(), soon()).await.unwrap();
        listed.iter().any(|object| object.name.ends_with("/0000000002"))
    })
    .await;
    adopting
}

#[tokio::test]
async fn kills_of_an_adopter_lose_nothing_that_it_adopts() {
    let test = "kills_of_an_adopter_lose_nothing_that_it_adopts";
    let Some(s3) = S3Server::of_all_tests(test).await else { return };
    let (home, server, mut wire) = filled(s3, test).await;
    assert_eq!(remove(&mut wire, 0..20).await, 20);
    drop(wire);
    server.kill();
    let mut adopting = give_up(s3, test).await;

    let proxy = Proxy::start(s3.s3);
    let watch = Watch::on(&proxy, owner());
    let adopter_home = home.beside();
    let adopter = || builder(&adopter_home, proxy.address, test).set("node.name", "node-5");
    for (moment, stop) in OF_ADOPTION {
        watch.stop_at(moment, 0, stop);
        let killed = adopter().start().await;
        let reached = timeout(MOMENT_WAIT, proxy.stopped()).await;
        let log = killed.kill();
        assert!(reached.is_ok(), "no such request: {moment:?} {stop:?}\n{log}");
        assert!(!log.contains("panicked"), "{log}");
        // What it sent last arrives while the next one starts.
        proxy.deliver().await;
    }
    let adopter = adopter().start().await;
    wait_until("the packs are adopted", SERVER_WAIT, async || {
        adopter.metric(ADOPTIONS).await >= 1.0
    })
    .await;
    serves(&adopter, 20).await;
    assert_eq!(adopter.metric("kvstrata_object_packs_made_total").await, 0.0);
    let mut wire = connect(&adopter).await;
    assert_eq!(remove(&mut wire, 20..40).await, 20);
    drop(wire);
    adopter.kill();
    assert!(adopting.wait().unwrap().success(), "nobody was seen to adopt");

    // Its node is back, from the bucket alone.
    lose_disk(&home);
    let back = builder(&home, s3.s3, test).start().await;
    wait_found(&back, SEALED - 40).await;
    serves(&back, 40).await;
    check_bucket(&s3.bucket(test)).await;
    back.stop(&[]).await;
}

/// All blocks from this one on are right, and those before were removed.
async fn serves(server: &Server, from: u64) {
    let mut wire = connect(server).await;
    assert_eq!(count_right(&mut wire, 0..from).await, 0, "they were removed");
    assert_eq!(count_right(&mut wire, from..SEALED).await as u64, SEALED - from);
    for counter in ["lost_packs", "wrong_blocks"] {
        let series = format!("kvstrata_object_{counter}_total");
        assert_eq!(server.metric(&series).await, 0.0, "{counter}");
    }
}
