//! Blocks that lie in packs and that the map does not have there, so that nobody removes them by their
//! place: a removal of their hash has to be named in the log all the same.

use std::collections::HashSet;

use crate::{key::IndexKey, object::catalog::digest};

/// Blocks that are remembered, 16 MiB of memory; if there are more, it may be any block.
const BLOCKS_MAX: usize = 1 << 20;

/// See the [module](self). Says of some other blocks, too, that they are among them.
#[derive(Debug, Default)]
pub(super) struct Unheld {
    blocks: HashSet<u64>,
    any: bool,
}

impl Unheld {
    pub(super) fn add(&mut self, key: &IndexKey) {
        if self.blocks.len() < BLOCKS_MAX {
            self.blocks.insert(digest(key));
        } else {
            self.any = true;
        }
    }

    pub(super) fn may_have(&self, key: &IndexKey) -> bool {
        self.any || self.blocks.contains(&digest(key))
    }
}
