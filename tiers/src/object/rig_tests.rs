//! What tests of owners and logs are made of: a store that is cut off at a chosen call, packs that can
//! be made again, and what must be true of them whatever happened.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, Error as StoreError, GetOptions, GetRange, GetResult, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result as StoreResult, memory::InMemory, path::Path,
};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::{sync::Semaphore, time::Instant};

use super::{
    ObjectMetrics,
    bucket::{Bucket, BucketConfig},
    codec::Coding,
    format::{Footer, PackEntry, PackTrailer},
    names::{ClusterName, Owner, PackId},
    owner::TAKEOVER_AFTER,
    rebuild::{Rebuilt, RebuiltPack},
};
use crate::{
    block::BlockHash, key::IndexKey, namespace::NamespaceId, store::BoxFuture, testing::Draws,
};

/// Bytes of a block in a pack.
const BLOCK_BYTES: u32 = 100;
/// A moment after 1970.
pub(super) const NOW: u64 = 1_700_000_000_000;
/// Longer than a holder may be silent.
pub(super) const LONG_MS: u64 = TAKEOVER_AFTER.as_secs() * 1000;

pub(super) fn owner() -> Owner {
    Owner { cluster: ClusterName::new("prod").unwrap(), ordinal: 3 }
}

pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(super) fn key(number: u64) -> IndexKey {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    IndexKey { namespace: NamespaceId::from_array([7; 32]), hash: BlockHash::from_array(hash) }
}

/// A pack with these blocks.
pub(super) fn pack(id: PackId, keys: impl IntoIterator<Item = u64>) -> Footer {
    let entry = |(number, key_number): (u32, u64)| PackEntry {
        key: key(key_number),
        offset: number * BLOCK_BYTES,
        stored: BLOCK_BYTES,
        len: BLOCK_BYTES,
        coding: Coding::Raw,
        layout: 1,
        sums: vec![key_number],
    };
    Footer {
        id,
        cluster: owner().cluster,
        created_unix_ms: NOW,
        namespaces: vec![(NamespaceId::from_array([7; 32]), vec![1, 2, 3])],
        entries: (0..).zip(keys).map(entry).collect(),
    }
}

/// Uploads a pack.
pub(super) async fn upload(bucket: &Bucket, footer: &Footer) -> bool {
    let encoded = footer.encode();
    let trailer = PackTrailer::of(footer, &encoded).encode();
    let data = vec![0; usize::try_from(footer.data_bytes()).unwrap()];
    let body = [data, encoded, trailer].map(Bytes::from).to_vec();
    bucket.put(&footer.id.name(&footer.cluster), body, soon()).await.is_ok()
}

/// The numbers of the blocks of each pack.
pub(super) fn blocks(rebuilt: &Rebuilt) -> BTreeMap<PackId, BTreeSet<u64>> {
    let of = |pack: &RebuiltPack| pack.footer.entries.iter().map(|it| it.sums[0]).collect();
    rebuilt.packs.iter().map(|pack| (pack.id, of(pack))).collect()
}

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// It is not done.
    Before,
    /// It is done, and nobody hears of it.
    After,
}

#[derive(Debug, Default)]
struct Counted {
    calls: usize,
    reads: Vec<(String, Range<u64>)>,
    /// From this call on everything fails; the first as it says.
    cut: Option<(usize, Cut)>,
    /// How often others go first, at each call.
    yields: Option<Draws>,
    /// Writes wait for a permit.
    gate: Option<Arc<Semaphore>>,
}

/// A store in memory that counts calls and can be cut off.
#[derive(Debug, Clone)]
pub(super) struct Double {
    inner: Arc<InMemory>,
    counted: Arc<Mutex<Counted>>,
}

impl fmt::Display for Double {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("double")
    }
}

impl Double {
    pub(super) fn over(inner: &Arc<InMemory>) -> Self {
        Self { inner: Arc::clone(inner), counted: Arc::default() }
    }

    pub(super) fn cut_at(self, call: usize, how: Cut) -> Self {
        self.counted.lock().cut = Some((call, how));
        self
    }

    pub(super) fn yielding(self, seed: u64) -> Self {
        self.counted.lock().yields = Some(Draws::new(seed));
        self
    }

    pub(super) fn gated(self, gate: &Arc<Semaphore>) -> Self {
        self.counted.lock().gate = Some(Arc::clone(gate));
        self
    }

    async fn pass_gate(&self) {
        let gate = self.counted.lock().gate.clone();
        if let Some(gate) = gate {
            gate.acquire().await.unwrap().forget();
        }
    }

    pub(super) fn bucket(&self) -> Arc<Bucket> {
        let config = BucketConfig { url: "memory:///".into(), ..BucketConfig::default() };
        let metrics = ObjectMetrics::register(&mut Registry::default());
        Bucket::over(Arc::new(self.clone()), config, metrics)
    }

    /// What was read since the last time, sorted.
    pub(super) fn reads(&self) -> Vec<(String, Range<u64>)> {
        let mut reads = std::mem::take(&mut self.counted.lock().reads);
        reads.sort_by(|a, b| a.0.cmp(&b.0));
        reads
    }

    pub(super) fn was_cut(&self) -> bool {
        let counted = self.counted.lock();
        counted.cut.is_some_and(|(call, _)| counted.calls >= call)
    }

    /// Counts a call. Whether it is done, and whether that is told.
    fn call(&self) -> (bool, bool) {
        let mut counted = self.counted.lock();
        counted.calls += 1;
        match counted.cut {
            Some((call, how)) if counted.calls >= call => {
                (counted.calls == call && how == Cut::After, false)
            }
            _ => (true, true),
        }
    }

    async fn let_others_go_first(&self) {
        let draws = self.counted.lock().yields.as_mut().map_or(0, |draws| draws.below(4));
        for _ in 0..draws {
            tokio::task::yield_now().await;
        }
    }

    async fn through<T>(&self, work: impl Future<Output = StoreResult<T>>) -> StoreResult<T> {
        self.let_others_go_first().await;
        let (done, told) = self.call();
        if !done {
            return Err(lost());
        }
        let result = work.await;
        if told { result } else { Err(lost()) }
    }
}

fn lost() -> StoreError {
    StoreError::Generic { store: "double", source: "cut off".into() }
}

impl ObjectStore for Double {
    fn put_opts<'a, 'b, 'r>(
        &'a self,
        location: &'b Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> BoxFuture<'r, StoreResult<PutResult>>
    where
        'a: 'r,
        'b: 'r,
        Self: 'r,
    {
        Box::pin(async move {
            self.pass_gate().await;
            self.through(self.inner.put_opts(location, payload, opts)).await
        })
    }

    fn put_multipart_opts<'a, 'b, 'r>(
        &'a self,
        location: &'b Path,
        opts: PutMultipartOptions,
    ) -> BoxFuture<'r, StoreResult<Box<dyn MultipartUpload>>>
    where
        'a: 'r,
        'b: 'r,
        Self: 'r,
    {
        Box::pin(self.through(self.inner.put_multipart_opts(location, opts)))
    }

    fn get_opts<'a, 'b, 'r>(
        &'a self,
        location: &'b Path,
        options: GetOptions,
    ) -> BoxFuture<'r, StoreResult<GetResult>>
    where
        'a: 'r,
        'b: 'r,
        Self: 'r,
    {
        let range = match &options.range {
            Some(GetRange::Bounded(range)) => range.clone(),
            _ => 0..u64::MAX,
        };
        self.counted.lock().reads.push((location.to_string(), range));
        Box::pin(self.through(self.inner.get_opts(location, options)))
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        let this = self.clone();
        let deletes = locations.then(move |location| {
            let this = this.clone();
            async move {
                let one = futures_util::stream::iter([location]).boxed();
                let mut deleted = this.inner.delete_stream(one);
                this.through(async { deleted.next().await.unwrap() }).await
            }
        });
        deletes.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        let (this, prefix) = (self.clone(), prefix.cloned());
        let names = async move {
            let listed = async {
                let listed = this.inner.list(prefix.as_ref());
                Ok(listed.collect::<Vec<_>>().await)
            };
            this.through(listed).await.unwrap_or_else(|error| vec![Err(error)])
        };
        let names = futures_util::stream::once(names);
        names.flat_map(futures_util::stream::iter).boxed()
    }

    fn list_with_delimiter<'a, 'b, 'r>(
        &'a self,
        prefix: Option<&'b Path>,
    ) -> BoxFuture<'r, StoreResult<ListResult>>
    where
        'a: 'r,
        'b: 'r,
        Self: 'r,
    {
        Box::pin(self.through(self.inner.list_with_delimiter(prefix)))
    }

    fn copy_opts<'a, 'b, 'c, 'r>(
        &'a self,
        from: &'b Path,
        to: &'c Path,
        options: CopyOptions,
    ) -> BoxFuture<'r, StoreResult<()>>
    where
        'a: 'r,
        'b: 'r,
        'c: 'r,
        Self: 'r,
    {
        Box::pin(self.through(self.inner.copy_opts(from, to, options)))
    }
}
