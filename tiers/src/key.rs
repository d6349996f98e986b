//! The name of a block on a medium: full namespace id and hash, whatever process reads it.

use crate::{block::BlockHash, map::Location, namespace::NamespaceId, store::Wanted};

/// Which block. The order is that of the bytes: one namespace is one range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IndexKey {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Its hash.
    pub hash: BlockHash,
}

impl IndexKey {
    /// The key of a block on the tier.
    #[must_use]
    pub fn of(block: &Wanted) -> Self {
        Self { namespace: block.namespace, hash: block.hash }
    }

    /// The block at a place of its tier.
    #[must_use]
    pub fn at(self, location: Location) -> Wanted {
        Wanted { namespace: self.namespace, hash: self.hash, location }
    }

    /// The key of what is no block: zeros.
    pub const NONE: Self =
        Self { namespace: NamespaceId::from_array([0; 32]), hash: BlockHash::from_array([0; 32]) };
}
