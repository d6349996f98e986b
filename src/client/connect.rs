//! The channel to one server: frame and window sizes, keepalive, message limits, deadlines.

use std::{fmt, future::Future, str::FromStr, sync::Arc, time::Duration};

use kvstrata_proto::v1::{self, block_cache_client::BlockCacheClient};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::sync::watch;
use tonic::{Request, Response, Status, transport::Endpoint};

use super::{
    access::{Access, Carrier, address_of, dialled},
    breaker::Breaker,
    bulk::Pool,
    status::{error_of, root},
};
use crate::{auth::Token, members::Members, tls::TlsOptions};

/// The longest gRPC message either side sends, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// HTTP/2 frames: the default of 16 KiB costs a third of the throughput.
const FRAME_BYTES_MAX: u32 = 2 << 20;
/// What one stream may have in flight, in bytes: a few messages of 1 MiB.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
/// What one connection may have in flight, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// How long a silent connection is trusted before it is probed.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a probe may stay unanswered.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Which way blocks take. Everything else goes over gRPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Path {
    /// Memory shared with the server if it is on this host and offers it, else the bulk port where the
    /// server has one that can be reached, else gRPC.
    #[default]
    Auto,
    /// Within gRPC messages.
    Grpc,
    /// The bulk port, or not at all.
    Bulk,
    /// Memory shared with the server, or not at all.
    Shm,
}

impl FromStr for Path {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "grpc" => Ok(Self::Grpc),
            "bulk" => Ok(Self::Bulk),
            "shm" => Ok(Self::Shm),
            _ => Err(Error::invalid(format!(
                "path: {text:?} given, auto, grpc, bulk or shm allowed"
            ))),
        }
    }
}

/// The deadlines of a client, of which every call has one, the way its blocks take, who it is, and how
/// it makes sure of the server.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Who this is, for people: what the server names when it is asked who opened a namespace. Default
    /// `kvstrata`; the process id is added.
    pub name: String,
    /// What routers call the engine that this is a client of. Default `None`: the name and the process
    /// id, which no router knows.
    pub instance: Option<String>,
    /// The machine it runs on. Default `None`: the host name.
    pub node: Option<String>,
    /// The availability zone of that. Default empty: unknown.
    pub zone: String,
    /// The way that the blocks of gets and puts take.
    pub path: Path,
    /// For the connection to be made. Default 5 s: a server on the network answers in milliseconds.
    pub connect_deadline: Duration,
    /// For each call that moves no blocks. Default 10 s; a lookup of 65,536 hashes takes a few ms.
    pub call_deadline: Duration,
    /// For the next message of a put or a get. Default 30 s: a stream that stands still is dead.
    pub stall_deadline: Duration,
    /// For one put or get as a whole. Default 10 min: tens of GiB over a slow network.
    pub transfer_deadline: Duration,
    /// The bearer token that is shown with every request. Default `None`. Over a network it belongs
    /// into TLS.
    pub token: Option<Token>,
    /// How the server is made sure of. Default `None`: by the CAs that the system trusts where the
    /// endpoint begins with `https://`, and no TLS where it does not.
    pub tls: Option<TlsOptions>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            name: "kvstrata".to_owned(),
            instance: None,
            node: None,
            zone: String::new(),
            path: Path::Auto,
            connect_deadline: Duration::from_secs(5),
            call_deadline: Duration::from_secs(10),
            stall_deadline: Duration::from_secs(30),
            transfer_deadline: Duration::from_secs(600),
            token: None,
            tls: None,
        }
    }
}

/// A connection to one server. Cheap to clone; clones share the connection.
#[derive(Clone)]
pub struct Client {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    endpoint: String,
    wire: BlockCacheClient<Carrier>,
    channel: Carrier,
    pub(super) access: Access,
    options: ClientOptions,
    members: watch::Sender<Members>,
    pub(super) bulk: Pool,
    breaker: Breaker,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoint", &self.shared.endpoint).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to `endpoint`: `host:port`, `http://host:port`, or `https://host:port` for TLS.
    ///
    /// # Errors
    /// `Invalid` if `endpoint` is not an address or a file of the options cannot be used; `Unavailable`
    /// or `Timeout` if nothing answers; `Unauthenticated` if the server is not the one meant.
    ///
    /// # Cancel safety
    /// Safe: a dropped attempt leaves nothing behind.
    pub async fn connect(endpoint: &str, options: ClientOptions) -> Result<Self> {
        let (address, secure) = address_of(endpoint, &options)?;
        let access = Access::new(&options, secure)?;
        let channel = configure(&format!("http://{address}"), &options)?;
        let connecting = access.connect(&channel, address);
        let connecting = tokio::time::timeout(options.connect_deadline, connecting);
        let channel = connecting
            .await
            .map_err(|_elapsed| cannot_connect(ErrorKind::Timeout, endpoint))?
            .map_err(|error| match dialled(&error) {
                Some((ErrorKind::Unavailable, why)) => {
                    cannot_connect(ErrorKind::Unavailable, endpoint).because(why)
                }
                Some((kind, why)) => Error::new(kind, why),
                None => cannot_connect(ErrorKind::Unavailable, endpoint).because(root(&error)),
            })?;
        let channel = Carrier::new(channel, access.bearing()?);
        let wire = BlockCacheClient::new(channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let endpoint = endpoint.to_owned();
        let members = watch::Sender::new(Members::default());
        Ok(Self {
            shared: Arc::new(Shared {
                endpoint,
                wire,
                channel,
                access,
                options,
                members,
                bulk: Pool::default(),
                breaker: Breaker::default(),
            }),
        })
    }

    /// The address this client was given.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.shared.endpoint
    }

    /// The newest member list seen in any answer or session event.
    #[must_use]
    pub fn members(&self) -> Members {
        self.shared.members.borrow().clone()
    }

    /// The deadlines in force.
    #[must_use]
    pub fn options(&self) -> &ClientOptions {
        &self.shared.options
    }

    /// Keeps `list` unless it is older than the one known.
    pub(super) fn learn_members(&self, list: Option<v1::MemberList>) {
        let Some(list) = list.map(Members::from) else {
            return;
        };
        self.shared.members.send_if_modified(|known| {
            // A node that was started again begins anew: what it says last holds.
            let newer = known.list.is_empty() || list.epoch >= known.epoch;
            let newer = newer && *known != list;
            if newer {
                *known = list;
            }
            newer
        });
    }

    pub(super) fn wire(&self) -> BlockCacheClient<Carrier> {
        self.shared.wire.clone()
    }

    pub(super) fn channel(&self) -> Carrier {
        self.shared.channel.clone()
    }

    /// Runs one call that moves no blocks, under its deadline.
    pub(super) async fn call<T, F>(&self, doing: &str, call: F) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.breaker().admit(doing)?;
        let answered = within(doing, self.shared.options.call_deadline, call).await;
        self.breaker().note(answered).map(Response::into_inner)
    }

    /// Whether the server answers.
    pub(super) fn breaker(&self) -> &Breaker {
        &self.shared.breaker
    }

    /// A request that tells the server how long this side waits.
    pub(super) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.shared.options.call_deadline);
        request
    }
}

/// Awaits `future` for at most `deadline`.
pub(super) async fn within<T, F>(doing: &str, deadline: Duration, future: F) -> Result<T>
where
    F: Future<Output = Result<T, Status>>,
{
    match tokio::time::timeout(deadline, future).await {
        Ok(result) => result.map_err(|status| error_of(doing, &status)),
        Err(_elapsed) => Err(timed_out(doing, deadline)),
    }
}

/// The error of a deadline that passed on this side.
pub(super) fn timed_out(doing: &str, deadline: Duration) -> Error {
    let waited = humantime::format_duration(deadline);
    Error::new(
        ErrorKind::Timeout,
        format!(
            "{doing}: no answer within {waited}; the outcome is unknown, and trying again is safe"
        ),
    )
}

fn configure(uri: &str, options: &ClientOptions) -> Result<Endpoint> {
    let endpoint = Endpoint::from_shared(uri.to_owned()).map_err(|error| {
        Error::invalid(format!(
            "endpoint: `{uri}` is not host:port, http://host:port or https://host:port"
        ))
        .because(error)
    })?;
    Ok(endpoint
        .connect_timeout(options.connect_deadline)
        .tcp_nodelay(true)
        .max_frame_size(FRAME_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true))
}

fn cannot_connect(kind: ErrorKind, endpoint: &str) -> Error {
    Error::new(
        kind,
        format!(
            "cannot connect to {endpoint}: is the server running? start it with `kvstrata serve`"
        ),
    )
}
