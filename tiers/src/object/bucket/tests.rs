//! A bucket over stores that work, and over one that fails in every way, in paused time.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::{
    Bucket, BucketConfig, BucketErrorKind,
    breaker::{FAILURES_MAX, PAUSE_MAX},
    retry::TRIES_MAX,
    upload::ABORT_DEADLINE,
};
use crate::{
    object::metrics::{ObjectMetrics, OpLabel, OutcomeLabel},
    testing::{FaultyObjectStore, Trouble},
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

fn metrics() -> ObjectMetrics {
    ObjectMetrics::register(&mut Registry::default())
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A store that fails on demand, and a bucket over it that has the object `there`, 11 bytes, and money
/// for retries.
async fn faulty() -> (Arc<FaultyObjectStore>, Arc<Bucket>) {
    let store = Arc::new(FaultyObjectStore::default());
    let config = BucketConfig {
        request_timeout: REQUEST_TIMEOUT,
        concurrency_max: 8,
        multipart_above_bytes: 100,
        part_bytes: 40,
        ..BucketConfig::default()
    };
    let bucket = Bucket::over_parts(Arc::clone(&store), config, metrics());
    for _ in 0..30 {
        bucket.put("there", vec!["hello ".into(), "world".into()], soon()).await.unwrap();
    }
    (store, bucket)
}

async fn read(bucket: &Bucket) -> Result<Bytes, BucketErrorKind> {
    bucket.get("there", 6..11, soon()).await.map_err(|error| error.kind())
}

/// As many names as fit on two pages and a half.
async fn many(bucket: &Bucket) -> Vec<String> {
    let names: Vec<_> = (0..2500).map(|number| format!("many/{number:05}")).collect();
    for name in &names {
        bucket.put(name, vec!["x".into()], soon()).await.unwrap();
    }
    names
}

#[test]
fn calls_can_move_between_threads() {
    fn assert_send<T: Send>(_: T) {}
    let store = Arc::new(FaultyObjectStore::default());
    let bucket = Bucket::over(store, BucketConfig::default(), metrics());
    let deadline = Instant::now();
    assert_send(bucket.get("a", 0..1, deadline));
    assert_send(bucket.get_whole("a", 1, deadline));
    assert_send(bucket.put("a", Vec::new(), deadline));
    assert_send(bucket.create("a", Bytes::new(), deadline));
    assert_send(bucket.delete("a", deadline));
    assert_send(bucket.list("a", deadline));
    assert_send(bucket.probe());
}

#[tokio::test]
async fn a_directory_serves_as_a_bucket() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}/made", directory.path().display());
    let config = BucketConfig { url, ..BucketConfig::default() };
    let bucket = Bucket::open(config, metrics()).unwrap();
    assert!(bucket.probe().await.unwrap().conditional_create);
    bucket.put("v1/a/x", vec!["hello ".into(), "world".into()], soon()).await.unwrap();
    assert_eq!(bucket.get("v1/a/x", 6..11, soon()).await.unwrap(), "world");
    assert!(!bucket.create("v1/a/x", "other".into(), soon()).await.unwrap());
    let listed = bucket.list("v1", soon()).await.unwrap();
    assert_eq!((listed.len(), listed[0].name.as_str(), listed[0].bytes), (1, "v1/a/x", 11));
    bucket.delete("v1/a/x", soon()).await.unwrap();
    bucket.delete("v1/a/x", soon()).await.unwrap();
    let gone = bucket.get("v1/a/x", 0..1, soon()).await.unwrap_err();
    assert_eq!(gone.kind(), BucketErrorKind::NotFound);
}

#[tokio::test(start_paused = true)]
async fn what_passes_is_tried_again_and_what_does_not_is_not() {
    let (store, bucket) = faulty().await;
    let reset_after = [Trouble::Status(503), Trouble::Reset, Trouble::Shorter];
    store.trouble_next(reset_after);
    assert_eq!(read(&bucket).await.unwrap(), "world");
    for (status, kind, sent) in [
        (500, BucketErrorKind::Failed, TRIES_MAX),
        (400, BucketErrorKind::Failed, 1),
        (403, BucketErrorKind::Refused, 1),
        (404, BucketErrorKind::NotFound, 1),
    ] {
        for _ in 0..20 {
            read(&bucket).await.unwrap();
        }
        let before = store.requests();
        store.trouble_always(Trouble::Status(status));
        assert_eq!(read(&bucket).await.unwrap_err(), kind, "{status}");
        assert_eq!(store.requests() - before, u64::from(sent), "{status}");
        store.trouble_always(Trouble::None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wrong_length_is_never_taken() {
    let (store, bucket) = faulty().await;
    for trouble in [Trouble::Shorter, Trouble::Longer] {
        store.trouble_always(trouble);
        assert_eq!(read(&bucket).await.unwrap_err(), BucketErrorKind::Damaged, "{trouble:?}");
        let whole = bucket.get_whole("there", 100, soon()).await.unwrap_err();
        assert_eq!(whole.kind(), BucketErrorKind::Damaged, "{trouble:?}");
        store.trouble_always(Trouble::None);
        for _ in 0..20 {
            read(&bucket).await.unwrap();
        }
    }
    let before = store.requests();
    for range in [6..12, 11..12, 100..101] {
        let error = bucket.get("there", range, soon()).await.unwrap_err();
        assert_eq!(error.kind(), BucketErrorKind::Damaged, "{error}");
    }
    let large = bucket.get_whole("there", 10, soon()).await.unwrap_err();
    assert_eq!(large.kind(), BucketErrorKind::Damaged);
    assert_eq!(store.requests() - before, 4, "an object that is too short does not grow");
    assert_eq!(bucket.get_whole("there", 11, soon()).await.unwrap(), "hello world");
}

#[tokio::test(start_paused = true)]
async fn deadlines_hold_and_a_stalled_request_is_sent_again_in_time() {
    let (store, bucket) = faulty().await;
    let start = Instant::now();
    store.trouble_next([Trouble::Stall]);
    assert_eq!(read(&bucket).await.unwrap(), "world");
    assert!(start.elapsed() < REQUEST_TIMEOUT + Duration::from_secs(1));
    store.trouble_always(Trouble::Stall);
    for seconds in [0, 1, 5] {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let (body, again) = (vec![Bytes::from(vec![0; 400])], || deadline);
        let kinds = [
            bucket.get("there", 0..1, again()).await.unwrap_err().kind(),
            bucket.put("other", vec!["x".into()], again()).await.unwrap_err().kind(),
            bucket.put("large", body, again()).await.unwrap_err().kind(),
            bucket.list("", again()).await.unwrap_err().kind(),
        ];
        assert!(Instant::now() <= deadline + ABORT_DEADLINE, "{seconds} s: {kinds:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_is_left_alone_and_noticed_when_it_is_back() {
    let (store, bucket) = faulty().await;
    let before = store.requests();
    for trouble in [Trouble::Status(503), Trouble::Reset, Trouble::Stall] {
        store.trouble_always(trouble);
        let mut busy = 0;
        for _ in 0..200 {
            let failed = read(&bucket).await.unwrap_err();
            busy += u32::from(matches!(failed, BucketErrorKind::Busy(_)));
            tokio::time::advance(Duration::from_millis(10)).await;
        }
        assert!(busy > 150, "{trouble:?}: only {busy} of 200 were spared");
        assert_eq!(bucket.metrics().breaker_open.get(), 1);
        store.trouble_always(Trouble::None);
        tokio::time::advance(PAUSE_MAX).await;
        assert_eq!(read(&bucket).await.unwrap(), "world", "{trouble:?}");
        assert_eq!(bucket.metrics().breaker_open.get(), 0);
    }
    assert!(store.requests() - before < 150, "{} requests sent", store.requests() - before);
}

#[tokio::test(start_paused = true)]
async fn retries_never_double_what_is_asked_for() {
    let (store, bucket) = faulty().await;
    // Never so many failures in a row that the breaker helps.
    let failures = std::iter::repeat_n(Trouble::Status(500), FAILURES_MAX as usize - 1);
    let troubles: Vec<_> = failures.chain([Trouble::None]).collect();
    store.trouble_next(std::iter::repeat_n(troubles, 500).flatten());
    for round in 0..50 {
        let before = (store.requests(), bucket.metrics().asked_requests.get());
        for _ in 0..20 {
            read(&bucket).await.unwrap_or_default();
        }
        let sent = store.requests() - before.0;
        let asked = bucket.metrics().asked_requests.get() - before.1;
        assert!(sent <= 2 * asked, "round {round}: {sent} sent, {asked} asked for");
    }
    let metrics = bucket.metrics();
    assert!(store.requests() <= 2 * metrics.asked_requests.get());
    assert_eq!(store.requests(), metrics.sent_requests());
    assert_eq!(metrics.retried_requests.get(), store.requests() - metrics.asked_requests.get());
}

#[tokio::test(start_paused = true)]
async fn the_very_first_request_can_be_tried_again() {
    let store = Arc::new(FaultyObjectStore::default());
    let bucket =
        Bucket::over(Arc::<FaultyObjectStore>::clone(&store), BucketConfig::default(), metrics());
    store.trouble_next([Trouble::Reset]);
    bucket.put("there", vec!["x".into()], soon()).await.unwrap();
    assert_eq!(store.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn slow_down_makes_fewer_requests_and_success_makes_more_again() {
    let (store, bucket) = faulty().await;
    store.set_latency(Duration::from_millis(10));
    join_all((0..100).map(|_| read(&bucket))).await;
    assert_eq!(store.most_under_way(), 8);
    store.trouble_next([Trouble::Status(429); 8]);
    join_all((0..8).map(|_| read(&bucket))).await;
    let cut = bucket.metrics().concurrency_limit.get();
    assert!(cut < 8, "the limit is {cut}");
    for _ in 0..10 {
        join_all((0..100).map(|_| read(&bucket))).await;
    }
    assert_eq!(bucket.metrics().concurrency_limit.get(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_conditional_write_knows_whose_the_object_is() {
    let (store, bucket) = faulty().await;
    let create = async |name: &'static str, body: &'static str| {
        bucket.create(name, body.into(), soon()).await.unwrap()
    };
    assert!(create("epoch/1", "me").await);
    assert!(!create("epoch/1", "me").await, "the first answer is clear");
    store.trouble_next([Trouble::ResetAfter]);
    assert!(create("epoch/2", "me").await, "an earlier try made it");
    store.trouble_next([Trouble::Conflict]);
    assert!(create("epoch/3", "me").await, "neither of two was done");
    for other in ["you", "somebody"] {
        let name = format!("epoch/{other}");
        bucket.put(&name, vec![other.into()], soon()).await.unwrap();
        store.trouble_next([Trouble::Reset]);
        assert!(!bucket.create(&name, "me!".into(), soon()).await.unwrap(), "{other} made it");
    }
}

#[tokio::test(start_paused = true)]
async fn a_large_object_goes_in_parts_that_fail_one_by_one() {
    let (store, bucket) = faulty().await;
    let body: Vec<Bytes> = (0..9_u8).map(|number| Bytes::from(vec![number; 33])).collect();
    let whole = body.concat();
    store.trouble_next([Trouble::Reset, Trouble::None, Trouble::Status(500), Trouble::ResetAfter]);
    bucket.put("large", body.clone(), soon()).await.unwrap();
    assert_eq!(bucket.get_whole("large", 1000, soon()).await.unwrap(), whole);
    let parts = bucket.metrics().requests(OpLabel::Part, OutcomeLabel::Ok).get();
    assert_eq!(parts, 8, "297 bytes in parts of 40");
    assert_eq!(store.open_uploads(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_fails_is_aborted() {
    let (store, bucket) = faulty().await;
    let body = vec![Bytes::from(vec![7; 300])];
    store.trouble_next([Trouble::None, Trouble::None, Trouble::Status(403)]);
    let error = bucket.put("large", body.clone(), soon()).await.unwrap_err();
    assert_eq!(error.kind(), BucketErrorKind::Refused);
    assert_eq!(store.open_uploads(), 0);
    store.trouble_next([Trouble::None, Trouble::Stall]);
    let deadline = Instant::now() + Duration::from_secs(1);
    let error = bucket.put("large", body, deadline).await.unwrap_err();
    assert_eq!(error.kind(), BucketErrorKind::Timeout);
    assert_eq!(store.open_uploads(), 0, "aborted behind the deadline");
    let none = bucket.get_whole("large", 1000, soon()).await.unwrap_err();
    assert_eq!(none.kind(), BucketErrorKind::NotFound);
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_was_completed_unseen_is_recognized() {
    let (store, bucket) = faulty().await;
    store.trouble_next([Trouble::None; 4]);
    store.trouble_next([Trouble::ResetAfter]);
    bucket.put("large", vec![Bytes::from(vec![7; 120])], soon()).await.unwrap();
    assert_eq!(bucket.get_whole("large", 120, soon()).await.unwrap().len(), 120);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_breaks_loses_and_doubles_nothing() {
    let (store, bucket) = faulty().await;
    let names = many(&bucket).await;
    for troubles in [
        vec![],
        vec![Trouble::BreakList(0)],
        vec![Trouble::BreakList(1700), Trouble::BreakList(1)],
        vec![Trouble::BreakList(999), Trouble::Stall],
    ] {
        store.trouble_next(troubles.iter().copied());
        let listed = bucket.list("many", soon()).await.unwrap();
        let listed: Vec<_> = listed.into_iter().map(|listed| listed.name).collect();
        assert_eq!(listed, names, "{troubles:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_goes_away_is_counted_and_keeps_no_place() {
    let (store, bucket) = faulty().await;
    store.trouble_always(Trouble::Stall);
    for _ in 0..20 {
        let pause = Duration::from_millis(100);
        let gone = tokio::time::timeout(pause, bucket.get("there", 0..1, soon())).await;
        assert!(gone.is_err());
    }
    let metrics = bucket.metrics();
    assert_eq!(metrics.requests(OpLabel::Get, OutcomeLabel::Cancelled).get(), 20);
    assert_eq!(metrics.requests_in_flight.get(), 0);
    store.trouble_always(Trouble::None);
    let places = join_all((0..8).map(|_| read(&bucket))).await;
    assert!(places.iter().all(Result::is_ok), "{places:?}");
}

#[tokio::test(start_paused = true)]
async fn requests_have_a_price() {
    let (_, bucket) = faulty().await;
    for _ in 0..1000 {
        read(&bucket).await.unwrap();
    }
    // 30 puts and 1000 gets.
    let dollars = bucket.metrics().request_cost_dollars.get();
    assert!((dollars - (30.0 * 0.005 / 1000.0 + 0.0004)).abs() < 1e-9, "{dollars}");
    assert!((bucket.prices().month(10 << 30) - 0.23).abs() < 1e-9);
}

#[tokio::test(start_paused = true)]
async fn a_probe_says_what_the_store_can_do_or_what_to_do() {
    let (store, bucket) = faulty().await;
    assert!(bucket.probe().await.unwrap().conditional_create);
    assert!(bucket.list("v1", soon()).await.unwrap().is_empty(), "it leaves nothing");
    for (trouble, says) in [
        (Trouble::Status(403), "not allowed: give these credentials the permission to write"),
        (Trouble::Status(404), "create the bucket, or correct object.url"),
        (Trouble::Status(500), "the store fails"),
        (Trouble::Stall, "check that the endpoint is right"),
    ] {
        store.trouble_always(trouble);
        let error = bucket.probe().await.unwrap_err().to_string();
        assert!(error.contains(says), "{trouble:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        store.trouble_always(Trouble::None);
        tokio::time::advance(PAUSE_MAX).await;
    }
    store.ignore_conditions();
    assert!(!bucket.probe().await.unwrap().conditional_create);
}
