//! Accepts bulk connections, from TCP and from a Unix socket, at most so many at a time together.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener, UnixStream},
};
use tracing::debug;

use super::{Bulk, connection};
use crate::{
    api::incoming::{self, Place, Places, accept},
    costs::Via,
    limits::BULK_UNIX_SEND_BYTES,
    shm::{self, socket::Files},
    tls::Entry,
};

/// Something that bulk connections come from.
#[derive(Debug)]
pub(crate) enum Listener {
    /// Other hosts, and this one.
    Tcp(TcpListener, Entry),
    /// This host.
    Unix(UnixListener, SocketFile),
}

/// Takes the file of a socket away when the server ends.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl SocketFile {
    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody else may have taken it away: that is as good.
        std::fs::remove_file(&self.0).unwrap_or_default();
    }
}

/// Listens on a Unix socket at `path`. A file that a server has left there, and that nobody listens to,
/// is replaced. Who may connect is decided by the directory.
///
/// # Errors
/// As the system's; `AddrInUse` if somebody listens there.
pub(crate) async fn listen_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    if UnixStream::connect(path).await.is_err_and(|error| refused(&error)) {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    Ok((listener, SocketFile(path.to_owned())))
}

/// Serves what comes from `listener` until the tasks of the node should end.
///
/// # Cancel safety
/// Safe: connections that were accepted are served on.
pub(crate) async fn serve(listener: Listener, bulk: Arc<Bulk>, places: Places) {
    let stop = bulk.node.tasks.stop_token();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = accept_one(&listener, &bulk, &places) => {}
        }
    }
}

async fn accept_one(listener: &Listener, bulk: &Arc<Bulk>, places: &Places) {
    match listener {
        Listener::Tcp(tcp, entry) => {
            let ((io, _peer), place) = places.next(|| accept(tcp)).await;
            let network = (Via::Network, None);
            match entry.begin(io).into_plain() {
                Ok(io) => spawn(Arc::clone(bulk), io.into_split(), network, place),
                Err(io) => spawn(Arc::clone(bulk), tokio::io::split(io), network, place),
            }
        }
        Listener::Unix(unix, _file) => {
            let ((io, _peer), place) = places.next(|| unix.accept()).await;
            widen(&io);
            if bulk.arena.is_some() {
                let (from, to, files) = shm::socket::split(io);
                spawn(Arc::clone(bulk), (from, to), (Via::UnixSocket, Some(files)), place);
            } else {
                spawn(Arc::clone(bulk), io.into_split(), (Via::UnixSocket, None), place);
            }
        }
    }
}

/// Lets more wait in a Unix socket than the system does by itself.
pub(crate) fn widen(io: &UnixStream) {
    if let Err(error) = set_socket_send_buffer_size(io, BULK_UNIX_SEND_BYTES) {
        debug!(%error, "the socket stays as it is");
    }
}

/// Serves one connection.
fn spawn<R, W>(bulk: Arc<Bulk>, (from, to): (R, W), by: (Via, Option<Arc<Files>>), place: Place)
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let node = Arc::clone(&bulk.node);
    let serving = Box::pin(connection::run(bulk, from, to, by));
    incoming::serve(&node, "bulk connection", place, serving);
}
