//! The nodes of the cluster, as the server that answers sees them.

use kvstrata_proto::v1;

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
}

/// A member list and its version.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    /// Grows with every change.
    pub epoch: u64,
    /// Index of the node that answered.
    pub answering: u32,
    /// Every node, in no particular order.
    pub list: Vec<Member>,
}

impl From<v1::MemberList> for Members {
    fn from(wire: v1::MemberList) -> Self {
        let list = wire.members.into_iter().map(Member::from).collect();
        Self { epoch: wire.epoch, answering: wire.self_, list }
    }
}

impl From<v1::Member> for Member {
    fn from(wire: v1::Member) -> Self {
        Self { index: wire.index, name: wire.name, endpoint: wire.endpoint, zone: wire.zone }
    }
}
