//! How a server leaves: told first, handed over, finished, flushed; all of it within the grace.
//!
//! ```text
//! unready -> routers, members, sessions are told -> what is hottest goes to other members   } while clients
//!         -> no session, no lease begins any more   calls and sessions finish               } finish
//!         -> what is left is ended -> what waits for nvme is copied -> drained
//! ```
//! SIGTERM and operators get the same drain; it begins once. What a leased get reads stays where it is until the
//! end: what is handed over is copied.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout_at};
use tracing::info;

use crate::{
    api::Calls,
    client::ClientOptions,
    cluster::handover,
    drain::Phase,
    limits::{
        DRAIN_TELL_MAX, DRAIN_TELL_SHARE_DIVISOR, HANDOVER_SHARE_DIVISOR, HANDOVER_TIME_DIVISOR,
    },
    node::Node,
    readiness::Readiness,
};

/// Tells everybody, hands over what is hottest to members that are reached by `access`, waits for calls and sessions within the grace, ends what is left, and copies what they have
/// stored to nvme as far as the grace goes.
///
/// # Cancel safety
/// Not safe: the node would stay half drained.
pub(super) async fn drain(
    node: &Arc<Node>,
    (calls, readiness): (&Calls, &Readiness),
    access: &ClientOptions,
    grace: Duration,
) {
    let began = Instant::now();
    let deadline = node.drain.begin(grace);
    info!(grace_ms = grace.as_millis(), "drain started");
    readiness.drain();
    node.membership.leave();
    node.sessions.drain(grace);
    let finishing = async {
        node.sessions.wait_none().await;
        calls.wait_none().await;
    };
    let handing = async {
        tell(node, began, grace).await;
        node.drain.comes_to(Phase::HandingOver);
        let bytes_max = node.stack.usage().dram_capacity_bytes / HANDOVER_SHARE_DIVISOR;
        handover::hand_over(node, access, bytes_max, began + grace / HANDOVER_TIME_DIVISOR).await;
        node.drain.comes_to(Phase::Finishing);
    };
    if timeout_at(deadline, async { tokio::join!(finishing, handing) }).await.is_err() {
        let (leases, _bytes) = node.leases.usage();
        info!(sessions = node.sessions.count(), leases, "grace is over, ending what is left");
    }
    node.sessions.end_all();
    node.drain.comes_to(Phase::Flushing);
    let blocks = node.stack.flush(deadline).await;
    if blocks > 0 {
        info!(blocks, "drained although blocks wait to be copied to nvme");
    }
    node.drain.comes_to(Phase::Drained);
    node.metrics.handover.record_drained(began.elapsed());
    info!(took_ms = began.elapsed().as_millis(), "drained");
}

/// Waits until routers are told that nothing can be loaded from here any more, or until they had their time.
async fn tell(node: &Node, began: Instant, grace: Duration) {
    let patience = (grace / DRAIN_TELL_SHARE_DIVISOR).min(DRAIN_TELL_MAX);
    if timeout_at(began + patience, node.drain.all_told()).await.is_err() {
        info!(
            patience_ms = patience.as_millis(),
            "a router is slow, it is not told before the rest"
        );
    }
}
