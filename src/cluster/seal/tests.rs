//! Seals against those who have no key, those who have heard, and those who send anything.

use std::net::Ipv4Addr;

use kvstrata_tiers::namespace::Secret;
use proptest::prelude::{any, proptest};

use super::*;

fn keys(secret: u8, name: &str) -> ClusterKeys {
    ClusterKeys::derive(&Secret::new([secret; 32]), name)
}

fn seals(boot: u8) -> Seals {
    Seals::new(keys(7, "c"), [boot; BOOT_BYTES])
}

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Two that know each other, at ports 1 and 2.
fn acquainted() -> (Seals, Seals) {
    let (mut a, mut b) = (seals(1), seals(2));
    let first = a.seal(at(2), b"first").unwrap();
    let Verdict::Answer(hello) = b.open(at(1), &first) else { panic!("no hello") };
    assert!(hello.len() <= first.len(), "an answer is never longer than what came");
    assert_eq!(a.open(at(2), &hello), Verdict::Learned);
    let second = a.seal(at(2), b"second").unwrap();
    assert_eq!(b.open(at(1), &second), Verdict::Message(b"second"));
    (a, b)
}

#[test]
fn bytes_are_those_of_the_specification() {
    let mut a = seals(1);
    let sealed = a.seal(at(2), b"gossip").unwrap();
    let mut expected = b"KVSG\x01\x01\0\0".to_vec();
    expected.extend_from_slice(&hex::decode(GOLDEN_TAG).unwrap());
    expected.extend_from_slice(&[1; 16]);
    expected.extend_from_slice(&[0; 16]);
    expected.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend_from_slice(b"gossip");
    expected.extend_from_slice(&hex::decode(GOLDEN_SEAL).unwrap());
    assert_eq!(hex::encode(sealed), hex::encode(expected));
}

/// The tag of the cluster `c`, and the seal under the key of that and the secret of 32 sevens.
const GOLDEN_TAG: &str = "1fa80cd88353e1e6";
const GOLDEN_SEAL: &str = "57b27e9f9a390120335b3d484b4a855e80a050e702675d1fd12b8db62bbc062d";

#[test]
fn both_learn_the_other_and_then_everything_arrives_once() {
    let (mut a, mut b) = acquainted();
    for round in 0..300_u32 {
        let there = a.seal(at(2), &round.to_le_bytes()).unwrap();
        assert_eq!(b.open(at(1), &there), Verdict::Message(&round.to_le_bytes()));
        assert_eq!(b.open(at(1), &there), Verdict::Refused(Refused::Replayed));
        let back = b.seal(at(1), b"back").unwrap();
        assert_eq!(a.open(at(2), &back), Verdict::Message(b"back"));
    }
}

#[test]
fn what_comes_in_another_order_arrives_and_what_is_too_old_does_not() {
    let (mut a, mut b) = acquainted();
    let sealed: Vec<_> = (0..200_u8).map(|number| a.seal(at(2), &[number]).unwrap()).collect();
    for (number, datagram) in (0..200).zip(&sealed).rev().take(128) {
        assert_eq!(b.open(at(1), datagram), Verdict::Message(&[number]));
    }
    for datagram in &sealed {
        assert_eq!(b.open(at(1), datagram), Verdict::Refused(Refused::Replayed));
    }
    let next = a.seal(at(2), b"next").unwrap();
    assert_eq!(b.open(at(1), &next), Verdict::Message(b"next"));
}

#[test]
fn a_restart_is_noticed_and_what_was_sent_before_it_is_worth_nothing() {
    let (mut a, mut b) = acquainted();
    let before = a.seal(at(2), b"before").unwrap();
    let hello = b.write(HELLO, &[1; BOOT_BYTES], &[]);
    assert_eq!(a.open(at(2), &hello), Verdict::Learned);
    let mut again = seals(3);
    let Verdict::Answer(news) = again.open(at(1), &before) else { panic!("no hello") };
    assert_eq!(a.open(at(2), &news), Verdict::Learned);
    let after = a.seal(at(2), b"after").unwrap();
    assert_eq!(again.open(at(1), &after), Verdict::Message(b"after"));
    // What the old process said cannot be said again, to make the new one unknown.
    for old in [hello, news] {
        assert_eq!(a.open(at(2), &old), Verdict::Refused(Refused::Replayed));
    }
    let still = a.seal(at(2), b"still").unwrap();
    assert_eq!(again.open(at(1), &still), Verdict::Message(b"still"));
}

#[test]
fn who_has_another_key_is_refused_by_what_it_is() {
    let (_, mut b) = acquainted();
    let mut of = |keys: ClusterKeys| {
        let mut outsider = Seals::new(keys, [9; BOOT_BYTES]);
        outsider.peers.put(at(2), [2; BOOT_BYTES]);
        let sealed = outsider.seal(at(2), b"x").unwrap();
        match b.open(at(9), &sealed) {
            Verdict::Refused(why) => why,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(of(keys(7, "d")), Refused::Foreign);
    assert_eq!(of(keys(8, "c")), Refused::Forged);
    let mut forged = keys(8, "c");
    forged.datagram[0] ^= 1;
    assert_eq!(of(forged), Refused::Forged);
}

#[test]
fn one_bit_or_byte_less_and_it_is_refused() {
    let (mut a, mut b) = acquainted();
    let sealed = a.seal(at(2), b"payload").unwrap();
    for bit in 0..sealed.len() * 8 {
        let mut damaged = sealed.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let verdict = b.open(at(1), &damaged);
        assert!(matches!(verdict, Verdict::Refused(_)), "bit {bit}: {verdict:?}");
    }
    for length in 0..sealed.len() {
        let verdict = b.open(at(1), &sealed[..length]);
        assert!(matches!(verdict, Verdict::Refused(_)), "length {length}: {verdict:?}");
    }
    assert_eq!(b.open(at(1), &sealed), Verdict::Message(b"payload"), "none of them used it up");
}

#[test]
fn what_is_too_long_is_neither_sealed_nor_opened() {
    let (mut a, mut b) = acquainted();
    let longest = vec![5; PAYLOAD_BYTES_MAX];
    let sealed = a.seal(at(2), &longest).unwrap();
    assert_eq!(sealed.len(), GOSSIP_DATAGRAM_BYTES_MAX);
    assert_eq!(b.open(at(1), &sealed), Verdict::Message(&longest));
    assert_eq!(a.seal(at(2), &[longest, vec![5]].concat()), None);
    let longer = vec![0; GOSSIP_DATAGRAM_BYTES_MAX + 1];
    assert_eq!(b.open(at(1), &longer), Verdict::Refused(Refused::TooLong));
}

#[test]
fn strangers_take_no_memory_and_members_a_bounded_amount() {
    let (mut a, mut b) = acquainted();
    let mut strangers = Seals::new(keys(8, "c"), [9; BOOT_BYTES]);
    let heard = a.seal(at(2), b"heard").unwrap();
    assert_eq!(b.open(at(1), &heard), Verdict::Message(b"heard"));
    for port in 1000..30_000 {
        let forged = strangers.seal(at(2), b"x").unwrap();
        assert_eq!(b.open(at(port), &forged), Verdict::Refused(Refused::Forged));
        assert_eq!(b.open(at(port), &heard), Verdict::Refused(Refused::Replayed));
    }
    assert_eq!((b.peers.len(), b.windows.len()), (1, 1));
    let answer = b.seal(at(1), b"for a").unwrap();
    assert_eq!(a.open(at(2), &answer), Verdict::Message(b"for a"), "still known");
    // Those with the key are bounded as well.
    for port in 0..u16::try_from(GOSSIP_PEERS_MAX + GOSSIP_BOOTS_MAX).unwrap() {
        let mut boot = [0; BOOT_BYTES];
        boot[..2].copy_from_slice(&(port + 100).to_le_bytes());
        boot[15] = 1;
        let mut member = Seals::new(keys(7, "c"), boot);
        member.peers.put(at(2), [2; BOOT_BYTES]);
        let sealed = member.seal(at(2), b"x").unwrap();
        assert_eq!(b.open(at(port), &sealed), Verdict::Message(b"x"));
    }
    assert_eq!((b.peers.len(), b.windows.len()), (GOSSIP_PEERS_MAX, GOSSIP_BOOTS_MAX));
}

#[test]
fn what_comes_back_to_its_sender_is_refused() {
    let (mut a, _) = acquainted();
    let sealed = a.seal(at(1), b"to myself").unwrap();
    assert_eq!(a.open(at(1), &sealed), Verdict::Refused(Refused::Own));
}

proptest! {
    #[test]
    fn any_bytes_get_a_verdict(bytes in any::<Vec<u8>>(), header in any::<bool>()) {
        let (_, mut b) = acquainted();
        let mut datagram = if header { b"KVSG\x01\x01\0\0".to_vec() } else { Vec::new() };
        datagram.extend_from_slice(&bytes);
        let verdict = b.open(at(9), &datagram);
        assert!(matches!(verdict, Verdict::Refused(_)), "{verdict:?}");
    }
}
