//! The nodes of the cluster, as the one that answers sees them, and as clients are told.

use bytes::Bytes;

/// The machine that this process runs on, as it calls itself.
#[must_use]
pub(crate) fn this_machine() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A member list and its version.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    /// Grows with every change.
    pub epoch: u64,
    /// Index of the node that answers.
    pub answering: u32,
    /// Every node, in no particular order.
    pub list: Vec<Member>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Stable within one list; runs name holders by it.
    pub index: u32,
    /// StatefulSet pod name or host name.
    pub name: String,
    /// `host:port` of the gRPC contract.
    pub endpoint: String,
    /// Empty when unknown.
    pub zone: String,
    /// The machine it runs on, as engines there call it.
    pub host: String,
    /// Its bulk port, if it has one.
    pub bulk: Option<BulkPort>,
}

/// Where a node's bulk port is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BulkPort {
    /// `host:port`; empty if it does not listen on TCP.
    pub tcp: String,
    /// Path of a Unix socket on the node's own host; empty if there is none.
    pub unix: String,
    /// What its welcome says, 16 bytes: another server may be where this one is said to be.
    pub instance: Bytes,
}

impl Members {
    /// The node that answers.
    #[must_use]
    pub fn own(&self) -> Option<&Member> {
        self.list.iter().find(|member| member.index == self.answering)
    }

    /// The bulk port of the node that answers, if it has one.
    #[must_use]
    pub fn bulk(&self) -> Option<&BulkPort> {
        self.own()?.bulk.as_ref()
    }
}
