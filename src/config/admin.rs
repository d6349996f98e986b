//! Where operators reach a node: loopback or a Unix socket, and nowhere else.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr};

use thiserror::Error;

use super::{Auto, Config, Maybe, Problem, Server};

/// How far the admin listener is above that of gRPC: HTTP, bulk and gossip are between them.
const ADMIN_PORT_ABOVE: u16 = 4;
/// What begins the path of a Unix socket.
const UNIX: &str = "unix:";

/// Where the admin listener is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminAddress {
    /// An address of this host's loopback.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

/// Not an address of an admin listener.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("127.0.0.1:PORT, or unix:/PATH")]
pub struct BadAdminAddress;

impl FromStr for AdminAddress {
    type Err = BadAdminAddress;

    fn from_str(text: &str) -> Result<Self, BadAdminAddress> {
        match text.strip_prefix(UNIX) {
            Some(path) if path.starts_with('/') => Ok(Self::Unix(PathBuf::from(path))),
            Some(_) => Err(BadAdminAddress),
            None => text.parse().map(Self::Tcp).map_err(|_unreadable| BadAdminAddress),
        }
    }
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl Server {
    /// Where the admin listener is; none if there is none.
    #[must_use]
    pub fn admin_address(&self) -> Option<AdminAddress> {
        match &self.admin_listen {
            Auto::Given(Maybe::None) => None,
            Auto::Given(Maybe::Given(address)) => Some(address.clone()),
            Auto::Auto => {
                let port = match self.grpc_listen.port() {
                    0 => 0,
                    port => port.checked_add(ADMIN_PORT_ABOVE)?,
                };
                Some(AdminAddress::Tcp(SocketAddr::from(([127, 0, 0, 1], port))))
            }
        }
    }
}

impl Config {
    pub(super) fn check_admin(&self, problems: &mut Vec<Problem>) {
        let server = &self.server;
        let Some(AdminAddress::Tcp(admin)) = server.admin_address() else { return };
        if !admin.ip().is_loopback() {
            let allowed = format!(
                "127.0.0.1:{} or unix:/PATH: what operators may do is not for other hosts",
                admin.port()
            );
            problems.push(Problem::new("server.admin_listen", admin, allowed));
        }
        let others = [server.bulk_address(), server.resp_address()].into_iter().flatten();
        let mut others = [server.grpc_listen, server.http_listen].into_iter().chain(others);
        if admin.port() != 0 && others.any(|other| meet(admin, other)) {
            let allowed = "none, unix:/PATH, or a port of its own, or port 0";
            problems.push(Problem::new("server.admin_listen", admin, allowed));
        }
    }
}

/// Whether not both can be listened on.
fn meet(admin: SocketAddr, other: SocketAddr) -> bool {
    admin.port() == other.port() && (other.ip().is_unspecified() || other.ip() == admin.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(server: Server) -> usize {
        let mut problems = Vec::new();
        Config { server, ..Config::default() }.check_admin(&mut problems);
        assert!(problems.iter().all(|problem| problem.key == "server.admin_listen"));
        problems.len()
    }

    #[test]
    fn it_follows_the_port_of_grpc_and_stays_on_loopback() {
        let mut server = Server::default();
        let is = |server: &Server| server.admin_address().map(|at| at.to_string());
        assert_eq!(is(&server).unwrap(), "127.0.0.1:9404");
        server.grpc_listen = "0.0.0.0:0".parse().unwrap();
        assert_eq!(is(&server).unwrap(), "127.0.0.1:0", "two of them do not meet");
        server.grpc_listen = "0.0.0.0:65535".parse().unwrap();
        assert_eq!(is(&server), None);
        server.admin_listen = "none".parse().unwrap();
        assert_eq!(is(&server), None);
        for text in ["unix:/run/kvstrata/admin.sock", "127.0.0.1:7"] {
            server.admin_listen = text.parse().unwrap();
            assert_eq!(is(&server).unwrap(), text);
        }
        for text in ["unix:", "unix:relative", "9404", "localhost:9404", ""] {
            assert_eq!(text.parse::<AdminAddress>(), Err(BadAdminAddress), "{text:?}");
        }
    }

    #[test]
    fn other_hosts_do_not_reach_it_and_a_port_that_is_taken_is_refused() {
        let at = |text: &str| Server { admin_listen: text.parse().unwrap(), ..Server::default() };
        for good in ["auto", "none", "[::1]:9404", "127.0.0.1:0", "unix:/a", "127.0.0.2:9400"] {
            assert_eq!(problems(at(good)), 0, "{good}");
        }
        for bad in ["0.0.0.0:9404", "10.0.0.1:9404", "127.0.0.1:9400", "127.0.0.1:9402"] {
            assert_eq!(problems(at(bad)), 1, "{bad}");
        }
        let resp = "0.0.0.0:9404".parse().unwrap();
        assert_eq!(problems(Server { resp_listen: resp, ..Server::default() }), 1);
    }
}
