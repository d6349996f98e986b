//! The calls of `kvstrata.v1.BlockCache`. Puts and gets are in their own files.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use kvstrata_proto::v1::{self as wire, block_cache_server::BlockCache};
use kvstrata_tiers::{error::Result, namespace::Wishes, stack::Chain};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use super::{Calls, Node, Observed, bearer_of, convert, get, put, stats};
use crate::{
    auth::Bearer,
    cluster::home,
    flow::{self, Prefetched},
    id::{LeaseId, SessionId},
    limits::LOOKUP_HASHES_MAX,
    members::{Member, Members, Roster},
    metrics::Op,
    openers::Opener,
    schemes,
    session::{Event, SessionGuard},
};

/// What a client is told that wishes for what the first one did not.
const KEEPS_NO_TOKENS: &str = "keep_tokens: another client has opened the namespace without it since the \
    server started, so token ids are not kept, nor found by; set it for all clients, then restart the server";

pub(super) type Pins = Vec<kvstrata_tiers::stack::Pin>;

/// The service; clones share the node.
#[derive(Debug, Clone)]
pub struct BlockService {
    node: Arc<Node>,
    calls: Calls,
}

impl BlockService {
    /// Serves `node`.
    #[must_use]
    pub fn new(node: Arc<Node>, calls: Calls) -> Self {
        Self { node, calls }
    }
}

#[tonic::async_trait]
impl BlockCache for BlockService {
    type SessionStream = Observed<wire::SessionEvent>;
    type PutStream = Observed<wire::PutResponse>;
    type GetStream = Observed<wire::GetResponse>;

    async fn open(
        &self,
        request: Request<wire::OpenRequest>,
    ) -> Result<Response<wire::OpenResponse>, Status> {
        let bearer = bearer_of(&request)?;
        self.calls.unary(Op::Open, async { self.node.open(&bearer, request.into_inner()) }).await
    }

    async fn session(
        &self,
        request: Request<wire::SessionRequest>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let bearer = bearer_of(&request)?;
        match self.node.begin_session(bearer, request.into_inner()) {
            Ok(events) => Ok(Response::new(self.calls.stream(Op::Session, events))),
            Err(why) => self.calls.unary(Op::Session, async { Err(why) }).await,
        }
    }

    async fn lookup(
        &self,
        request: Request<wire::LookupRequest>,
    ) -> Result<Response<wire::LookupResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = self.node.lookup(&bearer, request.into_inner());
        self.calls.unary(Op::Lookup, work).await
    }

    async fn put(
        &self,
        request: Request<Streaming<wire::PutRequest>>,
    ) -> Result<Response<Self::PutStream>, Status> {
        let bearer = bearer_of(&request)?;
        let responses = put::responses(Arc::clone(&self.node), bearer, request.into_inner());
        Ok(Response::new(self.calls.stream(Op::Put, responses)))
    }

    async fn get(
        &self,
        request: Request<wire::GetRequest>,
    ) -> Result<Response<Self::GetStream>, Status> {
        let bearer = bearer_of(&request)?;
        let responses = get::responses(&self.node, &bearer, request.into_inner());
        Ok(Response::new(self.calls.stream(Op::Get, responses)))
    }

    async fn describe(
        &self,
        request: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::DescribeResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.describe(&bearer, &request.into_inner()) };
        self.calls.unary(Op::Describe, work).await
    }

    async fn touch(
        &self,
        request: Request<wire::TouchRequest>,
    ) -> Result<Response<wire::TouchResponse>, Status> {
        let bearer = bearer_of(&request)?;
        self.calls.unary(Op::Touch, async { self.node.touch(&bearer, &request.into_inner()) }).await
    }

    async fn prefetch(
        &self,
        request: Request<wire::PrefetchRequest>,
    ) -> Result<Response<wire::PrefetchResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.prefetch_blocks(&bearer, &request.into_inner()) };
        self.calls.unary(Op::Prefetch, work).await
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.release(&bearer, &request.into_inner()) };
        self.calls.unary(Op::Release, work).await
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = async { self.node.renew(&bearer, &request.into_inner()) };
        self.calls.unary(Op::Renew, work).await
    }

    async fn remove(
        &self,
        request: Request<wire::RemoveRequest>,
    ) -> Result<Response<wire::RemoveResponse>, Status> {
        let bearer = bearer_of(&request)?;
        let work = self.node.remove(&bearer, request.into_inner());
        self.calls.unary(Op::Remove, work).await
    }

    async fn stats(
        &self,
        request: Request<wire::StatsRequest>,
    ) -> Result<Response<wire::StatsResponse>, Status> {
        let bearer = bearer_of(&request)?;
        self.calls.unary(Op::Stats, async { Ok(stats::of(&self.node, &bearer)) }).await
    }
}

impl Node {
    fn open(&self, bearer: &Bearer, request: wire::OpenRequest) -> Result<wire::OpenResponse> {
        let instance = convert::label("instance", request.instance)?;
        let host = convert::label("node", request.node)?;
        let zone = convert::label("zone", request.zone)?;
        let client_version = convert::label("client_version", request.client_version)?;
        let spec = convert::namespace_spec(bearer.tenant(), request.kind)?;
        let (keep_tokens, homing) = (request.keep_tokens, request.homing);
        let hash_schemes = schemes::checked(&request.hash_schemes, &spec, keep_tokens)?;
        let mut opened = self.namespaces.open(spec, Wishes { keep_tokens, hash_schemes })?;
        let namespace = opened.namespace;
        self.schemes.opened(&namespace);
        if keep_tokens && !namespace.keeps_tokens() {
            opened.warnings.push(KEEPS_NO_TOKENS.to_owned());
        }
        if opened.new {
            let id = namespace.id().short();
            info!(
                namespace = id,
                tenant = bearer.tenant(),
                instance,
                host,
                zone,
                client_version,
                "namespace opened"
            );
            let mismatches = self.namespaces.root_mismatches().len();
            self.metrics.hash_root_mismatches.set(i64::try_from(mismatches).unwrap_or(i64::MAX));
            for warning in &opened.warnings {
                warn!(namespace = id, instance, host, warning, "namespace needs attention");
            }
        }
        let home =
            self.home_of(homing, &home::Engine { instance: &instance, node: &host, zone: &zone });
        let at = Instant::now();
        let opener = Opener { instance, host, zone, client_version, at };
        self.openers.note(namespace.index(), opener);
        Ok(wire::OpenResponse {
            namespace_id: namespace.id().as_bytes().to_vec().into(),
            block_bytes: namespace.layout().block_bytes(),
            limits: Some(convert::limits(self.leases.limits())),
            members: Some(convert::members(&self.roster.now())),
            home,
            warnings: opened.warnings,
        })
    }

    /// The home of an engine, if it asks for one and says which one it is; it is counted if that is here.
    fn home_of(&self, homing: i32, engine: &home::Engine<'_>) -> Option<u32> {
        let asked = match wire::Homing::try_from(homing) {
            Ok(wire::Homing::Asked) => home::Asked::Member(Roster::OWN),
            Ok(wire::Homing::Sent) => home::Asked::SentTo(Roster::OWN),
            Ok(wire::Homing::Unspecified) | Err(_) => return None,
        };
        if engine.instance.is_empty() {
            return None;
        }
        let mut members = self.roster.now().list.clone();
        // It must not lose a home because it is counted there.
        for own in members.iter_mut().filter(|member| member.index == Roster::OWN) {
            own.engines = self.openers.engines_besides(engine.instance);
        }
        let home = self.sent_on(engine, &members).or_else(|| home::home(engine, &members, asked));
        self.openers.note_engine(engine.instance, home == Some(Roster::OWN));
        let elsewhere =
            members.iter().find(|member| Some(member.index) == home && member.index != Roster::OWN);
        let is_ours =
            home::first_choice(engine, &members).is_some_and(|first| first.index == Roster::OWN);
        if let Some(member) = elsewhere.filter(|_| is_ours) {
            self.openers.note_sent_on(engine.instance, &member.name);
        }
        home
    }

    /// Where an engine was sent that belongs here, but found no room: it goes there again, for its blocks are there.
    fn sent_on(&self, engine: &home::Engine<'_>, members: &[Member]) -> Option<u32> {
        let name = self.openers.sent_on(engine.instance)?;
        let first = home::first_choice(engine, members)?;
        let there = members.iter().find(|member| member.name == name && !member.draining)?;
        (first.index == Roster::OWN).then_some(there.index)
    }

    fn begin_session(
        self: &Arc<Self>,
        bearer: Arc<Bearer>,
        request: wire::SessionRequest,
    ) -> Result<impl futures_util::Stream<Item = Result<wire::SessionEvent, Status>> + use<>> {
        let client = convert::label("client", request.client)?;
        let (guard, events) = self.sessions.open(client, bearer)?;
        let mut members = self.roster.follow();
        let known = convert::members(&members.borrow_and_update());
        let opened = wire::SessionOpened {
            session_id: guard.session().id().as_bytes().to_vec().into(),
            limits: Some(convert::limits(self.leases.limits())),
            members: Some(known),
        };
        let opened = session_event(wire::session_event::Event::Opened(opened));
        let told = (guard, events, members);
        let later = stream::unfold(told, |(guard, mut events, mut members)| async move {
            let event = next_event(&guard, &mut events, &mut members).await?;
            Some((event, (guard, events, members)))
        });
        Ok(stream::iter([opened]).chain(later).map(Ok))
    }

    fn describe(
        &self,
        bearer: &Bearer,
        request: &wire::DescribeRequest,
    ) -> Result<wire::DescribeResponse> {
        let namespace = self.namespace(bearer, &request.namespace_id)?;
        let hashes = namespace.hashes(&request.hashes, LOOKUP_HASHES_MAX, "hashes")?;
        let parent = flow::parent(&namespace, &request.parent)?;
        let chain = Chain {
            hashes,
            parent,
            position: request.position,
            tokens: &request.tokens,
            lora_name: &request.lora_name,
        };
        Ok(wire::DescribeResponse { described: self.stack.describe(&namespace, chain)? })
    }

    fn touch(&self, bearer: &Bearer, request: &wire::TouchRequest) -> Result<wire::TouchResponse> {
        let namespace = self.namespace(bearer, &request.namespace_id)?;
        let hashes = namespace.hashes(&request.hashes, LOOKUP_HASHES_MAX, "hashes")?;
        Ok(wire::TouchResponse { touched: self.stack.touch(&namespace, hashes) })
    }

    async fn remove(
        &self,
        bearer: &Bearer,
        request: wire::RemoveRequest,
    ) -> Result<wire::RemoveResponse> {
        let namespace = self.namespace(bearer, &request.namespace_id)?;
        let hashes = namespace.hashes(&request.hashes, LOOKUP_HASHES_MAX, "hashes")?;
        Ok(wire::RemoveResponse { removed: self.stack.remove(&namespace, hashes).await? })
    }

    fn prefetch_blocks(
        self: &Arc<Self>,
        bearer: &Bearer,
        request: &wire::PrefetchRequest,
    ) -> Result<wire::PrefetchResponse> {
        let namespace = self.namespace(bearer, &request.namespace_id)?;
        let hashes = namespace.hashes(&request.hashes, LOOKUP_HASHES_MAX, "hashes")?;
        let Prefetched { in_dram, started } = self.prefetch(&namespace, hashes);
        Ok(wire::PrefetchResponse { in_dram, started })
    }

    fn release(
        &self,
        bearer: &Bearer,
        request: &wire::ReleaseRequest,
    ) -> Result<wire::ReleaseResponse> {
        let session = SessionId::read("session_id", &request.session_id)?;
        let lease = LeaseId::read("lease_id", &request.lease_id)?;
        // What is unknown is a success, and that of another tenant is unknown.
        if self.session(bearer, session).is_ok() {
            self.leases.release(session, lease);
        }
        Ok(wire::ReleaseResponse {})
    }

    fn renew(&self, bearer: &Bearer, request: &wire::RenewRequest) -> Result<wire::RenewResponse> {
        let session = SessionId::read("session_id", &request.session_id)?;
        let lease = LeaseId::read("lease_id", &request.lease_id)?;
        let ttl = Duration::from_millis(u64::from(request.ttl_ms));
        self.session(bearer, session)?;
        let granted = self.leases.renew(session, lease, self.leases.ttl("ttl_ms", ttl)?)?;
        Ok(wire::RenewResponse { lease: Some(convert::lease(&granted)) })
    }
}

async fn next_event(
    guard: &SessionGuard<Pins>,
    events: &mut mpsc::Receiver<Event>,
    members: &mut watch::Receiver<Arc<Members>>,
) -> Option<wire::SessionEvent> {
    tokio::select! {
        biased;
        () = guard.session().ended().cancelled() => None,
        () = guard.session().bearer().revoked().cancelled() => {
            info!(session = ?guard.session().id(), "token revoked, ending its session");
            None
        }
        event = events.recv() => event.map(|Event::Draining(grace)| {
            let draining = wire::Draining { grace_ms: flow::millis(grace) };
            session_event(wire::session_event::Event::Draining(draining))
        }),
        Ok(()) = members.changed() => {
            let list = convert::members(&members.borrow_and_update());
            Some(session_event(wire::session_event::Event::Members(list)))
        }
    }
}

fn session_event(event: wire::session_event::Event) -> wire::SessionEvent {
    wire::SessionEvent { event: Some(event) }
}
