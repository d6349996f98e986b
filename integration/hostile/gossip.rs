//! Datagrams for the port of gossip: of nobody, and of somebody who has the secret and says nonsense.
//!
//! They are made by docs/formats.md alone.

use std::time::Duration;

use kvstrata_tiers::testing::Mutator;
use tokio::{net::UdpSocket, time::timeout};

use crate::harness::CLUSTER_SECRET;

const HEADER_BYTES: usize = 56;
const SEAL_BYTES: usize = 32;
/// The boot of this one.
const BOOT: [u8; 16] = [0xb0; 16];
/// For an answer that comes at once.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Somebody who has the secret of the cluster.
pub(super) struct Insider {
    pub(super) socket: UdpSocket,
    /// The boot of the node that is talked to.
    to: [u8; 16],
    sequence: u64,
}

fn key(context: &str) -> [u8; 32] {
    blake3::derive_key(context, &[&CLUSTER_SECRET[..], b"kvstrata"].concat())
}

/// A datagram of this kind.
fn sealed(kind: u8, to: &[u8; 16], sequence: u64, payload: &[u8]) -> Vec<u8> {
    let tag = blake3::derive_key("kvstrata 2026-11 cluster tag v1", b"kvstrata");
    let mut out = vec![b'K', b'V', b'S', b'G', 1, kind, 0, 0];
    out.extend_from_slice(&tag[..8]);
    out.extend_from_slice(&BOOT);
    out.extend_from_slice(to);
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(payload);
    let seal = blake3::keyed_hash(&key("kvstrata 2026-11 cluster datagram key v1"), &out);
    out.extend_from_slice(seal.as_bytes());
    out
}

impl Insider {
    /// Learns the boot of the node at `address`, from the hello that it answers with.
    pub(super) async fn meet(address: &str) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(address).await.unwrap();
        let mut buffer = vec![0; 65_536];
        socket.send(&sealed(1, &[0; 16], 1, b"")).await.unwrap();
        let length = timeout(ANSWER_WAIT, socket.recv(&mut buffer)).await.unwrap().unwrap();
        let hello = &buffer[..length];
        assert_eq!((length, &hello[..6]), (HEADER_BYTES + SEAL_BYTES, &b"KVSG\x01\x02"[..]));
        assert_eq!(hello[32..48], BOOT, "it names who has asked");
        let to = hello[16..32].try_into().unwrap();
        let again = [&hello[..HEADER_BYTES]].concat();
        let seal = blake3::keyed_hash(&key("kvstrata 2026-11 cluster datagram key v1"), &again);
        assert_eq!(hello[HEADER_BYTES..], seal.as_bytes()[..]);
        Self { socket, to, sequence: 1 }
    }

    /// Seals what it says.
    pub(super) fn seal(&mut self, payload: &[u8]) -> Vec<u8> {
        self.sequence += 1;
        sealed(1, &self.to, self.sequence, payload)
    }

    /// The next datagram: nonsense that is sealed, or what was sealed and then changed.
    pub(super) fn next(&mut self, choose: &mut Mutator) -> Vec<u8> {
        let mut payload = vec![0x53, 0xb0, 0, u8::try_from(choose.below(4)).unwrap()];
        match choose.below(4) {
            // Lists of as many as there can be, of which none comes.
            0 => payload.extend_from_slice(&[0xff; 64]),
            1 => payload.extend((0..choose.below(60_000)).map(|place| place.to_le_bytes()[0])),
            2 => payload.extend_from_slice(&[1, 0xff, 0xff, 0x28, 0xb5, 0x2f, 0xfd, 0x60]),
            _ => payload = (0..choose.below(2000)).map(|place| place.to_le_bytes()[0]).collect(),
        }
        let whole = payload.clone();
        choose.mutate(&mut payload, &whole);
        let mut datagram = self.seal(&payload[..payload.len().min(60_000)]);
        if choose.chance(300) {
            let whole = datagram.clone();
            choose.mutate(&mut datagram, &whole);
            datagram.truncate(65_507);
        }
        datagram
    }
}
