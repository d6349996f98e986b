//! Connections over a pipe, with time paused: what clients are answered, byte for byte, and what peers
//! may not do.

use std::{sync::Arc, time::Duration};

use kvstrata_tiers::{block::BlockHash, namespace::NamespaceSpec};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    time::{Instant, sleep, timeout},
};

use super::{Resp, connection, key::Key, pairs::Pairs, space::Spaces};
use crate::{
    api::{Calls, tests::node},
    auth::{Gate, ONLY_TENANT},
    limits::{BULK_FRAME_DEADLINE, HELLO_DEADLINE, RESP_KEY_BYTES_MAX, RESP_KEYS_MAX},
    metrics::{RespDrop, TierLabel},
};

mod pairs;
mod peers;
mod tokens;

/// What the pipe holds in each direction: less than a value.
const PIPE_BYTES: usize = 16 << 10;
const VALUE_BYTES: usize = 100_001;

/// A listener without a network.
struct Stage {
    resp: Arc<Resp>,
}

/// The client's end of a connection.
struct Peer {
    io: DuplexStream,
}

/// A command as clients write it.
fn command<W: AsRef<[u8]>>(words: &[W]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.as_ref().len()).bytes());
        bytes.extend(word.as_ref());
        bytes.extend(b"\r\n");
    }
    bytes
}

fn set(key: &str, value: &[u8]) -> Vec<u8> {
    command(&[b"SET", key.as_bytes(), value])
}

/// A value as it is answered.
fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

fn value(number: u8) -> Vec<u8> {
    (0..VALUE_BYTES).map(|at| number.wrapping_add(u8::try_from(at % 251).unwrap())).collect()
}

impl Stage {
    fn new() -> Self {
        let node = Arc::new(node(Vec::new()));
        let gate = Gate::open(node.metrics.trust.clone());
        Self::with(node, gate)
    }

    fn with(node: Arc<crate::node::Node>, gate: Gate) -> Self {
        let calls = Calls::new(node.metrics.clone());
        let (spaces, pairs) = (Spaces::default(), Pairs::default());
        let (connections, prompt) = (0.into(), gate.asks());
        Self { resp: Arc::new(Resp { node, calls, gate, spaces, pairs, connections, prompt }) }
    }

    fn connect(&self) -> Peer {
        let (theirs, ours) = tokio::io::duplex(PIPE_BYTES);
        let (from, to) = tokio::io::split(ours);
        let serving = connection::run(Arc::clone(&self.resp), from, to);
        self.resp.node.tasks.spawn("resp", serving);
        Peer { io: theirs }
    }

    fn dropped(&self, reason: RespDrop) -> u64 {
        self.resp.node.metrics.resp.dropped(reason)
    }

    /// The names of the namespaces that were opened.
    fn spaces(&self) -> Vec<String> {
        let all = self.resp.node.namespaces.list();
        let name = |spec: &NamespaceSpec| match spec {
            NamespaceSpec::Opaque { name, .. } => Some(name.clone()),
            NamespaceSpec::Engine(_) => None,
        };
        all.iter().filter_map(|namespace| name(namespace.spec())).collect()
    }
}

impl Peer {
    async fn say(&mut self, bytes: impl AsRef<[u8]>) {
        self.io.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Says what may be longer than the pipe, and hears what is answered to it.
    async fn ask(&mut self, bytes: impl AsRef<[u8]>, answer: impl AsRef<[u8]>) {
        let answer = answer.as_ref();
        let mut heard = vec![0; answer.len()];
        let (mut from, mut to) = tokio::io::split(&mut self.io);
        let both =
            async { tokio::try_join!(to.write_all(bytes.as_ref()), from.read_exact(&mut heard)) };
        let asked = timeout(BULK_FRAME_DEADLINE * 4, both).await;
        assert!(
            heard == answer,
            "{:?} heard, {:?} expected ({asked:?})",
            show(&heard),
            show(answer)
        );
        asked.unwrap().unwrap();
    }

    /// All that comes until the connection ends.
    async fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        self.io.read_to_end(&mut rest).await.unwrap();
        show(&rest)
    }
}

fn show(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.get(..bytes.len().min(200)).unwrap_or_default()).into_owned()
}

#[tokio::test(start_paused = true)]
async fn values_come_back_as_they_were_stored() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    for (key, bytes) in [("one", 1), ("two", 2), ("a model@01000100@0@ff", VALUE_BYTES)] {
        let value = &value(7)[..bytes];
        peer.ask(command(&["GET", key]), "$-1\r\n").await;
        peer.ask(set(key, value), "+OK\r\n").await;
        peer.ask(command(&["get", key]), bulk(value)).await;
        peer.ask(command(&["STRLEN", key]), format!(":{bytes}\r\n")).await;
        peer.ask(command(&["TTL", key]), ":-1\r\n").await;
    }
    peer.ask(command(&["EXISTS", "one", "two", "one", "three"]), ":3\r\n").await;
    peer.ask(command(&["DBSIZE"]), ":3\r\n").await;
    peer.ask(command(&["DEL", "one", "three"]), ":1\r\n").await;
    peer.ask(command(&["UNLINK", "one"]), ":0\r\n").await;
    for (name, answer) in
        [("GET", "$-1\r\n"), ("EXISTS", ":0\r\n"), ("STRLEN", ":0\r\n"), ("TTL", ":-2\r\n")]
    {
        peer.ask(command(&[name, "one"]), answer).await;
    }
    let (blocks, _bytes) = stage.resp.node.metrics.delivered(TierLabel::Dram);
    assert_eq!(blocks, 3);
    assert_eq!(stage.spaces(), ["resp/keys", "resp/lmcache-mp/a model@01000100@0@"]);
}

#[tokio::test(start_paused = true)]
async fn many_values_come_in_the_order_asked_whatever_is_missing() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let keys = ["x", "m@01000100@0@01", "m@01000100@0@02", "y", "m@01000200@0@01"];
    for (number, key) in (0..).zip(keys) {
        peer.ask(set(key, &value(number)), "+OK\r\n").await;
    }
    let mut asked = vec!["MGET", "m@01000100@0@01", "gone", "m@01000100@0@03", "m@01000100@0@02"];
    asked.extend(["m@01000200@0@01", "y", "n@01000100@0@01", "x", "x"]);
    let nil = b"$-1\r\n".to_vec();
    let answers = [
        b"*9\r\n".to_vec(),
        bulk(&value(1)),
        nil.clone(),
        nil.clone(),
        bulk(&value(2)),
        bulk(&value(4)),
        bulk(&value(3)),
        nil,
        bulk(&value(0)),
        bulk(&value(0)),
    ];
    peer.ask(command(&asked), answers.concat()).await;
    // As RESP3 writes it.
    peer.say(command(&["HELLO", "3"])).await;
    let mut hello = [0; 4];
    peer.io.read_exact(&mut hello).await.unwrap();
    assert_eq!(&hello, b"%7\r\n");
    let rest = "$6\r\nserver\r\n$8\r\nkvstrata\r\n";
    let version = env!("CARGO_PKG_VERSION");
    let rest = format!(
        "{rest}$7\r\nversion\r\n${}\r\n{version}\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n\
         $6\r\nmaster\r\n$5\r\nproto\r\n:3\r\n$2\r\nid\r\n:1\r\n$7\r\nmodules\r\n*0\r\n",
        version.len()
    );
    peer.ask("", rest).await;
    peer.ask(command(&["MGET", "gone", "x"]), [b"*2\r\n_\r\n".to_vec(), bulk(&value(0))].concat())
        .await;
}

#[tokio::test(start_paused = true)]
async fn commands_that_come_together_are_answered_in_turn() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let commands = [
        set("k", &value(1)),
        command(&["GET", "k"]),
        set("k", &value(2)),
        command(&["EXISTS", "k"]),
        b"PING\r\n".to_vec(),
        command(&["GET", "k"]),
    ];
    let first = bulk(&value(1));
    let answers = [b"+OK\r\n", &first[..], b"+OK\r\n:1\r\n+PONG\r\n", &first[..]];
    peer.ask(commands.concat(), answers.concat()).await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_stored_is_answered_with_ok_and_counted() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let longest = usize::try_from(stage.resp.node.stack.block_bytes_max()).unwrap();
    let key = "k".repeat(RESP_KEY_BYTES_MAX + 1);
    let table = [
        (set("k", b""), "k", RespDrop::Length),
        (set("k", &vec![1; longest + 1]), "k", RespDrop::Length),
        (set(&key, b"v"), key.as_str(), RespDrop::Key),
        (command(&["SET", "k", "v", "XX"]), "k", RespDrop::Option),
        (command(&["SET", "k", "v", "EX"]), "k", RespDrop::Option),
        (command(&["SET", "k", "v", "EX", "-1"]), "k", RespDrop::Option),
        (command(&["SET", "k", "v", "GET"]), "k", RespDrop::Option),
    ];
    for (command_bytes, key, reason) in table {
        let before = stage.dropped(reason);
        peer.ask(command_bytes, "+OK\r\n").await;
        assert_eq!(stage.dropped(reason), before + 1, "{reason:?}");
        peer.ask(command(&["GET", key]), "$-1\r\n").await;
        peer.ask(command(&["EXISTS", key]), ":0\r\n").await;
    }
    peer.ask(set("k", &vec![1; longest]), "+OK\r\n").await;
    peer.ask(command(&["EXISTS", "k"]), ":1\r\n").await;
}

#[tokio::test(start_paused = true)]
async fn without_room_values_are_dropped_and_those_in_use_stay() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let longest = usize::try_from(stage.resp.node.stack.block_bytes_max()).unwrap();
    let node = &stage.resp.node;
    // Everything that dram holds is pinned by a reader.
    let mut pins = Vec::new();
    for number in 0.. {
        let key = format!("k{number}");
        peer.ask(set(&key, &vec![number; longest]), "+OK\r\n").await;
        if stage.dropped(RespDrop::Room) > 0 {
            break;
        }
        let place = Spaces::find(node, ONLY_TENANT, &Key::read(key.as_bytes())).unwrap();
        pins.push(pin(node, &place.namespace, place.hash));
    }
    assert!(pins.len() > 8, "{}", pins.len());
    peer.ask(command(&["GET", "k3"]), bulk(&vec![3; longest])).await;
    pins.into_iter().for_each(|pins| node.stack.unpin(pins));
    peer.ask(set("late", &vec![9; longest]), "+OK\r\n").await;
    peer.ask(command(&["GET", "late"]), bulk(&vec![9; longest])).await;
}

fn pin(
    node: &crate::node::Node,
    namespace: &kvstrata_tiers::namespace::Namespace,
    hash: BlockHash,
) -> Vec<kvstrata_tiers::stack::Pin> {
    let packed = *hash.as_bytes();
    let hashes = kvstrata_tiers::block::Hashes::new(&packed, packed.len()).unwrap();
    let ask = kvstrata_tiers::stack::Ask { sparse: false, pin_bytes_max: Some(u64::MAX) };
    node.stack.lookup(namespace, hashes, ask).pins
}

#[tokio::test(start_paused = true)]
async fn the_first_value_of_a_key_stays() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let nx = |number| command(&[&b"SET"[..], b"k", &value(number), b"PX", b"5", b"NX"]);
    peer.ask(nx(1), "+OK\r\n").await;
    peer.ask(nx(2), "$-1\r\n").await;
    peer.ask(set("k", &value(3)), "+OK\r\n").await;
    peer.ask(set("k", b"short"), "+OK\r\n").await;
    // Expiry is nobody's promise to forget.
    sleep(Duration::from_secs(60)).await;
    peer.ask(command(&["GET", "k"]), bulk(&value(1))).await;
    peer.ask(command(&["DEL", "k"]), ":1\r\n").await;
    peer.ask(set("k", &value(4)), "+OK\r\n").await;
    peer.ask(command(&["GET", "k"]), bulk(&value(4))).await;
}

#[tokio::test(start_paused = true)]
async fn what_libraries_say_by_the_way_is_answered() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let table = [
        ("PING", "+PONG\r\n"),
        ("ping hello", "$5\r\nhello\r\n"),
        ("ECHO x", "$1\r\nx\r\n"),
        ("SELECT 0", "+OK\r\n"),
        ("SELECT 1", "-ERR DB index is out of range\r\n"),
        ("AUTH anything", "+OK\r\n"),
        ("CLIENT SETINFO LIB-NAME redis-py", "+OK\r\n"),
        ("CLIENT GETNAME", "$-1\r\n"),
        ("CLIENT SETNAME engine-0", "+OK\r\n"),
        ("CLIENT GETNAME", "$8\r\nengine-0\r\n"),
        ("CLIENT ID", ":1\r\n"),
        ("CLIENT LIST", "-ERR unknown subcommand of 'client'\r\n"),
        ("COMMAND", "*0\r\n"),
        ("COMMAND COUNT", ":0\r\n"),
        ("CLUSTER SLOTS", "-ERR This instance has cluster support disabled\r\n"),
        ("HELLO 4", "-NOPROTO unsupported protocol version\r\n"),
        ("HELLO 3 NONSENSE", "-ERR syntax error in HELLO\r\n"),
        ("FLUSHALL", "-ERR unknown command 'FLUSHALL'\r\n"),
        ("\r\nDBSIZE", ":0\r\n"),
        ("SET k v", "+OK\r\n"),
        ("GET k", "$1\r\nv\r\n"),
        ("INFO server", "$"),
    ];
    for (said, answer) in table {
        peer.ask(format!("{said}\r\n"), answer).await;
    }
    let mut info = vec![0; 300];
    let read = peer.io.read(&mut info).await.unwrap();
    let info = show(&info[..read]);
    assert!(info.contains("redis_version:7") && info.contains("db0:keys=1"), "{info}");
    peer.say("QUIT\r\nPING\r\n").await;
    assert_eq!(peer.rest().await, "+OK\r\n");
}
