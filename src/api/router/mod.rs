//! The gRPC contract `kvstrata.router.v1`, and its twins in JSON: wire to domain and back.

mod check;
mod convert;
mod lines;
mod watch;

use std::{sync::Arc, time::Duration};

use kvstrata_proto::router::v1::{self as wire, router_server};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use serde::{Serialize, de::DeserializeOwned};
use tonic::{Request, Response, Status};

use super::{Calls, Node, Observed, bearer_of};
use crate::{
    auth::Bearer,
    flow::{count, millis},
    id::ReservationId,
    limits::{MESSAGE_BYTES_MAX, ROUTER_TTL},
    metrics::Op,
    object::now_unix_ms,
};

/// The service; clones share the node.
#[derive(Debug, Clone)]
pub(crate) struct RouterService {
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
    pub(crate) fn new(node: Arc<Node>, calls: Calls) -> Self {
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
            "reserve" => {
                let work = async |request| node.router_reserve(bearer, &request);
                self.twin(Op::RouterReserve, body, work).await
            }
            "release" => {
                let work = async |request| node.router_release(bearer, &request);
                self.twin(Op::RouterRelease, body, work).await
            }
            "report" => {
                let work = async |request| node.router_report(bearer, &request);
                self.twin(Op::RouterReport, body, work).await
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
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let bearer = bearer_of(&request)?;
        match self.node.router_watch(bearer, request.into_inner()) {
            Ok(updates) => Ok(Response::new(self.calls.stream(Op::RouterWatch, updates))),
            Err(why) => self.calls.unary(Op::RouterWatch, async { Err(why) }).await,
        }
    }

    async fn watch_tiers(
        &self,
        request: Request<wire::WatchTiersRequest>,
    ) -> Result<Response<Self::WatchTiersStream>, Status> {
        let bearer = bearer_of(&request)?;
        match self.node.router_watch_tiers(bearer, &request.into_inner()) {
            Ok(updates) => Ok(Response::new(self.calls.stream(Op::RouterWatchTiers, updates))),
            Err(why) => self.calls.unary(Op::RouterWatchTiers, async { Err(why) }).await,
        }
    }

    async fn reserve(
        &self,
        request: Request<wire::ReserveRequest>,
    ) -> Result<Response<wire::ReserveResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.router_reserve(&bearer, &request.into_inner()) };
        self.calls.unary(Op::RouterReserve, work).await
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.router_release(&bearer, &request.into_inner()) };
        self.calls.unary(Op::RouterRelease, work).await
    }

    async fn report(
        &self,
        request: Request<wire::ReportRequest>,
    ) -> Result<Response<wire::ReportResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.router_report(&bearer, &request.into_inner()) };
        self.calls.unary(Op::RouterReport, work).await
    }
}

/// What loading costs at a node.
pub(super) fn costs(node: &Node) -> Vec<wire::TierCost> {
    node.costs.snapshot().iter().map(|cost| convert::tier_cost(node, cost)).collect()
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
            tiers: costs(self),
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

    fn router_reserve(
        &self,
        bearer: &Bearer,
        request: &wire::ReserveRequest,
    ) -> Result<wire::ReserveResponse> {
        let loads = convert::held(self, &request.loads)?;
        let ttl = Duration::from_millis(u64::from(request.ttl_ms));
        let (id, ttl) = self.costs.reserve(bearer.tenant(), &loads, ttl)?;
        let reservation_id = id.as_bytes().to_vec().into();
        Ok(wire::ReserveResponse { reservation_id, ttl_ms: millis(ttl) })
    }

    fn router_release(
        &self,
        bearer: &Bearer,
        request: &wire::ReleaseRequest,
    ) -> Result<wire::ReleaseResponse> {
        let id = ReservationId::read("reservation_id", &request.reservation_id)?;
        self.costs.release(bearer.tenant(), id);
        Ok(wire::ReleaseResponse {})
    }

    fn router_report(
        &self,
        bearer: &Bearer,
        request: &wire::ReportRequest,
    ) -> Result<wire::ReportResponse> {
        let reports = convert::reports(self, &request.loads)?;
        let taken = reports.iter().filter(|report| self.costs.report(bearer.tenant(), report));
        Ok(wire::ReportResponse { taken: count(taken.count()) })
    }
}
