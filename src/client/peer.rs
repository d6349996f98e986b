//! What the nodes of a cluster ask of one another.

use bytes::Bytes;
use kvstrata_proto::{
    peer::v1::{self as peer, peer_client::PeerClient},
    v1,
};
use kvstrata_tiers::{error::Result, namespace::NamespaceId};
use tokio::time::Instant;
use tonic::{Request, Streaming, metadata::MetadataValue};

use super::{Client, Run, connect::MESSAGE_BYTES_MAX, lookup::answer, status::error_of};
use crate::{auth::TENANT_HEADER, cluster::mirror::Update};

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
        let mut node = PeerClient::new(self.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let request = Request::new(peer::FilterRequest { generation, version });
        let told = node.filter(request).await;
        told.map(|told| FilterUpdates(told.into_inner()))
            .map_err(|status| error_of("ask for a filter", &status))
    }
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
