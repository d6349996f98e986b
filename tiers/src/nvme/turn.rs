//! Whose turn it is: how both engines bound what is under way.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A turn, after those who have waited longer. At once if one is free, however much the caller's
/// task has done already: who polls an operation once may rely on it having begun.
pub(super) async fn turn(turns: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    match Arc::clone(turns).try_acquire_owned() {
        Ok(turn) => Some(turn),
        Err(_none_free) => Arc::clone(turns).acquire_owned().await.ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, task::Poll};

    use super::*;

    #[tokio::test]
    async fn a_free_turn_needs_no_waiting() {
        let turns = Arc::new(Semaphore::new(1000));
        let mut held = Vec::new();
        // One task, never suspended: more than tokio lets it await in one go.
        for _ in 0..1000 {
            let mut next = pin!(turn(&turns));
            let polled = std::future::poll_fn(|context| Poll::Ready(next.as_mut().poll(context)));
            let Poll::Ready(Some(turn)) = polled.await else { panic!("has to wait") };
            held.push(turn);
        }
        assert_eq!(turns.available_permits(), 0);
    }
}
