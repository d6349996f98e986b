//! Takes away what is left of pairs whose payload has been evicted.
//!
//! The two values of a chunk are of very different lengths, so they lie in different extents, and each is
//! evicted by itself. Small ones whose payload has gone would stay, make their extent look cold, and have
//! it reclaimed with those of all chunks that are still here. So whenever a pair is stored a few of those
//! stored before are looked at, in turn: as many leave as payloads do.

use std::collections::VecDeque;

use kvstrata_tiers::block::BlockHash;
use parking_lot::Mutex;

use super::space::Place;
use crate::{limits::RESP_PAIRS_MAX, node::Node};

/// Pairs that are looked at for each that is stored: more than one, to catch up.
const LOOKS: usize = 4;

/// The pairs that were stored since the start, as far as they are remembered.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    stored: Mutex<VecDeque<Stored>>,
}

#[derive(Debug)]
struct Stored {
    metadata: Place,
    payload: BlockHash,
}

impl Pairs {
    /// A pair was stored: looks at some that were stored before.
    pub(super) async fn note(&self, node: &Node, metadata: Place, payload: BlockHash) {
        let left = self.take_left(node, Stored { metadata, payload });
        for metadata in left {
            // What stays is of no use, and of little harm.
            if let Err(error) = metadata.remove(node).await {
                tracing::debug!(%error, "metadata of an evicted chunk not taken away");
            }
        }
    }

    /// What is left of pairs that are none any more.
    fn take_left(&self, node: &Node, new: Stored) -> Vec<Place> {
        let mut stored = self.stored.lock();
        let mut left = Vec::new();
        for _ in 0..LOOKS.min(stored.len()) {
            let Some(pair) = stored.pop_front() else { break };
            if pair.metadata.of(pair.payload).len(node).is_some() {
                stored.push_back(pair);
            } else {
                left.push(pair.metadata);
            }
        }
        if stored.len() < RESP_PAIRS_MAX {
            stored.push_back(new);
        }
        left
    }
}
