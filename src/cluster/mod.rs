//! The cluster: many nodes, none of which leads.
//!
//! Data stays whole where it was put. Only a contiguous prefix of a prompt counts, so blocks are not spread over the
//! nodes by their hashes: the batches of an engine instance go to its [home](home), whose map answers its lookups.
//! A join moves nothing, and a crash loses what that node held.
//!
//! What a node lacks it finds at others: each keeps a [filter] of every other, from which it [plans](plan) whom to ask.

pub mod fanout;
pub mod feed;
pub mod filter;
pub mod home;
pub mod mirror;
pub mod peers;
pub mod plan;

use std::sync::Arc;

use kvstrata_tiers::error::Result;

use crate::{client::ClientOptions, id, node::Node};

/// Keeps the filter of a node, and those of the others, until its tasks should end; `access` is what it shows when it
/// connects to them.
///
/// # Errors
/// `Internal` if the system has no randomness.
pub(crate) fn follow_others(node: &Arc<Node>, access: ClientOptions) -> Result<()> {
    let first = id::random_seed()?.max(1);
    let (following, stop) = (Arc::clone(node), node.tasks.stop_token());
    node.tasks.spawn_critical("filter", async move {
        let Node { feed, stack, changes, namespaces, .. } = &*following;
        let follow = feed.follow(first, stack, changes, namespaces);
        stop.run_until_cancelled(follow).await.unwrap_or_default();
    });
    let (following, stop) = (Arc::clone(node), node.tasks.stop_token());
    node.tasks.spawn_critical("members", async move {
        let Node { peers, roster, tasks, .. } = &*following;
        peers.run(roster, access, tasks, stop).await;
    });
    Ok(())
}
