//! The same server without a tier: `object_store` as it is, and bare HTTP.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use kvstrata_tiers::object::bucket::BucketConfig;
use object_store::{
    ObjectStoreExt,
    aws::{AmazonS3, AmazonS3Builder},
    path::Path,
    signer::Signer,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

/// How long a signed URL is good for.
const SIGNED_FOR: Duration = Duration::from_secs(600);
/// The longest head of an answer.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// A client of the library with its own defaults.
pub(crate) fn client(config: &BucketConfig) -> AmazonS3 {
    let builder = AmazonS3Builder::new().with_url(&config.url).with_allow_http(true);
    let options = config.options.iter();
    options
        .fold(builder, |builder, (name, value)| builder.with_config(name.parse().unwrap(), value))
        .build()
        .unwrap()
}

fn path(number: usize) -> Path {
    Path::from(format!("plain/{number:04}"))
}

/// Writes objects, so many at once; seconds.
pub(crate) async fn put(client: &AmazonS3, objects: &[Bytes], depth: usize) -> f64 {
    let started = Instant::now();
    let puts = objects.iter().enumerate().map(|(number, object)| async move {
        client.put(&path(number), object.clone().into()).await.unwrap();
    });
    stream::iter(puts).buffer_unordered(depth).collect::<Vec<()>>().await;
    started.elapsed().as_secs_f64()
}

/// Reads them; seconds.
pub(crate) async fn get(client: &AmazonS3, objects: &[Bytes], depth: usize) -> f64 {
    let started = Instant::now();
    let gets = objects.iter().enumerate().map(|(number, object)| async move {
        let got = client.get(&path(number)).await.unwrap().bytes().await.unwrap();
        assert_eq!(got.len(), object.len());
    });
    stream::iter(gets).buffer_unordered(depth).collect::<Vec<()>>().await;
    started.elapsed().as_secs_f64()
}

/// Bare HTTP to presigned URLs, a connection for each worker; seconds.
pub(crate) async fn bare(
    client: &AmazonS3,
    at: SocketAddr,
    objects: &[Bytes],
    method: &str,
    depth: usize,
) -> f64 {
    let mut shares: Vec<Vec<(String, &Bytes)>> = vec![Vec::new(); depth];
    for (number, object) in objects.iter().enumerate() {
        let verb = method.parse().unwrap();
        let url = client.signed_url(verb, &path(number), SIGNED_FOR).await.unwrap();
        let target = format!("{}?{}", url.path(), url.query().unwrap());
        shares[number % depth].push((target, object));
    }
    let started = Instant::now();
    let workers = shares.iter().map(|share| async move {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let mut body = Vec::new();
        for (target, object) in share {
            let sent: &[u8] = if method == "PUT" { object } else { &[] };
            let head = format!(
                "{method} {target} HTTP/1.1\r\nHost: {at}\r\nContent-Length: {}\r\n\r\n",
                sent.len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            stream.write_all(sent).await.unwrap();
            read_answer(&mut stream, &mut body).await;
            assert!(method == "PUT" || body.len() == object.len(), "{} bytes", body.len());
        }
    });
    stream::iter(workers).buffer_unordered(depth).collect::<Vec<()>>().await;
    started.elapsed().as_secs_f64()
}

async fn read_answer(stream: &mut TcpStream, body: &mut Vec<u8>) {
    let mut head = Vec::new();
    let end = loop {
        assert!(head.len() < HEAD_BYTES_MAX, "no end of the head");
        assert!(stream.read_buf(&mut head).await.unwrap() > 0, "the server went away");
        if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
    assert!(text.starts_with("http/1.1 200"), "{text}");
    let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let length: usize = length.trim().parse().unwrap();
    body.clear();
    body.extend_from_slice(&head[end..]);
    let had = body.len();
    body.resize(length, 0);
    stream.read_exact(&mut body[had..]).await.unwrap();
}
