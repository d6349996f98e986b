//! What the object tier needs of a store, on a real one.

use std::sync::Arc;

use futures_util::future::join_all;
use kvstrata_tiers::object::{
    OpLabel, OutcomeLabel,
    bucket::{Bucket, BucketErrorKind},
};

use super::{
    bytes,
    proxy::{Fault, Proxy},
    server::{S3Server, SECRET_KEY},
    soon,
};

/// Over one page of S3.
const NAMES: usize = 1_050;
/// Races: the server takes seconds for each.
const ROUNDS: u32 = 4;
/// Writers of one name.
const WRITERS: u64 = 16;
/// `aborted-upload/large` in base64.
const ABORTED_UPLOAD: &str = "YWJvcnRlZC11cGxvYWQvbGFyZ2U=";
/// Parts of 8 MiB, the last one shorter.
const LARGE_BYTES: usize = 20 << 20;

/// All of it, below a path of its own.
pub(super) async fn conforms(bucket: &Arc<Bucket>) {
    assert!(bucket.probe().await.unwrap().conditional_create);
    ranges(bucket).await;
    lengths(bucket).await;
    parts(bucket).await;
    pages(bucket).await;
    races(bucket).await;
}

async fn ranges(bucket: &Bucket) {
    let body = bytes(1, 100_000);
    bucket.put("ranges/a", vec![body.slice(..7), body.slice(7..)], soon()).await.unwrap();
    for range in [0..1, 5..50_000, 99_999..100_000, 0..100_000, 8..8] {
        let read = bucket.get("ranges/a", range.clone(), soon()).await.unwrap();
        let (start, end) = (usize::try_from(range.start), usize::try_from(range.end));
        assert!(read == body[start.unwrap()..end.unwrap()], "wrong bytes of {range:?}");
    }
    let whole = bucket.get_whole("ranges/a", 100_000, soon()).await.unwrap();
    assert!(whole == body);
}

async fn lengths(bucket: &Bucket) {
    bucket.put("ranges/a", vec![bytes(1, 100_000)], soon()).await.unwrap();
    let kind = async |name: &str, range| bucket.get(name, range, soon()).await.unwrap_err().kind();
    assert_eq!(kind("ranges/a", 99_999..100_001).await, BucketErrorKind::Damaged);
    assert_eq!(kind("ranges/a", 100_000..100_001).await, BucketErrorKind::Damaged);
    assert_eq!(kind("ranges/none", 0..1).await, BucketErrorKind::NotFound);
    let large = bucket.get_whole("ranges/a", 99_999, soon()).await.unwrap_err();
    assert_eq!(large.kind(), BucketErrorKind::Damaged);
    bucket.delete("ranges/a", soon()).await.unwrap();
    bucket.delete("ranges/a", soon()).await.unwrap();
    assert_eq!(kind("ranges/a", 0..1).await, BucketErrorKind::NotFound);
}

async fn parts(bucket: &Bucket) {
    let body = bytes(2, LARGE_BYTES);
    let before = bucket.metrics().requests(OpLabel::Part, OutcomeLabel::Ok).get();
    let pieces = body.chunks(3 << 20).map(|piece| body.slice_ref(piece)).collect();
    bucket.put("parts/large", pieces, soon()).await.unwrap();
    assert_eq!(bucket.metrics().requests(OpLabel::Part, OutcomeLabel::Ok).get() - before, 3);
    let whole = bucket.get_whole("parts/large", LARGE_BYTES as u64, soon()).await.unwrap();
    assert!(whole == body, "wrong bytes of an object in parts");
    let (start, end) = ((8 << 20) - 5, (8 << 20) + 5);
    let seam = bucket.get("parts/large", start as u64..end as u64, soon()).await.unwrap();
    assert!(seam == body[start..end], "wrong bytes where two parts meet");
}

async fn pages(bucket: &Bucket) {
    let name = |number: usize| format!("pages/{:02}/{number:05}", number % 7);
    let puts = (0..NAMES).map(|number| async move {
        bucket.put(&name(number), vec![bytes(3, number % 5)], soon()).await.unwrap();
    });
    join_all(puts).await;
    bucket.put("pages-beside/x", vec![bytes(3, 1)], soon()).await.unwrap();
    let listed = bucket.list("pages", soon()).await.unwrap();
    let mut found: Vec<_> =
        listed.iter().map(|listed| (listed.name.clone(), listed.bytes)).collect();
    let mut put: Vec<_> = (0..NAMES).map(|number| (name(number), number as u64 % 5)).collect();
    found.sort();
    put.sort();
    assert_eq!(found, put);
    assert!(listed.iter().all(|listed| listed.modified_unix_ms > 1_600_000_000_000));
    assert!(bucket.list("pages/none", soon()).await.unwrap().is_empty());
}

async fn races(bucket: &Bucket) {
    for round in 0..ROUNDS {
        let name = format!("races/{round}");
        let name = name.as_str();
        let writers = (0..WRITERS).map(|writer| async move {
            (writer, bucket.create(name, bytes(writer, 100), soon()).await.unwrap())
        });
        let made = join_all(writers).await;
        let winners: Vec<_> = made.iter().filter(|(_, won)| *won).map(|(who, _)| *who).collect();
        let there = bucket.get_whole(name, 100, soon()).await.unwrap();
        assert_eq!(winners.len(), 1, "round {round}: {winners:?}");
        assert!(there == bytes(winners[0], 100), "round {round}: not the winner's bytes");
    }
}

#[tokio::test]
async fn the_server_is_what_the_object_tier_needs() {
    let test = "the_server_is_what_the_object_tier_needs";
    let Some(server) = S3Server::of_all_tests(test).await else { return };
    conforms(&server.bucket("conformance/deep")).await;
}

#[tokio::test]
async fn an_upload_that_fails_leaves_no_parts() {
    let Some(server) = S3Server::of_all_tests("an_upload_that_fails_leaves_no_parts").await else {
        return;
    };
    let proxy = Proxy::start(server.s3);
    let bucket = super::bucket(S3Server::config(proxy.address, "aborted-upload"));
    let body = || vec![bytes(4, LARGE_BYTES)];
    // The beginning passes, one part does not.
    proxy.fail_some(Fault::Status(403), 1, 1);
    let error = bucket.put("large", body(), soon()).await.unwrap_err();
    assert_eq!(error.kind(), BucketErrorKind::Refused);
    assert_eq!(server.open_uploads(ABORTED_UPLOAD).await, 0);
    let none = bucket.get("large", 0..1, soon()).await.unwrap_err();
    assert_eq!(none.kind(), BucketErrorKind::NotFound);
    // Aborting does not pass either: what is looked at above shows it.
    proxy.fail_some(Fault::Status(403), 1, u64::MAX);
    bucket.put("large", body(), soon()).await.unwrap_err();
    assert_eq!(server.open_uploads(ABORTED_UPLOAD).await, 1);
}

#[tokio::test]
async fn a_probe_says_in_one_line_what_is_wrong() {
    let test = "a_probe_says_in_one_line_what_is_wrong";
    let Some(server) = S3Server::of_all_tests(test).await else { return };
    // The first of all ports, which no test can be given.
    let nobody = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    let good = S3Server::config(server.s3, "probe");
    let mut secret = good.clone();
    secret.options.push(("secret_access_key".to_owned(), "wrong".to_owned()));
    let down = S3Server::config(nobody, "probe");
    let mut nameless = good.clone();
    nameless.options.retain(|(name, _)| !name.contains("access_key"));
    // Where the cloud gives credentials to its machines: not here.
    nameless.options.push(("metadata_endpoint".to_owned(), format!("http://{nobody}")));
    for (config, says) in [
        (secret, "correct access key, secret and region"),
        (nameless, "no credentials: set those of the provider"),
        (down, "check that the endpoint is right"),
    ] {
        let error = super::bucket(config).probe().await.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert!(!error.contains(SECRET_KEY), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert!(super::bucket(good).probe().await.is_ok());
}
