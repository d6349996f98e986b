//! Nodes of one cluster that ask for tokens and speak TLS, each with a certificate of its own.

use std::{ops::Range, path::PathBuf};

use kvstrata::client::{
    Client, GetOptions, GetSummary, Handle, Lookup, LookupOptions, Path as Way, PutOutcome,
    Session, TlsOptions,
};

use super::{A, Files, metric, options, pki::Ca};
use crate::{
    client::{Seen, batch, hashes, namespace},
    cluster_drain::{PARTS, assert_right},
    harness::{Builder, SERVER_WAIT, Server, cluster_home, wait_until},
};

/// How nodes trust one another: without certificates of those who call, and with them.
pub(super) const MODES: [&str; 2] = ["tls.peer_ca_file", "tls.client_ca_file"];

/// See the module.
pub(super) struct Nodes {
    pub(super) files: Files,
    /// What nodes are trusted by.
    pub(super) ca: Ca,
    /// The setting that names the CA.
    mode: &'static str,
    /// The CAs by which tests trust the nodes.
    trusted: Vec<PathBuf>,
    servers: Vec<Server>,
    home: tempfile::TempDir,
}

/// A client of one tenant at one node, and nowhere else.
pub(super) struct Side {
    pub(super) client: Client,
    pub(super) handle: Handle,
    pub(super) session: Session,
}

impl Nodes {
    /// None yet.
    pub(super) fn new(mode: &'static str) -> Self {
        let (files, ca) = (Files::new(), Ca::new());
        files.write("ca", &ca.pem());
        let nodes = Self {
            files,
            ca,
            mode,
            trusted: Vec::new(),
            servers: Vec::new(),
            home: cluster_home(),
        };
        nodes.give("client", &nodes.ca);
        nodes
    }

    /// So many that know one another's filters.
    pub(super) async fn start(count: usize, mode: &'static str) -> Self {
        let mut nodes = Self::new(mode);
        for number in 0..count {
            nodes.give(&format!("node-{number}"), &nodes.ca);
            nodes.add().await;
        }
        for number in 0..count {
            nodes.wait_for(number, count, 0).await;
        }
        nodes
    }

    /// Files of a certificate, `NAME-cert` and `NAME-key`.
    pub(super) fn give(&self, name: &str, of: &Ca) {
        self.write(name, of.issue(|_params| {}));
    }

    /// Writes them.
    pub(super) fn write(&self, name: &str, (cert, key): (String, String)) {
        self.files.write(&format!("{name}-cert"), &cert);
        self.files.write(&format!("{name}-key"), &key);
    }

    /// What the next node is started with; its files are there already.
    pub(super) fn builder(&self) -> Builder {
        let number = self.servers.len();
        let text = |what: &str| self.files.text(&format!("node-{number}-{what}"));
        let builder = self.files.tokens().home(self.home.path());
        let builder = builder
            .set("node.name", &format!("node-{number}"))
            .set("node.host", &format!("host-{number}"))
            .set("tls.cert_file", &text("cert"))
            .set("tls.key_file", &text("key"))
            .set(self.mode, &self.files.text("ca"))
            .set("cluster.listen", "127.0.0.1:0");
        match self.servers.first() {
            Some(first) => builder.set("cluster.seeds", first.gossip()),
            None => builder,
        }
    }

    /// Starts the next one.
    pub(super) async fn add(&mut self) {
        let server = self.builder().start().await;
        self.take(server, "ca");
    }

    /// Takes one that was started, whose certificate is of the CA in this file.
    pub(super) fn take(&mut self, server: Server, ca: &str) {
        self.servers.push(server);
        self.trusted.push(self.files.path(ca));
    }

    /// Tests trust this node by another file from now on.
    pub(super) fn trust(&mut self, number: usize, ca: &str) {
        self.trusted[number] = self.files.path(ca);
    }

    pub(super) fn node(&self, number: usize) -> &Server {
        &self.servers[number]
    }

    pub(super) fn count(&self) -> usize {
        self.servers.len()
    }

    /// The value of a series at a node.
    pub(super) async fn metric(&self, number: usize, series: &str) -> f64 {
        metric(self.node(number), Some(&self.trusted[number]), series).await
    }

    /// Waits until a node lists so many members, and has the filters of all but some of the others.
    pub(super) async fn wait_for(&self, number: usize, members: usize, unknown: usize) {
        let what = format!("node {number} has {members} members, {unknown} of them unknown");
        let is_so = async || {
            let listed = self.metric(number, "kvstrata_cluster_members").await;
            let without = self.metric(number, "kvstrata_cluster_filter_unknown_members").await;
            (listed, without) == (members as f64, unknown as f64)
        };
        wait_until(&what, SERVER_WAIT, is_so).await;
    }

    /// How clients make sure of a node, and show what it may ask for.
    pub(super) fn tls(&self, number: usize) -> TlsOptions {
        let shown = (self.files.path("client-cert"), self.files.path("client-key"));
        let client = (self.mode == MODES[1]).then_some(shown);
        TlsOptions { ca_file: Some(self.trusted[number].clone()), client, server_name: None }
    }

    pub(super) async fn side(&self, number: usize, token: &str, way: Way) -> Side {
        let options = options(token, way, Some(self.tls(number)));
        let client = Client::connect(self.node(number).grpc(), options).await.unwrap();
        // With a session first a client stays where it is.
        let session = client.session("side").await.unwrap();
        let handle = client.open(namespace(&PARTS)).await.unwrap();
        Side { client, handle, session }
    }

    /// Puts blocks of the first tenant at a node.
    pub(super) async fn put(&self, number: usize, numbers: Range<u32>) {
        self.side(number, A, Way::Grpc).await.put(numbers).await;
    }

    /// Until the first tenant finds all of these from a node, and reads them there.
    pub(super) async fn wait_for_blocks(&self, number: usize, numbers: Range<u32>) {
        let side = self.side(number, A, Way::Auto).await;
        side.wait_for_prefix(&numbers).await;
        let got = side.get(numbers.clone()).await;
        assert_eq!((got.blocks(), got.missed), (numbers.len() as u64, 0), "at node {number}");
    }

    /// Ends all of them; nothing loud was logged but what is `expected`. Returns their logs.
    pub(super) async fn stop(self, expected: &[&str]) -> Vec<String> {
        let mut logs = Vec::new();
        for server in self.servers {
            logs.push(server.stop(expected).await);
        }
        logs
    }
}

impl Side {
    pub(super) async fn put(&self, numbers: Range<u32>) {
        let count = numbers.len() as u64;
        let report = self.handle.put(&self.session, &batch(numbers, &PARTS)).await.unwrap();
        assert_eq!(report.count(PutOutcome::Stored), count);
    }

    pub(super) async fn lookup(&self, numbers: &Range<u32>) -> Lookup {
        let asked = hashes(numbers.clone());
        self.handle.lookup(&asked, LookupOptions::default()).await.unwrap()
    }

    pub(super) async fn wait_for_prefix(&self, numbers: &Range<u32>) {
        wait_until("what another node has is found", SERVER_WAIT, async || {
            self.lookup(numbers).await.prefix_blocks as usize == numbers.len()
        })
        .await;
    }

    /// Gets blocks and checks every byte.
    pub(super) async fn get(&self, numbers: Range<u32>) -> GetSummary {
        let mut seen = Seen::default();
        let asked = hashes(numbers.clone());
        let got = self.handle.get(&asked, GetOptions::default(), &mut seen).await.unwrap();
        assert_eq!(assert_right(numbers.start, &seen) as u64, got.blocks());
        got
    }
}
