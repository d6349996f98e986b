//! What the nodes of a cluster ask of one another.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_proto::{
    peer::v1::{self as peer, peer_client::PeerClient},
    router::v1 as router,
    v1,
};
use kvstrata_tiers::{error::Result, namespace::NamespaceId, tier::Tier};
use tokio::time::Instant;
use tonic::{Request, Streaming, metadata::MetadataValue};

use super::{
    Client, Run, access::Carrier, connect::MESSAGE_BYTES_MAX, lookup::answer, status::error_of,
};
use crate::{
    auth::TENANT_HEADER,
    cluster::{mirror::Update, told::Told},
    costs::{Locality, TierCost, TierState},
    limits::OPENERS_TOLD_MAX,
    openers::Opener,
};

/// Costs that are taken of what a node tells: of each tier at each distance.
const COSTS_MAX: usize = Tier::ALL.len() * Locality::ALL.len();

/// A lookup in the name of a tenant, as only nodes may make one.
#[derive(Debug, Clone)]
pub(crate) struct PeerLookup<'a> {
    /// Whose namespace it is.
    pub(crate) tenant: &'a str,
    /// Its id, which is the same at all nodes.
    pub(crate) namespace: &'a NamespaceId,
    /// Hashes, packed.
    pub(crate) hashes: Bytes,
    /// How many these are.
    pub(crate) asked: usize,
    /// Host and zone of where the blocks would be loaded.
    pub(crate) reader: (&'a str, &'a str),
}

/// What a node tells of its filter.
#[derive(Debug)]
pub(crate) struct FilterUpdates(Streaming<peer::FilterUpdate>);

impl Client {
    /// The readable or pending runs that the node itself has of these, from the first one on.
    ///
    /// # Errors
    /// `UnknownNamespace` if nobody has opened it there, and whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: it changes nothing.
    pub(crate) async fn lookup_for(&self, lookup: PeerLookup<'_>) -> Result<Vec<Run>> {
        const DOING: &str = "look up at a member";
        let message = v1::LookupRequest {
            namespace_id: Bytes::copy_from_slice(lookup.namespace.as_bytes()),
            hashes: lookup.hashes,
            local: true,
            reader_node: lookup.reader.0.to_owned(),
            reader_zone: lookup.reader.1.to_owned(),
            ..v1::LookupRequest::default()
        };
        let mut request = self.request(message);
        name_tenant(&mut request, lookup.tenant);
        let mut wire = self.wire();
        let reply = wire.lookup(request).await.map_err(|status| error_of(DOING, &status))?;
        Ok(answer(reply.into_inner(), lookup.asked, None, Instant::now())?.runs)
    }

    /// Asks which blocks the node may have; the asker has a filter of this generation and version, 0 for none.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: it changes nothing.
    pub(crate) async fn filter(&self, known: (u64, u64)) -> Result<FilterUpdates> {
        let (generation, version) = known;
        let request = Request::new(peer::FilterRequest { generation, version });
        let told = self.node().filter(request).await;
        told.map(|told| FilterUpdates(told.into_inner()))
            .map_err(|status| error_of("ask for a filter", &status))
    }

    /// Asks what the node tells of itself; the asker knows its openers of this version, 0 for none. If that is the
    /// latest, none are told.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: it changes nothing.
    pub(crate) async fn tell(&self, openers_version: u64) -> Result<Told> {
        let request = Request::new(peer::TellRequest { openers_version });
        let told = self.node().tell(request).await;
        let told = told.map_err(|status| error_of("ask what a node tells of itself", &status))?;
        Ok(told_of(told.into_inner()))
    }

    fn node(&self) -> PeerClient<Carrier> {
        PeerClient::new(self.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }
}

/// What cannot be meant is left out.
fn told_of(wire: peer::TellResponse) -> Told {
    let mut openers: HashMap<NamespaceId, Vec<Opener>> = HashMap::new();
    let now = Instant::now();
    for peer::Opener { namespace_id, instance, host, zone } in
        wire.openers.into_iter().take(OPENERS_TOLD_MAX)
    {
        let Ok(id) = <[u8; 32]>::try_from(&*namespace_id) else { continue };
        let client_version = String::new();
        let opener = Opener { instance, host, zone, client_version, at: now };
        openers.entry(NamespaceId::from_bytes(id)).or_default().push(opener);
    }
    Told {
        costs: wire.costs.iter().take(COSTS_MAX).filter_map(cost_of).collect(),
        shared_memory: wire.shared_memory,
        openers_version: wire.openers_version,
        openers: Arc::new(openers),
    }
}

fn cost_of(wire: &router::TierCost) -> Option<TierCost> {
    let time = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok();
    let tier = match wire.tier() {
        router::Tier::Dram => Tier::Dram,
        router::Tier::Nvme => Tier::Nvme,
        router::Tier::Object => Tier::Object,
        router::Tier::Unspecified => return None,
    };
    let locality = match wire.locality() {
        router::Locality::SharedMemory => Locality::SharedMemory,
        router::Locality::SameNode => Locality::SameNode,
        router::Locality::SameZone => Locality::SameZone,
        router::Locality::Remote => Locality::Remote,
        router::Locality::Unspecified => return None,
    };
    let state = match wire.state() {
        router::TierState::Unspecified | router::TierState::Ok => TierState::Ok,
        router::TierState::Degraded => TierState::Degraded,
        router::TierState::Down => TierState::Down,
    };
    let is_speed = wire.bandwidth.is_finite() && wire.bandwidth > 0.0;
    is_speed.then_some(TierCost {
        node: wire.node.clone(),
        tier,
        locality,
        bandwidth: wire.bandwidth,
        setup: time(wire.setup_ms)?,
        queue: time(wire.queue_ms)?,
        queued_bytes: wire.queued_bytes,
        in_flight: wire.in_flight,
        state,
        sample_age: (!wire.assumed).then(|| Duration::from_millis(wire.sample_age_ms.into())),
    })
}

impl FilterUpdates {
    /// The next step; none at the end.
    ///
    /// # Errors
    /// Whatever ends the stream before.
    ///
    /// # Cancel safety
    /// Safe: a step is lost only with the stream.
    pub(crate) async fn next(&mut self) -> Result<Option<Update>> {
        let told = self.0.message().await.map_err(|status| error_of("take a filter", &status))?;
        Ok(told.map(|told| Update {
            generation: told.generation,
            version: told.version,
            keys: told.keys,
            offset: told.offset,
            words: told.words,
            added: told.added,
            complete: told.complete,
        }))
    }
}

/// Says for whom a node asks. A name that no header can carry is no tenant's of the other node.
fn name_tenant<T>(request: &mut Request<T>, tenant: &str) {
    if let Ok(tenant) = MetadataValue::try_from(tenant) {
        request.metadata_mut().insert(TENANT_HEADER, tenant);
    }
}
