//! A bucket over a store in memory: every call, and that calls can move between threads.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use object_store::memory::InMemory;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::{Bucket, BucketConfig, BucketErrorKind};
use crate::object::metrics::ObjectMetrics;

fn bucket() -> Arc<Bucket> {
    let metrics = ObjectMetrics::register(&mut Registry::default());
    Bucket::over_parts(Arc::new(InMemory::new()), BucketConfig::default(), metrics)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn calls_can_move_between_threads() {
    fn assert_send<T: Send>(_: T) {}
    let bucket = bucket();
    assert_send(bucket.get("a", 0..1, Instant::now()));
    assert_send(bucket.get_whole("a", 1, Instant::now()));
    assert_send(bucket.put("a", Vec::new(), Instant::now()));
    assert_send(bucket.create("a", Bytes::new(), Instant::now()));
    assert_send(bucket.delete("a", Instant::now()));
    assert_send(bucket.list("a", Instant::now()));
    assert_send(bucket.probe());
}

#[tokio::test(start_paused = true)]
async fn what_was_written_is_read_listed_and_deleted() {
    let bucket = bucket();
    bucket.put("v1/a/x", vec!["hello ".into(), "world".into()], soon()).await.unwrap();
    assert_eq!(bucket.get("v1/a/x", 6..11, soon()).await.unwrap(), "world");
    assert_eq!(bucket.get_whole("v1/a/x", 11, soon()).await.unwrap(), "hello world");
    let listed = bucket.list("v1/a", soon()).await.unwrap();
    assert_eq!((listed.len(), listed[0].name.as_str(), listed[0].bytes), (1, "v1/a/x", 11));
    bucket.delete("v1/a/x", soon()).await.unwrap();
    bucket.delete("v1/a/x", soon()).await.unwrap();
    let gone = bucket.get("v1/a/x", 0..1, soon()).await.unwrap_err();
    assert_eq!(gone.kind(), BucketErrorKind::NotFound);
    assert!(bucket.list("v1/a", soon()).await.unwrap().is_empty());
}
