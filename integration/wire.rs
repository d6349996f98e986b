//! A client as bare as the generated code allows: what a test sends is what it says.

use std::time::Duration;

use bytes::Bytes;
use kvstrata_proto::v1::{
    GetRequest, GetResponse, LeaseRequest, LookupRequest, LookupResponse, Namespace, OpenRequest,
    Part, PartData, PutData, PutOffer, PutOutcome, PutRequest, PutResponse, Range, SessionEvent,
    SessionRequest, StatsRequest, StatsResponse, block_cache_client::BlockCacheClient,
    get_response, open_request, put_request, put_response, session_event,
};
use kvstrata_tiers::{block::BlockHash, checksum::part_checksum, namespace::NamespaceId};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use crate::harness::{SERVER_WAIT, Server, wait_until};

/// Length of the hashes of these tests.
pub(crate) const HASH_BYTES: usize = 32;
/// Length of the one part of the blocks of these tests.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// A namespace with one part; tests change what they are about.
pub(crate) fn namespace(model: &str) -> Namespace {
    namespace_of(model, BLOCK_BYTES)
}

/// A namespace with one part of so many bytes.
pub(crate) fn namespace_of(model: &str, bytes: usize) -> Namespace {
    Namespace {
        model: model.to_owned(),
        weights: "revision-1".to_owned(),
        engine: "vllm".to_owned(),
        layout: "paged-1".to_owned(),
        dtype: "bf16".to_owned(),
        block_tokens: 16,
        parts: vec![Part { group: 0, rank: 0, bytes: u32::try_from(bytes).unwrap() }],
        split: "none".to_owned(),
        hash_algorithm: "sha256_cbor".to_owned(),
        hash_bytes: u32::try_from(HASH_BYTES).unwrap(),
        hash_root: vec![1; 32].into(),
        ..Namespace::default()
    }
}

/// The hash of a block by number.
pub(crate) fn hash(number: u64) -> [u8; HASH_BYTES] {
    let mut hash = [0xA5; HASH_BYTES];
    hash[..8].copy_from_slice(&number.to_be_bytes());
    hash[24..].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    hash
}

/// The packed hashes of blocks by number.
pub(crate) fn hashes(numbers: impl IntoIterator<Item = u64>) -> Bytes {
    numbers.into_iter().flat_map(hash).collect()
}

/// The bytes of a block by number: whoever knows the number can check them.
pub(crate) fn payload(number: u64) -> Vec<u8> {
    payload_of(number, BLOCK_BYTES)
}

/// The same for blocks of another length, a multiple of 8.
pub(crate) fn payload_of(number: u64, bytes: usize) -> Vec<u8> {
    let mut state = number ^ 0x5DEE_CE66_D1CE_4E5B;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32).to_le_bytes()
    };
    (0..bytes / 8).flat_map(|_| next()).collect()
}

/// A client with an open namespace, and a session if one was opened.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) client: BlockCacheClient<Channel>,
    pub(crate) namespace_id: Bytes,
    /// Bytes of one block of the namespace.
    pub(crate) block_bytes: usize,
    pub(crate) session_id: Bytes,
    /// The session lives as long as this stream.
    pub(crate) events: Option<Streaming<SessionEvent>>,
}

/// An open put stream.
#[derive(Debug)]
pub(crate) struct PutStream {
    pub(crate) requests: mpsc::Sender<PutRequest>,
    pub(crate) responses: Streaming<PutResponse>,
}

impl Wire {
    /// Connects, opens the namespace and a session.
    pub(crate) async fn connect(server: &Server, namespace: Namespace) -> Self {
        let mut wire = Self::without_session(server, namespace).await;
        wire.open_session().await.unwrap();
        wire
    }

    /// Connects and opens the namespace.
    pub(crate) async fn without_session(server: &Server, namespace: Namespace) -> Self {
        let mut client = server.client().await;
        let opened = client.open(open(namespace)).await.unwrap().into_inner();
        let block_bytes = usize::try_from(opened.block_bytes).unwrap();
        let (namespace_id, session_id) = (opened.namespace_id, Bytes::new());
        Self { client, namespace_id, block_bytes, session_id, events: None }
    }

    pub(crate) async fn open_session(&mut self) -> Result<(), Status> {
        let request = SessionRequest { client: "test".to_owned() };
        let mut events = self.client.session(request).await?.into_inner();
        match events.message().await?.and_then(|event| event.event) {
            Some(session_event::Event::Opened(opened)) => self.session_id = opened.session_id,
            other => panic!("the first event was {other:?}"),
        }
        self.events = Some(events);
        Ok(())
    }

    pub(crate) fn lookup_request(&self, numbers: impl IntoIterator<Item = u64>) -> LookupRequest {
        LookupRequest {
            namespace_id: self.namespace_id.clone(),
            hashes: hashes(numbers),
            session_id: self.session_id.clone(),
            ..LookupRequest::default()
        }
    }

    pub(crate) async fn lookup(
        &mut self,
        numbers: impl IntoIterator<Item = u64>,
    ) -> LookupResponse {
        let request = self.lookup_request(numbers);
        self.client.lookup(request).await.unwrap().into_inner()
    }

    pub(crate) async fn lookup_with_lease(
        &mut self,
        numbers: impl IntoIterator<Item = u64>,
        ttl: Duration,
    ) -> Result<LookupResponse, Status> {
        let ttl_ms = u32::try_from(ttl.as_millis()).unwrap();
        let lease = Some(LeaseRequest { ttl_ms, bytes_max: 0 });
        let request = LookupRequest { lease, ..self.lookup_request(numbers) };
        Ok(self.client.lookup(request).await?.into_inner())
    }

    /// An offer of all parts of these blocks.
    pub(crate) fn offer(&self, numbers: impl IntoIterator<Item = u64>) -> PutOffer {
        PutOffer {
            session_id: self.session_id.clone(),
            namespace_id: self.namespace_id.clone(),
            hashes: hashes(numbers),
            ..PutOffer::default()
        }
    }

    /// The only part of a block, with its checksum.
    pub(crate) fn part(&self, index: u32, number: u64, data: Vec<u8>) -> PartData {
        let id = NamespaceId::from_bytes(self.namespace_id.as_ref().try_into().unwrap());
        let hash = BlockHash::new(&hash(number)).unwrap();
        let checksum = part_checksum(&id, &hash, 0, 0, &data);
        let part_bytes = u32::try_from(data.len()).unwrap();
        PartData { index, checksum, part_bytes, data: data.into(), ..PartData::default() }
    }

    pub(crate) async fn put_stream(&mut self, offer: PutOffer) -> Result<PutStream, Status> {
        let (requests, receiver) = mpsc::channel(4);
        let message = Some(put_request::Message::Offer(offer));
        requests.send(PutRequest { message }).await.unwrap();
        let responses = self.client.put(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(PutStream { requests, responses })
    }

    /// Puts whole blocks with their own bytes; returns the outcome of each.
    pub(crate) async fn put(&mut self, numbers: &[u64]) -> Vec<PutOutcome> {
        let offer = self.offer(numbers.iter().copied());
        self.put_offer(offer, numbers).await.unwrap()
    }

    /// The same, acknowledged when nvme has them.
    pub(crate) async fn put_durable(&mut self, numbers: &[u64]) -> Result<Vec<PutOutcome>, Status> {
        let offer = PutOffer { durable: true, ..self.offer(numbers.iter().copied()) };
        self.put_offer(offer, numbers).await
    }

    async fn put_offer(
        &mut self,
        offer: PutOffer,
        numbers: &[u64],
    ) -> Result<Vec<PutOutcome>, Status> {
        let mut put = self.put_stream(offer).await?;
        for range in put.wanted().await? {
            for index in range.start..range.end {
                let number = numbers[usize::try_from(index).unwrap()];
                put.send(self.part(index, number, payload_of(number, self.block_bytes))).await;
            }
        }
        put.finish(numbers.len()).await
    }

    pub(crate) fn get_request(&self, numbers: impl IntoIterator<Item = u64>) -> GetRequest {
        GetRequest {
            namespace_id: self.namespace_id.clone(),
            hashes: hashes(numbers),
            ..GetRequest::default()
        }
    }

    /// Gets whole blocks; a miss is `None`.
    pub(crate) async fn get(&mut self, numbers: &[u64]) -> Vec<Option<Vec<u8>>> {
        let request = self.get_request(numbers.iter().copied());
        self.read(request, numbers.len()).await.unwrap()
    }

    /// Reads the answer to a get of `count` blocks.
    pub(crate) async fn read(
        &mut self,
        request: GetRequest,
        count: usize,
    ) -> Result<Vec<Option<Vec<u8>>>, Status> {
        let mut responses = self.client.get(request).await?.into_inner();
        let mut blocks = vec![None; count];
        while let Some(GetResponse { message }) = responses.message().await? {
            match message.unwrap() {
                get_response::Message::Miss(_) => {}
                get_response::Message::Data(data) => {
                    for part in data.parts {
                        let block: &mut Option<Vec<u8>> =
                            &mut blocks[usize::try_from(part.index).unwrap()];
                        block.get_or_insert_default().extend_from_slice(&part.data);
                    }
                }
            }
        }
        Ok(blocks)
    }
}

impl PutStream {
    /// Reads what is wanted.
    pub(crate) async fn wanted(&mut self) -> Result<Vec<Range>, Status> {
        match self.responses.message().await?.and_then(|response| response.message) {
            Some(put_response::Message::Wanted(wanted)) => Ok(wanted.ranges),
            other => panic!("the first response was {other:?}"),
        }
    }

    /// Sends a part; an error of the stream is seen by its reader.
    pub(crate) async fn send(&mut self, part: PartData) {
        let message = Some(put_request::Message::Data(PutData { parts: vec![part] }));
        self.requests.send(PutRequest { message }).await.unwrap_or_default();
    }

    /// Ends the requests and reads all results.
    pub(crate) async fn finish(self, count: usize) -> Result<Vec<PutOutcome>, Status> {
        let Self { requests, mut responses } = self;
        drop(requests);
        let mut outcomes = vec![PutOutcome::Unspecified; count];
        while let Some(PutResponse { message }) = responses.message().await? {
            let Some(put_response::Message::Results(results)) = message else {
                panic!("wanted came twice");
            };
            for result in results.results {
                for index in result.start..result.end {
                    outcomes[usize::try_from(index).unwrap()] = result.outcome();
                }
            }
        }
        Ok(outcomes)
    }
}

/// A request to open a namespace.
pub(crate) fn open(namespace: Namespace) -> OpenRequest {
    OpenRequest { kind: Some(open_request::Kind::Namespace(namespace)), ..OpenRequest::default() }
}

/// What the server says of itself.
pub(crate) async fn stats(observer: &Wire) -> StatsResponse {
    observer.client.clone().stats(StatsRequest {}).await.unwrap().into_inner()
}

/// Waits until no session, lease, leased byte or staged byte is left.
pub(crate) async fn wait_nothing_left(observer: &Wire) {
    wait_until("nothing is left", SERVER_WAIT, async || {
        let stats = stats(observer).await;
        (stats.sessions, stats.leases, stats.leased_bytes, stats.staging_bytes) == (0, 0, 0, 0)
    })
    .await;
}
