//! What makes datagrams trustworthy: a seal, and the refusal of what came before. Pure: bytes in, verdict out.
//!
//! ```text
//!  0  4  "KVSG"          16 16  boot of the sender     56  n  payload, none in a hello
//!  4  1  version, 1      32 16  boot of the receiver, 56+n 32  seal: keyed BLAKE3 of all before
//!  5  1  kind                   zero if not known
//!  6  2  zero            48  8  sequence number
//!  8  8  the cluster's tag      of the sender, LE
//! ```
//! Whoever has the key can seal; whoever hears a datagram can send it again. Against that each process has a random
//! *boot*, which no datagram of an earlier time can name, and numbers what it seals. A message counts only if it
//! names the boot of whoever receives it, and if its number has not come yet from its sender's boot. Clocks have no
//! part in it. A message that is sealed but names another boot is answered with a hello, which names both: so nodes
//! learn boots, of processes that have restarted, too. A hello is as long as an empty message, so nobody can be made
//! to send more than was sent to him, and what is not sealed is not answered at all.
//!
//! Invariants
//! - No byte of a payload is looked at before its seal is.
//! - Who has no key changes nothing in here but the counts of others: peers and windows are made for sealed
//!   datagrams alone, and are bounded for these.
//! - What is sent to an address names the boot that was heard from there last; the wrong one costs a round trip.

use std::{net::SocketAddr, num::NonZeroUsize};

use lru::LruCache;

use super::keys::{ClusterKeys, TAG_BYTES};
use crate::limits::{GOSSIP_BOOTS_MAX, GOSSIP_DATAGRAM_BYTES_MAX, GOSSIP_PEERS_MAX};

const MAGIC: &[u8; 4] = b"KVSG";
const VERSION: u8 = 1;
const MESSAGE: u8 = 1;
const HELLO: u8 = 2;

/// Length of a boot: 128 random bits are not met twice.
pub(crate) const BOOT_BYTES: usize = 16;
/// Length of what is before the payload, in bytes.
const HEADER_BYTES: usize = 56;
/// Length of the seal, in bytes.
const SEAL_BYTES: usize = 32;
/// What a seal adds to a payload; the length of a hello.
pub(crate) const OVERHEAD_BYTES: usize = HEADER_BYTES + SEAL_BYTES;
/// The longest payload that fits into a datagram.
pub(crate) const PAYLOAD_BYTES_MAX: usize = GOSSIP_DATAGRAM_BYTES_MAX - OVERHEAD_BYTES;

type Boot = [u8; BOOT_BYTES];

/// The boot of whoever is not known yet.
const UNKNOWN: Boot = [0; BOOT_BYTES];

/// Why a datagram was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Longer than any of ours.
    TooLong,
    /// Not in this form.
    Malformed,
    /// Of a cluster with another name.
    Foreign,
    /// Its seal is not of our key: forged, damaged, or of nodes with another secret.
    Forged,
    /// It came before, or is of an earlier time.
    Replayed,
    /// What this node has sealed itself: an address led back here.
    Own,
}

/// What becomes of a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict<'a> {
    /// Take this payload.
    Message(&'a [u8]),
    /// Send this hello back; nothing else is to be done.
    Answer(Vec<u8>),
    /// It was a hello, from which a boot was learned.
    Learned,
    /// Drop it.
    Refused(Refused),
}

/// What one process has sealed and heard.
pub(crate) struct Seals {
    keys: ClusterKeys,
    boot: Boot,
    sequence: u64,
    /// The boots of those who were heard, by address.
    peers: LruCache<SocketAddr, Boot>,
    /// What has come of each boot.
    windows: LruCache<Boot, Window>,
}

/// Which numbers of a sender have come: the highest, and which of those below.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    highest: u64,
    /// Bit n: the highest less n has come.
    seen: u128,
}

/// The parts of a datagram that is in form.
struct Parts<'a> {
    kind: u8,
    tag: &'a [u8; TAG_BYTES],
    from: &'a Boot,
    to: &'a Boot,
    sequence: u64,
    payload: &'a [u8],
    sealed: &'a [u8],
    seal: &'a [u8; SEAL_BYTES],
}

impl std::fmt::Debug for Seals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let peers = self.peers.len();
        f.debug_struct("Seals").field("peers", &peers).finish_non_exhaustive()
    }
}

impl Seals {
    /// Those of a process that starts; `boot` is random.
    pub(crate) fn new(keys: ClusterKeys, boot: Boot) -> Self {
        let bounded = |most: usize| NonZeroUsize::new(most).unwrap_or(NonZeroUsize::MIN);
        Self {
            keys,
            boot,
            sequence: 0,
            peers: LruCache::new(bounded(GOSSIP_PEERS_MAX)),
            windows: LruCache::new(bounded(GOSSIP_BOOTS_MAX)),
        }
    }

    /// Seals `payload` for whoever is at `to`; none if it is too long.
    pub(crate) fn seal(&mut self, to: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
        if payload.len() > PAYLOAD_BYTES_MAX {
            return None;
        }
        let boot = self.peers.get(&to).copied().unwrap_or(UNKNOWN);
        Some(self.write(MESSAGE, &boot, payload))
    }

    /// Opens what came from `from`.
    pub(crate) fn open<'a>(&mut self, from: SocketAddr, datagram: &'a [u8]) -> Verdict<'a> {
        if datagram.len() > GOSSIP_DATAGRAM_BYTES_MAX {
            return Verdict::Refused(Refused::TooLong);
        }
        let Some(parts) = read(datagram) else { return Verdict::Refused(Refused::Malformed) };
        if *parts.tag != self.keys.tag {
            return Verdict::Refused(Refused::Foreign);
        }
        // Hashes of this kind are compared in constant time.
        let seal = blake3::keyed_hash(&self.keys.datagram, parts.sealed);
        if seal != *parts.seal {
            return Verdict::Refused(Refused::Forged);
        }
        if *parts.from == self.boot {
            return Verdict::Refused(Refused::Own);
        }
        if *parts.to != self.boot {
            return match parts.kind {
                HELLO => Verdict::Refused(Refused::Replayed),
                _ => Verdict::Answer(self.write(HELLO, parts.from, &[])),
            };
        }
        let window = self.windows.get_or_insert_mut(*parts.from, Window::default);
        if !window.take(parts.sequence) {
            return Verdict::Refused(Refused::Replayed);
        }
        self.peers.put(from, *parts.from);
        match parts.kind {
            HELLO => Verdict::Learned,
            _ => Verdict::Message(parts.payload),
        }
    }

    fn write(&mut self, kind: u8, to: &Boot, payload: &[u8]) -> Vec<u8> {
        self.sequence += 1;
        let mut out = Vec::with_capacity(OVERHEAD_BYTES + payload.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, kind, 0, 0]);
        out.extend_from_slice(&self.keys.tag);
        out.extend_from_slice(&self.boot);
        out.extend_from_slice(to);
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(payload);
        let seal = blake3::keyed_hash(&self.keys.datagram, &out);
        out.extend_from_slice(seal.as_bytes());
        out
    }
}

/// Takes a datagram apart; none if it is not in form.
fn read(datagram: &[u8]) -> Option<Parts<'_>> {
    let (sealed, seal) = datagram.split_last_chunk::<SEAL_BYTES>()?;
    let (fixed, payload) = sealed.split_first_chunk::<HEADER_BYTES>()?;
    let (magic, rest) = fixed.split_first_chunk::<4>()?;
    let ([version, kind, zero @ ..], rest) = rest.split_first_chunk::<4>()?;
    let (tag, rest) = rest.split_first_chunk::<TAG_BYTES>()?;
    let (from, rest) = rest.split_first_chunk::<BOOT_BYTES>()?;
    let (to, sequence) = rest.split_first_chunk::<BOOT_BYTES>()?;
    let sequence = u64::from_le_bytes(sequence.try_into().ok()?);
    let in_form = magic == MAGIC && *version == VERSION && *zero == [0, 0] && sequence > 0;
    let of_kind = *kind == MESSAGE || (*kind == HELLO && payload.is_empty());
    let parts = Parts { kind: *kind, tag, from, to, sequence, payload, sealed, seal };
    (in_form && of_kind).then_some(parts)
}

impl Window {
    /// Takes a number, if it has not come yet and is not so old that this cannot be said.
    fn take(&mut self, sequence: u64) -> bool {
        if sequence > self.highest {
            let ahead = u32::try_from(sequence - self.highest).unwrap_or(u32::MAX);
            self.seen = self.seen.checked_shl(ahead).unwrap_or(0) | 1;
            self.highest = sequence;
            return true;
        }
        let behind = u32::try_from(self.highest - sequence).unwrap_or(u32::MAX);
        match 1_u128.checked_shl(behind) {
            Some(bit) if self.seen & bit == 0 => {
                self.seen |= bit;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
