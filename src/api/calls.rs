//! What every call gets: a measure of its time and outcome, and shelter from its own panics.
//!
//! A panic in a request becomes `INTERNAL` and a counter; the connection and all others go on. The
//! number of calls in flight is what a drain waits for; sessions are counted by their own table.

use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{FutureExt, Stream, StreamExt, stream::BoxStream};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{sync::watch, time::Instant};
use tonic::{Code, Response, Status};
use tracing::{debug, error};

use super::status;
use crate::metrics::{Op, Outcome, ServerMetrics};

/// The calls of one server; clones share them.
#[derive(Debug, Clone)]
pub struct Calls {
    metrics: ServerMetrics,
    in_flight: Arc<watch::Sender<usize>>,
}

/// One call; dropping it before its end means that the client went away.
pub(crate) struct Call {
    calls: Calls,
    op: Op,
    started: Instant,
    outcome: Outcome,
}

/// A response stream that is measured and sheltered.
pub struct Observed<T> {
    call: Call,
    /// None when it has ended: what it held is freed then, not when the client has read the end.
    items: Option<BoxStream<'static, Result<T, Status>>>,
}

impl Calls {
    /// No calls yet.
    #[must_use]
    pub fn new(metrics: ServerMetrics) -> Self {
        Self { metrics, in_flight: Arc::new(watch::Sender::new(0)) }
    }

    /// Runs a call that is answered with one message.
    ///
    /// # Errors
    /// The status of the call's error, or `INTERNAL` if it panicked.
    ///
    /// # Cancel safety
    /// As that of `work`.
    pub async fn unary<T>(
        &self,
        op: Op,
        work: impl Future<Output = Result<T>>,
    ) -> Result<Response<T>, Status> {
        let mut call = self.begin(op);
        let result = match AssertUnwindSafe(work).catch_unwind().await {
            Ok(result) => result.map_err(|why| status::from_error(&why)),
            Err(payload) => Err(call.panicked(payload.as_ref())),
        };
        call.end(result.as_ref().err());
        result.map(Response::new)
    }

    /// As [`unary`](Self::unary), for a call that is not answered by gRPC.
    ///
    /// # Errors
    /// That of `work`, or `Internal` if it panicked.
    ///
    /// # Cancel safety
    /// As that of `work`.
    pub(crate) async fn checked<T>(
        &self,
        op: Op,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let call = self.begin(op);
        let result = match AssertUnwindSafe(work).catch_unwind().await {
            Ok(result) => result,
            Err(payload) => {
                let status = call.panicked(payload.as_ref());
                Err(Error::new(ErrorKind::Internal, status.message()))
            }
        };
        call.finish(result.as_ref().err());
        result
    }

    /// Watches a call that is answered with a stream.
    pub fn stream<T>(
        &self,
        op: Op,
        items: impl Stream<Item = Result<T, Status>> + Send + 'static,
    ) -> Observed<T> {
        Observed { call: self.begin(op), items: Some(items.boxed()) }
    }

    /// Waits until no call is in flight, sessions not counted.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_none(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        if self.in_flight.subscribe().wait_for(|count| *count == 0).await.is_err() {
            debug!("call count closed");
        }
    }

    /// Begins a call; what becomes of it is told by [`Call::finish`].
    pub(crate) fn begin(&self, op: Op) -> Call {
        let call =
            Call { calls: self.clone(), op, started: Instant::now(), outcome: Outcome::Cancelled };
        call.count(|count| count.saturating_add(1));
        call
    }
}

impl Call {
    /// Ends the call, with an error if it failed.
    pub(crate) fn finish(mut self, failure: Option<&Error>) {
        let failure = failure.map(status::from_error);
        self.end(failure.as_ref());
    }

    fn count(&self, change: impl FnOnce(usize) -> usize) {
        // These last as long as their clients wish.
        let lasting = matches!(
            self.op,
            Op::Session | Op::RouterWatch | Op::RouterWatchTiers | Op::AdminDrain
        );
        if lasting {
            return;
        }
        let mut now = 0;
        self.calls.in_flight.send_modify(|count| {
            *count = change(*count);
            now = *count;
        });
        self.calls.metrics.calls_in_flight.set(i64::try_from(now).unwrap_or(i64::MAX));
    }

    fn end(&mut self, failure: Option<&Status>) {
        self.outcome = status::outcome(failure.map_or(Code::Ok, Status::code));
        match failure {
            Some(status) if status.code() == Code::Internal => {
                error!(op = self.op.name(), reason = status.message(), "call failed");
            }
            Some(status) => debug!(
                op = self.op.name(),
                outcome = self.outcome.name(),
                reason = status.message(),
                "call refused"
            ),
            None => {}
        }
    }

    fn panicked(&self, payload: &(dyn Any + Send)) -> Status {
        self.calls.metrics.request_panics.inc();
        let reason = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("unknown");
        error!(op = self.op.name(), reason, "request panicked");
        Status::internal("the request met a defect of the server; it is logged")
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.calls.metrics.record_call(self.op, self.outcome, self.started.elapsed());
        self.count(|count| count.saturating_sub(1));
    }
}

impl<T> Stream for Observed<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(items) = &mut self.items else { return Poll::Ready(None) };
        let item = match catch_unwind(AssertUnwindSafe(|| items.poll_next_unpin(cx))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(item)) => item,
            Err(payload) => Some(Err(self.call.panicked(payload.as_ref()))),
        };
        if !matches!(item, Some(Ok(_))) {
            self.items = None;
            let failure = item.as_ref().and_then(|item| item.as_ref().err());
            self.call.end(failure);
        }
        Poll::Ready(item)
    }
}

impl<T> fmt::Debug for Observed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observed").field("op", &self.call.op).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> Calls {
        Calls::new(ServerMetrics::register(&mut prometheus_client::registry::Registry::default()))
    }

    #[tokio::test]
    async fn a_panic_is_internal_and_counted_and_the_next_call_works() {
        let calls = calls();
        let failed = calls.unary::<()>(Op::Lookup, async { panic!("a test") }).await;
        assert_eq!(failed.unwrap_err().code(), Code::Internal);
        assert_eq!(calls.metrics.request_panics.get(), 1);
        let ok = calls.unary(Op::Lookup, async { Ok(5) }).await.unwrap();
        assert_eq!(ok.into_inner(), 5);
        calls.wait_none().await;
    }

    #[tokio::test]
    async fn a_panic_within_a_stream_ends_that_stream_only() {
        let calls = calls();
        let items = futures_util::stream::iter(0..3).map(|number| {
            assert!(number < 1, "a test");
            Ok(number)
        });
        let got: Vec<_> = calls.stream(Op::Get, items).collect().await;
        assert_eq!(got.len(), 2);
        assert_eq!(got[0].as_ref().unwrap(), &0);
        assert_eq!(got[1].as_ref().unwrap_err().code(), Code::Internal);
        calls.wait_none().await;
    }

    #[tokio::test]
    async fn an_error_has_the_code_of_its_kind() {
        let refused = calls().unary::<()>(Op::Put, async { Err(Error::invalid("x")) }).await;
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    }
}
