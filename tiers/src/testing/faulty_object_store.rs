//! An object store in memory that fails on demand, and counts what it was asked.

use std::{
    collections::VecDeque,
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, future::pending, stream, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartId,
    MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
    client::{HttpError, HttpErrorKind},
    memory::InMemory,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use parking_lot::Mutex;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing.
    None,
    /// It is refused with this HTTP status.
    Status(u16),
    /// The connection breaks before anything is done.
    Reset,
    /// The connection breaks after everything was done.
    ResetAfter,
    /// No answer ever comes.
    Stall,
    /// A body ends a byte too early.
    Shorter,
    /// A body goes on for a byte too many, and does not end.
    Longer,
    /// Two conditional writes met.
    Conflict,
    /// A list breaks after so many names.
    BreakList(usize),
}

/// The store.
#[derive(Debug)]
pub struct FaultyObjectStore {
    inner: Arc<InMemory>,
    /// What happens to the next requests, one each..
    next: Mutex<VecDeque<Trouble>>,
    /// ..and to those after.
    always: Mutex<Trouble>,
    /// How long each request takes.
    latency: Mutex<Duration>,
    overwrites: AtomicBool,
    requests: AtomicU64,
    under_way: AtomicUsize,
    most_under_way: AtomicUsize,
    /// Uploads in parts that were begun and neither completed nor aborted.
    uploads: Mutex<Vec<MultipartId>>,
}

impl Default for FaultyObjectStore {
    fn default() -> Self {
        Self {
            inner: Arc::default(),
            next: Mutex::default(),
            always: Mutex::new(Trouble::None),
            latency: Mutex::default(),
            overwrites: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
            most_under_way: AtomicUsize::new(0),
            uploads: Mutex::default(),
        }
    }
}

/// A request that is under way.
struct UnderWay<'a>(&'a AtomicUsize);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn broken(kind: HttpErrorKind) -> Error {
    let source = HttpError::new(kind, std::io::Error::other("connection reset by the double"));
    Error::Generic { store: "double", source: Box::new(source) }
}

fn refused(status: u16, path: &Path) -> Error {
    let source = format!("Server returned non-2xx status code: {status} Double: no").into();
    let path = path.to_string();
    match status {
        403 => Error::PermissionDenied { path, source },
        404 => Error::NotFound { path, source },
        _ => Error::Generic { store: "double", source },
    }
}

impl FaultyObjectStore {
    /// Another way to the same objects, with troubles of its own.
    #[must_use]
    pub fn another_way(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), ..Self::default() }
    }

    /// What happens to the next requests, one each.
    pub fn trouble_next(&self, troubles: impl IntoIterator<Item = Trouble>) {
        self.next.lock().extend(troubles);
    }

    /// What happens to all requests after those; [`Trouble::None`] heals it.
    pub fn trouble_always(&self, trouble: Trouble) {
        *self.always.lock() = trouble;
    }

    /// How long each request takes from now on.
    pub fn set_latency(&self, latency: Duration) {
        *self.latency.lock() = latency;
    }

    /// Makes it ignore the condition of conditional writes, as some stores do.
    pub fn ignore_conditions(&self) {
        self.overwrites.store(true, Ordering::Relaxed);
    }

    /// Requests so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The most requests that were under way at a time.
    #[must_use]
    pub fn most_under_way(&self) -> usize {
        self.most_under_way.load(Ordering::Relaxed)
    }

    /// Uploads in parts that were neither completed nor aborted.
    #[must_use]
    pub fn open_uploads(&self) -> usize {
        self.uploads.lock().len()
    }

    fn draw(&self) -> Trouble {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.next.lock().pop_front().unwrap_or_else(|| *self.always.lock())
    }

    /// Does a request, or what happens to it instead.
    async fn suffer<T>(
        &self,
        path: &Path,
        work: impl Future<Output = Result<T>>,
    ) -> Result<(T, Trouble)> {
        let trouble = self.draw();
        let under_way = self.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_under_way.fetch_max(under_way, Ordering::Relaxed);
        let _under_way = UnderWay(&self.under_way);
        let latency = *self.latency.lock();
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        match trouble {
            Trouble::Status(status) => Err(refused(status, path)),
            Trouble::Reset => Err(broken(HttpErrorKind::Interrupted)),
            Trouble::ResetAfter => {
                work.await?;
                Err(broken(HttpErrorKind::Interrupted))
            }
            Trouble::Stall => pending().await,
            Trouble::Conflict => Err(Error::AlreadyExists {
                path: path.to_string(),
                source: "ConditionalRequestConflict".into(),
            }),
            Trouble::None | Trouble::Shorter | Trouble::Longer | Trouble::BreakList(_) => {
                Ok((work.await?, trouble))
            }
        }
    }

    fn listed(
        &self,
        names: BoxStream<'static, Result<ObjectMeta>>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.draw() {
            Trouble::BreakList(after) => {
                let breaks = stream::once(async { Err(broken(HttpErrorKind::Interrupted)) });
                names.take(after).chain(breaks).boxed()
            }
            Trouble::Stall => pending::<Result<ObjectMeta>>().into_stream().boxed(),
            Trouble::Status(status) => {
                stream::once(async move { Err(refused(status, &Path::default())) }).boxed()
            }
            _ => names,
        }
    }
}

impl fmt::Display for FaultyObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyObjectStore")
    }
}

#[async_trait]
impl ObjectStore for FaultyObjectStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        if self.overwrites.load(Ordering::Relaxed) {
            options.mode = PutMode::Overwrite;
        }
        let put = self.inner.put_opts(location, payload, options);
        Ok(self.suffer(location, put).await?.0)
    }

    async fn put_multipart_opts(
        &self,
        _location: &Path,
        _options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotSupported { source: "use parts".into() })
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let get = self.inner.get_opts(location, options);
        let (found, trouble) = self.suffer(location, get).await?;
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let (attributes, extensions) = (found.attributes.clone(), found.extensions.clone());
        let body = found.bytes().await?;
        let chunks = match trouble {
            Trouble::Shorter => vec![body.slice(..body.len().saturating_sub(1))],
            Trouble::Longer => vec![body, Bytes::from_static(b"!")],
            // In two pieces, as from a network.
            _ => vec![body.slice(..body.len() / 2), body.slice(body.len() / 2..)],
        };
        let mut chunks = stream::iter(chunks.into_iter().map(Ok)).boxed();
        if trouble == Trouble::Longer {
            chunks = chunks.chain(pending::<Result<Bytes>>().into_stream()).boxed();
        }
        let payload = GetResultPayload::Stream(chunks);
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        match self.draw() {
            Trouble::Status(status) => {
                locations.map(move |location| Err(refused(status, &location?))).boxed()
            }
            Trouble::Stall => pending::<Result<Path>>().into_stream().boxed(),
            _ => self.inner.delete_stream(locations),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[async_trait]
impl MultipartStore for FaultyObjectStore {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        let create = async {
            let id = self.inner.create_multipart(path).await?;
            self.uploads.lock().push(id.clone());
            Ok(id)
        };
        Ok(self.suffer(path, create).await?.0)
    }

    async fn put_part(
        &self,
        path: &Path,
        id: &MultipartId,
        index: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        Ok(self.suffer(path, self.inner.put_part(path, id, index, data)).await?.0)
    }

    async fn complete_multipart(
        &self,
        path: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let complete = async {
            // As S3 says it.
            if !self.uploads.lock().contains(id) {
                return Err(refused(404, path));
            }
            let put = self.inner.complete_multipart(path, id, parts).await?;
            self.uploads.lock().retain(|open| open != id);
            Ok(put)
        };
        Ok(self.suffer(path, complete).await?.0)
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        let abort = async {
            self.inner.abort_multipart(path, id).await?;
            self.uploads.lock().retain(|open| open != id);
            Ok(())
        };
        self.suffer(path, abort).await?;
        Ok(())
    }
}
