//! What a fake says of the cluster that it is in, and how it stands to being read.

use std::collections::HashMap;

use bytes::Bytes;
use kvstrata_proto::v1;
use tonic::Status;

/// See the module. By default it is alone, and knows every namespace.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// What it says of members.
    pub(crate) members: Option<v1::MemberList>,
    /// The home that it names.
    pub(crate) home: Option<u32>,
    /// Where it says that blocks are which it has not: member indices.
    pub(crate) placed: HashMap<Bytes, u32>,
    /// A namespace is unknown until it is opened here.
    pub(crate) forgets: bool,
    /// A get is never answered.
    pub(crate) hangs: bool,
    /// Calls so far.
    pub(crate) opens: u32,
    pub(crate) lookups: u32,
    pub(crate) gets: u32,
    pub(crate) sessions: u32,
    /// Sessions are told that it will go away.
    pub(crate) stays: bool,
}

impl Plan {
    pub(super) fn opened(&mut self) -> (Option<v1::MemberList>, Option<u32>) {
        self.opens += 1;
        (self.members.clone(), self.home)
    }

    /// Whether a get is answered; `Ok(false)`: never.
    pub(super) fn asked(&mut self) -> Result<bool, Status> {
        self.gets += 1;
        if self.forgets && self.opens == 0 {
            return Err(Status::not_found("namespace: unknown"));
        }
        Ok(!self.hangs)
    }

    /// The runs of these hashes, the first `here` of which are here.
    pub(super) fn runs(&self, hashes: &[Bytes], has: impl Fn(&Bytes) -> bool) -> Vec<v1::Run> {
        let mut runs: Vec<v1::Run> = Vec::new();
        let own = self.members.as_ref().map_or(0, |members| members.self_);
        for (at, hash) in (0..).zip(hashes) {
            let holder = if has(hash) { Some(own) } else { self.placed.get(hash).copied() };
            let Some(holder) = holder else { continue };
            let locality = if holder == own { v1::Locality::Local } else { v1::Locality::Remote };
            match runs.last_mut() {
                Some(run) if (run.end, run.holder) == (at, holder) => run.end = at + 1,
                _ => runs.push(v1::Run {
                    start: at,
                    end: at + 1,
                    tier: v1::Tier::Dram.into(),
                    holder,
                    locality: locality.into(),
                    ..Default::default()
                }),
            }
        }
        runs
    }
}
