//! The router contract of kvstrata, answered from a set of blocks.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::stream;
use kvstrata_proto::router::v1::{
    Candidate, InstanceAnswer, Locality, LookupRequest, LookupResponse, Prefix, PromptAnswer,
    ReleaseRequest, ReleaseResponse, ReportRequest, ReportResponse, ReserveRequest,
    ReserveResponse, ScoreRequest, ScoreResponse, Scored, Segment, Tier, TierUpdate, WatchRequest,
    WatchTiersRequest, WatchUpdate,
    router_server::{Router, RouterServer},
};
use tokio::{net::TcpListener, runtime::Runtime};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use super::engine::{BLOCK_TOKENS, Store, hashes};

const HOLDER: &str = "kvstrata-0";
const BLOCK_BYTES: u64 = 1 << 20;

/// A running server of the contract; dropping it kills it.
pub(crate) struct Tiers {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<Mutex<State>>,
    runtime: Option<Runtime>,
}

/// What it says, and what it was told.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) store: Store,
    /// Never answers.
    pub(crate) silent: bool,
    /// Knows the engines by their names.
    pub(crate) knows: bool,
    /// Milliseconds until its nvme would begin.
    pub(crate) queue_ms: f64,
    pub(crate) asked: Vec<LookupRequest>,
    pub(crate) told: Vec<ScoreRequest>,
}

impl Tiers {
    pub(crate) fn start(store: &Store) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let state = State { store: Store::clone(store), knows: true, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let service = RouterServer::new(Service(Arc::clone(&state)))
            .max_decoding_message_size(8 << 20)
            .max_encoding_message_size(8 << 20);
        let entered = runtime.enter();
        let incoming = TcpIncoming::from(TcpListener::from_std(listener).unwrap());
        let serving = Server::builder().add_service(service).serve_with_incoming(incoming);
        drop(entered);
        let _detached = runtime.spawn(serving);
        Self { address, state, runtime: Some(runtime) }
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }
}

impl Drop for Tiers {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)))
                .join()
                .unwrap();
        }
    }
}

struct Service(Arc<Mutex<State>>);

impl State {
    fn answer(&self, request: &LookupRequest) -> LookupResponse {
        let prompt = &request.prompts[0];
        let hashes = hashes(&prompt.token_ids);
        let has = self.store.lock().unwrap();
        let blocks = hashes.iter().take_while(|hash| has.contains(hash)).count();
        let blocks = u32::try_from(blocks).unwrap();
        let segment = Segment {
            start: 0,
            end: blocks,
            tier: Tier::Nvme.into(),
            holder: HOLDER.to_owned(),
            locality: Locality::SameNode.into(),
            bytes: u64::from(blocks) * BLOCK_BYTES,
            est_load_ms: self.queue_ms + 0.1 + 0.05 * f64::from(blocks),
            queue_ms: self.queue_ms,
            setup_ms: 0.1,
            block_ms: 0.05,
        };
        let found = blocks > 0;
        let block_tokens = u32::try_from(BLOCK_TOKENS).unwrap();
        let instance = |candidate: &Candidate| InstanceAnswer {
            instance: candidate.instance.clone(),
            segments: Some(segment.clone()).filter(|_| found).into_iter().collect(),
            ..Default::default()
        };
        let prefix = || Prefix { blocks, block_tokens, ..Default::default() };
        let answer = PromptAnswer {
            total_blocks: u32::try_from(hashes.len()).unwrap(),
            prefixes: found.then(prefix).into_iter().collect(),
            instances: request.instances.iter().filter(|_| self.knows).map(instance).collect(),
            ..Default::default()
        };
        LookupResponse { answers: vec![answer], ..Default::default() }
    }
}

#[tonic::async_trait]
impl Router for Service {
    async fn lookup(
        &self,
        request: Request<LookupRequest>,
    ) -> Result<Response<LookupResponse>, Status> {
        let request = request.into_inner();
        let (silent, answer) = {
            let mut state = self.0.lock().unwrap();
            let answer = state.answer(&request);
            state.asked.push(request);
            (state.silent, answer)
        };
        if silent {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(answer))
    }

    async fn score(
        &self,
        request: Request<ScoreRequest>,
    ) -> Result<Response<ScoreResponse>, Status> {
        let request = request.into_inner();
        let scored = vec![Scored::default(); request.candidates.len()];
        self.0.lock().unwrap().told.push(request);
        Ok(Response::new(ScoreResponse { scored, ..Default::default() }))
    }

    type WatchStream = stream::Empty<Result<WatchUpdate, Status>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not asked by the router"))
    }

    type WatchTiersStream = stream::Empty<Result<TierUpdate, Status>>;

    async fn watch_tiers(
        &self,
        _: Request<WatchTiersRequest>,
    ) -> Result<Response<Self::WatchTiersStream>, Status> {
        Err(Status::unimplemented("not asked by the router"))
    }

    async fn reserve(
        &self,
        _: Request<ReserveRequest>,
    ) -> Result<Response<ReserveResponse>, Status> {
        Err(Status::unimplemented("not asked by the router"))
    }

    async fn release(
        &self,
        _: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        Err(Status::unimplemented("not asked by the router"))
    }

    async fn report(&self, _: Request<ReportRequest>) -> Result<Response<ReportResponse>, Status> {
        Err(Status::unimplemented("not asked by the router"))
    }
}
