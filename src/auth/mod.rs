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

mod token;
mod tokens;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

use blake3::Hash;
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

pub use self::token::Token;
use crate::{
    id::random_key,
    metrics::{Door, TrustMetrics, Unproven},
};

/// The tenant of every client where there are no tokens.
pub const ONLY_TENANT: &str = "default";
/// How a token is announced in a header.
const SCHEME: &[u8] = b"bearer ";

/// Whoever has shown a token that is valid, or came in where none is asked for.
#[derive(Debug)]
pub struct Bearer {
    tenant: Box<str>,
    operator: bool,
    revoked: CancellationToken,
}

impl Bearer {
    /// The one there is without tokens.
    #[must_use]
    pub fn anyone() -> Self {
        Self::new(ONLY_TENANT, true)
    }

    fn new(tenant: &str, operator: bool) -> Self {
        Self { tenant: tenant.into(), operator, revoked: CancellationToken::new() }
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
    admission: Admission,
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
        let admission = Admission::Anyone(Arc::new(Bearer::anyone()));
        Self { shared: Arc::new(Shared { metrics, admission }) }
    }

    /// Lets in who has a token; none is known yet.
    ///
    /// # Errors
    /// `Internal` if the system has no random bytes.
    pub fn closed(metrics: TrustMetrics) -> Result<Self> {
        let admission = Admission::Bearers { key: random_key()?, known: RwLock::default() };
        Ok(Self { shared: Arc::new(Shared { metrics, admission }) })
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
            let bearer =
                same.map_or_else(|| Arc::new(Bearer::new(line.tenant, line.operator)), Arc::clone);
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

    /// Lets a client in that shows `token`, or nothing.
    ///
    /// # Errors
    /// `Unauthenticated` if it should show one, or another one. Counted.
    pub fn admit(&self, door: Door, token: Option<&[u8]>) -> Result<Arc<Bearer>> {
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
    fn a_header_has_its_token_behind_the_scheme() {
        assert_eq!(bearer_token(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer_token(b"bearer  abc "), Some(&b"abc"[..]));
        for other in [&b"Basic abc"[..], b"Bearer", b"abc", b""] {
            assert_eq!(bearer_token(other), None, "{other:?}");
        }
    }
}
