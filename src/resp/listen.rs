//! Accepts RESP connections, at most so many at a time.

use std::sync::Arc;

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};

use super::{Resp, connection, pairs::Pairs, space::Spaces};
use crate::{
    api::{
        Calls,
        incoming::{Place, Places, accept, serve},
    },
    auth::Gate,
    keep_alive::keep_alive,
    limits::RESP_CONNECTIONS_MAX,
    node::Node,
    tls::Entry,
};

/// Where RESP connections come from.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) tcp: TcpListener,
    pub(crate) entry: Entry,
}

/// Serves what comes from `listener` until the tasks of the node should end.
pub(crate) fn start(listener: Listener, node: Arc<Node>, calls: Calls, gate: Gate) {
    let prompt = gate.asks() || listener.entry.is_encrypted();
    let places = Places::new(RESP_CONNECTIONS_MAX, node.metrics.resp.connections.clone());
    let (tasks, stop) = (node.tasks.clone(), node.tasks.stop_token());
    let (spaces, pairs, connections) = (Spaces::default(), Pairs::default(), 0.into());
    let resp = Arc::new(Resp { node, calls, gate, spaces, pairs, connections, prompt });
    tasks.spawn_critical("resp", async move {
        while stop.run_until_cancelled(accept_one(&listener, &resp, &places)).await.is_some() {}
    });
}

async fn accept_one(listener: &Listener, resp: &Arc<Resp>, places: &Places) {
    let next = || async {
        let (io, _peer) = accept(&listener.tcp).await?;
        keep_alive(&io)?;
        Ok(io)
    };
    let (io, place) = places.next(next).await;
    match listener.entry.begin(io).into_plain() {
        Ok(io) => spawn(resp, io.into_split(), place),
        Err(io) => spawn(resp, tokio::io::split(io), place),
    }
}

fn spawn<R, W>(resp: &Arc<Resp>, (from, to): (R, W), place: Place)
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let serving = connection::run(Arc::clone(resp), from, to);
    serve(&resp.node, "resp connection", place, serving);
}
