//! A server process of our own: started on free ports, stopped by SIGTERM, watched all the while.
//!
//! It is the same binary, run as `kvstrata serve`, so a replay measures what an engine would see: a
//! process behind a socket. Its identity secret and its log live in a directory that only this user
//! can read and that goes away with the [`ServerProcess`]. The same server can be killed and started
//! again: on the same directory, with the same secret, on other ports.

use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::{Child, ChildStdout, Command},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    auth::{ONLY_TENANT, Token},
    client::ClientOptions,
    metrics::Door,
    tls::{Dialer, Generated, write_private},
};

/// How long a server may take until it serves: mapping memory and binding ports take milliseconds,
/// and what is on a disk is found again in seconds.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(60);
/// How often a server is asked whether it is ready.
const READY_INTERVAL: Duration = Duration::from_millis(5);
/// How long a server may take to answer that.
const READY_DEADLINE: Duration = Duration::from_secs(5);
/// The longest answer to that which is read, in bytes.
const READY_BYTES_MAX: u64 = 4096;
/// How long a server may take to stop: no client is left, so there is nothing to drain.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// How long a dying server may take from its last packet to its end: memory is unmapped meanwhile.
const DEATH_DEADLINE: Duration = Duration::from_secs(2);
/// Names tried for the directory before giving up.
const DIRECTORY_TRIES: u32 = 1000;
/// Lines of the server's log shown when it fails.
const LOG_LINES_SHOWN: usize = 8;

/// What the server is told.
#[derive(Debug, Clone, Default)]
pub struct ServerSettings {
    /// Size of dram, such as `512MiB`; the server's default if `None`.
    pub dram: Option<String>,
    /// Memory of the whole process, such as `1GiB`; the server's default if `None`.
    pub memory: Option<String>,
    /// Its nvme tier, if it gets one.
    pub nvme: Option<NvmeSettings>,
    /// Any other settings, as `key=value`.
    pub others: Vec<String>,
    /// Whether it asks for a token and speaks TLS, by a certificate that is made for it.
    pub secure: bool,
    /// Whether it shares its memory, by a Unix socket in its own directory.
    pub shared_memory: bool,
}

/// What the server is told of its nvme tier.
#[derive(Debug, Clone, Default)]
pub struct NvmeSettings {
    /// Where it is; in the server's own directory, which goes away with it, if `None`.
    pub path: Option<PathBuf>,
    /// Its capacity, such as `4GiB`; the server's default if `None`.
    pub capacity: Option<String>,
    /// Bytes of one segment, such as `16MiB`; the server's default if `None`.
    pub segment_bytes: Option<String>,
}

/// A running server. Dropping it kills it; [`stop`](Self::stop) lets it end well.
#[derive(Debug)]
pub struct ServerProcess {
    settings: ServerSettings,
    child: Child,
    endpoint: String,
    secrets: Option<Secrets>,
    /// Kept open: a server whose output is closed could not print.
    _stdout: BufReader<ChildStdout>,
    directory: Directory,
}

/// What a secure server is known by, and what it asks for.
#[derive(Debug)]
struct Secrets {
    token: Token,
    files: Generated,
    tokens_file: PathBuf,
    dialer: Dialer,
}

impl Secrets {
    fn create(directory: &Path) -> Result<Self> {
        let (token, files) = (Token::random()?, Generated::create(directory)?);
        let tokens_file = directory.join("tokens");
        write_private(&tokens_file, &format!("{ONLY_TENANT} {} operator\n", token.reveal()))?;
        let dialer = Dialer::new(&files.trusted())?;
        Ok(Self { token, files, tokens_file, dialer })
    }

    /// The settings that make a server use them.
    fn settings(&self) -> [(&'static str, &Path); 3] {
        [
            ("auth.tokens_file", &self.tokens_file),
            ("tls.cert_file", &self.files.cert_file),
            ("tls.key_file", &self.files.key_file),
        ]
    }
}

/// A process that serves.
struct Started {
    child: Child,
    endpoint: String,
    stdout: BufReader<ChildStdout>,
}

#[derive(Debug, Deserialize)]
struct Addresses {
    grpc: String,
    http: String,
}

impl ServerProcess {
    /// Starts a server and waits until it is ready.
    ///
    /// # Errors
    /// `Unavailable` if it does not start; the error shows the end of its log.
    ///
    /// # Cancel safety
    /// Safe: a server that was being started is killed.
    pub async fn start(settings: ServerSettings) -> Result<Self> {
        let directory = Directory::create()?;
        let secrets = settings.secure.then(|| Secrets::create(&directory.path)).transpose()?;
        let started = start(&settings, secrets.as_ref(), &directory).await?;
        let Started { child, endpoint, stdout } = started;
        Ok(Self { settings, child, endpoint, secrets, _stdout: stdout, directory })
    }

    /// Kills it with SIGKILL and waits until it is gone.
    pub(super) async fn kill(&mut self) -> Result<()> {
        self.child.kill().await.map_err(|error| failed("kill the server").because(error))
    }

    /// Starts it again on what it left, after a [`kill`](Self::kill); returns how long that took,
    /// from the start of the process until it was ready.
    pub(super) async fn start_again(&mut self) -> Result<Duration> {
        let started_at = Instant::now();
        let started = start(&self.settings, self.secrets.as_ref(), &self.directory).await?;
        let Started { child, endpoint, stdout } = started;
        let took = started_at.elapsed();
        (self.child, self.endpoint, self._stdout) = (child, endpoint, stdout);
        Ok(took)
    }

    /// Starts it again on what it left, and kills it `after` that: however far it has got then.
    pub(super) async fn start_and_kill(&mut self, after: Duration) -> Result<()> {
        let mut child = command(&self.settings, self.secrets.as_ref(), &self.directory)?
            .spawn()
            .map_err(|error| failed("start a server").because(error))?;
        sleep(after).await;
        child.kill().await.map_err(|error| failed("kill the server").because(error))
    }

    /// Waits for an end that nobody asked for; returns the error that tells of it.
    pub(super) async fn ended(&mut self) -> Error {
        match self.child.wait().await {
            Ok(status) => self.ended_badly(status),
            Err(error) => failed("wait for the server").because(error),
        }
    }

    /// Where the replay may keep files of its own about this server.
    pub(super) fn directory(&self) -> &Path {
        &self.directory.path
    }

    /// Leaves the directory with everything that the server has stored and logged for whoever wants to
    /// know what went wrong; returns where that is.
    pub fn keep_directory(&mut self) -> &Path {
        self.directory.kept = true;
        &self.directory.path
    }

    /// The options of a client that it lets in.
    #[must_use]
    pub fn client_options(&self) -> ClientOptions {
        let token = self.secrets.as_ref().map(|secrets| secrets.token.clone());
        let tls = self.secrets.as_ref().map(|secrets| secrets.files.trusted());
        ClientOptions { token, tls, ..ClientOptions::default() }
    }

    /// `host:port` of its gRPC contract.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Adds to a failed call that the server has ended, if it has, and the end of its log.
    ///
    /// A process that is killed closes its connections before it can be waited for, so an error that
    /// may come from its death is given a moment.
    ///
    /// # Cancel safety
    /// Safe: the server is left as it is.
    pub async fn explain(&mut self, error: Error) -> Error {
        let patience = match error.kind() {
            ErrorKind::Unavailable => DEATH_DEADLINE,
            _ => Duration::ZERO,
        };
        match timeout(patience, self.child.wait()).await {
            Ok(Ok(status)) => self.ended_badly(status).because(error),
            Ok(Err(_)) | Err(_) => error,
        }
    }

    /// Asks it to stop and waits until it has.
    ///
    /// # Errors
    /// `Internal` if it does not end in time, ends with another exit code than 0, or has logged an
    /// error; the message shows the end of its log.
    ///
    /// # Cancel safety
    /// Safe: the server is killed.
    pub async fn stop(mut self) -> Result<()> {
        let pid = self.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM)
                .map_err(|error| failed("stop the server").because(error))?;
        }
        let ended = timeout(STOP_DEADLINE, self.child.wait()).await;
        match ended {
            Ok(Ok(status)) if status.success() && !self.directory.has_logged_error() => Ok(()),
            Ok(Ok(status)) => Err(self.ended_badly(status)),
            Ok(Err(error)) => Err(failed("wait for the server").because(error)),
            Err(_elapsed) => {
                let waited = humantime::format_duration(STOP_DEADLINE);
                let log = self.directory.log_tail();
                let what = format!("stop the server: it still runs {waited} after SIGTERM{log}");
                Err(Error::new(ErrorKind::Internal, what))
            }
        }
    }

    fn ended_badly(&self, status: ExitStatus) -> Error {
        let log = self.directory.log_tail();
        Error::new(ErrorKind::Internal, format!("the server ended with {status}{log}"))
    }
}

/// Starts a process and waits until it is ready.
async fn start(
    settings: &ServerSettings,
    secrets: Option<&Secrets>,
    directory: &Directory,
) -> Result<Started> {
    let mut child = command(settings, secrets, directory)?
        .spawn()
        .map_err(|error| failed("start a server").because(error))?;
    let stdout = child.stdout.take().ok_or_else(|| failed("read the server's output"))?;
    let mut stdout = BufReader::new(stdout);
    let mut line = String::new();
    let deadline = Instant::now() + START_DEADLINE;
    let read = timeout_at(deadline, stdout.read_line(&mut line)).await;
    let addresses = match read {
        Ok(Ok(1..)) => serde_json::from_str::<Addresses>(&line).ok(),
        Ok(Ok(0) | Err(_)) | Err(_) => None,
    };
    let log = || directory.log_tail();
    let Some(addresses) = addresses else {
        let what = format!("start a server: it did not say where it serves{}", log());
        return Err(failed(&what));
    };
    // It may serve before it has found everything that it has.
    while !is_ready(&addresses.http, secrets.map(|secrets| &secrets.dialer)).await {
        if let Ok(Some(status)) = child.try_wait() {
            return Err(failed(&format!("start a server: it ended with {status}{}", log())));
        }
        if Instant::now() >= deadline {
            let waited = humantime::format_duration(START_DEADLINE);
            return Err(failed(&format!("start a server: not ready within {waited}{}", log())));
        }
        sleep(READY_INTERVAL).await;
    }
    Ok(Started { child, endpoint: addresses.grpc, stdout })
}

/// Whether `/readyz` says yes. A server that does not answer is not ready.
async fn is_ready(http: &str, dialer: Option<&Dialer>) -> bool {
    let ask = async {
        match dialer {
            Some(dialer) => ask_ready(http, dialer.connect(Door::Http, http).await.ok()?).await,
            None => ask_ready(http, TcpStream::connect(http).await.ok()?).await,
        }
    };
    let answer = timeout(READY_DEADLINE, ask).await;
    answer.is_ok_and(|answer| answer.is_some_and(|answer| answer.starts_with(b"HTTP/1.1 200")))
}

/// The answer to `/readyz`; none if the server does not give one.
async fn ask_ready(http: &str, mut io: impl AsyncRead + AsyncWrite + Unpin) -> Option<Vec<u8>> {
    let request = format!("GET /readyz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n");
    io.write_all(request.as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    io.take(READY_BYTES_MAX).read_to_end(&mut answer).await.ok()?;
    Some(answer)
}

fn command(
    settings: &ServerSettings,
    secrets: Option<&Secrets>,
    directory: &Directory,
) -> Result<Command> {
    let program = std::env::current_exe()
        .map_err(|error| failed("find the path of this program").because(error))?;
    let log = fs::File::options().append(true).create(true).open(directory.log());
    let log = log.map_err(|error| failed("open the server's log").because(error))?;
    let mut command = Command::new(program);
    command.args(["serve", "--print-addresses"]).args([
        "--grpc-listen",
        "127.0.0.1:0",
        "--http-listen",
        "127.0.0.1:0",
    ]);
    if let Some(dram) = &settings.dram {
        command.args(["--dram", dram]);
    }
    let mut set = |key: &str, value: &dyn std::fmt::Display| {
        command.arg("--set").arg(format!("{key}={value}"));
    };
    set("identity.secret_file", &directory.path.join("identity").display());
    for (key, path) in secrets.into_iter().flat_map(Secrets::settings) {
        set(key, &path.display());
    }
    if settings.shared_memory {
        set("server.bulk_unix", &directory.path.join("bulk").display());
        set("server.shared_memory", &true);
    }
    if let Some(memory) = &settings.memory {
        set("memory.limit", memory);
    }
    if let Some(nvme) = &settings.nvme {
        let path = nvme.path.clone().unwrap_or_else(|| directory.path.join("nvme"));
        set("nvme.path", &path.display());
        for (key, value) in
            [("nvme.capacity", &nvme.capacity), ("nvme.segment_bytes", &nvme.segment_bytes)]
        {
            value.iter().for_each(|value| set(key, value));
        }
    }
    for other in &settings.others {
        command.args(["--set", other]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).kill_on_drop(true);
    Ok(command)
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}

/// A directory of this user only, removed on drop unless it is kept.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    kept: bool,
}

impl Directory {
    fn create() -> Result<Self> {
        let parent = std::env::temp_dir();
        let process = std::process::id();
        let mut last = None;
        for number in 0..DIRECTORY_TRIES {
            let path = parent.join(format!("kvstrata-replay-{process}-{number}"));
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self { path, kept: false }),
                Err(error) => last = Some(error),
            }
        }
        let error = failed(&format!("create a directory in {}", parent.display()));
        Err(match last {
            Some(cause) => error.because(cause),
            None => error,
        })
    }

    fn log(&self) -> PathBuf {
        self.path.join("server.log")
    }

    fn has_logged_error(&self) -> bool {
        read_text(&self.log()).lines().any(|line| line.contains("ERROR"))
    }

    /// The end of the log as a suffix of an error message.
    fn log_tail(&self) -> String {
        let text = read_text(&self.log());
        let lines: Vec<_> = text.lines().collect();
        let shown = lines.get(lines.len().saturating_sub(LOG_LINES_SHOWN)..).unwrap_or_default();
        if shown.is_empty() {
            String::new()
        } else {
            format!("; its log ends with\n{}", shown.join("\n"))
        }
    }
}

fn read_text(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

impl Drop for Directory {
    fn drop(&mut self) {
        if !self.kept {
            // Left behind at worst: a secret that names nothing any more, readable by its owner only.
            drop(fs::remove_dir_all(&self.path));
        }
    }
}
