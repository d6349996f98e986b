//! What the nodes of a cluster know one another by: keys made of the install's secret and the cluster's name.
//!
//! Nobody hands them out. Nodes with the same file of `identity.secret_file` and the same `cluster.name` make the
//! same keys, and all others make others, so that a node of another cluster can neither be heard nor come in.

use std::fmt;

use kvstrata_tiers::namespace::Secret;

use crate::auth::Token;

/// What the key of datagrams is derived for.
const DATAGRAM_CONTEXT: &str = "kvstrata 2026-11 cluster datagram key v1";
/// What the token of nodes is derived for.
const TOKEN_CONTEXT: &str = "kvstrata 2026-11 cluster token v1";
/// What the tag of a cluster is derived for; it is no secret.
const TAG_CONTEXT: &str = "kvstrata 2026-11 cluster tag v1";

/// Length of a cluster's tag, in bytes.
pub(crate) const TAG_BYTES: usize = 8;

/// See the module. Never printed.
#[derive(Clone)]
pub(crate) struct ClusterKeys {
    /// Seals datagrams.
    pub(crate) datagram: [u8; 32],
    /// What a node shows when it calls another.
    pub(crate) token: Token,
    /// Tells datagrams of other clusters from forged ones. Made of the name alone.
    pub(crate) tag: [u8; TAG_BYTES],
}

impl ClusterKeys {
    /// Those of the cluster of this name.
    pub(crate) fn derive(secret: &Secret, cluster: &str) -> Self {
        let mut tag = [0; TAG_BYTES];
        let whole = blake3::derive_key(TAG_CONTEXT, cluster.as_bytes());
        tag.iter_mut().zip(whole).for_each(|(to, from)| *to = from);
        Self {
            datagram: secret.derive(DATAGRAM_CONTEXT, cluster.as_bytes()),
            token: Token::of_key(&secret.derive(TOKEN_CONTEXT, cluster.as_bytes())),
            tag,
        }
    }
}

impl fmt::Debug for ClusterKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKeys(redacted)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_secret_and_name_make_the_same_keys_and_others_others() {
        let keys = |secret: u8, name: &str| ClusterKeys::derive(&Secret::new([secret; 32]), name);
        let (ours, same) = (keys(1, "a"), keys(1, "a"));
        assert!(ours.datagram == same.datagram && ours.token == same.token && ours.tag == same.tag);
        for other in [keys(2, "a"), keys(1, "b")] {
            assert!(ours.datagram != other.datagram && ours.token != other.token);
        }
        assert_eq!(ours.tag, keys(2, "a").tag, "the tag is of the name alone");
        assert_ne!(ours.tag, keys(1, "b").tag);
        assert_ne!(hex::encode(ours.datagram), ours.token.reveal());
        assert!(!format!("{ours:?}").contains(ours.token.reveal()));
    }
}
