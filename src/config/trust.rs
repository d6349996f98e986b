//! The sections of who may come in and how: tokens and TLS.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{Auto, Maybe, PathText, Problem, Server};

/// Who may come in.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Auth {
    /// File with the bearer tokens of clients and the tenants they stand for; read again when it
    /// changes. Default `none`: no client is asked for a token, which only loopback listens with.
    pub tokens_file: Maybe<PathText>,
    /// File with what each tenant may have of the tiers and do in a second; read again when it changes.
    /// Default `none`: no tenant has a quota.
    pub tenants_file: Maybe<PathText>,
    /// Whether whoever reaches the listeners from other hosts may come in without a token. Default
    /// `false`: they would read, store and remove blocks of everybody.
    pub allow_anonymous: bool,
}

/// How connections are encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tls {
    /// PEM file with the certificate of this node and what links it to its CA. Read again when it
    /// changes. Default `none`: connections are not encrypted.
    pub cert_file: Maybe<PathText>,
    /// PEM file with its key. Default `none`.
    pub key_file: Maybe<PathText>,
    /// PEM file with the CA of clients: those of gRPC, bulk and RESP must show a certificate of it.
    /// Default `none`: they show none.
    pub client_ca_file: Maybe<PathText>,
    /// PEM file with the CA of the other nodes of the cluster, by which this node trusts them when it calls them.
    /// Default `auto`: `client_ca_file`, or the CAs that the machine trusts.
    pub peer_ca_file: Auto<PathText>,
}

impl Tls {
    /// The CA of the other nodes, if it is not one that the machine trusts.
    #[must_use]
    pub fn peer_ca(&self) -> Option<&PathText> {
        self.peer_ca_file.given().or(self.client_ca_file.given())
    }
}

impl Auth {
    pub(super) fn check(&self, server: &Server, problems: &mut Vec<Problem>) {
        if self.tokens_file.given().is_some() {
            if self.allow_anonymous {
                let allowed = "false, because auth.tokens_file says who may come in";
                problems.push(Problem::new("auth.allow_anonymous", true, allowed));
            }
            return;
        }
        if self.allow_anonymous {
            return;
        }
        let listens: [(&str, Option<SocketAddr>); 4] = [
            ("server.grpc_listen", Some(server.grpc_listen)),
            ("server.http_listen", Some(server.http_listen)),
            ("server.bulk_listen", server.bulk_address()),
            ("server.resp_listen", server.resp_address()),
        ];
        for (key, address) in listens {
            // What follows from another key is said of that.
            let follows = key == "server.bulk_listen" && server.bulk_listen.given().is_none();
            let Some(address) = address.filter(|at| !at.ip().is_loopback() && !follows) else {
                continue;
            };
            let allowed = format!(
                "127.0.0.1:{} without tokens; to let other hosts in, name a file of tokens in \
                 auth.tokens_file (docs/trust.md), or set auth.allow_anonymous = true if whoever \
                 reaches this address may read and remove everything",
                address.port()
            );
            problems.push(Problem::new(key, address, allowed));
        }
    }
}

impl Tls {
    pub(super) fn check(&self, server: &Server, problems: &mut Vec<Problem>) {
        let plain = server.resp_address().filter(|at| !at.ip().is_loopback());
        if let Some(address) =
            plain.filter(|_| self.cert_file.given().is_none() && !server.resp_plain)
        {
            let allowed = format!(
                "127.0.0.1:{} without TLS; give a certificate in tls.cert_file (docs/trust.md), or set \
                 server.resp_plain = true if tokens and values may cross the network readable",
                address.port()
            );
            problems.push(Problem::new("server.resp_listen", address, allowed));
        }
        let given = |file: &Maybe<PathText>| file.given().is_some();
        let mut missing = |key: &str, why: &str| {
            problems.push(Problem::new(key, "none", format!("a path, because {why} is given")));
        };
        match (given(&self.cert_file), given(&self.key_file)) {
            (true, false) => missing("tls.key_file", "tls.cert_file"),
            (false, true) => missing("tls.cert_file", "tls.key_file"),
            (false, false) if given(&self.client_ca_file) => {
                missing("tls.cert_file", "tls.client_ca_file");
            }
            (false, false) if self.peer_ca_file.given().is_some() => {
                missing("tls.cert_file", "tls.peer_ca_file");
            }
            (true, true) | (false, false) => {}
        }
    }
}
