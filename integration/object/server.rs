//! SeaweedFS as an S3 server: one for all tests of the process, on free ports of this machine, gone
//! with the process however that ends.

use std::{
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use kvstrata_tiers::object::bucket::{Bucket, BucketConfig};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::OnceCell,
    time::{Instant, timeout},
};

use crate::skipped;

/// The bucket of all tests, each with a path of its own.
pub(super) const BUCKET: &str = "kvstrata";
const ACCESS_KEY: &str = "test";
pub(super) const SECRET_KEY: &str = "testsecret";
/// So that what tests write comes in parts, too.
pub(super) const MULTIPART_ABOVE_BYTES: u64 = 16 << 20;
/// Time to start: 5 s on an idle machine.
const START_WAIT: Duration = Duration::from_secs(60);
/// Somebody else may take one of the ports before the server does.
const START_TRIES: usize = 3;

/// Runs a program until whoever started it is gone, also after a SIGKILL: then its end of the pipe is
/// closed. A handler in the tests could not promise that.
const KEEPER: &str = r#"
directory=$1 ports=$2; shift 2
TMPDIR=$directory "$@" >"$directory/log" 2>&1 </dev/null &
child=$!
cat >/dev/null
kill -9 "$child"
wait "$child" 2>/dev/null
rm -rf "$directory"
for port in $ports; do rm -f /tmp/seaweedfs-*-"$port".sock; done
"#;

static SERVER: OnceCell<Option<S3Server>> = OnceCell::const_new();

/// A running server.
#[derive(Debug)]
pub(super) struct S3Server {
    pub(super) s3: SocketAddr,
    pub(super) filer: SocketAddr,
    /// Holds the pipe.
    _keeper: Child,
}

impl S3Server {
    /// The server, started by whoever asks first; `None` after saying that `test` is skipped.
    pub(super) async fn of_all_tests(test: &str) -> Option<&'static Self> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/weed");
        let server = SERVER.get_or_init(|| start(program.exists().then_some(program))).await;
        if server.is_none() {
            let details = "no .venv/bin/weed; run scripts/python-tools.sh";
            skipped::say(test, "no S3 server", details);
        }
        server.as_ref()
    }

    /// How to reach a path of the bucket of all tests through `endpoint`: the server, or what stands
    /// before it.
    pub(super) fn config(endpoint: SocketAddr, path: &str) -> BucketConfig {
        let options = [
            ("endpoint", format!("http://{endpoint}")),
            ("region", "us-east-1".to_owned()),
            ("access_key_id", ACCESS_KEY.to_owned()),
            ("secret_access_key", SECRET_KEY.to_owned()),
        ];
        BucketConfig {
            url: format!("s3://{BUCKET}/{path}"),
            options: options.map(|(name, value)| (name.to_owned(), value)).into(),
            multipart_above_bytes: MULTIPART_ABOVE_BYTES,
            ..BucketConfig::default()
        }
    }

    /// The same for a server process: what its environment must say.
    pub(super) fn environment(endpoint: SocketAddr) -> [String; 5] {
        [
            format!("AWS_ENDPOINT=http://{endpoint}"),
            "AWS_ALLOW_HTTP=true".to_owned(),
            "AWS_REGION=us-east-1".to_owned(),
            format!("AWS_ACCESS_KEY_ID={ACCESS_KEY}"),
            format!("AWS_SECRET_ACCESS_KEY={SECRET_KEY}"),
        ]
    }

    /// A path of the bucket of all tests.
    pub(super) fn bucket(&self, path: &str) -> Arc<Bucket> {
        super::bucket(Self::config(self.s3, path))
    }

    /// Uploads in parts of one object that were neither completed nor aborted; its name is given in
    /// base64, as the server notes it.
    pub(super) async fn open_uploads(&self, name: &str) -> usize {
        let listing = format!("/buckets/{BUCKET}/.uploads/?limit=1000");
        let (status, page) = filer(self.filer, "GET", &listing).await;
        assert!(matches!(status, 200 | 404), "{page}");
        page.matches(&format!("\"key\":\"{name}\"")).count()
    }
}

async fn start(program: Option<PathBuf>) -> Option<S3Server> {
    let program = program?;
    for _ in 0..START_TRIES {
        if let Some(server) = try_start(&program).await {
            return Some(server);
        }
    }
    panic!("{} did not start within {START_WAIT:?}, {START_TRIES} times", program.display());
}

async fn try_start(program: &Path) -> Option<S3Server> {
    let directory = tempfile::tempdir().unwrap().keep();
    let identities = serde_json::json!({"identities": [{
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }]});
    std::fs::write(directory.join("s3.json"), identities.to_string()).unwrap();
    let ports = free_ports();
    let [s3, s3_grpc, filer, filer_grpc, volume, volume_grpc, master, master_grpc] = ports;
    let keeper = Command::new("sh")
        .args(["-c", KEEPER, "keeper"])
        .arg(&directory)
        .arg(ports.map(|port| port.to_string()).join(" "))
        .arg(program)
        .args(["-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"])
        .args(["-volume.max=50", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"])
        .args([format!("-s3.config={}", directory.join("s3.json").display())])
        .args([format!("-dir={}", directory.display())])
        .args(["-s3", "-s3.port.iceberg=0", "-s3.port.lance=0"])
        .args([format!("-s3.port={s3}"), format!("-s3.port.grpc={s3_grpc}")])
        .args([format!("-filer.port={filer}"), format!("-filer.port.grpc={filer_grpc}")])
        .args([format!("-volume.port={volume}"), format!("-volume.port.grpc={volume_grpc}")])
        .args([format!("-master.port={master}"), format!("-master.port.grpc={master_grpc}")])
        // Keys that interrupt the tests must not reach it: it has to clean up behind them.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let here = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let server = S3Server { s3: here(s3), filer: here(filer), _keeper: keeper };
    timeout(START_WAIT, ready(&server)).await.ok()?;
    Some(server)
}

/// Waits until the bucket is made and works.
async fn ready(server: &S3Server) {
    loop {
        let (status, _) = filer(server.filer, "POST", &format!("/buckets/{BUCKET}/")).await;
        if matches!(status, 201 | 409) && server.bucket("start").probe().await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Ports that were free a moment ago, all different.
fn free_ports() -> [u16; 8] {
    let listeners: [_; 8] =
        std::array::from_fn(|_| std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

/// Asks the server's own file interface; status 0 if it does not answer.
async fn filer(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\n\
             Content-Length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        std::io::Result::Ok(response)
    };
    let until = Instant::now() + Duration::from_secs(10);
    let response = tokio::time::timeout_at(until, exchange).await;
    let response = response.map_or_else(|_late| String::new(), Result::unwrap_or_default);
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, ""));
    let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or(0), body.to_owned())
}
