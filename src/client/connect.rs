//! A client: what it was told, which server it is at, and calls under their deadlines.
//!
//! It is at one server at a time. Of several endpoints that is the first one that answers, until the
//! first namespace is opened: then it [goes home](super::home), if its engine has a home, and stays.

use std::{fmt, future::Future, str::FromStr, sync::Arc, time::Duration};

use kvstrata_proto::v1::block_cache_client::BlockCacheClient;
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};

use super::{
    access::Carrier,
    endpoints::{self, Target},
    holders::Holders,
    home::Moves,
    server::Server,
    status::error_of,
};
use crate::{auth::Token, members::Members, tls::TlsOptions};

/// The longest gRPC message either side sends, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
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
    /// What routers call the engine that this is a client of. With it the client goes to the engine's home
    /// when it opens its first namespace. Default `None`: the name and the process id, which no router
    /// knows, and which are at home wherever they are.
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
    /// The tenant for whom a node asks another, with the token of their cluster. Default `None`: whose the token
    /// is. Who is no node and names one is refused.
    pub acting_for: Option<String>,
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
            acting_for: None,
        }
    }
}

/// A connection to one server of a cluster. Cheap to clone; clones share the connection.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    options: ClientOptions,
    /// Where it is: another one only while it goes home.
    server: RwLock<Arc<Server>>,
    /// Whether it stays there. Held while it goes home.
    settled: Mutex<bool>,
    moves: Moves,
    holders: Holders,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to the first of `endpoints` that answers: one, or several with commas between them, each of
    /// which has its share of the deadline. An endpoint is `host:port`, `http://host:port`, or
    /// `https://host:port` for TLS, which then all of them speak.
    ///
    /// # Errors
    /// `Invalid` if one is not an address or a file of the options cannot be used; `Unavailable`
    /// or `Timeout` if nothing answers; `Unauthenticated` if the server is not the one meant.
    ///
    /// # Cancel safety
    /// Safe: a dropped attempt leaves nothing behind.
    pub async fn connect(endpoints: &str, options: ClientOptions) -> Result<Self> {
        let targets = endpoints::targets(endpoints, options.tls.is_some())?;
        let server = Server::first(&targets, &options).await?;
        Ok(Self::at(server, options))
    }

    /// A client that is at `server`.
    pub(super) fn at(server: Server, options: ClientOptions) -> Self {
        let shared = Shared {
            options,
            server: RwLock::new(Arc::new(server)),
            settled: Mutex::new(false),
            moves: Moves::default(),
            holders: Holders::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The address of the server that this client is at, as it was given.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.server().target.to_string()
    }

    /// The newest member list seen in any answer or session event.
    #[must_use]
    pub fn members(&self) -> Members {
        self.server().members().clone()
    }

    /// Whether the server has said that it will go away: finish, and begin nothing more there.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.server().is_draining()
    }

    /// The deadlines in force.
    #[must_use]
    pub fn options(&self) -> &ClientOptions {
        &self.shared.options
    }

    /// The server that it is at.
    pub(super) fn server(&self) -> Arc<Server> {
        Arc::clone(&self.shared.server.read())
    }

    /// From now on it is at `server`.
    pub(super) fn go_to(&self, server: Arc<Server>) {
        *self.shared.server.write() = server;
    }

    /// Whether it stays where it is; to be held by whoever changes that.
    pub(super) fn settled(&self) -> &Mutex<bool> {
        &self.shared.settled
    }

    pub(super) fn moves_made(&self) -> &Moves {
        &self.shared.moves
    }

    /// Other members that blocks are read from.
    pub(super) fn holders(&self) -> &Holders {
        &self.shared.holders
    }

    /// Another server of the same cluster, at `host:port`.
    pub(super) async fn neighbour(&self, address: &str, deadline: Duration) -> Result<Server> {
        let here = self.server();
        let target = Target { address: address.to_owned(), secure: here.target.secure };
        Server::connect(target, here.access.clone(), deadline).await
    }

    pub(super) fn wire(&self) -> BlockCacheClient<Carrier> {
        self.server().wire()
    }

    pub(super) fn channel(&self) -> Carrier {
        self.server().channel()
    }

    /// Runs one call that moves no blocks, under its deadline.
    pub(super) async fn call<T, F>(&self, doing: &str, call: F) -> Result<T>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.server().call(doing, self.shared.options.call_deadline, call).await
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
