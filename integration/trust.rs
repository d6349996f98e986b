//! Who may come in, and how: tokens and TLS on every listener of real servers.

mod cluster;
mod nodes;
mod pki;
mod quotas;
mod renewal;
mod replays;
mod rotation;
mod secrets;
mod start;
mod tenants;
mod tls;
mod unobservable;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kvstrata::client::{Client, ClientOptions, Path as Way, TlsOptions};
use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs, pki_types::pem::PemObject};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};

use crate::harness::{Builder, Server};

/// The tokens of two tenants, and of one who looks after the node.
const A: &str = "tenant-a-token-0123456789-0123456789";
const B: &str = "tenant-b-token-0123456789-0123456789";
const OPERATOR: &str = "operator-token-0123456789-0123456789";

/// Files that a server is given.
struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let files = Self { directory: tempfile::tempdir().unwrap() };
        files.write("tokens", &format!("a {A}\nb {B}\nops {OPERATOR} operator\n"));
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Replaces a file as the kubelet does: at once.
    fn write(&self, name: &str, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        let draft = self.path("draft");
        std::fs::write(&draft, text).unwrap();
        std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(draft, self.path(name)).unwrap();
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// A server that asks for tokens.
    fn tokens(&self) -> Builder {
        Server::builder().dram("64MiB").set("auth.tokens_file", &self.text("tokens"))
    }

    /// A server that asks for tokens and speaks TLS.
    fn tls(&self) -> Builder {
        let tls = self.tokens().set("tls.cert_file", &self.text("cert"));
        tls.set("tls.key_file", &self.text("key"))
    }

    /// Options that trust the CA of the files.
    fn trusting(&self) -> TlsOptions {
        TlsOptions { ca_file: Some(self.path("ca")), ..TlsOptions::default() }
    }
}

fn options(token: &str, way: Way, tls: Option<TlsOptions>) -> ClientOptions {
    ClientOptions { path: way, token: Some(token.parse().unwrap()), tls, ..Default::default() }
}

async fn connect(server: &Server, token: &str, way: Way) -> Client {
    Client::connect(server.grpc(), options(token, way, None)).await.unwrap()
}

/// Status and body of a page.
async fn page(
    server: &Server,
    ca: Option<&Path>,
    token: Option<&str>,
    path: &str,
) -> (u16, String) {
    let io = TcpStream::connect(server.http()).await.unwrap();
    let Some(ca) = ca else { return ask(io, token, path).await };
    let mut roots = RootCertStore::empty();
    let ca = std::fs::read(ca).unwrap();
    roots.add(rustls::pki_types::CertificateDer::from_pem_slice(&ca).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let io = connector.connect("127.0.0.1".try_into().unwrap(), io).await.unwrap();
    ask(io, token, path).await
}

async fn ask(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    token: Option<&str>,
    path: &str,
) -> (u16, String) {
    let shown = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n{shown}Connection: close\r\n\r\n");
    io.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    io.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split_whitespace().nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// The value of a series in `/metrics`, given as it is printed there.
async fn metric(server: &Server, ca: Option<&Path>, series: &str) -> f64 {
    let (status, page) = page(server, ca, Some(OPERATOR), "/metrics").await;
    assert_eq!(status, 200, "{page}");
    let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no series {series} in\n{page}")).parse().unwrap()
}

/// `/metrics` of a server whose tenants have quotas.
pub(crate) async fn page_with_quotas() -> String {
    let files = Files::new();
    files.write("tenants", "[a]\ndram_floor = \"1MiB\"\n");
    let server = files.tokens().set("auth.tenants_file", &files.text("tenants")).start().await;
    let (status, page) = page(&server, None, Some(OPERATOR), "/metrics").await;
    assert_eq!(status, 200, "{page}");
    page
}

/// Nothing that was logged has a token in it.
fn assert_no_token(log: &str) {
    for token in [A, B, OPERATOR] {
        assert!(!log.contains(token), "a token is in the log");
    }
}
