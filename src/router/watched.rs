//! The body of an answer on its way to the client: passed on as it comes, and watched, so that it is known
//! when its first token came and that it has ended, however it did.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::body::{Body, Bytes};
use http_body::{Body as _, Frame, SizeHint};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use super::{Router, decide::Choice, metrics::Outcome, slots::Slot};

/// See the module.
pub(super) struct Watched {
    body: Body,
    under_way: UnderWay,
}

/// A request that an engine works on.
pub(super) struct UnderWay {
    pub(super) router: Arc<Router>,
    pub(super) choice: Choice,
    pub(super) slot: Slot,
    /// Tokens in a block.
    pub(super) unit: usize,
    /// Whether the first bytes of the answer are its first token.
    pub(super) streams: bool,
    /// When it was sent.
    pub(super) sent: Instant,
    /// What has become of it; none if another engine is asked.
    pub(super) outcome: Option<Outcome>,
    /// What it is if the answer comes to its end.
    pub(super) at_end: Outcome,
    pub(super) _place: Arc<OwnedSemaphorePermit>,
}

impl UnderWay {
    /// Its answer.
    pub(super) fn watch(self, body: Body) -> Body {
        let mut watched = Watched { body, under_way: self };
        // An answer without a body has ended already, and nobody may ask.
        if watched.body.is_end_stream() {
            watched.under_way.outcome = Some(watched.under_way.at_end);
        }
        Body::new(watched)
    }

    fn first_bytes(&mut self) {
        self.slot.first_token();
        if self.streams {
            self.streams = false;
            if self.at_end == Outcome::Ok {
                let ms = self.sent.elapsed().as_secs_f64() * 1e3;
                self.router.learn(&self.choice, self.unit, ms);
            }
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.outcome.into_iter().for_each(|outcome| self.router.metrics.record(outcome));
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) if frame.data_ref().is_some_and(|data| !data.is_empty()) => {
                self.under_way.first_bytes();
                if self.body.is_end_stream() {
                    self.under_way.outcome = Some(self.under_way.at_end);
                }
            }
            Some(Ok(_empty)) => {}
            Some(Err(_lost)) => self.under_way.outcome = Some(Outcome::Broken),
            None => self.under_way.outcome = Some(self.under_way.at_end),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
