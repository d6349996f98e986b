//! Lookups: what this node has, then what others have behind it, and a lease on the head.

use std::{sync::atomic::Ordering, time::Duration};

use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    block::Hashes,
    error::{Error, Result},
    namespace::Namespace,
    stack::Ask,
    tier::Run,
};
use tokio::time::Instant;

use super::{Node, blocks::Pins, convert};
use crate::{
    auth::Bearer,
    cluster::{
        fanout,
        plan::{Found, Prefix},
    },
    costs::Locality,
    flow,
    id::SessionId,
    lease::Reservation,
    limits::LOOKUP_HASHES_MAX,
    members::Roster,
    session::{Session, draining},
};

/// The least unit of memory that a block of a page or more is rounded to.
const PAGE_BYTES: u64 = 4096;

/// A lease that will be granted if the lookup pins anything.
struct Promise {
    reservation: Reservation<Pins>,
    ttl: Duration,
    session: std::sync::Arc<Session>,
}

impl Promise {
    fn keep(self, pins: Pins, bytes: u64) -> Result<wire::Lease> {
        let blocks = flow::count(pins.len());
        let granted = self.reservation.grant(pins, blocks, bytes, self.ttl)?;
        let leases = &self.session.counters().leases;
        leases.fetch_add(1, Ordering::Relaxed);
        Ok(convert::lease(&granted))
    }
}

impl Node {
    /// Answers a lookup. Others are asked only for what this node lacks, and never by a node that asks.
    pub(super) async fn lookup(
        &self,
        bearer: &Bearer,
        request: wire::LookupRequest,
    ) -> Result<wire::LookupResponse> {
        let namespace = self.namespace(bearer, &request.namespace_id)?;
        let hashes = namespace.hashes(&request.hashes, LOOKUP_HASHES_MAX, "hashes")?;
        let promise = self.promise(bearer, &namespace, &request, hashes.len())?;
        let reader = self.reader(&namespace, &request)?;
        let locality = self.costs.locality(&reader.0, &reader.1);
        let pin_bytes_max = promise.as_ref().map(|promise| promise.reservation.bytes());
        let ask = Ask { sparse: request.sparse, pin_bytes_max };
        let answer = self.stack.find(&namespace, hashes, ask);
        let own = |run: Run| self.own(run, locality);
        let mut prefix = Prefix::new(answer.asked, answer.runs.into_iter().map(own).collect());
        let asks_others = !request.local && !bearer.is_node();
        let partial = if asks_others && !prefix.is_whole() && self.roster.has_others() {
            let (packed, reader) = (request.hashes.clone(), (&*reader.0, &*reader.1));
            let (peers, deadline) =
                (&*self.peers.list(), Instant::now() + fanout::patience(hashes.len()));
            let ask =
                fanout::Ask { namespace: &namespace, hashes, packed, reader, peers, deadline };
            let behind = |end| self.own_behind(&namespace, hashes, end, locality);
            self.peers.complete(&ask, &mut prefix, behind).await
        } else {
            false
        };
        // What a node asks was counted where an engine asked for it.
        if !bearer.is_node() {
            self.metrics.record_lookup(convert::answers(prefix.counts()));
            namespace.counters().count_lookup(prefix.counts());
        }
        let lease = match promise {
            Some(promise) if !answer.pins.is_empty() => {
                Some(promise.keep(answer.pins, answer.pinned_bytes)?)
            }
            _ => None,
        };
        let end = prefix.end();
        let sparse = answer.sparse.into_iter().filter_map(|run| behind_prefix(run, end));
        Ok(wire::LookupResponse {
            asked: answer.asked,
            prefix_blocks: prefix.readable(),
            runs: prefix.runs().iter().map(convert::found).collect(),
            counts: Some(convert::counts(prefix.counts())),
            lease,
            sparse: sparse.map(|run| convert::found(&own(run))).collect(),
            members_epoch: self.roster.now().epoch,
            partial,
        })
    }

    /// Host and zone of where the blocks would be loaded.
    fn reader(
        &self,
        namespace: &Namespace,
        request: &wire::LookupRequest,
    ) -> Result<(String, String)> {
        let host = convert::label("reader_node", request.reader_node.clone())?;
        let zone = convert::label("reader_zone", request.reader_zone.clone())?;
        if host.is_empty() && zone.is_empty() {
            let latest = |host: &str, zone: &str| (host.to_owned(), zone.to_owned());
            return Ok(self.openers.with_latest(namespace.index(), latest));
        }
        Ok((host, zone))
    }

    /// A run that this node has.
    fn own(&self, run: Run, locality: Locality) -> Found {
        let est_load = self.costs.estimate(run.tier, locality, run.bytes);
        Found { run, holder: Roster::OWN, est_load }
    }

    /// What this node has from the position `end` on.
    fn own_behind(
        &self,
        namespace: &Namespace,
        hashes: Hashes<'_>,
        end: u32,
        locality: Locality,
    ) -> Vec<Found> {
        let rest = hashes.skip(usize::try_from(end).unwrap_or(usize::MAX));
        let runs = self.stack.peek(namespace, rest).runs.into_iter();
        let moved = |run: Run| Run { start: run.start + end, end: run.end + end, ..run };
        runs.map(|run| self.own(moved(run), locality)).collect()
    }

    /// Sets aside bytes for the lease that a lookup asks for.
    fn promise(
        &self,
        bearer: &Bearer,
        namespace: &Namespace,
        request: &wire::LookupRequest,
        blocks: usize,
    ) -> Result<Option<Promise>> {
        let Some(asked) = &request.lease else { return Ok(None) };
        let session = self.session(bearer, SessionId::read("session_id", &request.session_id)?)?;
        if self.sessions.is_draining() {
            return Err(draining());
        }
        let ttl_ms = Duration::from_millis(u64::from(asked.ttl_ms));
        let ttl = self.leases.ttl("lease.ttl_ms", ttl_ms)?;
        let limit = self.leases.limits().session_bytes_max;
        if asked.bytes_max > limit {
            return Err(Error::invalid(format!(
                "lease.bytes_max: {} given, 0 to {limit} allowed, 0 takes the limit",
                asked.bytes_max
            )));
        }
        // No more than the blocks asked can need, so that lookups at once do not starve each other.
        // A quarter more than their payload covers what rounding to slots may add.
        let longest = u64::from(namespace.layout().bytes_max());
        let slot = longest + longest / 4 + PAGE_BYTES;
        let needed = slot.saturating_mul(u64::try_from(blocks).unwrap_or(u64::MAX));
        let bytes = if asked.bytes_max == 0 { limit } else { asked.bytes_max }.min(needed);
        let reservation = self.leases.reserve(session.id(), bytes)?;
        Ok(Some(Promise { reservation, ttl, session }))
    }
}

/// What of a run is behind the end of a prefix.
fn behind_prefix(run: Run, end: u32) -> Option<Run> {
    if run.start >= end {
        return Some(run);
    }
    let blocks = run.end.checked_sub(end).filter(|blocks| *blocks > 0)?;
    let block_bytes = run.bytes / u64::from(run.end - run.start).max(1);
    Some(Run { start: end, bytes: block_bytes.saturating_mul(u64::from(blocks)), ..run })
}
