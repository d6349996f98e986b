//! `kvstrata.admin.v1`: what operators ask of this node, on a listener of its own.
//!
//! On loopback a token of an operator is asked for where the node asks for tokens; the file of a Unix socket can be
//! opened by this process's user and by root, and whoever else comes by it is hung up on. None of these calls is
//! on the port of clients.

use std::{
    io::{self, IoSlice},
    os::unix::fs::PermissionsExt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream as Items, stream};
use kvstrata_proto::admin::v1::{
    self as wire,
    admin_server::{Admin, AdminServer},
};
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, UnixListener, UnixStream},
    sync::watch,
    time::{Instant, timeout},
};
use tonic::{Request, Response, Status, transport::server::Connected};
use tracing::{error, warn};

use super::{
    Calls, Guarded, Observed, correct_unreadable,
    incoming::{self, Place, Places},
    transport,
};
use crate::{
    auth::Gate,
    bulk::SocketFile,
    drain::{Phase, Progress},
    limits::{ADMIN_CONNECTIONS_MAX, ADMIN_PROGRESS_INTERVAL},
    metrics::Op,
    node::Node,
    tls::Entry,
};

/// What may be done with the file of the socket: by its owner, and by nobody else.
const SOCKET_MODE: u32 = 0o600;

/// Where operators come in.
#[derive(Debug)]
pub(crate) enum Listener {
    /// Loopback.
    Tcp(TcpListener, Entry),
    /// A Unix socket.
    Unix(UnixListener, SocketFile),
}

/// Takes the file of a socket for its owner alone.
///
/// # Errors
/// As the system's.
pub(crate) fn keep_private(file: &SocketFile) -> io::Result<()> {
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(SOCKET_MODE))
}

/// Serves operators until the tasks of the node should end.
pub(crate) fn start(listener: Listener, node: &Arc<Node>, calls: &Calls, gate: &Gate) {
    let service = AdminService { node: Arc::clone(node), calls: calls.clone() };
    let service = AdminServer::new(service);
    let (stop, gate) = (node.tasks.stop_token(), gate.clone());
    let router = transport().layer(tower::util::MapResponseLayer::new(correct_unreadable));
    node.tasks.spawn_critical("admin", async move {
        let stopped = stop.clone().cancelled_owned();
        let serving = async {
            match listener {
                Listener::Tcp(tcp, entry) => {
                    let guarded = Guarded::for_operators(service, gate);
                    let from =
                        incoming::connections(tcp, entry, ADMIN_CONNECTIONS_MAX, Gauge::default());
                    let mut router = router;
                    let router = router.add_service(guarded);
                    router.serve_with_incoming_shutdown(from, stopped).await
                }
                Listener::Unix(unix, file) => {
                    let mut router = router;
                    let router = router.add_service(service);
                    let served = router.serve_with_incoming_shutdown(local(unix), stopped).await;
                    drop(file);
                    served
                }
            }
        };
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(CLOSE_GRACE).await;
        };
        tokio::select! {
            served = serving => if let Err(why) = served {
                error!(error = %why, "admin listener failed");
            },
            () = late => {}
        }
    });
}

/// Time for a drain to begin that was asked for: as long as a busy runtime takes for one turn.
const ADMIN_BEGIN_MAX: Duration = Duration::from_secs(2);
/// Time for operators to hang up once the node ends.
const CLOSE_GRACE: Duration = Duration::from_millis(500);

/// The service.
#[derive(Debug, Clone)]
struct AdminService {
    node: Arc<Node>,
    calls: Calls,
}

#[tonic::async_trait]
impl Admin for AdminService {
    type DrainStream = Observed<wire::DrainProgress>;

    async fn drain(
        &self,
        _request: Request<wire::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        self.node.drain.ask();
        let told = told(Arc::clone(&self.node), self.node.drain.follow());
        Ok(Response::new(self.calls.stream(Op::AdminDrain, told)))
    }

    async fn status(
        &self,
        _request: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusResponse>, Status> {
        let node = &self.node;
        let members = u32::try_from(node.roster.now().list.len()).unwrap_or(u32::MAX);
        let status = wire::StatusResponse {
            node: node.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: u64::try_from(node.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            drain: Some(progress(node, node.drain.progress())),
            members,
        };
        self.calls.unary(Op::AdminStatus, async { Ok(status) }).await
    }
}

/// How far the drain is: at once, then whenever something has changed or a little time has passed, until it is
/// over.
fn told(
    node: Arc<Node>,
    follow: watch::Receiver<Progress>,
) -> impl Items<Item = Result<wire::DrainProgress, Status>> {
    stream::unfold(Some((node, follow, true)), |state| async move {
        let (node, mut follow, is_first) = state?;
        if is_first {
            // The server is about to begin it.
            let begun = follow.wait_for(|progress| progress.phase != Phase::Serving);
            drop(timeout(ADMIN_BEGIN_MAX, begun).await);
        } else {
            // What counts is how far it is then, whichever of both has woken us.
            drop(timeout(ADMIN_PROGRESS_INTERVAL, follow.changed()).await);
        }
        let known = *follow.borrow_and_update();
        let message = progress(&node, known);
        let next = (known.phase != Phase::Drained).then_some((node, follow, false));
        Some((Ok(message), next))
    })
}

fn progress(node: &Node, known: Progress) -> wire::DrainProgress {
    let (leases, _bytes) = node.leases.usage();
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let left = known.until.map_or(Duration::ZERO, |until| until.duration_since(Instant::now()));
    let phase = match known.phase {
        Phase::Serving => wire::DrainPhase::Serving,
        Phase::Announcing => wire::DrainPhase::Announcing,
        Phase::HandingOver => wire::DrainPhase::HandingOver,
        Phase::Finishing => wire::DrainPhase::Finishing,
        Phase::Flushing => wire::DrainPhase::Flushing,
        Phase::Drained => wire::DrainPhase::Drained,
    };
    wire::DrainProgress {
        phase: phase.into(),
        sessions: count(node.sessions.count()),
        leases: count(leases),
        left_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX),
        chosen_blocks: known.handed.chosen,
        handed_blocks: known.handed.blocks,
        handed_bytes: known.handed.bytes,
        present_blocks: known.handed.present,
        refused_blocks: known.handed.refused,
    }
}

/// Connections of this process's user and of root.
fn local(listener: UnixListener) -> impl Items<Item = io::Result<LocalConnection>> {
    let places = Places::new(ADMIN_CONNECTIONS_MAX, Gauge::default());
    stream::unfold((listener, places), |(listener, places)| async move {
        let connection = loop {
            let ((io, _peer), place) = places.next(|| listener.accept()).await;
            if is_ours(&io) {
                break LocalConnection { io, _place: place };
            }
        };
        Some((Ok(connection), (listener, places)))
    })
}

fn is_ours(io: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let ours = io.peer_cred().is_ok_and(|peer| [0, own].contains(&peer.uid()));
    if !ours {
        warn!("somebody else has opened the admin socket: hung up");
    }
    ours
}

/// A connection over the socket, with its place.
#[derive(Debug)]
struct LocalConnection {
    io: UnixStream,
    _place: Place,
}

impl Connected for LocalConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for LocalConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for LocalConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
