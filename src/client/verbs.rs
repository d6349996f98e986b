//! The small verbs: describe, touch, prefetch, remove.

use bytes::Bytes;
use kvstrata_proto::v1;
use kvstrata_tiers::{block::BlockHash, error::Result};

use super::{Handle, HashList};

/// What is known of a chain of blocks besides its hashes.
#[derive(Debug, Clone, Default)]
pub struct Description<'a> {
    /// Hash before the first one; `None` at the root.
    pub parent: Option<BlockHash>,
    /// Index of the first block in its chain.
    pub position: u32,
    /// Count x block_tokens token ids, or empty. Kept only where the namespace opted in.
    pub tokens: &'a [u32],
    /// Name of the adapter, empty for none.
    pub lora_name: &'a str,
}

/// What a prefetch found and began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prefetched {
    /// Blocks that are in dram already.
    pub in_dram: u32,
    /// Loads started.
    pub started: u32,
}

impl Handle {
    /// Attaches parent, position and tokens to the blocks of one chain; returns how many took it.
    ///
    /// # Errors
    /// `Invalid` if the tokens do not fit the blocks, or there are more blocks than one call takes.
    ///
    /// # Cancel safety
    /// Safe: describing twice is the same as once.
    pub async fn describe(&self, hashes: &HashList, what: Description<'_>) -> Result<u32> {
        self.check(hashes)?;
        let request = v1::DescribeRequest {
            namespace_id: self.wire_id(),
            hashes: hashes.packed(),
            parent: wire_parent(what.parent.as_ref(), hashes.hash_bytes()),
            position: what.position,
            tokens: what.tokens.to_vec(),
            lora_name: what.lora_name.to_owned(),
        };
        let mut wire = self.client.wire();
        let call = wire.describe(self.client.request(request));
        Ok(self.client.call("describe", call).await?.described)
    }

    /// Marks blocks as used now, tail first; returns how many were present.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: at worst some blocks look older than they are.
    pub async fn touch(&self, hashes: &HashList) -> Result<u32> {
        self.check(hashes)?;
        let mut touched = 0;
        // The last slice first, so that the order over all slices is tail first too.
        let slices: Vec<_> = hashes.chunks(self.limits().lookup_hashes_max).collect();
        for (_, slice) in slices.into_iter().rev() {
            let request = v1::TouchRequest { namespace_id: self.wire_id(), hashes: slice.packed() };
            let mut wire = self.client.wire();
            let call = wire.touch(self.client.request(request));
            touched += self.client.call("touch", call).await?.touched;
        }
        Ok(touched)
    }

    /// Asks for blocks to be moved towards dram ahead of need.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: loads that were started go on.
    pub async fn prefetch(&self, hashes: &HashList) -> Result<Prefetched> {
        self.check(hashes)?;
        let mut total = Prefetched::default();
        for (_, slice) in hashes.chunks(self.limits().lookup_hashes_max) {
            let request =
                v1::PrefetchRequest { namespace_id: self.wire_id(), hashes: slice.packed() };
            let mut wire = self.client.wire();
            let call = wire.prefetch(self.client.request(request));
            let reply = self.client.call("prefetch", call).await?;
            total.in_dram += reply.in_dram;
            total.started += reply.started;
        }
        Ok(total)
    }

    /// Removes blocks from every tier, also those under lease; returns how many were there. Reads in
    /// flight finish; later ones miss.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: removing twice is the same as once.
    pub async fn remove(&self, hashes: &HashList) -> Result<u32> {
        self.check(hashes)?;
        let mut removed = 0;
        for (_, slice) in hashes.chunks(self.limits().lookup_hashes_max) {
            let request =
                v1::RemoveRequest { namespace_id: self.wire_id(), hashes: slice.packed() };
            let mut wire = self.client.wire();
            let call = wire.remove(self.client.request(request));
            removed += self.client.call("remove", call).await?.removed;
        }
        Ok(removed)
    }
}

/// A parent as it goes over the wire: as long as every other hash, empty at the root.
pub(super) fn wire_parent(parent: Option<&BlockHash>, hash_bytes: usize) -> Bytes {
    let bytes = parent.and_then(|hash| hash.as_bytes().get(..hash_bytes));
    bytes.map(Bytes::copy_from_slice).unwrap_or_default()
}
