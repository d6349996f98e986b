//! The manifest of an ordinal: a log of which packs there are and which of their blocks were removed.
//! Each object of the log says what changed; a base says that it says everything.

use super::{Damage, FORMAT_VERSION, Footer, length, short};
use crate::{
    block::BlockHash,
    fields::{Fields, Reader},
    key::IndexKey,
    namespace::NamespaceId,
    object::names::{ClusterName, ManifestId, PackId, Seq},
};

const MAGIC: &[u8; 8] = b"KVSTRMAN";
const HEADER_BYTES: usize = 40;
/// What stands before a record.
const RECORD_BYTES: usize = 8;
const KEY_BYTES: usize = 64;

const PACK: u8 = 1;
const DROPPED: u8 = 2;
const REMOVED: u8 = 3;
const BASE: u8 = 4;

/// One line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestRecord {
    /// There is a pack: what its footer says, and so how long it is
    /// ([`Footer::object_bytes`]).
    Pack(Footer),
    /// There is no such pack (any more).
    Dropped(PackId),
    /// Blocks were removed for good, wherever they are in packs made before a moment.
    Removed {
        /// The blocks.
        keys: Vec<IndexKey>,
        /// Packs from this one on have what was put again since.
        before: Seq,
    },
    /// The objects of this epoch from number `from` up to this one say everything: those before `from`,
    /// and those of earlier epochs, are superseded. It stands in the last object of a base, so that
    /// one which was never finished supersedes nothing.
    Base {
        /// The first object of the base, at most the one that this stands in.
        from: u64,
    },
}

impl ManifestRecord {
    /// Bytes that it takes in a manifest.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let body = match self {
            Self::Pack(footer) => footer.footer_bytes(),
            Self::Dropped(_) => 24,
            Self::Removed { keys, .. } => 16 + (keys.len() * KEY_BYTES) as u64,
            Self::Base { .. } => 8,
        };
        RECORD_BYTES as u64 + body
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Pack(_) => PACK,
            Self::Dropped(_) => DROPPED,
            Self::Removed { .. } => REMOVED,
            Self::Base { .. } => BASE,
        }
    }

    fn encode(&self, out: &mut Fields) {
        let body = u32::try_from(self.bytes()).unwrap_or(u32::MAX);
        out.put(&[self.kind(), 0, 0, 0]).u32(body.saturating_sub(length(RECORD_BYTES)));
        match self {
            Self::Pack(footer) => {
                out.put(&footer.encode());
            }
            Self::Dropped(pack) => {
                out.u32(pack.ordinal).u32(0).u64(pack.epoch).u64(pack.seq);
            }
            Self::Removed { keys, before } => {
                out.u64(before.epoch).u64(before.seq);
                for key in keys {
                    out.put(key.namespace.as_bytes()).put(key.hash.as_bytes());
                }
            }
            Self::Base { from } => {
                out.u64(*from);
            }
        }
    }

    fn decode(fields: &mut Reader<'_>) -> Result<Self, Damage> {
        fields.need(RECORD_BYTES)?;
        let kind = fields.u8();
        fields.zeros(3)?;
        let bytes = fields.size();
        let body = fields.take(bytes)?;
        let mut fields = Reader(body);
        let record = match kind {
            PACK => return Footer::decode(body).map(Self::Pack),
            DROPPED => {
                fields.need(24)?;
                let ordinal = fields.u32();
                fields.zeros(4)?;
                Self::Dropped(PackId { ordinal, epoch: fields.u64(), seq: fields.u64() })
            }
            REMOVED => {
                fields.need(16)?;
                let before = Seq { epoch: fields.u64(), seq: fields.u64() };
                let (keys, _) = fields.0.as_chunks::<KEY_BYTES>();
                let keys = keys.iter().map(decode_key).collect::<Vec<_>>();
                fields.skip(keys.len() * KEY_BYTES);
                Self::Removed { keys, before }
            }
            BASE => {
                fields.need(8)?;
                Self::Base { from: fields.u64() }
            }
            _ => return Err(Damage::Version),
        };
        fields.end()?;
        Ok(record)
    }
}

fn decode_key(bytes: &[u8; KEY_BYTES]) -> IndexKey {
    let mut fields = Reader(bytes);
    let namespace = NamespaceId::from_array(fields.array());
    IndexKey { namespace, hash: BlockHash::from_array(fields.array()) }
}

/// One object of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The cluster.
    pub cluster: ClusterName,
    /// Which object it is.
    pub id: ManifestId,
    /// What it says, in this order.
    pub records: Vec<ManifestRecord>,
}

impl Manifest {
    /// Bytes of one that says nothing.
    #[must_use]
    pub fn empty_bytes(cluster: &ClusterName) -> u64 {
        (HEADER_BYTES + cluster.as_str().len() + 8) as u64
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let records = self.records.iter().map(ManifestRecord::bytes).sum::<u64>();
        let bytes = usize::try_from(Self::empty_bytes(&self.cluster) + records).unwrap_or(0);
        let mut out = Fields::start(MAGIC, FORMAT_VERSION, bytes);
        let cluster = self.cluster.as_str();
        out.u16(short(cluster.len())).u32(self.id.ordinal);
        out.u64(self.id.at.epoch).u64(self.id.at.seq).u32(length(self.records.len())).u32(0);
        out.put(cluster.as_bytes());
        for record in &self.records {
            record.encode(&mut out);
        }
        out.sealed()
    }

    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let mut fields = Reader::open_whole(bytes, MAGIC, FORMAT_VERSION)?;
        fields.need(HEADER_BYTES - 10)?;
        let cluster_bytes = fields.u16();
        let ordinal = fields.u32();
        let at = Seq { epoch: fields.u64(), seq: fields.u64() };
        let count = fields.size();
        fields.zeros(4)?;
        let cluster = super::cluster(&mut fields, cluster_bytes)?;
        let mut records = Vec::new();
        for _ in 0..count {
            records.push(ManifestRecord::decode(&mut fields)?);
        }
        fields.end()?;
        Ok(Self { cluster, id: ManifestId { ordinal, at }, records })
    }
}
