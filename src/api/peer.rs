//! The calls of `kvstrata.peer.v1.Peer`: what nodes ask of one another, and nobody else may.

use std::sync::Arc;

use futures_util::stream;
use kvstrata_proto::peer::v1::{
    self as wire,
    peer_server::{Peer, PeerServer},
};
use tonic::{Request, Response, Status};

use super::{Calls, Node, Observed, bearer_of};
use crate::{cluster::mirror::Update, limits::MESSAGE_BYTES_MAX, metrics::Op};

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
        if !bearer_of(&request)?.is_node() {
            let why =
                "the filter of a node is for nodes of its cluster, which show the cluster's token";
            return Err(Status::permission_denied(why));
        }
        let wire::FilterRequest { generation, version } = request.into_inner();
        let feed = self.node.feed.clone();
        let telling = feed.telling(generation, version);
        let updates = stream::unfold((feed, telling), |(feed, mut telling)| async move {
            let update = feed.next(&mut telling)?;
            Some((Ok(told(update)), (feed, telling)))
        });
        Ok(Response::new(self.calls.stream(Op::PeerFilter, updates)))
    }
}

fn told(update: Update) -> wire::FilterUpdate {
    let Update { generation, version, keys, offset, words, added, complete } = update;
    wire::FilterUpdate { generation, version, keys, offset, words, added, complete }
}
