//! The streams of the router contract.

use std::{future::Future, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use kvstrata_proto::router::v1::{self as wire, watch_update};
use kvstrata_tiers::error::{Error, Result};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Node, convert};
use crate::{
    advice::{Blocks, Names, Range, Update},
    auth::Bearer,
    limits::ROUTER_TIERS_INTERVAL,
    object::now_unix_ms,
};

impl Node {
    /// What is on which tier, until the node stops or the token is revoked.
    pub(super) fn router_watch(
        self: &Arc<Self>,
        bearer: Arc<Bearer>,
        request: wire::WatchRequest,
    ) -> Result<impl Stream<Item = Result<wire::WatchUpdate, Status>> + Send + use<>> {
        let scheme = convert::watch_scheme(request.hash_scheme())?;
        let range = match (request.namespace_id.is_empty(), request.model.is_empty()) {
            (false, _) => Range::Namespace(request.namespace_id),
            (true, false) => Range::Model(request.model),
            (true, true) => Range::All,
        };
        let watcher = self.watch(&bearer, range, scheme)?;
        let (epoch, end) = (self.advice.epoch(), Ends::new(self, bearer));
        Ok(stream::unfold((watcher, 0, end), move |(mut watcher, sequence, end)| async move {
            let update = Some(message(end.unless_ended(watcher.next()).await?));
            let update = wire::WatchUpdate { sequence, epoch, update };
            Some((Ok(update), (watcher, sequence + 1, end)))
        }))
    }

    /// What tiers cost, whenever it changes.
    pub(super) fn router_watch_tiers(
        self: &Arc<Self>,
        bearer: Arc<Bearer>,
        request: &wire::WatchTiersRequest,
    ) -> Result<impl Stream<Item = Result<wire::TierUpdate, Status>> + Send + use<>> {
        let given = Duration::from_millis(u64::from(request.interval_ms));
        if !given.is_zero() && given < ROUTER_TIERS_INTERVAL {
            return Err(Error::invalid(format!(
                "interval_ms: {} given, 0 or at least {} allowed",
                request.interval_ms,
                ROUTER_TIERS_INTERVAL.as_millis()
            )));
        }
        let interval = given.max(ROUTER_TIERS_INTERVAL);
        let (changes, end) = (self.costs.changes(), Ends::new(self, bearer));
        let node = Arc::clone(self);
        let all = (node, changes, end);
        Ok(stream::unfold((all, None), move |((node, mut changes, end), told)| async move {
            if let Some(told) = told {
                let pause = sleep_until(told + interval);
                end.unless_ended(async {
                    pause.await;
                    changes.next().await;
                })
                .await?;
            }
            let update = wire::TierUpdate {
                epoch: node.advice.epoch(),
                as_of_ms: now_unix_ms(),
                tiers: super::costs(&node),
            };
            Some((Ok(update), ((node, changes, end), Some(Instant::now()))))
        }))
    }
}

/// When a stream ends that has no end of its own.
struct Ends {
    stop: CancellationToken,
    bearer: Arc<Bearer>,
}

impl Ends {
    fn new(node: &Node, bearer: Arc<Bearer>) -> Self {
        Self { stop: node.tasks.stop_token(), bearer }
    }

    async fn unless_ended<T>(&self, next: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            () = self.bearer.revoked().cancelled() => None,
            item = next => Some(item),
        }
    }
}

fn message(update: Update) -> watch_update::Update {
    match update {
        Update::Reset(reason) => {
            watch_update::Update::Reset(wire::Reset { reason: reason.to_owned() })
        }
        Update::SnapshotEnd(blocks) => {
            watch_update::Update::SnapshotEnd(wire::SnapshotEnd { blocks })
        }
        Update::Blocks(Blocks { namespace, names, tiers }) => {
            let (hashes, hashes64) = match names {
                Names::Own(hashes) => (hashes, Vec::new()),
                Names::Short(hashes) => (Vec::new(), hashes),
            };
            watch_update::Update::Blocks(wire::Blocks {
                namespace_id: namespace.id().as_bytes().to_vec().into(),
                hashes: hashes.into(),
                hashes64,
                tiers: tiers.into(),
            })
        }
    }
}
