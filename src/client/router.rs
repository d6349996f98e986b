//! What routers ask: where prefixes are, what loading costs whom, and whom to take.
//!
//! The messages are those of the contract, which a router may have spoken as JSON already.

/// The messages of `kvstrata.router.v1`.
pub use kvstrata_proto::router::v1 as messages;

use std::fmt;

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use messages::{
    LookupRequest, LookupResponse, ReleaseRequest, ReportRequest, ReserveRequest, ReserveResponse,
    ScoreRequest, ScoreResponse, TierUpdate, WatchRequest, WatchTiersRequest, WatchUpdate,
    router_client::RouterClient,
};
use tonic::{Request, Streaming};

use super::{
    Client,
    access::Carrier,
    connect::{MESSAGE_BYTES_MAX, within},
    status::{broken_contract, error_of},
};

impl Client {
    fn router(&self) -> RouterClient<Carrier> {
        RouterClient::new(self.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Says where the prefixes of prompts are, and what loading them costs each instance. Prompts that
    /// there was no time for are at the end and left out; the answer is `partial` then.
    ///
    /// # Errors
    /// `Invalid` for a request that cannot work, `UnknownNamespace` for a namespace that was named, and
    /// whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: loads that a prefetch has started go on.
    pub async fn router_lookup(&self, request: LookupRequest) -> Result<LookupResponse> {
        const DOING: &str = "look up for a router";
        let prompts = request.prompts.len();
        let mut router = self.router();
        let reply = self.call(DOING, router.lookup(self.request(request))).await?;
        let answers = reply.answers.len();
        if answers > prompts || (answers < prompts && !reply.partial) {
            let what = format!("{answers} answers to {prompts} prompts");
            return Err(broken_contract(DOING, &what));
        }
        Ok(reply)
    }

    /// Says which candidate to take for a prompt.
    ///
    /// # Errors
    /// As [`router_lookup`](Self::router_lookup).
    ///
    /// # Cancel safety
    /// Safe: loads that a prefetch has started go on, and a reservation ends by itself.
    pub async fn router_score(&self, request: ScoreRequest) -> Result<ScoreResponse> {
        const DOING: &str = "score candidates";
        let candidates = request.candidates.len();
        let mut router = self.router();
        let reply = self.call(DOING, router.score(self.request(request))).await?;
        let taken = usize::try_from(reply.taken).unwrap_or(usize::MAX);
        if reply.scored.len() != candidates || taken >= candidates {
            let scored = reply.scored.len();
            let what = format!("number {taken} of {scored} taken among {candidates} candidates");
            return Err(broken_contract(DOING, &what));
        }
        Ok(reply)
    }

    /// Counts loads as waiting that are about to come, for as long as the answer says.
    ///
    /// # Errors
    /// `Exhausted` if too much is reserved already, and whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: a reservation ends by itself.
    pub async fn router_reserve(&self, request: ReserveRequest) -> Result<ReserveResponse> {
        let mut router = self.router();
        self.call("reserve loads", router.reserve(self.request(request))).await
    }

    /// Takes a reservation back; one that has ended is a success.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: releasing twice is a success.
    pub async fn router_release(&self, request: ReleaseRequest) -> Result<()> {
        let mut router = self.router();
        self.call("release loads", router.release(self.request(request))).await.map(drop)
    }

    /// Says how long loads took that were estimated; returns how many of these could be used.
    ///
    /// # Errors
    /// `Invalid` for numbers that are none, and whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: at worst an estimate learns twice from one load.
    pub async fn router_report(&self, request: ReportRequest) -> Result<u32> {
        let mut router = self.router();
        Ok(self.call("report loads", router.report(self.request(request))).await?.taken)
    }

    /// Follows what is on which tier: a snapshot, then what changes.
    ///
    /// # Errors
    /// `Exhausted` if too many follow already, `UnknownNamespace` for one that was named, and whatever
    /// keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn router_watch(&self, request: WatchRequest) -> Result<Updates<WatchUpdate>> {
        const DOING: &str = "watch the tiers";
        let mut router = self.router();
        let server = self.server();
        server.breaker.admit(DOING)?;
        // No gRPC timeout here: it would end the stream.
        let call = router.watch(Request::new(request));
        let opened = within(DOING, self.options().call_deadline, call).await;
        let stream = server.breaker.note(opened)?.into_inner();
        Ok(Updates { stream, doing: DOING, number: |update| Some(update.sequence), next: 0 })
    }

    /// Follows what loading costs: all of it now, and again when it has changed.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn router_watch_tiers(
        &self,
        request: WatchTiersRequest,
    ) -> Result<Updates<TierUpdate>> {
        const DOING: &str = "watch what loading costs";
        let mut router = self.router();
        let server = self.server();
        server.breaker.admit(DOING)?;
        let call = router.watch_tiers(Request::new(request));
        let opened = within(DOING, self.options().call_deadline, call).await;
        let stream = server.breaker.note(opened)?.into_inner();
        Ok(Updates { stream, doing: DOING, number: |_unnumbered| None, next: 0 })
    }
}

/// What a server goes on to tell. It stops when this is dropped.
pub struct Updates<T> {
    stream: Streaming<T>,
    doing: &'static str,
    /// The number of an update, if it has one.
    number: fn(&T) -> Option<u64>,
    /// The number of the next one.
    next: u64,
}

impl<T> Updates<T> {
    /// The next update; waits for it. After an error there is none any more: begin anew.
    ///
    /// # Errors
    /// `Unavailable` if the server has ended it, `Internal` if one is missing before it.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next(&mut self) -> Result<T> {
        let update = self.stream.message().await.map_err(|status| error_of(self.doing, &status))?;
        let Some(update) = update else {
            let text = format!("{}: the server has ended it; begin anew", self.doing);
            return Err(Error::new(ErrorKind::Unavailable, text));
        };
        match (self.number)(&update) {
            Some(number) if number != self.next => {
                let what = format!("update {number} came in place of {}", self.next);
                return Err(broken_contract(self.doing, &what));
            }
            _ => self.next += 1,
        }
        Ok(update)
    }
}

impl<T> fmt::Debug for Updates<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Updates").field("next", &self.next).finish_non_exhaustive()
    }
}
