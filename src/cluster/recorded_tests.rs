//! Gossip as version 0.1.0 says it: recorded bytes that every later version reads, and what later ones may say more.
//!
//! `recorded/` has what two processes sent one another, under the secret of 32 times 0x5e and the name `kvstrata`. It
//! stays as it is: a version that says it otherwise adds its own beside it, and reads both.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, ChitchatMessage, Deserializable,
    FailureDetectorConfig, Serializable, spawn_chitchat,
    transport::{Socket, Transport},
};
use kvstrata_tiers::namespace::Secret;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{
    about::{ABOUT_KEY, LOAD_KEY, Load, TierLoad, read_load, read_member, say_about, say_load},
    keys::ClusterKeys,
    seal::{OVERHEAD_BYTES, Refused, Seals, Verdict},
    view::{Alive, Seen, View},
};
use crate::members::{BulkPort, Member};

const HELLO: &[u8] = include_bytes!("recorded/hello");
const SYN: &[u8] = include_bytes!("recorded/syn");
const SYN_ACK: &[u8] = include_bytes!("recorded/syn-ack");
const ACK: &[u8] = include_bytes!("recorded/ack");

/// What later versions may say of a member, and an earlier one has to read.
const LATER_ABOUT: &str = r#"{"endpoint":"kv-9:9400","rack":{"row":4},"bulk":{"tcp":"kv-9:9402",
    "unix":"","instance":"07070707070707070707070707070707","rdma":"mlx5_0"},"version":"9.0.0"}"#;
const LATER_LOAD: &str = r#"{"engines":2,"heat":[0.5,7],"draining":true,"tiers":[
    {"tier":"hbm","capacity":9,"used":4,"lanes":3},{"tier":"dram"}]}"#;

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

fn keys() -> ClusterKeys {
    ClusterKeys::derive(&Secret::new([0x5e; 32]), "kvstrata")
}

/// What the process makes of a datagram that it was for.
fn opened(datagram: &[u8], taken: impl FnOnce(Verdict<'_>)) {
    let boot = datagram[32..48].try_into().unwrap();
    taken(Seals::new(keys(), boot).open(at(1), datagram));
}

fn payload(datagram: &[u8]) -> Vec<u8> {
    let mut payload = Vec::new();
    opened(datagram, |verdict| match verdict {
        Verdict::Message(message) => payload.extend_from_slice(message),
        other => panic!("{other:?}"),
    });
    payload
}

fn message(payload: &[u8]) -> Option<ChitchatMessage> {
    ChitchatMessage::deserialize(&mut &*payload).ok()
}

/// The datagram with a change, sealed again.
fn resealed(datagram: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut changed = datagram[..datagram.len() - 32].to_vec();
    change(&mut changed);
    let seal = blake3::keyed_hash(&keys().datagram, &changed);
    changed.extend_from_slice(seal.as_bytes());
    changed
}

/// Gossip that travels in memory, as bytes.
struct Pipe(Mutex<Option<Ends>>);

struct Ends {
    inbox: mpsc::Receiver<Vec<u8>>,
    /// None: nobody listens.
    outbox: Option<mpsc::Sender<Vec<u8>>>,
}

#[async_trait::async_trait]
impl Transport for Pipe {
    async fn open(&self, _address: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        Ok(Box::new(self.0.lock().take().unwrap()))
    }
}

#[async_trait::async_trait]
impl Socket for Ends {
    async fn send(&mut self, _to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        let mut bytes = Vec::new();
        message.serialize(&mut bytes);
        if let Some(outbox) = &self.outbox {
            outbox.send(bytes).await.unwrap_or_default();
        }
        Ok(())
    }

    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        match self.inbox.recv().await {
            Some(bytes) => Ok((at(1), message(&bytes).unwrap())),
            None => std::future::pending().await,
        }
    }
}

/// A process that gossips over these ends, and says this.
async fn gossiping(name: &str, ends: Ends, said: &[(&str, &str)]) -> ChitchatHandle {
    let detector = FailureDetectorConfig::new(
        5.0,
        1,
        Duration::from_secs(1),
        Duration::from_millis(500),
        Duration::from_secs(600),
    );
    let config = ChitchatConfig {
        chitchat_id: ChitchatId::new(name.to_owned(), 7, at(2)),
        cluster_id: "kvstrata".to_owned(),
        gossip_interval: Duration::from_millis(20),
        listen_addr: at(2),
        seed_nodes: vec![at(1).to_string()],
        failure_detector_config: detector,
        marked_for_deletion_grace_period: Duration::from_secs(600),
        catchup_callback: None,
        extra_liveness_predicate: None,
    };
    let said = said.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    spawn_chitchat(config, said, &Pipe(Mutex::new(Some(ends)))).await.unwrap()
}

/// What it knows of another, as soon as that has said something.
async fn heard(process: &ChitchatHandle, name: &str) -> BTreeMap<String, String> {
    let knows = async {
        loop {
            let found = process.with_chitchat(|chitchat| {
                let mut states = chitchat.node_states().iter();
                let (_, state) = states.find(|(id, _)| *id.node_id == *name)?;
                let said = state.key_values();
                Some(said.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
            });
            match found.await {
                Some::<BTreeMap<_, _>>(found) if !found.is_empty() => return found,
                _ => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), knows).await.unwrap()
}

/// The list that a node makes of one other, which says this.
fn seen(name: &str, about: Option<&str>, load: Option<&str>) -> Seen {
    let other = Alive { name, generation: 1, about, load };
    let own = Member { name: "own".to_owned(), ..Member::default() };
    View::default().list(own, std::iter::once(other))
}

#[test]
fn recorded_datagrams_are_read() {
    opened(HELLO, |verdict| assert_eq!(verdict, Verdict::Learned));
    for (datagram, kind) in [(SYN, 0), (SYN_ACK, 1), (ACK, 2)] {
        let payload = payload(datagram);
        assert_eq!(payload.len(), datagram.len() - OVERHEAD_BYTES);
        assert_eq!(payload[..4], [0x53, 0xb0, 0, kind], "magic, version and kind of message");
        assert!(message(&payload).is_some(), "message {kind}");
    }
    let mut again = Vec::new();
    message(&payload(SYN)).unwrap().serialize(&mut again);
    assert_eq!(again, payload(SYN), "and said as it was");
}

#[tokio::test]
async fn a_recorded_member_is_known_by_what_it_said() {
    let (send, inbox) = mpsc::channel(4);
    let process = gossiping("later", Ends { inbox, outbox: None }, &[]).await;
    for (datagram, name) in [(SYN_ACK, "kv-0"), (ACK, "kv-1")] {
        send.send(payload(datagram)).await.unwrap();
        let said = heard(&process, name).await;
        let text = |key: &str| said.get(key).map(String::as_str);
        let listed = seen(name, text(ABOUT_KEY), text(LOAD_KEY));
        assert_eq!(listed.left_out, 0, "{said:?}");
        let member = &listed.list[1];
        let told = [&member.name, &member.host, &member.zone, &member.version].map(String::as_str);
        assert_eq!(told, [name, &format!("host-{name}"), "zone", "0.1.0"]);
        assert!(member.endpoint.starts_with("127.0.0.1:") && !member.draining, "{said:?}");
        assert!(member.bulk.as_ref().unwrap().tcp.starts_with("127.0.0.1:"), "{said:?}");
    }
    process.shutdown().await.unwrap();
}

#[test]
fn what_is_said_is_what_version_0_1_0_reads() {
    let member = Member {
        endpoint: "kv-0:9400".to_owned(),
        zone: "b".to_owned(),
        host: "node-7".to_owned(),
        bulk: Some(BulkPort {
            tcp: "kv-0:9402".to_owned(),
            unix: "/run/kv".to_owned(),
            instance: bytes::Bytes::from_static(&[7; 16]),
        }),
        version: "0.1.0".to_owned(),
        http: "kv-0:9401".to_owned(),
        ..Member::default()
    };
    let about = concat!(
        r#"{"endpoint":"kv-0:9400","zone":"b","host":"node-7","bulk":{"tcp":"kv-0:9402","#,
        r#""unix":"/run/kv","instance":"07070707070707070707070707070707"},"#,
        r#""http":"kv-0:9401","version":"0.1.0"}"#
    );
    assert_eq!(say_about(&member), about);
    let tiers = vec![TierLoad { tier: "dram".to_owned(), capacity: 9, used: 4 }];
    let load = Load { engines: 3, sessions: 5, draining: true, tiers };
    let said = r#"{"engines":3,"sessions":5,"draining":true,"tiers":[{"tier":"dram","capacity":9,"used":4}]}"#;
    assert_eq!(say_load(&load), said);
}

#[tokio::test]
async fn a_later_version_that_says_more_is_a_member() {
    let ((there, from), (back, to)) = (mpsc::channel(64), mpsc::channel(64));
    let said = [(ABOUT_KEY, LATER_ABOUT), ("shape", "{\"of\":7}"), (LOAD_KEY, LATER_LOAD)];
    let later = gossiping("later", Ends { inbox: to, outbox: Some(there) }, &said).await;
    let own = [(ABOUT_KEY, r#"{"endpoint":"kv-1:9400"}"#), (LOAD_KEY, "{}")];
    let this = gossiping("this", Ends { inbox: from, outbox: Some(back) }, &own).await;
    let heard_here = heard(&this, "later").await;
    assert_eq!(heard_here["shape"], "{\"of\":7}", "a key that is not known does no harm");
    let text = |key: &str| heard_here.get(key).map(String::as_str);
    let listed = seen("later", text(ABOUT_KEY), text(LOAD_KEY));
    let member = &listed.list[1];
    assert_eq!((member.endpoint.as_str(), member.version.as_str()), ("kv-9:9400", "9.0.0"));
    assert_eq!((member.engines, member.draining), (2, true));
    assert_eq!(member.bulk.as_ref().unwrap().tcp, "kv-9:9402");
    let tiers: Vec<_> = listed.loads[&1].tiers.iter().map(|tier| tier.tier.as_str()).collect();
    assert_eq!(tiers, ["hbm", "dram"]);
    // And the later one lists this one, which says less.
    let there = heard(&later, "this").await;
    let listed = seen("this", Some(&there[ABOUT_KEY]), Some(&there[LOAD_KEY]));
    assert_eq!((listed.left_out, listed.list[1].endpoint.as_str()), (0, "kv-1:9400"));
    later.shutdown().await.unwrap();
    this.shutdown().await.unwrap();
}

#[test]
fn what_is_missing_takes_its_default_and_what_has_another_meaning_is_not_listed() {
    let least = r#"{"endpoint":"a:1"}"#;
    let expected =
        Member { name: "a".to_owned(), endpoint: "a:1".to_owned(), index: 1, ..Member::default() };
    for load in [None, Some("{}")] {
        let listed = seen("a", Some(least), load);
        assert_eq!(listed.list[1], expected, "{load:?}");
    }
    assert_eq!(read_load("{}"), Some(Load::default()));
    // Until it has said where it is, it is nowhere, and no nonsense either.
    assert_eq!((seen("a", None, None).list.len(), seen("a", None, None).left_out), (1, 0));
    let other_types = [
        (r#"{"endpoint":["a:1"]}"#, "{}"),
        (r#"{"endpoint":"a:1","bulk":"a:2"}"#, "{}"),
        (r#"{"host":"a"}"#, "{}"),
        (least, r#"{"engines":"2"}"#),
        (least, r#"{"tiers":{}}"#),
    ];
    for (about, load) in other_types {
        let listed = seen("a", Some(about), Some(load));
        assert_eq!((listed.list.len(), listed.left_out), (1, 1), "{about} {load}");
    }
    assert!(read_member("a", least, &Load::default()).is_some());
}

#[test]
fn another_version_of_the_format_is_dropped_and_harms_nothing() {
    let malformed =
        |verdict: Verdict<'_>| assert_eq!(verdict, Verdict::Refused(Refused::Malformed));
    opened(&resealed(ACK, |bytes| bytes[4] = 2), malformed);
    opened(&resealed(ACK, |bytes| bytes[5] = 3), malformed);
    opened(&resealed(ACK, |bytes| bytes[7] = 1), malformed);
    // Gossip of another version within a datagram of this one.
    for change in [(2, 1), (3, 9), (0, 0)] {
        let (place, byte) = change;
        let other = resealed(ACK, |bytes| bytes[56 + place] = byte);
        assert!(message(&payload(&other)).is_none(), "{change:?}");
    }
}

#[test]
fn any_change_of_what_was_recorded_is_read_or_refused() {
    for datagram in [SYN, SYN_ACK, ACK] {
        let good = payload(datagram);
        for place in 0..good.len() {
            for bits in [0x01, 0x80, 0xff] {
                let mut changed = good.clone();
                changed[place] ^= bits;
                let _read = message(&changed);
            }
            let _cut = message(&good[..place]);
        }
    }
}
