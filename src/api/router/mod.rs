//! The gRPC contract `kvstrata.router.v1`, and its twins in JSON: wire to domain and back.

mod convert;

use std::sync::Arc;

use kvstrata_proto::router::v1::{self as wire, router_server};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use serde::{Serialize, de::DeserializeOwned};
use tonic::{Request, Response, Status};

use super::{Calls, Node, Observed, bearer_of};
use crate::{
    auth::Bearer,
    flow::millis,
    limits::{MESSAGE_BYTES_MAX, ROUTER_TTL},
    metrics::Op,
    object::now_unix_ms,
};

/// The service; clones share the node.
#[derive(Debug, Clone)]
pub struct RouterService {
    node: Arc<Node>,
    calls: Calls,
}

/// The contract's service with its message limits.
pub(crate) fn service(node: Arc<Node>, calls: Calls) -> router_server::RouterServer<RouterService> {
    router_server::RouterServer::new(RouterService::new(node, calls))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

impl RouterService {
    /// Serves `node`.
    #[must_use]
    pub fn new(node: Arc<Node>, calls: Calls) -> Self {
        Self { node, calls }
    }

    /// The twin of a call: takes and gives its messages as proto3 JSON. None if there is no such call.
    ///
    /// # Errors
    /// As the call, and `Invalid` for what is no such message.
    ///
    /// # Cancel safety
    /// As the call.
    pub(crate) async fn json(
        &self,
        verb: &str,
        bearer: &Bearer,
        body: &[u8],
    ) -> Option<Result<Vec<u8>>> {
        let node = &self.node;
        Some(match verb {
            "lookup" => {
                let work = async |request| node.router_lookup(bearer, request).await;
                self.twin(Op::RouterLookup, body, work).await
            }
            "score" => {
                let work = async |request| node.router_score(bearer, request).await;
                self.twin(Op::RouterScore, body, work).await
            }
            _ => return None,
        })
    }

    async fn twin<T: DeserializeOwned, U: Serialize>(
        &self,
        op: Op,
        body: &[u8],
        work: impl AsyncFnOnce(T) -> Result<U>,
    ) -> Result<Vec<u8>> {
        self.calls
            .checked(op, async {
                let request = serde_json::from_slice(body)
                    .map_err(|why| Error::invalid(format!("body: {why}")))?;
                let answer = work(request).await?;
                serde_json::to_vec(&answer).map_err(|why| {
                    Error::new(ErrorKind::Internal, "write an answer as JSON").because(why)
                })
            })
            .await
    }
}

#[tonic::async_trait]
impl router_server::Router for RouterService {
    type WatchStream = Observed<wire::WatchUpdate>;
    type WatchTiersStream = Observed<wire::TierUpdate>;

    async fn lookup(
        &self,
        request: Request<wire::LookupRequest>,
    ) -> Result<Response<wire::LookupResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = self.node.router_lookup(&bearer, request.into_inner());
        self.calls.unary(Op::RouterLookup, work).await
    }

    async fn score(
        &self,
        request: Request<wire::ScoreRequest>,
    ) -> Result<Response<wire::ScoreResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = self.node.router_score(&bearer, request.into_inner());
        self.calls.unary(Op::RouterScore, work).await
    }

    async fn watch(
        &self,
        _request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("watch"))
    }

    async fn watch_tiers(
        &self,
        _request: Request<wire::WatchTiersRequest>,
    ) -> Result<Response<Self::WatchTiersStream>, Status> {
        Err(Status::unimplemented("watch_tiers"))
    }

    async fn reserve(
        &self,
        _request: Request<wire::ReserveRequest>,
    ) -> Result<Response<wire::ReserveResponse>, Status> {
        Err(Status::unimplemented("reserve"))
    }

    async fn release(
        &self,
        _request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseResponse>, Status> {
        Err(Status::unimplemented("release"))
    }

    async fn report(
        &self,
        _request: Request<wire::ReportRequest>,
    ) -> Result<Response<wire::ReportResponse>, Status> {
        Err(Status::unimplemented("report"))
    }
}

impl Node {
    async fn router_lookup(
        self: &Arc<Self>,
        bearer: &Bearer,
        request: wire::LookupRequest,
    ) -> Result<wire::LookupResponse> {
        let question = convert::question(request)?;
        let answer = self.advise(bearer, &question).await?;
        Ok(wire::LookupResponse {
            epoch: self.advice.epoch(),
            as_of_ms: now_unix_ms(),
            ttl_ms: millis(ROUTER_TTL),
            tiers: self.wire_tier_costs(),
            ..convert::lookup(self, answer)
        })
    }

    async fn router_score(
        self: &Arc<Self>,
        bearer: &Bearer,
        request: wire::ScoreRequest,
    ) -> Result<wire::ScoreResponse> {
        let contest = convert::contest(request)?;
        let outcome = self.judge(bearer, &contest).await?;
        Ok(wire::ScoreResponse {
            epoch: self.advice.epoch(),
            as_of_ms: now_unix_ms(),
            ttl_ms: millis(ROUTER_TTL),
            ..convert::scores(&contest.candidates, outcome)
        })
    }

    fn wire_tier_costs(&self) -> Vec<wire::TierCost> {
        self.tier_costs().iter().map(|cost| convert::tier_cost(self, cost)).collect()
    }
}
