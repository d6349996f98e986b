//! The nodes of the cluster, as the one that answers sees them, and as clients are told.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::watch;

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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member {
    /// What the node that answers calls it, for as long as that runs; runs name holders by it.
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
    /// It will go away.
    pub draining: bool,
    /// Engine instances whose home it is now.
    pub engines: u32,
    /// The version that it runs.
    pub version: String,
    /// `host:port` of its pages; empty when unknown.
    pub http: String,
}

/// Where a node's bulk port is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
        self.member(self.answering)
    }

    /// The node with this index.
    #[must_use]
    pub fn member(&self, index: u32) -> Option<&Member> {
        self.list.iter().find(|member| member.index == index)
    }

    /// The node of this name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Member> {
        self.list.iter().find(|member| member.name == name)
    }

    /// The bulk port of the node that answers, if it has one.
    #[must_use]
    pub fn bulk(&self) -> Option<&BulkPort> {
        self.own()?.bulk.as_ref()
    }
}

/// The member list of a node that runs, as it changes. Clones share it.
#[derive(Debug, Clone)]
pub struct Roster {
    now: Arc<watch::Sender<Arc<Members>>>,
}

impl Roster {
    /// Index of the node itself in its own lists.
    pub const OWN: u32 = 0;

    /// The cluster of one node, until others are known.
    #[must_use]
    pub fn alone(own: Member) -> Self {
        let own = Member { index: Self::OWN, ..own };
        let members = Members { epoch: 1, answering: Self::OWN, list: vec![own] };
        Self { now: Arc::new(watch::Sender::new(Arc::new(members))) }
    }

    /// The list as it is now.
    #[must_use]
    pub fn now(&self) -> Arc<Members> {
        Arc::clone(&self.now.borrow())
    }

    /// Told of every change.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Arc<Members>> {
        self.now.subscribe()
    }

    /// Whether there are others.
    #[must_use]
    pub fn has_others(&self) -> bool {
        self.now.borrow().list.len() > 1
    }

    /// Replaces the list, under the next epoch if it differs; returns whether it does.
    pub fn replace(&self, list: Vec<Member>) -> bool {
        self.now.send_if_modified(|members| {
            if members.list == list {
                return false;
            }
            *members = Arc::new(Members { epoch: members.epoch + 1, list, ..**members });
            true
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_new_epoch_if_it_differs_and_only_then() {
        let roster = Roster::alone(Member { name: "a".to_owned(), index: 7, ..Member::default() });
        let mut followed = roster.follow();
        let first = roster.now();
        assert_eq!(first.own().map(|own| own.name.as_str()), Some("a"));
        assert!(!roster.replace(first.list.clone()) && !roster.has_others());
        assert!(!followed.has_changed().unwrap());
        let other = Member { index: 1, name: "b".to_owned(), ..Member::default() };
        assert!(roster.replace([first.list.clone(), vec![other]].concat()) && roster.has_others());
        let second = followed.borrow_and_update().clone();
        assert_eq!((second.epoch, second.answering), (first.epoch + 1, Roster::OWN));
        assert_eq!(second.member(1).map(|member| member.name.as_str()), Some("b"));
        assert_eq!(second.member(2), None);
    }
}
