//! The cluster: many nodes, none of which leads.
//!
//! Data stays whole where it was put. Only a contiguous prefix of a prompt counts, so blocks are not spread over the
//! nodes by their hashes: the batches of an engine instance go to its [home](home), whose map answers its lookups.
//! A join moves nothing, and a crash loses what that node held.
//!
//! What a node lacks it finds at others: each keeps a [filter] of every other, from which it [plans](plan) whom to ask.
//!
//! Nodes find one another by gossip ([membership](membership)): it says who lives and where, and carries a seal.

pub mod about;
pub mod fanout;
pub mod feed;
pub mod filter;
pub(crate) mod handover;
pub mod home;
pub(crate) mod keys;
pub mod membership;
pub mod mirror;
pub mod peers;
pub mod plan;
mod push;
mod seal;
pub(crate) mod second;
mod seeds;
pub mod told;
mod transport;
mod view;

#[cfg(test)]
mod recorded_tests;

use std::sync::Arc;

use crate::{client::ClientOptions, node::Node};

/// Keeps the filter of a node, and those of the others, until its tasks should end; `access` is what it shows when it
/// connects to them.
pub(crate) fn follow_others(node: &Arc<Node>, access: ClientOptions) {
    // Another one after each start, so that nobody takes another start's filter for this one's.
    let first = node.advice.epoch().max(1);
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
}
