//! Opening a namespace: the handle that every block call goes through.

use std::sync::Arc;

use bytes::Bytes;
use kvstrata_proto::v1::{self, Homing, open_request::Kind};
use kvstrata_tiers::{
    block::HASH_BYTES_MAX,
    error::{Error, ErrorKind, Result},
    namespace::{Identity, NamespaceId, PartSpec, Wishes},
};

use super::{
    Client, ClientOptions, HashList, placements::Placements, server::Server,
    status::broken_contract,
};
use crate::members::this_machine;

const OPEN: &str = "open namespace";

/// What to open.
#[derive(Debug, Clone)]
pub enum NamespaceSpec {
    /// Blocks of an engine. The tenant given here is not sent: the server takes it from the
    /// connection's identity.
    Engine(Box<Identity>),
    /// Values under foreign keys, hashed by [`kvstrata_tiers::namespace::foreign_hash`].
    Opaque {
        /// Separates users of foreign keys from one another.
        name: String,
        /// The longest value accepted, in bytes; 0 takes the server's limit.
        bytes_max: u32,
    },
}

/// What the server accepts in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Hashes in one lookup.
    pub lookup_hashes_max: usize,
    /// Blocks in one put stream.
    pub put_blocks_max: usize,
    /// Blocks in one get.
    pub get_blocks_max: usize,
    /// Bytes in one gRPC message.
    pub message_bytes_max: usize,
    /// Bytes in one part.
    pub part_bytes_max: usize,
    /// Bytes one lease may cover.
    pub lease_bytes_max: u64,
    /// The longest lease, in milliseconds.
    pub lease_ttl_ms_max: u32,
}

/// An open namespace of one client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    pub(super) client: Client,
    opened: Arc<Opened>,
    /// What is to be read from other members.
    pub(super) placements: Arc<Placements>,
}

/// What is asked of a server to be opened, and of others later.
#[derive(Debug)]
pub(super) struct Asked {
    kind: Kind,
    wishes: Wishes,
    hash_bytes: usize,
    parts: Box<[PartSpec]>,
}

#[derive(Debug)]
struct Opened {
    id: NamespaceId,
    asked: Asked,
    block_bytes: u64,
    limits: Limits,
    warnings: Vec<String>,
}

impl Client {
    /// Declares a namespace and returns the handle to it. Repeating it is free.
    ///
    /// # Errors
    /// `Invalid` if a field is out of range, and whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: opening is idempotent.
    pub async fn open(&self, spec: NamespaceSpec) -> Result<Handle> {
        self.open_with(spec, Wishes::default()).await
    }

    /// As [`open`](Self::open), with token ids that are kept, or names of other hash schemes.
    ///
    /// # Errors
    /// `Invalid` if a field is out of range, and whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: opening is idempotent.
    pub async fn open_with(&self, spec: NamespaceSpec, wishes: Wishes) -> Result<Handle> {
        let asked = declare(spec, wishes)?;
        // Boxed: it may connect, and every caller would carry that.
        let reply = Box::pin(self.open_at_home(&asked)).await?;
        let opened = Opened {
            id: id_of(&reply)?,
            asked,
            block_bytes: reply.block_bytes,
            limits: Limits::from(reply.limits.unwrap_or_default()),
            warnings: reply.warnings,
        };
        let placements = Arc::default();
        Ok(Handle { client: self.clone(), opened: Arc::new(opened), placements })
    }

    /// Opens a namespace at one server and keeps what that says of its members.
    pub(super) async fn open_at(
        &self,
        server: &Server,
        asked: &Asked,
        homing: Homing,
    ) -> Result<v1::OpenResponse> {
        let ClientOptions { name, instance, node, zone, call_deadline, .. } = self.options();
        let Asked { kind, wishes, .. } = asked;
        let request = v1::OpenRequest {
            kind: Some(kind.clone()),
            keep_tokens: wishes.keep_tokens,
            hash_schemes: wishes.hash_schemes.iter().cloned().collect(),
            instance: instance.clone().unwrap_or_else(|| format!("{name}:{}", std::process::id())),
            node: node.clone().unwrap_or_else(this_machine),
            zone: zone.clone(),
            client_version: concat!("kvstrata ", env!("CARGO_PKG_VERSION")).to_owned(),
            homing: homing.into(),
        };
        let mut wire = server.wire();
        let call = wire.open(self.request(request));
        let mut reply = server.call(OPEN, *call_deadline, call).await?;
        server.learn_members(reply.members.take());
        Ok(reply)
    }
}

fn id_of(reply: &v1::OpenResponse) -> Result<NamespaceId> {
    let id = <[u8; 32]>::try_from(reply.namespace_id.as_ref())
        .map_err(|_wrong_length| broken_contract(OPEN, "namespace_id is not 32 bytes long"))?;
    Ok(NamespaceId::from_bytes(id))
}

impl Handle {
    /// The namespace's id.
    #[must_use]
    pub fn id(&self) -> &NamespaceId {
        &self.opened.id
    }

    /// The client this handle belongs to.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The same namespace through another client, such as one to another node of the cluster. The
    /// node refuses it as unknown unless somebody has opened it there.
    #[must_use]
    pub fn at(&self, client: &Client) -> Self {
        let (client, opened) = (client.clone(), Arc::clone(&self.opened));
        Self { client, opened, placements: Arc::default() }
    }

    /// Opens the namespace again at the server that the client is at, for what that says of it and of others.
    pub(super) async fn open_again(&self) -> Result<()> {
        let reply = self
            .client
            .open_at(&self.client.server(), &self.opened.asked, Homing::Unspecified)
            .await?;
        if id_of(&reply)? == self.opened.id {
            return Ok(());
        }
        let text = "open namespace: the server gives it another id; is it of another cluster?";
        Err(Error::new(ErrorKind::UnknownNamespace, text))
    }

    /// The declared parts; one of any length for an opaque namespace.
    #[must_use]
    pub fn parts(&self) -> &[PartSpec] {
        &self.opened.asked.parts
    }

    /// Bytes of a whole block; 0 for an opaque namespace.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.opened.block_bytes
    }

    /// Whether values have any length.
    #[must_use]
    pub fn is_opaque(&self) -> bool {
        self.opened.block_bytes == 0
    }

    /// What the server accepts in one call.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.opened.limits
    }

    /// What a person should know now, such as another client's hash root.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.opened.warnings
    }

    pub(super) fn wire_id(&self) -> Bytes {
        Bytes::copy_from_slice(self.opened.id.as_bytes())
    }

    /// Refuses hashes of another length than declared, before they cross the wire.
    pub(super) fn check(&self, hashes: &HashList) -> Result<()> {
        if hashes.hash_bytes() == self.opened.asked.hash_bytes {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "hashes: {} bytes each given, exactly {} declared by the namespace",
            hashes.hash_bytes(),
            self.opened.asked.hash_bytes
        )))
    }

    /// The declared parts that `chosen` names, in that order; all when it is empty.
    pub(super) fn chosen_parts(&self, chosen: &[u32]) -> Result<Vec<(u32, PartSpec)>> {
        let numbered = (0_u32..).zip(self.parts().iter().copied());
        if chosen.is_empty() {
            return Ok(numbered.collect());
        }
        let declared: Vec<_> = numbered.collect();
        let find = |part: &u32| {
            declared.iter().find(|(index, _)| index == part).copied().ok_or_else(|| {
                Error::invalid(format!("parts: {part} given, 0 to {} declared", declared.len() - 1))
            })
        };
        chosen.iter().map(find).collect()
    }
}

fn declare(spec: NamespaceSpec, wishes: Wishes) -> Result<Asked> {
    let (kind, hash_bytes, parts): (_, _, Box<[_]>) = match spec {
        NamespaceSpec::Engine(identity) => {
            let hash_bytes = usize::try_from(identity.hash_bytes).unwrap_or(usize::MAX);
            let parts: Box<[_]> = identity.parts.as_slice().into();
            if parts.is_empty() {
                return Err(Error::invalid("parts: none declared, at least 1 required"));
            }
            (Kind::Namespace(wire_of(*identity)), hash_bytes, parts)
        }
        NamespaceSpec::Opaque { name, bytes_max } => {
            let part = PartSpec { group: 0, rank: 0, bytes: bytes_max };
            let kind = Kind::Opaque(v1::OpaqueNamespace { name, bytes_max });
            (kind, HASH_BYTES_MAX, Box::new([part]))
        }
    };
    Ok(Asked { kind, wishes, hash_bytes, parts })
}

fn wire_of(identity: Identity) -> v1::Namespace {
    let part = |part: PartSpec| v1::Part { group: part.group, rank: part.rank, bytes: part.bytes };
    v1::Namespace {
        model: identity.model,
        weights: identity.weights,
        engine: identity.engine,
        layout: identity.layout,
        dtype: identity.dtype,
        block_tokens: identity.block_tokens,
        parts: identity.parts.into_iter().map(part).collect(),
        split: identity.split,
        hash_algorithm: identity.hash_algorithm,
        hash_bytes: identity.hash_bytes,
        hash_root: identity.hash_root.into(),
        lora: identity.lora.into(),
        cache_salt: identity.cache_salt.into(),
    }
}

impl From<v1::Limits> for Limits {
    /// A limit of 0 was not stated: then only the client's own bounds hold.
    fn from(wire: v1::Limits) -> Self {
        let or_unlimited = |value: u32| match usize::try_from(value) {
            Ok(0) | Err(_) => usize::MAX,
            Ok(limit) => limit,
        };
        Self {
            lookup_hashes_max: or_unlimited(wire.lookup_hashes_max),
            put_blocks_max: or_unlimited(wire.put_blocks_max),
            get_blocks_max: or_unlimited(wire.get_blocks_max),
            message_bytes_max: or_unlimited(wire.message_bytes_max),
            part_bytes_max: or_unlimited(wire.part_bytes_max),
            lease_bytes_max: wire.lease_bytes_max,
            lease_ttl_ms_max: wire.lease_ttl_ms_max,
        }
    }
}
