//! A server of the contract that keeps blocks in a map and lies in one chosen way, so that the
//! client is tested against what no correct server does.

mod plan;

use std::{
    collections::HashMap,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use kvstrata_proto::v1::{
    self,
    block_cache_server::{BlockCache, BlockCacheServer},
    get_response::{self, Message},
    put_request, put_response, session_event,
};
use kvstrata_tiers::{block::BlockHash, checksum::part_checksum, namespace::NamespaceId};
use tokio::{net::TcpListener, runtime::Runtime};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

pub(crate) use plan::Plan;

/// How the server lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    None,
    /// One byte of the second block is flipped.
    FlippedByte,
    /// One byte of the second block is flipped, and the checksum is made to fit.
    ForgedByte,
    /// A lookup leases what it finds, and a get then has none of it.
    BrokenPromise,
    /// Everything is taken, and no lookup finds it.
    AlwaysMiss,
    /// Everything is found without a lease, and a get then has none of it.
    FoundAndGone,
    /// Every put meets other bytes under the same key.
    Differs,
    /// The first two blocks carry one another's bytes and checksums.
    SwappedBlocks,
    /// The first two blocks come in the wrong order.
    SwappedOrder,
    /// The stream ends well after the first block.
    ShortStream,
    /// The stream fails after the first block.
    BrokenStream,
    /// A lookup never answers.
    Silence,
    /// The counts of a lookup do not sum to what was asked.
    WrongSum,
    /// Every put is refused for lack of room, for 70 ms.
    NoRoom,
    /// A lookup fails with a delay of 250 ms in the metadata.
    Overloaded,
}

const NAMESPACE: [u8; 32] = [9; 32];

type Key = (Bytes, u32);
type Value = (Bytes, u64);

/// A running fake.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    pub(crate) lie: Arc<Mutex<Lie>>,
    plan: Arc<Mutex<Plan>>,
    /// Its own, so that dropping the fake also ends its connections.
    runtime: Option<Runtime>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Fake {
    pub(crate) fn start(lie: Lie) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let lie = Arc::new(Mutex::new(lie));
        let plan: Arc<Mutex<Plan>> = Arc::default();
        let store = Store { lie: Arc::clone(&lie), plan: Arc::clone(&plan), ..Default::default() };
        let service = BlockCacheServer::new(store)
            .max_decoding_message_size(8 << 20)
            .max_encoding_message_size(8 << 20);
        let entered = runtime.enter();
        let incoming =
            TcpIncoming::from(TcpListener::from_std(listener).unwrap()).with_nodelay(Some(true));
        let serving = Server::builder().add_service(service).serve_with_incoming(incoming);
        drop(entered);
        let _detached = runtime.spawn(serving);
        Self { address, lie, plan, runtime: Some(runtime) }
    }

    pub(crate) fn endpoint(&self) -> String {
        self.address.to_string()
    }

    /// What it says of its cluster.
    pub(crate) fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap()
    }

    pub(crate) fn lie(&self, lie: Lie) {
        *self.lie.lock().unwrap() = lie;
    }
}

struct Store {
    lie: Arc<Mutex<Lie>>,
    plan: Arc<Mutex<Plan>>,
    parts: Arc<Mutex<u32>>,
    values: Arc<Mutex<HashMap<Key, Value>>>,
}

impl Default for Store {
    fn default() -> Self {
        let lie = Arc::new(Mutex::new(Lie::None));
        Self { lie, plan: Arc::default(), parts: Arc::default(), values: Arc::default() }
    }
}

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn split(packed: &Bytes) -> Vec<Bytes> {
    (0..packed.len() / 32).map(|at| packed.slice(at * 32..at * 32 + 32)).collect()
}

fn wire(number: usize) -> u32 {
    u32::try_from(number).unwrap()
}

impl Store {
    fn lie(&self) -> Lie {
        *self.lie.lock().unwrap()
    }

    fn block(&self, hash: &Bytes, parts: &[u32]) -> Option<Vec<(u32, Value)>> {
        let values = self.values.lock().unwrap();
        parts
            .iter()
            .map(|part| Some((*part, values.get(&(hash.clone(), *part))?.clone())))
            .collect()
    }

    fn has(&self, hash: &Bytes) -> bool {
        let all: Vec<u32> = (0..*self.parts.lock().unwrap()).collect();
        self.block(hash, &all).is_some()
    }

    fn get_messages(&self, request: &v1::GetRequest) -> Vec<Result<v1::GetResponse, Status>> {
        let lie = self.lie();
        let declared: Vec<u32> = (0..*self.parts.lock().unwrap()).collect();
        let parts = if request.parts.is_empty() { declared } else { request.parts.clone() };
        let mut hashes = split(&request.hashes);
        if lie == Lie::SwappedBlocks {
            hashes.swap(0, 1);
        }
        let mut messages: Vec<_> = (0..)
            .zip(&hashes)
            .map(|(index, hash)| match self.block(hash, &parts) {
                Some(_) if matches!(lie, Lie::BrokenPromise | Lie::FoundAndGone) => Ok(miss(index)),
                Some(values) if index == 1 => Ok(data(index, lie.tamper(hash, values))),
                Some(values) => Ok(data(index, values)),
                None => Ok(miss(index)),
            })
            .collect();
        if request.stop_at_miss {
            let is_miss = |message: &Result<v1::GetResponse, Status>| matches!(message, Ok(response) if matches!(response.message, Some(Message::Miss(_))));
            let end = messages.iter().position(is_miss).map_or(messages.len(), |at| at + 1);
            messages.truncate(end);
        }
        match lie {
            Lie::SwappedOrder => messages.swap(0, 1),
            Lie::ShortStream => messages.truncate(1),
            Lie::BrokenStream => {
                messages.truncate(1);
                messages.push(Err(Status::unavailable("gone")));
            }
            _ => {}
        }
        messages
    }
}

impl Lie {
    fn tamper(self, hash: &Bytes, values: Vec<(u32, Value)>) -> Vec<(u32, Value)> {
        let tampered = values.into_iter().map(|(part, (value, checksum))| {
            let mut bytes = value.to_vec();
            if matches!(self, Self::FlippedByte | Self::ForgedByte) {
                *bytes.last_mut().unwrap() ^= 1;
            }
            let hash = BlockHash::new(hash).unwrap();
            let forged = part_checksum(&NamespaceId::from_bytes(NAMESPACE), &hash, 0, part, &bytes);
            let checksum = if self == Self::ForgedByte { forged } else { checksum };
            (part, (bytes.into(), checksum))
        });
        tampered.collect()
    }
}

/// One block in pieces of at most 1 MiB.
fn data(index: u32, values: Vec<(u32, Value)>) -> v1::GetResponse {
    let mut parts = Vec::new();
    for (part, (value, checksum)) in values {
        let mut offset = 0;
        loop {
            let end = value.len().min(offset + (1 << 20));
            let data = value.slice(offset..end);
            let (part_bytes, at) = (wire(value.len()), wire(offset));
            parts.push(v1::PartData { index, part, offset: at, data, checksum, part_bytes });
            offset = end;
            if offset == value.len() {
                break;
            }
        }
    }
    let data = v1::GetData { parts, tier: v1::Tier::Dram.into() };
    v1::GetResponse { message: Some(get_response::Message::Data(data)) }
}

fn miss(index: u32) -> v1::GetResponse {
    let reason = v1::MissReason::Absent.into();
    let miss = v1::GetMiss { start: index, end: index + 1, reason };
    v1::GetResponse { message: Some(get_response::Message::Miss(miss)) }
}

fn put_reply(message: put_response::Message) -> v1::PutResponse {
    v1::PutResponse { message: Some(message) }
}

fn results(count: u32, outcome: v1::PutOutcome) -> v1::PutResponse {
    let result = v1::PutResult { start: 0, end: count, outcome: outcome.into() };
    put_reply(put_response::Message::Results(v1::PutResults { results: vec![result] }))
}

/// Limits far below a real server's, so that splitting is seen.
fn limits() -> v1::Limits {
    v1::Limits {
        lookup_hashes_max: 65_536,
        put_blocks_max: 7,
        get_blocks_max: 5,
        message_bytes_max: 8 << 20,
        part_bytes_max: 64 << 20,
        lease_bytes_max: 1 << 30,
        lease_ttl_ms_max: 60_000,
    }
}

#[tonic::async_trait]
impl BlockCache for Store {
    type SessionStream = Boxed<v1::SessionEvent>;
    type PutStream = Boxed<v1::PutResponse>;
    type GetStream = Boxed<v1::GetResponse>;

    async fn open(
        &self,
        request: Request<v1::OpenRequest>,
    ) -> Result<Response<v1::OpenResponse>, Status> {
        let (parts, block_bytes) = match request.into_inner().kind {
            Some(v1::open_request::Kind::Namespace(namespace)) => {
                let bytes = namespace.parts.iter().map(|part| u64::from(part.bytes)).sum();
                (wire(namespace.parts.len()), bytes)
            }
            _ => (1, 0),
        };
        *self.parts.lock().unwrap() = parts;
        let (members, home) = self.plan.lock().unwrap().opened();
        Ok(Response::new(v1::OpenResponse {
            namespace_id: Bytes::from_static(&NAMESPACE),
            block_bytes,
            limits: Some(limits()),
            members,
            home,
            ..Default::default()
        }))
    }

    async fn session(
        &self,
        _request: Request<v1::SessionRequest>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let opened =
            v1::SessionOpened { session_id: Bytes::from_static(&[1; 16]), ..Default::default() };
        let first = v1::SessionEvent { event: Some(session_event::Event::Opened(opened)) };
        let draining = v1::Draining { grace_ms: 1234 };
        let second = v1::SessionEvent { event: Some(session_event::Event::Draining(draining)) };
        let mut plan = self.plan.lock().unwrap();
        plan.sessions += 1;
        let told = if plan.stays { vec![Ok(first)] } else { vec![Ok(first), Ok(second)] };
        let events = stream::iter(told).chain(stream::pending());
        Ok(Response::new(Box::pin(events)))
    }

    async fn lookup(
        &self,
        request: Request<v1::LookupRequest>,
    ) -> Result<Response<v1::LookupResponse>, Status> {
        if self.lie() == Lie::Silence {
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
        if self.lie() == Lie::Overloaded {
            let mut status = Status::resource_exhausted("too many lookups");
            status.metadata_mut().insert("retry-after-ms", "250".parse().unwrap());
            return Err(status);
        }
        let request = request.into_inner();
        let hashes = split(&request.hashes);
        let found = |hash: &&Bytes| self.lie() != Lie::AlwaysMiss && self.has(hash);
        let mut plan = self.plan.lock().unwrap();
        plan.lookups += 1;
        let runs = plan.runs(&hashes, |hash| found(&hash));
        let (mut prefix, mut sparse) = (wire(hashes.iter().take_while(found).count()), Vec::new());
        let mut named = Vec::new();
        if plan.members.is_some() {
            prefix = 0;
            for run in runs {
                let follows = run.start == prefix;
                prefix = if follows { run.end } else { prefix };
                if follows { named.push(run) } else { sparse.push(run) }
            }
        }
        let members_epoch = plan.members.as_ref().map_or(0, |members| members.epoch);
        let asked = wire(hashes.len());
        let off = u32::from(self.lie() == Lie::WrongSum);
        let counts =
            v1::TierCounts { dram: prefix, miss: asked - prefix + off, ..Default::default() };
        Ok(Response::new(v1::LookupResponse {
            asked,
            prefix_blocks: prefix,
            counts: Some(counts),
            runs: named,
            sparse: if request.sparse { sparse } else { Vec::new() },
            members_epoch,
            lease: request.lease.filter(|_| self.lie() != Lie::FoundAndGone).map(|_| v1::Lease {
                lease_id: Bytes::from_static(&[2; 16]),
                blocks: prefix,
                ttl_ms: 30_000,
                ..Default::default()
            }),
            ..Default::default()
        }))
    }

    async fn put(
        &self,
        request: Request<Streaming<v1::PutRequest>>,
    ) -> Result<Response<Self::PutStream>, Status> {
        let mut messages = request.into_inner();
        let Some(put_request::Message::Offer(offer)) =
            messages.message().await?.and_then(|message| message.message)
        else {
            return Err(Status::invalid_argument("offer first"));
        };
        let hashes = split(&offer.hashes);
        let count = wire(hashes.len());
        if self.lie() == Lie::NoRoom {
            let wanted = v1::PutWanted { ranges: Vec::new(), retry_after_ms: 70 };
            let replies = [
                Ok(put_reply(put_response::Message::Wanted(wanted))),
                Ok(results(count, v1::PutOutcome::Refused)),
            ];
            return Ok(Response::new(Box::pin(stream::iter(replies))));
        }
        let lie = self.lie();
        let outcome = if lie == Lie::Differs {
            v1::PutOutcome::DuplicateDiffers
        } else {
            v1::PutOutcome::Stored
        };
        let ranges = vec![v1::Range { start: 0, end: count }];
        let wanted = v1::PutWanted { ranges, retry_after_ms: 0 };
        let values = Arc::clone(&self.values);
        let tail = async move {
            while let Some(message) = messages.message().await? {
                let Some(put_request::Message::Data(data)) = message.message else {
                    break;
                };
                for piece in data.parts {
                    let key = (hashes[piece.index as usize].clone(), piece.part);
                    let mut values = values.lock().unwrap();
                    let (value, checksum) = values.entry(key).or_default();
                    if piece.offset == 0 {
                        value.clear();
                    }
                    assert_eq!(piece.offset as usize, value.len());
                    *value = [value.as_ref(), piece.data.as_ref()].concat().into();
                    *checksum = piece.checksum;
                }
            }
            Ok(results(count, outcome))
        };
        let first = Ok(put_reply(put_response::Message::Wanted(wanted)));
        Ok(Response::new(Box::pin(stream::iter([first]).chain(stream::once(tail)))))
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<Self::GetStream>, Status> {
        let answers = self.plan.lock().unwrap().asked()?;
        if !answers {
            std::future::pending::<()>().await;
        }
        let messages = self.get_messages(&request.into_inner());
        Ok(Response::new(Box::pin(stream::iter(messages))))
    }

    async fn touch(
        &self,
        request: Request<v1::TouchRequest>,
    ) -> Result<Response<v1::TouchResponse>, Status> {
        let touched = wire(split(&request.into_inner().hashes).len());
        Ok(Response::new(v1::TouchResponse { touched }))
    }

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Err(Status::unimplemented("not in the fake"))
    }

    async fn prefetch(
        &self,
        _: Request<v1::PrefetchRequest>,
    ) -> Result<Response<v1::PrefetchResponse>, Status> {
        Err(Status::unimplemented("not in the fake"))
    }

    async fn release(
        &self,
        _: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseResponse>, Status> {
        Ok(Response::new(v1::ReleaseResponse {}))
    }

    async fn renew(
        &self,
        _: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewResponse>, Status> {
        Err(Status::aborted("ended"))
    }

    async fn remove(
        &self,
        _: Request<v1::RemoveRequest>,
    ) -> Result<Response<v1::RemoveResponse>, Status> {
        Err(Status::unimplemented("not in the fake"))
    }

    async fn stats(
        &self,
        _: Request<v1::StatsRequest>,
    ) -> Result<Response<v1::StatsResponse>, Status> {
        let dram = v1::TierStats { tier: v1::Tier::Dram.into(), ..v1::TierStats::default() };
        Ok(Response::new(v1::StatsResponse { tiers: vec![dram], ..v1::StatsResponse::default() }))
    }
}
