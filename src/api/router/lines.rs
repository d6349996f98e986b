//! The twins of calls that are answered by streams: one message of proto3 JSON a line.

use std::{pin::pin, sync::Arc};

use futures_util::{Stream, StreamExt, stream, stream::BoxStream};
use kvstrata_tiers::error::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::timeout;
use tonic::Status;

use super::RouterService;
use crate::{auth::Bearer, limits::HTTP_BEAT_INTERVAL, metrics::Op};

impl RouterService {
    /// The twin of a call that is answered by a stream: a message a line, and an empty line where there was
    /// none for [`HTTP_BEAT_INTERVAL`], by which either side notices that the other one is gone. None if
    /// there is no such call.
    ///
    /// # Errors
    /// As the call, and `Invalid` for what is no such message.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn json_lines(
        &self,
        verb: &str,
        bearer: &Arc<Bearer>,
        body: &[u8],
    ) -> Option<Result<BoxStream<'static, Vec<u8>>>> {
        let (node, bearer) = (&self.node, Arc::clone(bearer));
        Some(match verb {
            "watch" => {
                let begin = |request| node.router_watch(bearer, request);
                self.lines(Op::RouterWatch, body, begin).await
            }
            "watch_tiers" => {
                let begin = |request| node.router_watch_tiers(bearer, &request);
                self.lines(Op::RouterWatchTiers, body, begin).await
            }
            _ => return None,
        })
    }

    async fn lines<T: DeserializeOwned, U: Serialize + Send + 'static, S>(
        &self,
        op: Op,
        body: &[u8],
        begin: impl FnOnce(T) -> Result<S>,
    ) -> Result<BoxStream<'static, Vec<u8>>>
    where
        S: Stream<Item = Result<U, Status>> + Send + 'static,
    {
        let request =
            serde_json::from_slice(body).map_err(|why| Error::invalid(format!("body: {why}")));
        match request.and_then(begin) {
            Ok(messages) => Ok(beating(self.calls.stream(op, messages)).boxed()),
            Err(why) => self.calls.checked(op, async { Err(why) }).await,
        }
    }
}

/// Ends with the first message that is none.
fn beating<U: Serialize + Send + 'static>(
    messages: impl Stream<Item = Result<U, Status>> + Send + Unpin + 'static,
) -> impl Stream<Item = Vec<u8>> + Send {
    stream::unfold(messages, |mut messages| async move {
        let line = match timeout(HTTP_BEAT_INTERVAL, pin!(messages.next())).await {
            Ok(message) => {
                let mut line = serde_json::to_vec(&message?.ok()?).ok()?;
                line.push(b'\n');
                line
            }
            Err(_elapsed) => b"\n".to_vec(),
        };
        Some((line, messages))
    })
}
