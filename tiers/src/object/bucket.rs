//! One bucket (or container, or directory) of an object store, asked by name.
//!
//! ```text
//! get, put, .. -> budget -> place among those under way -> breaker -> request, timed -> exact bytes
//!                   ^                                                    |
//!                   +------------- transient, affordable, in time -------+
//! ```
//! Promises
//! - What a read returns has exactly the length asked for; anything else is an error. That the bytes
//!   are the right ones is for checksums above to say.
//! - Every call ends at its deadline; a failed write in parts up to a second later, to clean up.
//! - Requests sent are at most twice those asked for, whatever the store does. It is left alone while
//!   it is down, and noticed when it is back.
//! - Every request is counted with how it ended, and priced.
//!
//! After a failed or cancelled write the object may be there, whole, or appear later; half an object is
//! never seen. Names are made of segments between `/`, and lie below the path of the URL.
//!
//! Why not the retries of the library below: they have no budget across requests, do not know our
//! deadlines, and hide from the limit what the store says.

mod breaker;
mod error;
mod limit;
mod meter;
mod open;
mod probe;
mod retry;
mod transfer;
mod upload;

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use futures_util::{StreamExt, stream::BoxStream};
use object_store::{
    Error as StoreError, ObjectMeta, ObjectStore, PutMode, PutPayload, Result as StoreResult,
    multipart::MultipartStore, path::Path,
};
use tokio::{sync::Mutex, time::Instant};

use self::{
    error::Fault,
    meter::Meter,
    retry::{Call, Sender},
};
pub use self::{
    error::{BucketError, BucketErrorKind},
    open::{BucketConfig, SCHEMES},
    probe::Probe,
};
use crate::object::{
    metrics::{ObjectMetrics, OpLabel, OutcomeLabel},
    prices::Prices,
};

/// Names in one page of a list: what S3 gives.
const PAGE_NAMES: usize = 1000;
/// What S3 says when two conditional writes meet and neither is done: it may be tried again.
const CONFLICT: &str = "ConditionalRequestConflict";

/// What a list says of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name, without the path of the URL.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// When it was written, by the clock of the store.
    pub modified_unix_ms: u64,
}

/// One bucket.
#[derive(Debug)]
pub struct Bucket {
    config: BucketConfig,
    /// What messages call it.
    shown: String,
    store: Arc<dyn ObjectStore>,
    /// The same store, if it takes objects in parts.
    in_parts: Option<Parts>,
    /// Whether lists come in the order of names, so that a broken one can go on behind its last.
    lists_sorted: bool,
    prefix: Path,
    sender: Sender,
}

/// A store that takes objects in parts.
#[derive(Clone)]
struct Parts(Arc<dyn MultipartStore>);

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Parts")
    }
}

/// What a bucket is made over.
#[derive(Debug)]
struct Backend {
    store: Arc<dyn ObjectStore>,
    in_parts: Option<Parts>,
    lists_sorted: bool,
    prefix: Path,
}

/// What became of a conditional write.
enum Created {
    Ours,
    Theirs,
    /// An earlier try of ours may have made it.
    Unclear,
}

impl Bucket {
    /// A bucket over any store that lists in the order of names. Objects are written whole.
    #[must_use]
    pub fn over(
        store: Arc<dyn ObjectStore>,
        config: BucketConfig,
        metrics: ObjectMetrics,
    ) -> Arc<Self> {
        let prefix = Path::default();
        Self::new(Backend { store, in_parts: None, lists_sorted: true, prefix }, config, metrics)
    }

    /// The same over one that takes large objects in parts.
    #[must_use]
    pub fn over_parts<S: ObjectStore + MultipartStore>(
        store: Arc<S>,
        config: BucketConfig,
        metrics: ObjectMetrics,
    ) -> Arc<Self> {
        let in_parts = Some(Parts(Arc::<S>::clone(&store)));
        let prefix = Path::default();
        Self::new(Backend { store, in_parts, lists_sorted: true, prefix }, config, metrics)
    }

    fn new(backend: Backend, config: BucketConfig, metrics: ObjectMetrics) -> Arc<Self> {
        let Backend { store, in_parts, lists_sorted, prefix } = backend;
        let meter = Meter { metrics, prices: config.prices };
        let sender = Sender::new(config.concurrency_max, config.request_timeout, meter);
        let shown = config.url.clone();
        Arc::new(Self { config, shown, store, in_parts, lists_sorted, prefix, sender })
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> &ObjectMetrics {
        &self.sender.meter.metrics
    }

    /// Its URL, for messages.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.shown
    }

    /// The prices it counts with.
    #[must_use]
    pub fn prices(&self) -> Prices {
        self.config.prices
    }

    /// Reads a range of an object, all of it or nothing.
    ///
    /// # Errors
    /// `NotFound`; `Damaged` if the object ends before, or the answer is shorter or longer; and those
    /// of every request: `Refused`, `Busy`, `Timeout`, `Failed`.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn get(
        &self,
        name: &str,
        range: Range<u64>,
        deadline: Instant,
    ) -> Result<Bytes, BucketError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let call = Call { op: OpLabel::Get, verb: "read", name, deadline };
        let path = self.path(call)?;
        let read_bytes = &self.metrics().read_bytes;
        let attempt = async |_| {
            let read = transfer::read_range(&self.store, &path, &range, read_bytes).await?;
            Ok((read, OutcomeLabel::Ok))
        };
        self.sender.send(call, attempt).await
    }

    /// Reads a whole object of at most so many bytes.
    ///
    /// # Errors
    /// Those of [`Self::get`]; `Damaged` if it is larger.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn get_whole(
        &self,
        name: &str,
        bytes_max: u64,
        deadline: Instant,
    ) -> Result<Bytes, BucketError> {
        let call = Call { op: OpLabel::Get, verb: "read", name, deadline };
        let path = self.path(call)?;
        let read_bytes = &self.metrics().read_bytes;
        let attempt = async |_| {
            let read = transfer::read_whole(&self.store, &path, bytes_max, read_bytes).await?;
            Ok((read, OutcomeLabel::Ok))
        };
        self.sender.send(call, attempt).await
    }

    /// Writes an object, in place of one that is there. It appears whole or not at all.
    ///
    /// # Errors
    /// `Refused`, `Busy`, `Timeout`, `Failed`. It may be there all the same, or appear later.
    ///
    /// # Cancel safety
    /// Not safe: parts that were sent stay until the bucket's lifecycle rule removes them.
    pub async fn put(
        &self,
        name: &str,
        body: Vec<Bytes>,
        deadline: Instant,
    ) -> Result<(), BucketError> {
        let call = Call { op: OpLabel::Put, verb: "write", name, deadline };
        let path = self.path(call)?;
        let bytes = transfer::length(&body);
        if let Some(Parts(store)) = &self.in_parts
            && bytes > self.config.multipart_above_bytes
        {
            let upload = upload::Upload { bucket: self, store: store.as_ref(), path, call };
            return upload.put(body).await;
        }
        let payload = PutPayload::from_iter(body);
        let attempt = async |_| {
            self.metrics().written_bytes.inc_by(bytes);
            let put = self.store.put_opts(&path, payload.clone(), PutMode::Overwrite.into()).await;
            put.map_err(Fault::of)?;
            Ok(((), OutcomeLabel::Ok))
        };
        self.sender.send(call, attempt).await
    }

    /// Writes an object if there is none of that name; false if there is. Of several writers exactly
    /// one gets true, if their bodies differ: after an unclear answer the body says whose it is.
    ///
    /// # Errors
    /// `Unsupported` if the store cannot do this, and those of [`Self::put`].
    ///
    /// # Cancel safety
    /// Not safe: the object may be there.
    pub async fn create(
        &self,
        name: &str,
        body: Bytes,
        deadline: Instant,
    ) -> Result<bool, BucketError> {
        let call = Call { op: OpLabel::Create, verb: "create", name, deadline };
        let path = self.path(call)?;
        let attempt = async |tries| {
            self.metrics().written_bytes.inc_by(body.len() as u64);
            let payload = PutPayload::from_bytes(body.clone());
            match self.store.put_opts(&path, payload, PutMode::Create.into()).await {
                Ok(_) => Ok((Created::Ours, OutcomeLabel::Ok)),
                Err(conflict @ StoreError::AlreadyExists { .. })
                    if conflict.to_string().contains(CONFLICT) =>
                {
                    Err(Fault { transient: true, ..Fault::of(conflict) })
                }
                Err(StoreError::AlreadyExists { .. }) => {
                    let whose = if tries == 0 { Created::Theirs } else { Created::Unclear };
                    Ok((whose, OutcomeLabel::Exists))
                }
                Err(error) => Err(Fault::of(error)),
            }
        };
        match self.sender.send(call, attempt).await? {
            Created::Ours => Ok(true),
            Created::Theirs => Ok(false),
            Created::Unclear => {
                match self.get_whole(name, body.len() as u64, deadline).await {
                    Ok(there) => Ok(there == body),
                    // A longer one is another's.
                    Err(error) if error.kind() == BucketErrorKind::Damaged => Ok(false),
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// Removes an object, which may be gone already.
    ///
    /// # Errors
    /// `Refused`, `Busy`, `Timeout`, `Failed`.
    ///
    /// # Cancel safety
    /// Not safe: the object may be gone.
    pub async fn delete(&self, name: &str, deadline: Instant) -> Result<(), BucketError> {
        let call = Call { op: OpLabel::Delete, verb: "delete", name, deadline };
        let path = self.path(call)?;
        let attempt = async |_| {
            let one = futures_util::stream::iter([Ok(path.clone())]).boxed();
            match self.store.delete_stream(one).next().await {
                None | Some(Ok(_)) => Ok(((), OutcomeLabel::Ok)),
                Some(Err(StoreError::NotFound { .. })) => Ok(((), OutcomeLabel::NotFound)),
                Some(Err(error)) => Err(Fault::of(error)),
            }
        };
        self.sender.send(call, attempt).await
    }

    /// Names everything below `prefix`, which is made of whole segments; in no promised order. What is
    /// written or removed meanwhile may be in it or not.
    ///
    /// # Errors
    /// `Refused`, `Busy`, `Timeout`, `Failed`.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn list(&self, prefix: &str, deadline: Instant) -> Result<Vec<Listed>, BucketError> {
        let call = Call { op: OpLabel::List, verb: "list", name: prefix, deadline };
        let path = self.path(call)?;
        let listing = Mutex::new(Listing { pages: None, last: None, found: Vec::new() });
        let attempt = async |_| Ok((self.page(&path, &listing).await?, OutcomeLabel::Ok));
        while self.sender.send(call, attempt).await? {}
        Ok(listing.into_inner().found)
    }

    /// Takes one page; says whether there may be more. Nothing of a broken page is lost or doubled.
    async fn page(&self, prefix: &Path, listing: &Mutex<Listing>) -> Result<bool, Fault> {
        let mut listing = listing.lock().await;
        let Listing { pages, last, found } = &mut *listing;
        // Taken out: after a failed or abandoned page the next try asks anew.
        let mut names = pages.take().unwrap_or_else(|| {
            if !self.lists_sorted {
                found.clear();
                *last = None;
            }
            match &*last {
                Some(last) => self.store.list_with_offset(Some(prefix), last),
                None => self.store.list(Some(prefix)),
            }
        });
        for _ in 0..PAGE_NAMES {
            let Some(meta) = names.next().await else { return Ok(false) };
            let meta = meta.map_err(Fault::of)?;
            found.extend(self.listed(&meta));
            *last = Some(meta.location);
        }
        *pages = Some(names);
        Ok(true)
    }

    fn listed(&self, meta: &ObjectMeta) -> Option<Listed> {
        let name = meta.location.as_ref().strip_prefix(self.prefix.as_ref())?;
        let modified = meta.last_modified.timestamp_millis();
        Some(Listed {
            name: name.trim_start_matches('/').to_owned(),
            bytes: meta.size,
            modified_unix_ms: u64::try_from(modified).unwrap_or(0),
        })
    }

    fn path(&self, call: Call<'_>) -> Result<Path, BucketError> {
        let name = call.name.trim_matches('/');
        let whole = match self.prefix.as_ref() {
            "" => name.to_owned(),
            prefix => format!("{prefix}/{name}"),
        };
        Path::parse(whole).map_err(|error| call.failed(Fault::name(error), 1))
    }
}

/// A list that is being read.
struct Listing {
    pages: Option<BoxStream<'static, StoreResult<ObjectMeta>>>,
    last: Option<Path>,
    found: Vec<Listed>,
}

#[cfg(test)]
mod tests;
