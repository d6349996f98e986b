//! Who a client is: bearer tokens, the tenants that they stand for, and the gate that asks for them.
//!
//! A tenant is part of the identity of every namespace and the owner of every session, so what one
//! tenant stores does not exist for another. It comes from the token alone, never from a request.
//! Without a tokens file there is one tenant, [`ONLY_TENANT`], and everybody is it.
//!
//! Tokens are compared by a hash under a key that is made at each start: how long a comparison takes
//! says nothing about a token, and no token is kept in memory. What is shown, logged or counted of one
//! is its tenant. When the file no longer has a token, whoever came in by it is told so
//! ([`Bearer::revoked`]): sessions and bulk connections end, and the next call is refused.
//!
//! The nodes of a cluster have a token of their own, which no file has ([`Gate::know_nodes`]). A node asks in the
//! name of a tenant, which it says beside its token ([`TENANT_HEADER`]); nobody else may say one.

pub mod allotments;
mod rates;
mod token;
mod tokens;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, OnceLock},
};

use blake3::Hash;
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

pub use self::{
    rates::{RateLimits, RateTable, Rates},
    token::Token,
};
use crate::{
    id::random_key,
    metrics::{Door, TrustMetrics, Unproven},
};

/// The tenant of every client where there are no tokens.
pub const ONLY_TENANT: &str = "default";
/// The header in which a node names the tenant for whom it asks.
pub const TENANT_HEADER: &str = "kvstrata-tenant";
/// What stands between the token of a node and the tenant where both are in one field; no token has it.
pub(crate) const TENANT_MARK: u8 = b'@';
/// How a token is announced in a header.
const SCHEME: &[u8] = b"bearer ";

/// Whoever has shown a token that is valid, or came in where none is asked for.
#[derive(Debug)]
pub struct Bearer {
    tenant: Box<str>,
    operator: bool,
    rates: Arc<Rates>,
    node: bool,
    revoked: CancellationToken,
}

impl Bearer {
    /// The one there is without tokens, where nobody's rates are limited.
    #[must_use]
    pub fn anyone() -> Self {
        Self::new(ONLY_TENANT, true, Arc::default())
    }

    fn new(tenant: &str, operator: bool, rates: Arc<Rates>) -> Self {
        let revoked = CancellationToken::new();
        Self { tenant: tenant.into(), operator, rates, node: false, revoked }
    }

    /// A node that asks for a tenant, or, with an empty one, for itself. Its requests are no tenant's own.
    fn node(tenant: &str) -> Self {
        Self { node: true, ..Self::new(tenant, tenant.is_empty(), Arc::default()) }
    }

    /// What its tenant may do in a second.
    #[must_use]
    pub fn rates(&self) -> &Arc<Rates> {
        &self.rates
    }

    /// Whose blocks it may use.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Whether it may see what concerns the whole node: metrics, and the totals of all tenants.
    #[must_use]
    pub fn is_operator(&self) -> bool {
        self.operator
    }

    /// Whether it is a node of the cluster.
    #[must_use]
    pub fn is_node(&self) -> bool {
        self.node
    }

    /// Cancelled when its token is valid no longer.
    #[must_use]
    pub fn revoked(&self) -> &CancellationToken {
        &self.revoked
    }
}

/// Lets in who has a valid token; clones share the tokens.
#[derive(Clone)]
pub struct Gate {
    shared: Arc<Shared>,
}

struct Shared {
    metrics: TrustMetrics,
    rates: Arc<RateTable>,
    admission: Admission,
    /// What the token of the cluster's nodes is known by, if there are others.
    nodes: OnceLock<KnownBy>,
}

/// A token is known by its hash under a key.
struct KnownBy {
    key: [u8; 32],
    hash: Hash,
}

enum Admission {
    /// There are no tokens.
    Anyone(Arc<Bearer>),
    /// Bearers by the hash of their token under the key.
    Bearers { key: [u8; 32], known: RwLock<HashMap<Hash, Arc<Bearer>>> },
}

impl Gate {
    /// Lets everybody in, as [`ONLY_TENANT`].
    #[must_use]
    pub fn open(metrics: TrustMetrics) -> Self {
        let rates = Arc::<RateTable>::default();
        let anyone = Bearer::new(ONLY_TENANT, true, rates.of(ONLY_TENANT));
        Self::of(metrics, rates, Admission::Anyone(Arc::new(anyone)))
    }

    /// Lets in who has a token; none is known yet.
    ///
    /// # Errors
    /// `Internal` if the system has no random bytes.
    pub fn closed(metrics: TrustMetrics) -> Result<Self> {
        let admission = Admission::Bearers { key: random_key()?, known: RwLock::default() };
        Ok(Self::of(metrics, Arc::default(), admission))
    }

    fn of(metrics: TrustMetrics, rates: Arc<RateTable>, admission: Admission) -> Self {
        let shared = Shared { metrics, rates, admission, nodes: OnceLock::new() };
        Self { shared: Arc::new(shared) }
    }

    /// What tenants may do in a second.
    #[must_use]
    pub fn rates(&self) -> &Arc<RateTable> {
        &self.shared.rates
    }

    /// Lets the nodes of the cluster in, too, who show this token. Once: later ones change nothing.
    ///
    /// # Errors
    /// `Internal` if the system has no random bytes.
    pub fn know_nodes(&self, token: &Token) -> Result<()> {
        let key = random_key()?;
        self.shared.nodes.get_or_init(|| KnownBy { key, hash: token.hash(&key) });
        Ok(())
    }

    /// Whether it asks for tokens.
    #[must_use]
    pub fn asks(&self) -> bool {
        matches!(self.shared.admission, Admission::Bearers { .. })
    }

    /// How many tenants there are.
    #[must_use]
    pub fn tenants(&self) -> usize {
        match &self.shared.admission {
            Admission::Anyone(_) => 1,
            Admission::Bearers { known, .. } => {
                let known = known.read();
                known.values().map(|bearer| bearer.tenant()).collect::<HashSet<_>>().len()
            }
        }
    }

    /// Takes the tokens of a file in place of those known. A token that is in both stands for the same
    /// bearer as before, unless its line says something else now.
    ///
    /// # Errors
    /// `Invalid` with the line and what is wrong with it, never with a token; then nothing changes.
    pub fn replace(&self, text: &[u8]) -> Result<()> {
        let Admission::Bearers { key, known } = &self.shared.admission else { return Ok(()) };
        let mut next = HashMap::new();
        let mut known = known.write();
        for line in tokens::read(text)? {
            let hash = line.token.hash(key);
            let same = known.get(&hash).filter(|bearer| line.is_of(bearer));
            let made = || {
                let rates = self.shared.rates.of(line.tenant);
                Arc::new(Bearer::new(line.tenant, line.operator, rates))
            };
            let bearer = same.map_or_else(made, Arc::clone);
            if next.insert(hash, bearer).is_some() {
                return Err(tokens::problem(line.number, "its token is that of a line before"));
            }
        }
        for (hash, bearer) in known.iter() {
            if next.get(hash).is_none_or(|kept| !Arc::ptr_eq(kept, bearer)) {
                bearer.revoked.cancel();
            }
        }
        *known = next;
        Ok(())
    }

    /// Lets a client in that shows `token`, or nothing, and names no tenant.
    ///
    /// # Errors
    /// As [`admit_for`](Self::admit_for).
    pub fn admit(&self, door: Door, token: Option<&[u8]>) -> Result<Arc<Bearer>> {
        self.admit_for(door, token, None)
    }

    /// Lets in who shows `token`, or nothing, and asks for `tenant`, if it says so.
    ///
    /// # Errors
    /// `Unauthenticated` if it should show one, or another one; if it names a tenant and is no node, or is a
    /// node and names none. Counted.
    pub fn admit_for(
        &self,
        door: Door,
        token: Option<&[u8]>,
        tenant: Option<&[u8]>,
    ) -> Result<Arc<Bearer>> {
        let refuse = |text| Err(self.refuse(door, Unproven::Wrong, text));
        match (token.is_some_and(|token| self.is_of_a_node(token)), tenant) {
            (false, None) => self.admit_client(door, token),
            (false, Some(_)) => {
                refuse("kvstrata-tenant: only nodes of this cluster may name a tenant")
            }
            (true, None) => refuse("kvstrata-tenant: a node must name the tenant it asks for"),
            (true, Some(tenant)) => match tokens::tenant(tenant) {
                Some(tenant) => Ok(Arc::new(Bearer::node(tenant))),
                None => refuse("kvstrata-tenant: not the name of a tenant"),
            },
        }
    }

    /// Lets in who shows `field`: a token, or that of a node, [`TENANT_MARK`] and a tenant.
    ///
    /// # Errors
    /// As [`admit_for`](Self::admit_for).
    pub(crate) fn admit_joined(&self, door: Door, field: &[u8]) -> Result<Arc<Bearer>> {
        let mut parts = field.splitn(2, |byte| *byte == TENANT_MARK);
        let token = parts.next().filter(|token| !token.is_empty());
        self.admit_for(door, token, parts.next())
    }

    /// Lets in a node that asks for itself.
    ///
    /// # Errors
    /// `Unauthenticated` if it is none. Counted.
    pub fn admit_node(&self, door: Door, token: Option<&[u8]>) -> Result<Arc<Bearer>> {
        if token.is_some_and(|token| self.is_of_a_node(token)) {
            return Ok(Arc::new(Bearer::node("")));
        }
        let why = if token.is_some() { Unproven::Wrong } else { Unproven::Missing };
        Err(self.refuse(door, why, "token: only nodes of this cluster may ask this"))
    }

    fn is_of_a_node(&self, token: &[u8]) -> bool {
        let known = self.shared.nodes.get();
        known.is_some_and(|known| token::hash(&known.key, token) == known.hash)
    }

    fn admit_client(&self, door: Door, token: Option<&[u8]>) -> Result<Arc<Bearer>> {
        let (key, known) = match &self.shared.admission {
            Admission::Anyone(bearer) => return Ok(Arc::clone(bearer)),
            Admission::Bearers { key, known } => (key, known),
        };
        let Some(token) = token else {
            let text = "token: none given; this server asks for a bearer token";
            return Err(self.refuse(door, Unproven::Missing, text));
        };
        let found = known.read().get(&token::hash(key, token)).cloned();
        let text = "token: the one given is not valid here (any more)";
        found.ok_or_else(|| self.refuse(door, Unproven::Wrong, text))
    }

    /// Lets in who may see what concerns the whole node.
    ///
    /// # Errors
    /// As [`admit`](Self::admit), and if the token is not an operator's. Counted.
    pub fn admit_operator(&self, door: Door, token: Option<&[u8]>) -> Result<Arc<Bearer>> {
        if token.is_some_and(|token| self.is_of_a_node(token)) {
            return self.admit_node(door, token);
        }
        let bearer = self.admit(door, token)?;
        if bearer.is_operator() {
            return Ok(bearer);
        }
        let text = "token: the one given is not an operator's";
        Err(self.refuse(door, Unproven::Wrong, text))
    }

    fn refuse(&self, door: Door, why: Unproven, text: &str) -> Error {
        self.shared.metrics.record_unauthenticated(door, why);
        Error::new(ErrorKind::Unauthenticated, text)
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("asks", &self.asks()).finish_non_exhaustive()
    }
}

/// The token in the value of an `authorization` header; none if it has another scheme.
#[must_use]
pub fn bearer_token(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    const FIRST: &str = "first-token-of-thirty-two-or-more-characters";
    const SECOND: &str = "second-token-of-thirty-two-or-more-characters";

    fn gate(file: &str) -> Gate {
        let gate = Gate::closed(TrustMetrics::register(&mut Registry::default())).unwrap();
        gate.replace(file.as_bytes()).unwrap();
        gate
    }

    fn admitted(gate: &Gate, token: &str) -> Option<Arc<Bearer>> {
        gate.admit(Door::Grpc, Some(token.as_bytes())).ok()
    }

    #[test]
    fn a_token_stands_for_its_tenant_and_no_other_token_for_any() {
        let gate = gate(&format!("a {FIRST}\nb {SECOND} operator\n"));
        let a = admitted(&gate, FIRST).unwrap();
        assert_eq!((a.tenant(), a.is_operator()), ("a", false));
        let b = admitted(&gate, SECOND).unwrap();
        assert_eq!((b.tenant(), b.is_operator()), ("b", true));
        for wrong in ["", &FIRST[1..], &format!("{FIRST}x"), "a", &FIRST.to_uppercase()] {
            let error = gate.admit(Door::Bulk, Some(wrong.as_bytes())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unauthenticated);
        }
        assert!(gate.admit(Door::Bulk, None).is_err());
        assert!(gate.admit_operator(Door::Http, Some(FIRST.as_bytes())).is_err());
        gate.admit_operator(Door::Http, Some(SECOND.as_bytes())).unwrap();
    }

    #[test]
    fn what_is_refused_is_counted_by_door_and_reason() {
        let gate = gate(&format!("a {FIRST}\n"));
        for _ in 0..2 {
            gate.admit(Door::Bulk, None).unwrap_err();
        }
        gate.admit(Door::Grpc, Some(b"x")).unwrap_err();
        gate.admit_operator(Door::Http, Some(FIRST.as_bytes())).unwrap_err();
        let metrics = &gate.shared.metrics;
        assert_eq!(metrics.unauthenticated(Door::Bulk, Unproven::Missing), 2);
        assert_eq!(metrics.unauthenticated(Door::Grpc, Unproven::Wrong), 1);
        assert_eq!(metrics.unauthenticated(Door::Http, Unproven::Wrong), 1);
        assert_eq!(metrics.unauthenticated(Door::Grpc, Unproven::Missing), 0);
    }

    #[test]
    fn a_new_file_revokes_what_it_does_not_have_and_keeps_the_rest() {
        let gate = gate(&format!("a {FIRST}\nb {SECOND}\n"));
        let (a, b) = (admitted(&gate, FIRST).unwrap(), admitted(&gate, SECOND).unwrap());
        gate.replace(format!("b {SECOND}\n# a has left\n").as_bytes()).unwrap();
        assert!(a.revoked().is_cancelled() && !b.revoked().is_cancelled());
        assert!(admitted(&gate, FIRST).is_none());
        assert!(Arc::ptr_eq(&b, &admitted(&gate, SECOND).unwrap()));
        // The same token for another tenant is another bearer.
        gate.replace(format!("c {SECOND}\n").as_bytes()).unwrap();
        assert!(b.revoked().is_cancelled());
        assert_eq!(admitted(&gate, SECOND).unwrap().tenant(), "c");
    }

    #[test]
    fn a_bad_file_changes_nothing_and_is_not_quoted() {
        let gate = gate(&format!("a {FIRST}\n"));
        let twice = format!("a {SECOND}\nb {SECOND}\n");
        for bad in ["", "a\n", "a short\n", &twice] {
            let error = gate.replace(bad.as_bytes()).unwrap_err().to_string();
            assert!(!error.contains("short") && !error.contains(SECOND), "{error}");
        }
        assert!(admitted(&gate, FIRST).is_some() && admitted(&gate, SECOND).is_none());
    }

    #[test]
    fn no_token_is_shown() {
        let gate = gate(&format!("a {FIRST}\n"));
        let bearer = admitted(&gate, FIRST).unwrap();
        let token: Token = FIRST.parse().unwrap();
        for shown in [format!("{gate:?}"), format!("{bearer:?}"), format!("{token:?}")] {
            assert!(!shown.contains(FIRST), "{shown}");
        }
    }

    #[test]
    fn a_node_acts_for_the_tenant_it_names_and_nobody_else_names_one() {
        let nodes: Token = "n".repeat(64).parse().unwrap();
        let node = Some(nodes.reveal().as_bytes());
        let open = Gate::open(TrustMetrics::register(&mut Registry::default()));
        for gate in [gate(&format!("a {FIRST}\n")), open] {
            gate.know_nodes(&nodes).unwrap();
            let b = gate.admit_for(Door::Grpc, node, Some(b"b")).unwrap();
            assert_eq!((b.tenant(), b.is_node(), b.is_operator()), ("b", true, false));
            let field = [nodes.reveal().as_bytes(), b"@b@c"].concat();
            assert_eq!(gate.admit_joined(Door::Bulk, &field).unwrap().tenant(), "b@c");
            let itself = gate.admit_node(Door::Grpc, node).unwrap();
            assert!(itself.is_node() && itself.is_operator() && itself.tenant().is_empty());
            gate.admit_operator(Door::Http, node).unwrap();
            // A client is let in as what it is, and by no means as what it says.
            let client = gate.admit_joined(Door::Bulk, FIRST.as_bytes()).unwrap();
            assert!(["a", ONLY_TENANT].contains(&client.tenant()) && !client.is_node());
            let of_others = [Some(FIRST.as_bytes()), Some(&nodes.reveal().as_bytes()[1..]), None];
            for token in of_others {
                gate.admit_for(Door::Grpc, token, Some(b"b")).unwrap_err();
                gate.admit_node(Door::Grpc, token).unwrap_err();
            }
            gate.admit_joined(Door::Bulk, format!("{FIRST}@b").as_bytes()).unwrap_err();
            // A node without a tenant has no blocks, and a tenant must have a name.
            gate.admit(Door::Resp, node).unwrap_err();
            let long = [b'x'; crate::limits::TENANT_BYTES_MAX + 1];
            for bad in [&b""[..], b"a b", b"\xff", &long] {
                gate.admit_for(Door::Grpc, node, Some(bad)).unwrap_err();
            }
        }
    }

    #[test]
    fn a_header_has_its_token_behind_the_scheme() {
        assert_eq!(bearer_token(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer_token(b"bearer  abc "), Some(&b"abc"[..]));
        for other in [&b"Basic abc"[..], b"Bearer", b"abc", b""] {
            assert_eq!(bearer_token(other), None, "{other:?}");
        }
    }
}
