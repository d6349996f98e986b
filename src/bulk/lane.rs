//! What the reader and the writer of one connection share: credit, and the requests under way.

use std::collections::HashMap;

use kvstrata_tiers::error::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::limits::BULK_REQUESTS_MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct Lane {
    /// Bytes of payload that the client may still be sent.
    credit: Mutex<u64>,
    more: Notify,
    under_way: Mutex<HashMap<u32, CancellationToken>>,
}

impl Lane {
    pub(super) fn new(credit: u32) -> Self {
        let (more, under_way) = (Notify::new(), Mutex::default());
        Self { credit: Mutex::new(u64::from(credit)), more, under_way }
    }

    /// The client can take so many more bytes.
    pub(super) fn add_credit(&self, bytes: u32) {
        let mut credit = self.credit.lock();
        *credit = credit.saturating_add(u64::from(bytes));
        self.more.notify_one();
    }

    /// Takes credit for `most` bytes, or for fewer, but not for fewer than `least`.
    pub(super) fn take_credit(&self, least: usize, most: usize) -> Option<usize> {
        let mut credit = self.credit.lock();
        let bytes = usize::try_from(*credit).unwrap_or(usize::MAX).min(most);
        if bytes < least {
            return None;
        }
        *credit = credit.saturating_sub(u64::try_from(bytes).unwrap_or(u64::MAX));
        Some(bytes)
    }

    /// Waits until there is credit for `least` bytes. There is one writer to wait.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn wait_credit(&self, least: usize) {
        let least = u64::try_from(least).unwrap_or(u64::MAX);
        while *self.credit.lock() < least {
            self.more.notified().await;
        }
    }

    /// Begins a request; none if too many are under way.
    ///
    /// # Errors
    /// `Invalid` if the number is that of another one, or of none.
    pub(super) fn begin(&self, request: u32) -> Result<Option<CancellationToken>> {
        let mut under_way = self.under_way.lock();
        if request == 0 || under_way.contains_key(&request) {
            let text = format!("request: {request} given, a number that is not in use required");
            return Err(Error::invalid(text));
        }
        if under_way.len() >= BULK_REQUESTS_MAX {
            return Ok(None);
        }
        let token = CancellationToken::new();
        under_way.insert(request, token.clone());
        Ok(Some(token))
    }

    /// Asks a request to end.
    pub(super) fn cancel(&self, request: u32) {
        if let Some(token) = self.under_way.lock().get(&request) {
            token.cancel();
        }
    }

    /// A request has been answered.
    pub(super) fn end(&self, request: u32) {
        self.under_way.lock().remove(&request);
    }

    /// Nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.lock().is_empty()
    }
}
