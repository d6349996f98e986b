//! Streams that end on time even if nobody polls them.
//!
//! A client that does not read keeps its stream from being polled, and whatever the stream holds
//! (blocks loaded ahead, packed messages) would stay as long as the connection does. So a task drops
//! the stream's contents when its time is over; a poll after that ends it with an error.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{Stream, StreamExt, stream, stream::BoxStream};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::tasks::Tasks;

type Items<T> = BoxStream<'static, Result<T, Status>>;

/// `items` until they end, or until their time is over.
pub(super) fn until<T: Send + 'static>(
    tasks: &Tasks,
    name: &'static str,
    end: Instant,
    items: Items<T>,
) -> impl Stream<Item = Result<T, Status>> + Send + use<T> {
    let held = Arc::new(Mutex::new(Some(items)));
    let done = CancellationToken::new();
    let (watched, over, stop) = (Arc::clone(&held), done.clone(), tasks.stop_token());
    tasks.spawn(name, async move {
        tokio::select! {
            () = over.cancelled() => {}
            () = stop.cancelled() => {}
            () = sleep_until(end) => {
                // Dropped outside the lock: giving blocks back takes a while.
                let items = watched.lock().take();
                drop(items);
            }
        }
    });
    let guard = done.drop_guard();
    let mut ended = false;
    stream::poll_fn(move |cx: &mut Context<'_>| {
        let _ends_the_watch = &guard;
        if ended {
            return Poll::Ready(None);
        }
        let mut held = held.lock();
        let polled = match held.as_mut() {
            Some(items) => items.poll_next_unpin(cx),
            None => {
                ended = true;
                let text = format!("{name}: its time is over, and its responses were not read");
                return Poll::Ready(Some(Err(Status::deadline_exceeded(text))));
            }
        };
        ended = matches!(polled, Poll::Ready(None));
        polled
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn items(kept: Arc<()>) -> Items<u32> {
        let numbers = stream::iter(0..3);
        numbers
            .map(move |number| {
                let _kept = &kept;
                Ok(number)
            })
            .boxed()
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_polls_is_dropped_in_time() {
        let (tasks, kept) = (Tasks::new(), Arc::new(()));
        let end = Instant::now() + Duration::from_secs(10);
        let mut watched = std::pin::pin!(until(&tasks, "get", end, items(Arc::clone(&kept))));
        assert_eq!(watched.next().await.unwrap().unwrap(), 0);
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert_eq!(Arc::strong_count(&kept), 2, "not before its time");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(Arc::strong_count(&kept), 1);
        let error = watched.next().await.unwrap().unwrap_err();
        assert_eq!(error.code(), tonic::Code::DeadlineExceeded);
        assert!(watched.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_read_ends_as_it_would_and_its_watch_with_it() {
        let (tasks, kept) = (Tasks::new(), Arc::new(()));
        let end = Instant::now() + Duration::from_secs(10);
        let read: Vec<_> = until(&tasks, "get", end, items(kept)).collect().await;
        assert_eq!(read.len(), 3);
        assert!(tasks.shutdown(Duration::from_secs(1)).await.is_empty());
    }
}
