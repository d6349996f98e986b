//! The calls of `kvstrata.peer.v1.Peer`: what nodes ask of one another, and nobody else may.

use std::sync::Arc;

use futures_util::stream;
use kvstrata_proto::peer::v1::{
    self as wire,
    peer_server::{Peer, PeerServer},
};
use kvstrata_tiers::namespace::NamespaceTable;
use tonic::{Request, Response, Status};

use super::{Calls, Node, Observed, bearer_of, router};
use crate::{
    cluster::mirror::Update,
    limits::{MESSAGE_BYTES_MAX, OPENERS_TOLD_MAX},
    metrics::Op,
    openers::Opener,
};

/// The service; clones share the node.
#[derive(Debug, Clone)]
pub(crate) struct PeerService {
    node: Arc<Node>,
    calls: Calls,
}

/// Serves `node` to other nodes.
pub(crate) fn service(node: Arc<Node>, calls: Calls) -> PeerServer<PeerService> {
    PeerServer::new(PeerService { node, calls })
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

#[tonic::async_trait]
impl Peer for PeerService {
    type FilterStream = Observed<wire::FilterUpdate>;

    async fn filter(
        &self,
        request: Request<wire::FilterRequest>,
    ) -> Result<Response<Self::FilterStream>, Status> {
        only_nodes(&request)?;
        let wire::FilterRequest { generation, version } = request.into_inner();
        let feed = self.node.feed.clone();
        let telling = feed.telling(generation, version);
        let updates = stream::unfold((feed, telling), |(feed, mut telling)| async move {
            let update = feed.next(&mut telling)?;
            Some((Ok(told(update)), (feed, telling)))
        });
        Ok(Response::new(self.calls.stream(Op::PeerFilter, updates)))
    }

    async fn tell(
        &self,
        request: Request<wire::TellRequest>,
    ) -> Result<Response<wire::TellResponse>, Status> {
        only_nodes(&request)?;
        let known = request.into_inner().openers_version;
        self.calls.unary(Op::PeerTell, async { Ok(self.node.tell(known)) }).await
    }
}

impl Node {
    /// What others have to know of this node to answer routers in its place, to one that knows the openers of this
    /// version.
    fn tell(&self, known: u64) -> wire::TellResponse {
        // Counts begin anew with each start, epochs do not.
        let openers_version = self.advice.epoch().wrapping_add(self.openers.version());
        let openers = match openers_version == known {
            true => Vec::new(),
            false => self.openers.latest(OPENERS_TOLD_MAX),
        };
        let openers = openers.into_iter();
        wire::TellResponse {
            costs: router::costs(self),
            shared_memory: self.costs.is_shared(),
            openers_version,
            openers: openers.filter_map(|(of, who)| opener(&self.namespaces, of, who)).collect(),
        }
    }
}

fn only_nodes<T>(request: &Request<T>) -> Result<(), Status> {
    if bearer_of(request)?.is_node() {
        return Ok(());
    }
    let why = "what nodes tell of themselves is for nodes of their cluster, which show its token";
    Err(Status::permission_denied(why))
}

fn opener(namespaces: &NamespaceTable, of: u32, who: Opener) -> Option<wire::Opener> {
    let namespace_id = namespaces.by_index(of)?.id().as_bytes().to_vec().into();
    let Opener { instance, host, zone, .. } = who;
    Some(wire::Opener { namespace_id, instance, host, zone })
}

fn told(update: Update) -> wire::FilterUpdate {
    let Update { generation, version, keys, offset, words, added, complete } = update;
    wire::FilterUpdate { generation, version, keys, offset, words, added, complete }
}
