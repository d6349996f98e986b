//! What routers ask: where prefixes are, what loading costs whom, and whom to take.
//!
//! The messages are those of the contract, which a router may have spoken as JSON already.

/// The messages of `kvstrata.router.v1`.
pub use kvstrata_proto::router::v1 as messages;

use kvstrata_tiers::error::Result;
use messages::{
    LookupRequest, LookupResponse, ScoreRequest, ScoreResponse, router_client::RouterClient,
};

use super::{Client, access::Carrier, connect::MESSAGE_BYTES_MAX, status::broken_contract};

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
}
