//! The door to a store through a proxy that breaks requests: no wrong length is taken, deadlines hold,
//! retries stay within twice of what was asked for, and it all works again when it is healed.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, future::join_all, stream};
use kvstrata_tiers::object::{
    OpLabel, OutcomeLabel,
    bucket::{Bucket, BucketErrorKind},
};
use tokio::time::Instant;

use super::{
    bytes,
    proxy::{Fault, Proxy},
    server::S3Server,
    soon,
};
use crate::harness::wait_until;

const OBJECT_BYTES: usize = 300_000;
/// The deadline of requests that are broken.
const DEADLINE: Duration = Duration::from_millis(1500);
/// What a busy machine may add to it, and what cleaning up after a large write may.
const SLACK: Duration = Duration::from_millis(2500);
/// A store that is back is noticed within the longest pause of the breaker, 30 s.
const RECOVERY: Duration = Duration::from_secs(45);

const FAULTS: [Fault; 11] = [
    Fault::Status(503),
    Fault::Status(429),
    Fault::Status(403),
    Fault::Reset,
    Fault::SlowClose,
    Fault::Latency,
    Fault::Cut,
    Fault::Shorter,
    Fault::Whole,
    Fault::WrongBody,
    Fault::Stalled,
];

/// A proxy, a bucket behind it, and an object there.
async fn behind_proxy(server: &S3Server, path: &str) -> (Proxy, Arc<Bucket>, Bytes) {
    let proxy = Proxy::start(server.s3);
    let bucket = super::bucket(S3Server::config(proxy.address, path));
    let body = bytes(7, OBJECT_BYTES);
    bucket.put("there", vec![body.clone()], soon()).await.unwrap();
    (proxy, bucket, body)
}

/// Every call once, with one deadline; each must end in time, and reads with nothing of a wrong length.
async fn all_calls(bucket: &Bucket, body: &Bytes, fault: Fault) {
    let began = Instant::now();
    let deadline = began + DEADLINE;
    let range = 1_000..200_000_u64;
    let read = async {
        if let Ok(read) = bucket.get("there", range.clone(), deadline).await {
            assert_eq!(read.len() as u64, range.end - range.start, "{fault:?}");
            assert_eq!(read == body[1_000..200_000], fault != Fault::WrongBody, "{fault:?}");
        }
    };
    let write = async {
        // Whether it was done is not known.
        drop(bucket.put("small", vec![bytes(8, 1000)], deadline).await);
        drop(bucket.put("large", vec![bytes(9, 17 << 20)], deadline).await);
        drop(bucket.create("new", bytes(10, 10), deadline).await);
        drop(bucket.list("", deadline).await);
        drop(bucket.delete("small", deadline).await);
    };
    futures_util::join!(read, write);
    assert!(began.elapsed() < DEADLINE + SLACK, "{fault:?}: {:?}", began.elapsed());
}

async fn survives(server: &S3Server, number: usize, fault: Fault) {
    let (proxy, bucket, body) = behind_proxy(server, &format!("faults/{number}")).await;
    proxy.fail(fault, 1000);
    all_calls(&bucket, &body, fault).await;
    let metrics = bucket.metrics();
    let asked = metrics.asked_requests.get();
    assert!(proxy.requests() <= 2 * asked, "{fault:?}: {} of {asked}", proxy.requests());
    assert!(metrics.sent_requests() <= 2 * asked, "{fault:?}");
    proxy.heal();
    wait_until("it works again", RECOVERY, async || {
        let read = bucket.get("there", 0..OBJECT_BYTES as u64, soon()).await;
        read.is_ok_and(|read| read == body)
    })
    .await;
    assert_eq!(metrics.breaker_open.get(), 0, "{fault:?}");
    assert_eq!(metrics.requests_in_flight.get(), 0, "{fault:?}");
}

#[tokio::test]
async fn every_fault_ends_in_time_and_heals() {
    let test = "every_fault_ends_in_time_and_heals";
    let Some(server) = S3Server::of_all_tests(test).await else { return };
    // Not all at a time: this is about deadlines, not about the speed of the machine.
    let runs = FAULTS.iter().enumerate().map(|(number, fault)| survives(server, number, *fault));
    stream::iter(runs).buffer_unordered(6).collect::<Vec<()>>().await;
}

#[tokio::test]
async fn each_fault_is_called_by_its_name() {
    let Some(server) = S3Server::of_all_tests("each_fault_is_called_by_its_name").await else {
        return;
    };
    for (fault, outcome, kind) in [
        (Fault::Status(503), OutcomeLabel::Throttled, None),
        (Fault::Status(429), OutcomeLabel::Throttled, None),
        (Fault::Status(500), OutcomeLabel::Failed, Some(BucketErrorKind::Failed)),
        (Fault::Status(403), OutcomeLabel::Refused, Some(BucketErrorKind::Refused)),
        (Fault::Status(404), OutcomeLabel::NotFound, Some(BucketErrorKind::NotFound)),
        (Fault::Status(416), OutcomeLabel::Damaged, Some(BucketErrorKind::Damaged)),
        (Fault::Reset, OutcomeLabel::Failed, Some(BucketErrorKind::Failed)),
        (Fault::Cut, OutcomeLabel::Failed, Some(BucketErrorKind::Failed)),
        (Fault::Shorter, OutcomeLabel::Damaged, Some(BucketErrorKind::Damaged)),
        (Fault::Whole, OutcomeLabel::Damaged, Some(BucketErrorKind::Damaged)),
        (Fault::Stalled, OutcomeLabel::Timeout, Some(BucketErrorKind::Timeout)),
    ] {
        let (proxy, bucket, _) = behind_proxy(server, "named").await;
        // Without money for retries it would be `Busy`.
        for _ in 0..10 {
            bucket.get("there", 0..10, soon()).await.unwrap();
        }
        proxy.fail(fault, 1000);
        let short = Instant::now() + Duration::from_millis(400);
        let deadline = if fault == Fault::Stalled { short } else { soon() };
        let error = bucket.get("there", 5..100_000, deadline).await.unwrap_err();
        let counted = bucket.metrics().requests(OpLabel::Get, outcome).get();
        assert!(counted > 0, "{fault:?}: {error:?}");
        match kind {
            Some(kind) => assert_eq!(error.kind(), kind, "{fault:?}: {error:?}"),
            None => assert!(matches!(error.kind(), BucketErrorKind::Busy(_)), "{error:?}"),
        }
    }
}

#[tokio::test]
async fn a_flaky_store_serves_all_the_same() {
    let Some(server) = S3Server::of_all_tests("a_flaky_store_serves_all_the_same").await else {
        return;
    };
    for fault in [Fault::Status(503), Fault::Reset, Fault::Cut, Fault::Shorter] {
        let (proxy, bucket, body) = behind_proxy(server, &format!("flaky/{fault:?}")).await;
        proxy.fail(fault, 100);
        let (bucket, body) = (&bucket, &body);
        let reads = (0..200_u64).map(|number| async move {
            let range = number * 1000..number * 1000 + 50_000;
            let Ok(read) = bucket.get("there", range.clone(), soon()).await else { return 0 };
            let start = usize::try_from(range.start).unwrap();
            assert!(read == body[start..start + 50_000], "wrong bytes of {range:?}");
            1
        });
        let served: u32 = stream::iter(reads).buffered(8).collect::<Vec<u32>>().await.iter().sum();
        assert!(served >= 190, "{fault:?}: only {served} of 200 reads were served");
        let metrics = bucket.metrics();
        assert!(metrics.retried_requests.get() > 5, "{fault:?}: nothing was tried again");
        assert_eq!(
            metrics.asked_requests.get() + metrics.retried_requests.get(),
            metrics.sent_requests()
        );
        assert!(proxy.requests() <= metrics.sent_requests(), "{fault:?}: sent and not counted");
    }
}

#[tokio::test]
async fn an_outage_is_not_made_worse_and_its_end_is_noticed() {
    let test = "an_outage_is_not_made_worse_and_its_end_is_noticed";
    let Some(server) = S3Server::of_all_tests(test).await else { return };
    let (proxy, bucket, body) = behind_proxy(server, "outage").await;
    proxy.fail(Fault::Status(503), 1000);
    let before = proxy.requests();
    for _ in 0..50 {
        let reads = (0..10).map(|_| bucket.get("there", 0..10, soon()));
        assert!(join_all(reads).await.iter().all(Result::is_err));
    }
    let sent = proxy.requests() - before;
    assert!(sent < 100, "{sent} requests for 500 that were asked for in an outage");
    proxy.heal();
    wait_until("it works again", RECOVERY, async || {
        let read = bucket.get_whole("there", OBJECT_BYTES as u64, soon()).await;
        read.is_ok_and(|read| read == body)
    })
    .await;
}
