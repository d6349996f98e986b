//! Nodes that find one another, lose one another, and do not listen to anybody else.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use kvstrata_proto::v1::{Member, MemberList, SessionEvent, SessionRequest, session_event::Event};
use parking_lot::Mutex;
use tokio::{net::UdpSocket, task::JoinSet, time::Instant};
use tonic::Streaming;

use crate::harness::{SERVER_WAIT, Server, wait_until};

/// Within this a node that was killed has left every list.
const GONE_WITHIN: Duration = Duration::from_secs(5);
/// What a node says that makes the secret of its cluster, as the first one here does.
const NEW_SECRET: &str = "this node has made a new identity secret";

/// Starts a node that gossips; `seeds` may be none.
async fn node(home: &Path, name: &str, seeds: Option<&str>) -> Server {
    let builder = Server::builder().dram("64MiB").home(home);
    let builder = builder.set("node.name", name).set("cluster.listen", "127.0.0.1:0");
    let builder = match seeds {
        Some(seeds) => builder.set("cluster.seeds", seeds),
        None => builder,
    };
    builder.start().await
}

/// What a session is told of members.
struct Told {
    events: Streaming<SessionEvent>,
    list: MemberList,
}

impl Told {
    async fn by(server: &Server) -> Self {
        let mut client = server.client().await;
        let request = SessionRequest { client: "test".to_owned() };
        let mut events = client.session(request).await.unwrap().into_inner();
        let opened = events.message().await.unwrap().unwrap().event.unwrap();
        let Event::Opened(opened) = opened else { panic!("not opened: {opened:?}") };
        Self { events, list: opened.members.unwrap() }
    }

    /// Waits for a list that is as it should be.
    async fn until(&mut self, what: &str, is_so: impl Fn(&[Member]) -> bool) -> &MemberList {
        let waiting = async {
            while !is_so(&self.list.members) {
                let event = self.events.message().await.unwrap().unwrap().event.unwrap();
                if let Event::Members(list) = event {
                    assert!(list.epoch > self.list.epoch, "{list:?} after {:?}", self.list);
                    self.list = list;
                }
            }
        };
        let waited = tokio::time::timeout(SERVER_WAIT, waiting).await;
        assert!(waited.is_ok(), "{what}: {:?}", self.list);
        &self.list
    }

    fn member(&self, name: &str) -> &Member {
        self.list.members.iter().find(|member| member.name == name).unwrap()
    }
}

fn names(members: &[Member]) -> Vec<&str> {
    let mut names: Vec<_> = members.iter().map(|member| member.name.as_str()).collect();
    names.sort_unstable();
    names
}

fn are(members: &[Member], wanted: &[&str]) -> bool {
    names(members) == wanted
}

#[tokio::test]
async fn nodes_find_one_another_lose_the_killed_one_and_know_it_again() {
    let home = tempfile::tempdir().unwrap();
    let a = node(home.path(), "a", None).await;
    let mut at_a = Told::by(&a).await;
    assert!(are(&at_a.list.members, &["a"]));
    let started = Instant::now();
    let (b, c) = tokio::join!(
        node(home.path(), "b", Some(a.gossip())),
        node(home.path(), "c", Some(a.gossip()))
    );
    let (mut at_b, mut at_c) = tokio::join!(Told::by(&b), Told::by(&c));
    for told in [&mut at_a, &mut at_b, &mut at_c] {
        told.until("three", |members| are(members, &["a", "b", "c"])).await;
        for (name, server) in [("a", &a), ("b", &b), ("c", &c)] {
            let member = told.member(name);
            assert_eq!((member.endpoint.as_str(), member.draining), (server.grpc(), false));
            assert_eq!(member.http, server.http());
            assert_eq!(member.bulk.as_ref().unwrap().tcp, server.bulk());
        }
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?} to meet", started.elapsed());
    assert_eq!(at_b.member("b").index, at_b.list.self_, "a node is first in its own list");
    let index = at_a.member("c").index;

    c.kill();
    let killed = Instant::now();
    for told in [&mut at_a, &mut at_b] {
        told.until("c is gone", |members| are(members, &["a", "b"])).await;
    }
    let gone = killed.elapsed();
    assert!(gone < GONE_WITHIN, "gone after {gone:?}");
    assert!(
        gone > Duration::from_millis(1500),
        "gone after {gone:?}: a stall would be taken for it"
    );

    let c = node(home.path(), "c", Some(b.gossip())).await;
    for told in [&mut at_a, &mut at_b] {
        told.until("c is back", |members| are(members, &["a", "b", "c"])).await;
        assert_eq!(told.member("c").endpoint, c.grpc());
    }
    assert_eq!(at_a.member("c").index, index, "an index stays with its name");
    assert!(a.metric("kvstrata_cluster_epoch").await >= 4.0);
    assert_eq!(a.metric("kvstrata_cluster_members").await, 3.0);

    // One that leaves says so before it does.
    let held = Told::by(&b).await;
    b.terminate();
    for told in [&mut at_a, &mut Told::by(&c).await] {
        told.until("b leaves", |members| {
            members.iter().any(|member| member.name == "b" && member.draining)
        })
        .await;
    }
    drop((held, at_b));
    b.stop(&[]).await;
    a.assert_quiet(&[NEW_SECRET]);
    c.assert_quiet(&[]);
}

#[tokio::test]
async fn a_restart_that_nobody_noticed_takes_its_own_place() {
    let home = tempfile::tempdir().unwrap();
    let a = node(home.path(), "a", None).await;
    let b = node(home.path(), "b", Some(a.gossip())).await;
    let mut told = Told::by(&a).await;
    told.until("both", |members| are(members, &["a", "b"])).await;
    let before = told.member("b").clone();
    b.kill();
    let b = node(home.path(), "b", Some(a.gossip())).await;
    let list = told.until("the new one", |members| {
        members.iter().any(|member| member.name == "b" && member.endpoint != before.endpoint)
    });
    list.await;
    assert_eq!(told.member("b").endpoint, b.grpc());
    assert_eq!(told.member("b").index, before.index);
    assert_eq!(a.metric("kvstrata_cluster_names_twice").await, 0.0);
}

/// Hands datagrams on between whoever sends to it first and `to`, and keeps what it has handed to `to`.
struct Relay {
    at: SocketAddr,
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
    tasks: JoinSet<()>,
}

impl Relay {
    async fn to(to: &str) -> Self {
        let to: SocketAddr = to.parse().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap();
        let heard = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let keeps = Arc::clone(&heard);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let (mut buffer, mut first) = (vec![0; 65_536], None);
            while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                let datagram = &buffer[..length];
                if from == to {
                    if let Some(first) = first {
                        socket.send_to(datagram, first).await.unwrap();
                    }
                } else {
                    first.get_or_insert(from);
                    keeps.lock().push(datagram.to_vec());
                    socket.send_to(datagram, to).await.unwrap();
                }
            }
        });
        Self { at, heard, tasks }
    }
}

async fn datagrams(server: &Server, outcome: &str) -> f64 {
    server.metric(&format!("kvstrata_cluster_datagrams_total{{outcome=\"{outcome}\"}}")).await
}

/// Sends anything, from many: it is counted, and takes no memory.
async fn noise(to: &Server) {
    let resident = to.status_bytes("VmRSS:");
    let (malformed, long) = (datagrams(to, "malformed").await, vec![0x4b; 1400]);
    for round in 0..400_u32 {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        for number in 0..50_u32 {
            let random = blake3::hash(&(round * 50 + number).to_le_bytes());
            let length = (number * 28) as usize;
            let noise = [random.as_bytes().as_slice(), &long[..length]].concat();
            socket.send_to(&noise, to.gossip()).await.unwrap();
        }
    }
    wait_until("noise was counted", SERVER_WAIT, async || {
        datagrams(to, "malformed").await >= malformed + 1000.0
    })
    .await;
    let grown = to.status_bytes("VmRSS:").saturating_sub(resident);
    assert!(grown < 8 << 20, "{grown} bytes more");
}

#[tokio::test]
async fn who_has_no_key_is_not_heard_however_much_it_says() {
    let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let a = node(home.path(), "a", None).await;
    let mut relay = Relay::to(a.gossip()).await;
    let b = node(home.path(), "b", Some(&relay.at.to_string())).await;
    let mut told = Told::by(&a).await;
    told.until("both", |members| are(members, &["a", "b"])).await;

    // Nodes with another secret, or of a cluster of another name.
    let stranger = node(elsewhere.path(), "stranger", Some(a.gossip())).await;
    let foreign = Server::builder().dram("64MiB").home(home.path()).set("node.name", "foreign");
    let foreign = foreign.set("cluster.listen", "127.0.0.1:0").set("cluster.name", "other");
    let foreign = foreign.set("cluster.seeds", a.gossip()).start().await;
    wait_until("both were refused", SERVER_WAIT, async || {
        datagrams(&a, "forged").await >= 3.0 && datagrams(&a, "foreign").await >= 3.0
    })
    .await;

    // What the relay has heard, once more, and with a byte of it changed.
    let heard = relay.heard.lock().clone();
    relay.tasks.abort_all();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (replayed, forged) = (datagrams(&a, "replayed").await, datagrams(&a, "forged").await);
    let answered = datagrams(&a, "answered").await;
    let count = heard.len() as f64;
    assert!(count >= 2.0, "{count} datagrams through the relay");
    let epoch = a.metric("kvstrata_cluster_epoch").await;
    for datagram in &heard {
        let mut changed = datagram.clone();
        *changed.last_mut().unwrap() ^= 1;
        socket.send_to(datagram, a.gossip()).await.unwrap();
        socket.send_to(&changed, a.gossip()).await.unwrap();
    }
    wait_until("all of that was refused", SERVER_WAIT, async || {
        let again = datagrams(&a, "replayed").await - replayed;
        let answered = datagrams(&a, "answered").await - answered;
        again >= 1.0 && again + answered >= count && datagrams(&a, "forged").await >= forged + count
    })
    .await;

    noise(&a).await;
    assert_eq!(a.page("/livez").await.0, 200);
    assert_eq!(a.metric("kvstrata_cluster_epoch").await, epoch, "nobody has come or gone");
    let taken = datagrams(&a, "taken").await;
    wait_until("gossip goes on", SERVER_WAIT, async || datagrams(&a, "taken").await > taken).await;
    assert!(are(&Told::by(&a).await.list.members, &["a", "b"]));
    assert!(are(&Told::by(&stranger).await.list.members, &["stranger"]));
    assert!(are(&Told::by(&foreign).await.list.members, &["foreign"]));
    drop(told);
    for (server, expected) in [(a, NEW_SECRET), (stranger, NEW_SECRET), (b, ""), (foreign, "")] {
        let expected: &[&str] = if expected.is_empty() { &[] } else { &[expected] };
        server.stop(expected).await;
    }
}
