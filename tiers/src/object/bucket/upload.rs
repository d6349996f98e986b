//! Writes a large object in parts: each part is a request of its own, timed, limited and tried again by
//! itself. What fails is aborted, so that no parts stay behind; only after a crash do they, until the
//! bucket's lifecycle rule removes them.

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{
    MultipartId, ObjectStoreExt, PutPayload,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use tokio::time::Instant;

use super::{
    Bucket, BucketError, BucketErrorKind,
    error::Fault,
    retry::Call,
    transfer::{length, parts},
};
use crate::object::metrics::{OpLabel, OutcomeLabel};

/// Parts of one object under way: enough to hide the latency, few enough to leave places to reads.
const PARTS_IN_FLIGHT: usize = 4;
/// How long aborting may take, behind the deadline too: parts that stay cost money.
pub(super) const ABORT_DEADLINE: Duration = Duration::from_secs(1);

/// An object on its way.
pub(super) struct Upload<'a> {
    pub(super) bucket: &'a Bucket,
    pub(super) store: &'a dyn MultipartStore,
    pub(super) path: Path,
    pub(super) call: Call<'a>,
}

impl Upload<'_> {
    /// Writes the object, or aborts.
    pub(super) async fn put(&self, body: Vec<Bytes>) -> Result<(), BucketError> {
        let call = Call { op: OpLabel::Multipart, verb: "begin the upload of", ..self.call };
        let begin = async |_| {
            let id = self.store.create_multipart(&self.path).await.map_err(Fault::of)?;
            Ok((id, OutcomeLabel::Ok))
        };
        let id = self.bucket.sender.send(call, begin).await?;
        let written = self.write(&id, body).await;
        if written.is_err() {
            self.abort(&id).await;
        }
        written
    }

    async fn write(&self, id: &MultipartId, body: Vec<Bytes>) -> Result<(), BucketError> {
        let bytes = length(&body);
        let parts = parts(body, self.bucket.config.part_bytes).into_iter().enumerate();
        let sending = parts.map(|(index, part)| self.part(id, index, part));
        let sent: Vec<PartId> =
            stream::iter(sending).buffered(PARTS_IN_FLIGHT).try_collect().await?;
        self.complete(id, sent, bytes).await
    }

    async fn part(
        &self,
        id: &MultipartId,
        index: usize,
        part: PutPayload,
    ) -> Result<PartId, BucketError> {
        let call = Call { op: OpLabel::Part, verb: "write a part of", ..self.call };
        let attempt = async |_| {
            self.bucket.metrics().written_bytes.inc_by(part.content_length() as u64);
            let part = self.store.put_part(&self.path, id, index, part.clone()).await;
            Ok((part.map_err(Fault::of)?, OutcomeLabel::Ok))
        };
        self.bucket.sender.send(call, attempt).await
    }

    async fn complete(
        &self,
        id: &MultipartId,
        parts: Vec<PartId>,
        bytes: u64,
    ) -> Result<(), BucketError> {
        let call = Call { op: OpLabel::Multipart, verb: "complete the upload of", ..self.call };
        let attempt = async |_| {
            let done = self.store.complete_multipart(&self.path, id, parts.clone()).await;
            done.map_err(Fault::of)?;
            Ok(((), OutcomeLabel::Ok))
        };
        match self.bucket.sender.send(call, attempt).await {
            // The upload is gone: a try that seemed to fail may have completed it.
            Err(error) if error.kind() == BucketErrorKind::NotFound => {
                if self.is_there(bytes).await { Ok(()) } else { Err(error) }
            }
            done => done,
        }
    }

    async fn is_there(&self, bytes: u64) -> bool {
        let call = Call { op: OpLabel::Head, verb: "look at", ..self.call };
        let attempt = async |_| {
            let meta = self.bucket.store.head(&self.path).await.map_err(Fault::of)?;
            Ok((meta.size, OutcomeLabel::Ok))
        };
        self.bucket.sender.send(call, attempt).await.is_ok_and(|there| there == bytes)
    }

    async fn abort(&self, id: &MultipartId) {
        let deadline = Instant::now() + ABORT_DEADLINE;
        let call =
            Call { op: OpLabel::Multipart, verb: "abort the upload of", deadline, ..self.call };
        let attempt = async |_| match self.store.abort_multipart(&self.path, id).await {
            Ok(()) => Ok(((), OutcomeLabel::Ok)),
            Err(object_store::Error::NotFound { .. }) => Ok(((), OutcomeLabel::NotFound)),
            Err(error) => Err(Fault::of(error)),
        };
        if let Err(error) = self.bucket.sender.send(call, attempt).await {
            tracing::debug!(%error, "parts of an upload stay until the bucket's lifecycle rule");
        }
    }
}
