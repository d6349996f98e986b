//! Blocks that any test can make again: a stack, a namespace, and bytes from an identity.

use std::{sync::Arc, time::Duration};

use prometheus_client::registry::Registry;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    block::{BlockHash, Hashes},
    checksum::part_checksum,
    error::Result,
    metrics::TierMetrics,
    namespace::{Identity, Namespace, NamespaceSpec, NamespaceTable, PartSpec, Secret},
    stack::{Chain, Description, Fetch, Offer, Piece, PutBatch, PutOutcome, Stack, StackConfig},
    store::BlockStore,
};

/// The hash of block `number`.
#[must_use]
pub fn hash_of(number: u64) -> BlockHash {
    BlockHash::from_array(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

/// The bytes of `part` of block `number` in a namespace: any reader can make them again.
#[must_use]
pub fn block_bytes(namespace: &Namespace, number: u64, part: u32, len: usize) -> Vec<u8> {
    let seed =
        xxh3_64_with_seed(namespace.id().as_bytes(), number.wrapping_mul(31) + u64::from(part));
    let words = (0_u64..).map(|word| xxh3_64_with_seed(&word.to_le_bytes(), seed));
    words.flat_map(u64::to_le_bytes).take(len).collect()
}

/// A stack with one way to open namespaces on it.
#[derive(Debug)]
pub struct Fixture {
    /// The stack.
    pub stack: Stack,
    /// Its namespaces.
    pub namespaces: Arc<NamespaceTable>,
}

impl Fixture {
    /// A stack of `dram_bytes` over `cold`.
    ///
    /// # Errors
    /// Those of [`Stack::open`].
    pub fn new(dram_bytes: u64, cold: Vec<Arc<dyn BlockStore>>) -> Result<Self> {
        Self::with_index(dram_bytes, 1 << 20, cold)
    }

    /// A stack whose map holds at most `index_blocks_max` entries.
    ///
    /// # Errors
    /// Those of [`Stack::open`].
    pub fn with_index(
        dram_bytes: u64,
        index_blocks_max: u64,
        cold: Vec<Arc<dyn BlockStore>>,
    ) -> Result<Self> {
        let namespaces = Arc::new(NamespaceTable::new(Secret::new([7; 32]), false));
        Self::over(dram_bytes, index_blocks_max, cold, namespaces)
    }

    /// A stack over namespaces that its colder tiers know, too.
    ///
    /// # Errors
    /// Those of [`Stack::open`].
    pub fn over(
        dram_bytes: u64,
        index_blocks_max: u64,
        cold: Vec<Arc<dyn BlockStore>>,
        namespaces: Arc<NamespaceTable>,
    ) -> Result<Self> {
        let config = StackConfig { dram_bytes, index_blocks_max, seed: 1 };
        let metrics = TierMetrics::register(&mut Registry::default());
        let stack = Stack::open(config, Arc::clone(&namespaces), cold, metrics)?;
        Ok(Self { stack, namespaces })
    }

    /// The bytes of the parts of a block, if it comes back within ten seconds.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn read(&self, namespace: &Arc<Namespace>, number: u64) -> Option<Vec<Vec<u8>>> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let fetch = self.stack.get(namespace, hash_of(number), &[], deadline).await;
        let Ok(Fetch::Hit(block)) = fetch else { return None };
        (0_u32..)
            .zip(namespace.layout().parts())
            .map(|(part, _)| block.part(part).map(|bytes| bytes.as_ref().to_vec()))
            .collect()
    }

    /// Opens a namespace whose parts have these lengths.
    ///
    /// # Errors
    /// Those of [`NamespaceTable::open`].
    pub fn namespace(&self, model: &str, parts: &[u32]) -> Result<Arc<Namespace>> {
        self.namespace_of(model, parts, 16)
    }

    /// The same with so many tokens in a block.
    ///
    /// # Errors
    /// Those of [`NamespaceTable::open`].
    pub fn namespace_of(
        &self,
        model: &str,
        parts: &[u32],
        block_tokens: u32,
    ) -> Result<Arc<Namespace>> {
        self.namespace_for("default", (model, parts), block_tokens)
    }

    /// The same of a tenant.
    ///
    /// # Errors
    /// Those of [`NamespaceTable::open`].
    pub fn namespace_for(
        &self,
        tenant: &str,
        (model, parts): (&str, &[u32]),
        block_tokens: u32,
    ) -> Result<Arc<Namespace>> {
        let parts = (0_u32..).zip(parts);
        let identity = Identity {
            tenant: tenant.into(),
            model: model.into(),
            weights: "1".into(),
            engine: "test".into(),
            layout: "plain".into(),
            dtype: "u8".into(),
            block_tokens,
            parts: parts.map(|(rank, bytes)| PartSpec { group: 0, rank, bytes: *bytes }).collect(),
            split: "none".into(),
            hash_algorithm: "blake3".into(),
            hash_bytes: 32,
            hash_root: Vec::new(),
            lora: Vec::new(),
            cache_salt: Vec::new(),
        };
        let spec = NamespaceSpec::Engine(Box::new(identity));
        Ok(self.namespaces.open(spec, true)?.namespace)
    }

    /// Offers the blocks named by `numbers`, all parts, behind `parent`.
    ///
    /// # Errors
    /// Those of [`Stack::put`].
    pub fn offer(
        &self,
        namespace: &Arc<Namespace>,
        numbers: &[u64],
        parent: Option<u64>,
    ) -> Result<PutBatch> {
        let packed = pack(numbers);
        let hashes = Hashes::new(&packed, 32)?;
        let parent = parent.map(hash_of);
        self.stack
            .put(namespace, Offer { hashes, parts: &[], checksums: &[], parent, lengths: &[] })
    }

    /// Writes part `part` of the block at `position`, which is block `number`.
    ///
    /// # Errors
    /// Those of [`PutBatch::write`].
    pub fn write(
        &self,
        batch: &mut PutBatch,
        namespace: &Namespace,
        (position, number): (u32, u64),
        part: u32,
    ) -> Result<Option<PutOutcome>> {
        let specs = namespace.layout().parts();
        let spec = usize::try_from(part).ok().and_then(|part| specs.get(part));
        let spec = spec.copied().unwrap_or(PartSpec { group: 0, rank: 0, bytes: 1 });
        let len = usize::try_from(spec.bytes).unwrap_or(0);
        let data = block_bytes(namespace, number, part, len);
        let checksum =
            part_checksum(namespace.id(), &hash_of(number), spec.group, spec.rank, &data);
        batch.write(Piece { position, part, offset: 0, data: &data, checksum, part_bytes: 0 })
    }

    /// Describes block `number`; how many blocks took it.
    ///
    /// # Errors
    /// Those of [`Stack::describe`].
    pub fn describe(
        &self,
        namespace: &Namespace,
        number: u64,
        description: &Description,
    ) -> Result<u32> {
        let packed = pack(&[number]);
        let Description { parent, position, tokens, lora_name } = description;
        let (hashes, parent, position) = (Hashes::new(&packed, 32)?, *parent, *position);
        self.stack.describe(namespace, Chain { hashes, parent, position, tokens, lora_name })
    }

    /// Puts whole blocks in one batch; returns how many are readable afterwards because of it.
    ///
    /// # Errors
    /// Those of [`Stack::put`].
    pub fn put(&self, namespace: &Arc<Namespace>, numbers: &[u64]) -> Result<usize> {
        self.put_behind(namespace, numbers, None)
    }

    /// As [`put`](Self::put), as the continuation of the chain that ends with `parent`.
    ///
    /// # Errors
    /// Those of [`Stack::put`].
    pub fn put_behind(
        &self,
        namespace: &Arc<Namespace>,
        numbers: &[u64],
        parent: Option<u64>,
    ) -> Result<usize> {
        let mut batch = self.offer(namespace, numbers, parent)?;
        let claims = batch.claims().to_vec();
        let mut stored = 0;
        for ((position, number), claim) in (0_u32..).zip(numbers).zip(claims) {
            if claim != crate::stack::Claim::Wanted {
                continue;
            }
            for part in 0..u32::try_from(namespace.layout().parts().len()).unwrap_or(0) {
                match self.write(&mut batch, namespace, (position, *number), part)? {
                    Some(PutOutcome::Stored) => stored += 1,
                    Some(PutOutcome::Refused) => break,
                    Some(PutOutcome::PartStored | PutOutcome::Corrupt) | None => {}
                }
            }
        }
        batch.finish();
        Ok(stored)
    }
}

/// The packed hashes of blocks.
#[must_use]
pub fn pack(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| *hash_of(*number).as_bytes()).collect()
}
