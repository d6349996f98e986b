//! Who holds an epoch, and that he is still there.

use super::{Damage, FORMAT_VERSION, short};
use crate::{
    fields::{Fields, Reader},
    object::names::{ClusterName, EpochId},
};

const EPOCH_MAGIC: &[u8; 8] = b"KVSTREPO";
const ALIVE_MAGIC: &[u8; 8] = b"KVSTRALV";
const HEADER_BYTES: usize = 48;

/// The longest name of a holder, in bytes: that of a DNS name.
pub const HOLDER_BYTES_MAX: usize = 253;

/// As what an epoch is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// The ordinal is the holder's own.
    #[default]
    Own,
    /// The holder stands in for a node that is gone, until it returns.
    Ward,
    /// Nobody holds it: whoever wants it may take it at once.
    Released,
    /// Nobody holds it, and there is nothing in it to stand in for.
    Empty,
}

impl Role {
    /// The role of a number, as it is written.
    fn of(number: u8) -> Option<Self> {
        [Self::Own, Self::Ward, Self::Released, Self::Empty].into_iter().nth(number.into())
    }

    /// Whether the node that opened the epoch holds it.
    #[must_use]
    pub fn is_held(self) -> bool {
        matches!(self, Self::Own | Self::Ward)
    }
}

/// The object that opens an epoch: made by a conditional create, never changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochRecord {
    /// The cluster.
    pub cluster: ClusterName,
    /// The epoch.
    pub id: EpochId,
    /// Who opened it, 1 to 253 bytes: the node that holds it, as `role` says.
    pub holder: String,
    /// As what.
    pub role: Role,
    /// When it was opened, in milliseconds since 1970, as the holder's clock said.
    pub opened_unix_ms: u64,
    /// The epoch of another holder that was taken over with this one. Below the last number there is.
    pub adopted_from: Option<u64>,
}

impl EpochRecord {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let adopted = self.adopted_from.map_or(0, |epoch| epoch.saturating_add(1));
        let whose = (&self.cluster, self.id, self.holder.as_str(), self.role);
        encode(EPOCH_MAGIC, whose, self.opened_unix_ms, adopted)
    }

    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let ((cluster, id, holder, role), opened_unix_ms, adopted) = decode(EPOCH_MAGIC, bytes)?;
        let adopted_from = adopted.checked_sub(1);
        Ok(Self { cluster, id, holder, role, opened_unix_ms, adopted_from })
    }
}

/// The object that a holder writes again and again: while it is young, nobody else opens an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alive {
    /// The cluster.
    pub cluster: ClusterName,
    /// The epoch that is held.
    pub id: EpochId,
    /// The node that holds it, 1 to 253 bytes.
    pub holder: String,
    /// When it was written, in milliseconds since 1970, as the holder's clock said.
    pub seen_unix_ms: u64,
}

impl Alive {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let whose = (&self.cluster, self.id, self.holder.as_str(), Role::Own);
        encode(ALIVE_MAGIC, whose, self.seen_unix_ms, 0)
    }

    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let ((cluster, id, holder, role), seen_unix_ms, none) = decode(ALIVE_MAGIC, bytes)?;
        let alive = Self { cluster, id, holder, seen_unix_ms };
        if none == 0 && role == Role::Own { Ok(alive) } else { Err(Damage::Misplaced) }
    }
}

fn encode(
    magic: &[u8; 8],
    (cluster, id, holder, role): (&ClusterName, EpochId, &str, Role),
    unix_ms: u64,
    adopted: u64,
) -> Vec<u8> {
    let cluster = cluster.as_str();
    let mut out =
        Fields::start(magic, FORMAT_VERSION, HEADER_BYTES + cluster.len() + holder.len() + 8);
    out.u16(short(cluster.len())).u32(id.ordinal).u64(id.epoch).u64(unix_ms).u64(adopted);
    out.u16(short(holder.len())).put(&[role as u8, 0, 0, 0, 0, 0]);
    out.put(cluster.as_bytes()).put(holder.as_bytes());
    out.sealed()
}

type Read = ((ClusterName, EpochId, String, Role), u64, u64);

fn decode(magic: &[u8; 8], bytes: &[u8]) -> Result<Read, Damage> {
    let mut fields = Reader::open_whole(bytes, magic, FORMAT_VERSION)?;
    fields.need(HEADER_BYTES - 10)?;
    let cluster_bytes = fields.u16();
    let id = EpochId { ordinal: fields.u32(), epoch: fields.u64() };
    let (unix_ms, adopted) = (fields.u64(), fields.u64());
    let holder_bytes = usize::from(fields.u16());
    let role = Role::of(fields.u8()).ok_or(Damage::Misplaced)?;
    fields.zeros(5)?;
    let cluster = super::cluster(&mut fields, cluster_bytes)?;
    let holder = std::str::from_utf8(fields.take(holder_bytes)?);
    let holder = holder.map_err(|_not_text| Damage::Misplaced)?.to_owned();
    fields.end()?;
    let right = (1..=HOLDER_BYTES_MAX).contains(&holder_bytes);
    if right { Ok(((cluster, id, holder, role), unix_ms, adopted)) } else { Err(Damage::Misplaced) }
}
