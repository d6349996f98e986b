//! A `kvstrata router` process, and what a client of OpenAI's interface sees of it.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

use super::engine::Engine;
use crate::harness::{SERVER_WAIT, command, wait_until};

const SOON: Duration = Duration::from_secs(30);

/// A running router; dropping it kills it.
pub(crate) struct RouterProcess {
    child: Child,
    pub(crate) address: String,
    log: Arc<Mutex<Vec<String>>>,
    following: Option<JoinHandle<()>>,
    _home: tempfile::TempDir,
}

/// An answer that is read as it comes.
pub(crate) struct Answer {
    io: TcpStream,
    read: Vec<u8>,
    pub(crate) status: u16,
    head: String,
    sent: Instant,
    /// When the first bytes of the body were there.
    pub(crate) first: Option<Duration>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
    /// Whether it came to its end.
    pub(crate) complete: bool,
    pub(crate) first: Duration,
}

impl RouterProcess {
    /// Starts one in front of engines that are named `a`, `b`, ..., and waits until it knows all of them.
    pub(crate) async fn start(engines: &[&Engine], arguments: &[&str]) -> Self {
        let flags = "abcdefgh"
            .chars()
            .zip(engines)
            .flat_map(|(name, engine)| ["--engine".to_owned(), engine.flag(&name.to_string())]);
        let flags: Vec<_> = flags.chain(arguments.iter().map(|text| (*text).to_owned())).collect();
        let router = Self::spawn(&flags);
        router.wait_up(engines.len()).await;
        let listening = async || router.metric("kvstrata_event_sources").await;
        let count = engines.len() as f64;
        wait_until("events are listened to", SOON, async || listening().await == count).await;
        router
    }

    pub(crate) fn spawn(arguments: &[String]) -> Self {
        let home = tempfile::tempdir().unwrap();
        let mut child = command(&home)
            .args(["router", "--listen", "127.0.0.1:0", "--print-addresses"])
            .args(arguments)
            .env_remove("KVSTRATA_ENDPOINT")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&log);
        let stderr = child.stderr.take().unwrap();
        let following = std::thread::spawn(move || {
            let lines = BufReader::new(stderr).lines().map_while(Result::ok);
            lines.for_each(|line| kept.lock().unwrap().push(line));
        });
        let mut router =
            Self { child, address: String::new(), log, following: Some(following), _home: home };
        router.address = router.printed();
        router
    }

    fn printed(&mut self) -> String {
        let mut line = String::new();
        let mut stdout: BufReader<ChildStdout> = BufReader::new(self.child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let Ok(printed) = serde_json::from_str::<Value>(&line) else {
            panic!("the router did not start:\n{}", self.ended().1)
        };
        printed["http"].as_str().unwrap().to_owned()
    }

    /// Waits until so many engines are up.
    pub(crate) async fn wait_up(&self, count: usize) {
        let up = async || {
            let engines = self.engines().await;
            engines.iter().filter(|engine| engine["up"] == true).count()
        };
        wait_until("engines are up", SOON, async || up().await == count).await;
    }

    /// Waits until an engine has told of so many blocks.
    pub(crate) async fn wait_blocks(&self, name: &str, blocks: u64) {
        let what = format!("{name} has told of {blocks} blocks");
        wait_until(&what, SOON, async || {
            let engines = self.engines().await;
            let engine = engines.iter().find(|engine| engine["engine"] == name).unwrap();
            engine["device_blocks"] == blocks
        })
        .await;
    }

    pub(crate) async fn engines(&self) -> Vec<Value> {
        let whole = self.get("/engines").await;
        assert_eq!(whole.status, 200, "{whole:?}");
        serde_json::from_str(&whole.body).unwrap()
    }

    /// The value of a series of `/metrics`.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let page = self.get("/metrics").await.body;
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no series {series} in\n{page}")).parse().unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Whole {
        self.send("GET", path, "").await.whole().await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Whole {
        self.send("POST", path, &body.to_string()).await.whole().await
    }

    /// Sends a request and returns once the head of the answer is there.
    pub(crate) async fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        let mut io = TcpStream::connect(&self.address).await.unwrap();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nx-mine: passed\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        let sent = Instant::now();
        io.write_all(request.as_bytes()).await.unwrap();
        let mut answer =
            Answer { io, read: Vec::new(), status: 0, head: String::new(), sent, first: None };
        let end = loop {
            if let Some(end) = answer.read.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end + 4;
            }
            assert!(answer.more().await, "no answer: {:?}\n{}", answer.read, self.log());
        };
        answer.head = String::from_utf8(answer.read.drain(..end).collect()).unwrap();
        answer.status = answer.head.split_whitespace().nth(1).unwrap().parse().unwrap();
        answer
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    /// Waits for the end; returns the exit code and the log.
    pub(crate) fn ended(&mut self) -> (Option<i32>, String) {
        let status = self.child.wait().unwrap();
        self.following.take().into_iter().for_each(|thread| thread.join().unwrap());
        (status.code(), self.log())
    }

    /// Ends it; fails if it has logged an error, or a warning that contains none of `expected`.
    pub(crate) fn stop(mut self, expected: &[&str]) {
        self.terminate();
        let (code, log) = self.ended();
        assert_eq!(code, Some(0), "{log}");
        let loud = log.lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR "));
        let unlisted: Vec<_> =
            loud.filter(|line| !expected.iter().any(|text| line.contains(text))).collect();
        assert!(unlisted.is_empty(), "unlisted in the log:\n{}", unlisted.join("\n"));
    }
}

impl Drop for RouterProcess {
    fn drop(&mut self) {
        // It may have ended already, which is as good.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

impl Answer {
    /// Reads what is there; false at the end.
    async fn more(&mut self) -> bool {
        let mut bytes = vec![0; 16 * 1024];
        let reading = timeout(SERVER_WAIT, self.io.read(&mut bytes));
        let Ok(count) = reading.await.unwrap() else { return false };
        self.read.extend(&bytes[..count]);
        if !self.head.is_empty() && count > 0 && self.first.is_none() {
            self.first = Some(self.sent.elapsed());
        }
        count > 0
    }

    /// Waits until this has come of the body.
    pub(crate) async fn wait_for(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.read).contains(text) {
            assert!(self.more().await, "{text} never came: {:?}", self.read);
        }
    }

    pub(crate) fn has(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.read).contains(text)
    }

    pub(crate) async fn whole(mut self) -> Whole {
        if !self.read.is_empty() {
            self.first = Some(self.sent.elapsed());
        }
        while self.more().await {}
        let chunked = self.head.to_lowercase().contains("transfer-encoding: chunked");
        let (body, complete) = if chunked { dechunked(&self.read) } else { (self.read, true) };
        Whole {
            status: self.status,
            head: self.head,
            body: String::from_utf8(body).unwrap(),
            complete,
            first: self.first.unwrap_or_default(),
        }
    }
}

fn dechunked(mut bytes: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(line) = bytes.windows(2).position(|pair| pair == b"\r\n") {
        let length = std::str::from_utf8(&bytes[..line]).unwrap();
        let length = usize::from_str_radix(length, 16).unwrap();
        if length == 0 {
            return (body, true);
        }
        let end = (line + 2 + length).min(bytes.len());
        body.extend(&bytes[line + 2..end]);
        bytes = bytes.get(end + 2..).unwrap_or_default();
    }
    (body, false)
}

impl Whole {
    /// What the header of the decision says of `field`.
    pub(crate) fn route(&self, field: &str) -> &str {
        let line = self.head.lines().find_map(|line| line.strip_prefix("x-kvstrata-route: "));
        let line = line.unwrap_or_else(|| panic!("no decision in {}", self.head));
        let mut fields = line.split("; ").filter_map(|field| field.split_once('='));
        fields.find(|(name, _)| *name == field).unwrap().1
    }

    /// Where the engine says that blocks came from.
    pub(crate) fn blocks(&self, source: &str) -> u64 {
        let first = self.body.lines().next().unwrap();
        let said: Value = serde_json::from_str(first.trim_start_matches("data: ")).unwrap();
        said[source].as_u64().unwrap()
    }
}
