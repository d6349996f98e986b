//! What is to be appended: a record's contents, and who is told.

use tokio::sync::oneshot;

use super::{
    format::{Kind, RecordHeader, Shape, Tombstone},
    index::{IndexEntry, IndexKey},
};
use crate::{
    error::Result,
    map::Location,
    namespace::{Namespace, NamespaceId},
    store::{Outgoing, Payload, Wanted},
};

/// Bytes of a record.
#[derive(Debug)]
pub(super) enum Bytes {
    Arena(Payload),
    Heap(Vec<u8>),
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Arena(payload) => payload.as_ref(),
            Self::Heap(bytes) => bytes,
        }
    }
}

/// Who is told when a record is durable and indexed.
#[derive(Debug)]
pub(super) enum Then {
    Put(oneshot::Sender<Result<Location>>),
    Removed(oneshot::Sender<Result<()>>, Vec<Wanted>),
    /// Copied from another place.
    Moved(Wanted),
    /// Tombstones that could not be written before.
    Owed,
    Nobody,
}

/// A record to be written.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) kind: Kind,
    pub(super) key: IndexKey,
    pub(super) layout: u64,
    pub(super) sums: Vec<u64>,
    pub(super) bytes: Bytes,
    /// For blocks: what must be in the segment before it.
    pub(super) namespace: Option<(NamespaceId, Vec<u8>)>,
    /// For tombstones that were in the log already: their barriers.
    pub(super) tombstones: Vec<Tombstone>,
    pub(super) then: Then,
}

impl Item {
    /// Bytes of the record of a block.
    pub(super) fn record_bytes(block: &Outgoing) -> u64 {
        Shape::of(block.checksums.as_slice().len(), block.payload.as_ref().len()).bytes()
    }

    pub(super) fn block(block: Outgoing, done: oneshot::Sender<Result<Location>>) -> Self {
        Self {
            kind: Kind::Block,
            key: IndexKey { namespace: *block.namespace.id(), hash: block.hash },
            layout: block.namespace.layout().digest(),
            sums: block.checksums.as_slice().to_vec(),
            bytes: Bytes::Arena(block.payload),
            namespace: Some(encoded(&block.namespace)),
            tombstones: Vec::new(),
            then: Then::Put(done),
        }
    }

    pub(super) fn tombstones(blocks: Vec<Wanted>, done: oneshot::Sender<Result<()>>) -> Self {
        let then = Then::Removed(done, blocks);
        Self { then, ..Self::note(Kind::Tombstones, IndexKey::NONE, Vec::new()) }
    }

    /// Tombstones that another segment held.
    pub(super) fn old_tombstones(tombstones: Vec<Tombstone>) -> Self {
        Self { tombstones, ..Self::note(Kind::Tombstones, IndexKey::NONE, Vec::new()) }
    }

    /// Tombstones that could not be written before.
    pub(super) fn owed(tombstones: Vec<Tombstone>) -> Self {
        Self { then: Then::Owed, ..Self::old_tombstones(tombstones) }
    }

    /// A block that another segment held.
    pub(super) fn moved(
        from: Wanted,
        header: RecordHeader,
        payload: Vec<u8>,
        namespace: &Namespace,
    ) -> Self {
        Self {
            kind: Kind::Block,
            key: header.key,
            layout: header.layout,
            sums: header.sums,
            bytes: Bytes::Heap(payload),
            namespace: Some(encoded(namespace)),
            tombstones: Vec::new(),
            then: Then::Moved(from),
        }
    }

    pub(super) fn note(kind: Kind, key: IndexKey, bytes: Vec<u8>) -> Self {
        Self {
            kind,
            key,
            layout: 0,
            sums: Vec::new(),
            bytes: Bytes::Heap(bytes),
            namespace: None,
            tombstones: Vec::new(),
            then: Then::Nobody,
        }
    }

    fn payload_len(&self) -> usize {
        let removed = match &self.then {
            Then::Removed(_, blocks) => blocks.len(),
            Then::Put(_) | Then::Moved(_) | Then::Owed | Then::Nobody => 0,
        };
        let tombstones = removed + self.tombstones.len();
        if tombstones > 0 { tombstones * Tombstone::BYTES } else { self.bytes.as_ref().len() }
    }

    /// Bytes of the record.
    pub(super) fn bytes(&self) -> u64 {
        Shape::of(self.sums.len(), self.payload_len()).bytes()
    }
}

fn encoded(namespace: &Namespace) -> (NamespaceId, Vec<u8>) {
    (*namespace.id(), namespace.encoded())
}

/// Bytes of the record of an entry.
pub(super) fn bytes_of(entry: &IndexEntry) -> u64 {
    let len = usize::try_from(entry.len).unwrap_or(usize::MAX);
    Shape::of(entry.checksums.as_slice().len(), len).bytes()
}
