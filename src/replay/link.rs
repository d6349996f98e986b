//! Where the server is, and one client's connection to it.

use std::sync::Arc;

use bytes::BytesMut;
use indicatif::ProgressBar;
use kvstrata_tiers::{
    block::HASH_BYTES_MAX,
    error::Result,
    namespace::{Identity, PartSpec},
};
use tokio::sync::watch;

use super::{crash::Removals, ledger::Ledger, pace::Pace, payload::Source};
use crate::{
    client::{Client, ClientOptions, Handle, HashList, NamespaceSpec, Session},
    trace::Trace,
};

/// Where the server can be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Serving {
    /// How often it has been started.
    pub(super) generation: u64,
    /// `host:port`, or several; `None` while there is none.
    pub(super) endpoint: Option<String>,
}

/// What all clients of one replay have in common.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) trace: Arc<Trace>,
    pub(super) serving: watch::Receiver<Serving>,
    pub(super) block_bytes: u32,
    pub(super) source: Source,
    pub(super) durable: bool,
    /// How clients connect, and the way that their blocks take.
    pub(super) client: ClientOptions,
    pub(super) disturbed: Option<Disturbed>,
    pub(super) progress: ProgressBar,
}

/// What clients keep for a server that is killed now and then.
#[derive(Debug, Clone)]
pub(super) struct Disturbed {
    pub(super) ledger: Ledger,
    pub(super) pace: Arc<Pace>,
    pub(super) removals: Removals,
}

/// A connection with the trace's namespace open and a session.
pub(super) struct Link {
    pub(super) generation: u64,
    pub(super) client: Client,
    pub(super) handle: Handle,
    pub(super) session: Session,
}

impl Link {
    /// Connects to the server that serves now, or in a cluster to the home of an engine called `name`.
    pub(super) async fn open(shared: &Shared, name: &str) -> Result<Self> {
        let serving = shared.serving.borrow().clone();
        Self::open_at(shared, serving, name).await
    }

    /// Connects to a server.
    pub(super) async fn open_at(shared: &Shared, serving: Serving, name: &str) -> Result<Self> {
        let Serving { generation, endpoint } = serving;
        let endpoint = endpoint.unwrap_or_default();
        let options = ClientOptions { instance: Some(name.to_owned()), ..shared.client.clone() };
        let client = Client::connect(&endpoint, options).await?;
        let handle = client.open(namespace(shared)).await?;
        let session = client.session(name).await?;
        Ok(Self { generation, client, handle, session })
    }
}

/// The hash of a trace's block: BLAKE3 of its id (u64, little-endian). Ids name whole prefixes, so
/// there is nothing to chain.
pub(super) fn hashes_of(blocks: &[u32]) -> HashList {
    let mut packed = BytesMut::with_capacity(blocks.len() * HASH_BYTES_MAX);
    for block in blocks {
        packed.extend_from_slice(blake3::hash(&u64::from(*block).to_le_bytes()).as_bytes());
    }
    HashList::of_full(packed.freeze())
}

/// Another trace or another kind of payload is another namespace: their blocks never meet.
fn namespace(shared: &Shared) -> NamespaceSpec {
    let weights = match &shared.source {
        Source::Generated => "generated".to_owned(),
        Source::Sampled(sample) => format!("sampled {}", blake3::hash(sample).to_hex()),
    };
    NamespaceSpec::Engine(Box::new(Identity {
        tenant: String::new(),
        model: format!("replay of {}", shared.trace.name()),
        weights,
        engine: "replay".to_owned(),
        layout: "replay-v1".to_owned(),
        dtype: "bytes".to_owned(),
        block_tokens: shared.trace.block_tokens(),
        parts: vec![PartSpec { group: 0, rank: 0, bytes: shared.block_bytes }],
        split: "none".to_owned(),
        hash_algorithm: "blake3".to_owned(),
        hash_bytes: 32,
        hash_root: Vec::new(),
        lora: Vec::new(),
        cache_salt: Vec::new(),
    }))
}
