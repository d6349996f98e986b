//! A real server process for a test: free ports, its own configuration directory, killed on drop.
//!
//! `Server::builder().dram("64MiB").start().await` returns once the server serves. What it logs is
//! kept; [`Server::stop`] ends it the polite way and fails the test if there was a WARN or ERROR that
//! the test did not list.

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use kvstrata_proto::v1::block_cache_client::BlockCacheClient;
use serde::Deserialize;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};
use tonic::transport::{Channel, Endpoint};

/// Longest time for a server to start or stop: the machine may be building something else.
pub(crate) const SERVER_WAIT: Duration = Duration::from_secs(60);
/// The largest message that the clients of tests read and write, over the server's own limit.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// The window of the clients of tests: a default one would measure the window.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;

/// What a server is started with.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    arguments: Vec<String>,
    open_files: Option<u32>,
    home: Option<PathBuf>,
    wrapper: Vec<String>,
    /// Another program than the one that was built.
    program: Option<PathBuf>,
    /// Where gRPC and HTTP listen; on free ports of this host if it is not said.
    at: Option<[String; 2]>,
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    addresses: Addresses,
    log: Arc<Mutex<Vec<String>>>,
    /// Ends when everything that was logged is in `log`.
    following: Option<JoinHandle<()>>,
    _configuration: Option<tempfile::TempDir>,
}

#[derive(Debug, Default, Deserialize)]
struct Addresses {
    grpc: String,
    http: String,
    bulk: Option<String>,
    gossip: Option<String>,
    admin: Option<String>,
    resp: Option<String>,
}

impl Builder {
    /// Bytes of dram, like `64MiB`.
    pub(crate) fn dram(self, size: &str) -> Self {
        self.set("dram.capacity", size)
    }

    /// Any setting, by its dotted key.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        self.arguments.extend(["--set".to_owned(), format!("{key}={value}")]);
        self
    }

    /// The soft limit of open files that it is started with.
    pub(crate) fn open_files(mut self, count: u32) -> Self {
        self.open_files = Some(count);
        self
    }

    /// Keeps its secret in a directory that outlives it.
    pub(crate) fn home(mut self, directory: &Path) -> Self {
        self.home = Some(directory.to_owned());
        self
    }

    /// Runs it by another program, which must become it: its process id is taken for the server's.
    pub(crate) fn wrapped_in(mut self, command: Vec<String>) -> Self {
        self.wrapper = command;
        self
    }

    /// Runs this program in place of the one that was built.
    pub(crate) fn program(mut self, program: &Path) -> Self {
        self.program = Some(program.to_owned());
        self
    }

    /// Lets it listen at an address of its own, on the ports that are the default.
    pub(crate) fn at(mut self, address: &str) -> Self {
        self.at = Some([9400, 9401].map(|port| format!("{address}:{port}")));
        self
    }

    /// Starts the process and waits until it serves.
    pub(crate) async fn start(self) -> Server {
        let (mut server, serves) = self.spawn();
        let Ok(Ok(line)) = timeout(SERVER_WAIT, serves).await else {
            panic!("the server did not start:\n{}", server.log());
        };
        server.addresses = serde_json::from_str(&line).unwrap();
        server
    }

    /// Starts the process, which must end by itself; returns its exit code and what it said.
    pub(crate) async fn start_refused(self) -> (Option<i32>, String) {
        let (mut server, _never) = self.spawn();
        (server.exit_code().await, server.log())
    }

    fn spawn(self) -> (Server, oneshot::Receiver<String>) {
        let own = self.home.is_none().then(|| tempfile::tempdir().unwrap());
        let home = self.home.as_deref().or(own.as_ref().map(tempfile::TempDir::path)).unwrap();
        let [grpc, http] =
            self.at.unwrap_or_else(|| ["127.0.0.1:0", "127.0.0.1:0"].map(str::to_owned));
        let built = Path::new(env!("CARGO_BIN_EXE_kvstrata"));
        let bare = command_of(self.program.as_deref().unwrap_or(built), home);
        let mut child = wrapped(limited(bare, self.open_files), &self.wrapper)
            .args(["serve", "--print-addresses"])
            .args(["--set", &format!("server.grpc_listen={grpc}"), "--http-listen", &http])
            .args(self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&log);
        let stderr = child.stderr.take().unwrap();
        let following = Some(follow(stderr, move |line| kept.lock().unwrap().push(line)));
        let (send, serves) = oneshot::channel();
        let mut send = Some(send);
        follow(child.stdout.take().unwrap(), move |line| {
            send.take().map(|send| send.send(line).unwrap_or_default()).unwrap_or_default();
        });
        let addresses = Addresses::default();
        (Server { child, addresses, log, following, _configuration: own }, serves)
    }
}

impl Server {
    /// A server with 64 MiB of dram unless said otherwise.
    pub(crate) fn builder() -> Builder {
        Builder::default()
    }

    /// `host:port` of the gRPC contract.
    pub(crate) fn grpc(&self) -> &str {
        &self.addresses.grpc
    }

    /// `host:port` of the pages.
    pub(crate) fn http(&self) -> &str {
        &self.addresses.http
    }

    /// `host:port` of the bulk port.
    pub(crate) fn bulk(&self) -> &str {
        self.addresses.bulk.as_deref().unwrap()
    }

    /// `host:port` of gossip, over UDP.
    pub(crate) fn gossip(&self) -> &str {
        self.addresses.gossip.as_deref().unwrap()
    }

    /// `host:port` of the admin listener.
    pub(crate) fn admin(&self) -> &str {
        self.addresses.admin.as_deref().unwrap()
    }

    /// `host:port` of RESP.
    pub(crate) fn resp(&self) -> &str {
        self.addresses.resp.as_deref().unwrap()
    }

    /// A connection of its own.
    pub(crate) async fn channel(&self) -> Channel {
        let endpoint = Endpoint::new(format!("http://{}", self.grpc()))
            .unwrap()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(STREAM_WINDOW_BYTES * 4);
        endpoint.connect().await.unwrap()
    }

    /// A client with a connection of its own and no limits.
    pub(crate) async fn client(&self) -> BlockCacheClient<Channel> {
        BlockCacheClient::new(self.channel().await)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Status and body of a page.
    pub(crate) async fn page(&self, path: &str) -> (u16, String) {
        http(&self.addresses.http, &format!("GET {path}"), "").await
    }

    /// Status and body of what is answered to this JSON.
    pub(crate) async fn post(&self, path: &str, json: &str) -> (u16, String) {
        http(&self.addresses.http, &format!("POST {path}"), json).await
    }

    /// The value of a series in `/metrics`, given as it is printed there.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let (_, page) = self.page("/metrics").await;
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        let value = value.unwrap_or_else(|| panic!("no series {series} in\n{page}"));
        value.parse().unwrap()
    }

    /// What it has logged so far; the latest lines may be missing while it runs.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// Its process id.
    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// A field of its `/proc/PID/status` that counts KiB, in bytes.
    pub(crate) fn status_bytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process_id()));
        let status = status.unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    /// Kills it with SIGKILL and waits until it is gone; returns all that it has logged.
    pub(crate) fn kill(mut self) -> String {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.complete_log()
    }

    /// The whole log of a process that has ended.
    fn complete_log(&mut self) -> String {
        self.following.take().map(JoinHandle::join).transpose().unwrap();
        self.log()
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        let pid = i32::try_from(self.child.id()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    /// Waits for the end; returns the exit code.
    pub(crate) async fn exit_code(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.complete_log();
                return status.code();
            }
            assert!(start.elapsed() < SERVER_WAIT, "still running:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Terminates the server; it must exit with 0 and have logged no WARN or ERROR but those that
    /// contain one of `expected`. Returns all that it has logged.
    pub(crate) async fn stop(mut self, expected: &[&str]) -> String {
        self.terminate();
        assert_eq!(self.exit_code().await, Some(0), "log:\n{}", self.log());
        self.assert_quiet(expected);
        self.log()
    }

    /// Fails if there is a WARN or ERROR in the log that contains none of `expected`.
    pub(crate) fn assert_quiet(&self, expected: &[&str]) {
        let log = self.log();
        let loud = log.lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR "));
        let unlisted: Vec<_> =
            loud.filter(|line| !expected.iter().any(|text| line.contains(text))).collect();
        assert!(unlisted.is_empty(), "unlisted in the server's log:\n{}", unlisted.join("\n"));
    }
}

/// The secret of the clusters of tests.
pub(crate) const CLUSTER_SECRET: [u8; 32] = [0x5e; 32];

/// Where the nodes of one cluster keep the secret that they share.
pub(crate) fn cluster_home() -> tempfile::TempDir {
    home_of(CLUSTER_SECRET)
}

/// Where nodes keep this secret.
pub(crate) fn home_of(secret: [u8; 32]) -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("kvstrata/identity");
    std::fs::create_dir(home.path().join("kvstrata")).unwrap();
    std::fs::write(&path, hex::encode(secret)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    home
}

/// The built binary with an environment that holds no settings of whoever runs the tests.
pub(crate) fn command(configuration: &tempfile::TempDir) -> Command {
    command_of(Path::new(env!("CARGO_BIN_EXE_kvstrata")), configuration.path())
}

fn command_of(program: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KV_") {
            command.env_remove(name);
        }
    }
    command.env("XDG_CONFIG_HOME", home);
    command
}

/// The command, under a soft limit of open files if one is given.
fn limited(bare: Command, open_files: Option<u32>) -> Command {
    let Some(count) = open_files else { return bare };
    let script = format!("ulimit -Sn {count} && exec \"$0\" \"$@\"");
    wrapped(bare, &["sh".to_owned(), "-c".to_owned(), script])
}

/// The command as the arguments of another one, if there is one.
fn wrapped(bare: Command, wrapper: &[String]) -> Command {
    let [program, arguments @ ..] = wrapper else { return bare };
    let mut command = Command::new(program);
    command.args(arguments).arg(bare.get_program()).args(bare.get_args());
    for (name, value) in bare.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already, which is as good.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

/// Hands lines on from a thread of its own, so that a busy test does not stop the server's log.
fn follow(
    from: impl Read + Send + 'static,
    mut take: impl FnMut(String) + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        BufReader::new(from).lines().map_while(Result::ok).for_each(&mut take);
    })
}

/// A plain HTTP/1.1 request; the tests need no more of a client than this.
async fn http(address: &str, what: &str, body: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut io = tokio::net::TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let head = format!("{what} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n");
    let request = format!("{head}Content-Length: {length}\r\n\r\n{body}");
    io.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    io.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// Asks until the answer is yes; fails the test with `what` after `limit`.
pub(crate) async fn wait_until<F: Future<Output = bool>>(
    what: &str,
    limit: Duration,
    mut predicate: impl FnMut() -> F,
) {
    let start = Instant::now();
    while !predicate().await {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
