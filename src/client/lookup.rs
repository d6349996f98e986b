//! Lookups and leases.

use std::time::Duration;

use bytes::Bytes;
use kvstrata_proto::v1;
use kvstrata_tiers::{
    error::{Error, Result},
    tier::{Tier, TierCounts},
};
use tokio::time::Instant;

use super::{Client, Handle, HashList, Session, status::broken_contract};

const DOING: &str = "lookup";

/// How to look up.
#[derive(Debug, Clone, Copy, Default)]
pub struct LookupOptions<'a> {
    /// Keep what was found from being evicted; without it nobody's protection is extended.
    pub lease: Option<LeaseAsk<'a>>,
    /// Also report what is present after the first gap.
    pub sparse: bool,
    /// Only what the node that is asked has.
    pub local: bool,
    /// Host and zone of where the blocks would be loaded; both empty: where the client is that opened the
    /// namespace last.
    pub reader: (&'a str, &'a str),
}

/// A wish for a lease.
#[derive(Debug, Clone, Copy)]
pub struct LeaseAsk<'a> {
    /// The session that will own it.
    pub session: &'a Session,
    /// How long it should last; zero takes the server's default.
    pub ttl: Duration,
    /// The most bytes it should cover; 0 takes the server's limit.
    pub bytes_max: u64,
}

/// A promise that the first blocks of a lookup stay readable until the deadline.
///
/// Dropping it gives nothing back: call [`Client::release`], or let the deadline or the end of the
/// session do it.
#[derive(Debug, Clone)]
pub struct Lease {
    pub(super) id: Bytes,
    pub(super) session: Bytes,
    /// The first this many positions of the lookup are covered.
    pub blocks: u32,
    /// Bytes covered.
    pub bytes: u64,
    /// When the promise ends, unless it is renewed.
    pub deadline: Instant,
}

/// Where a run of blocks is, seen from the node that answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locality {
    /// On that node.
    Local,
    /// On another node.
    Remote,
}

/// Positions `start..end` are on one tier of one holder.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// First position.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
    /// The hottest tier that has them.
    pub tier: Tier,
    /// [`Member::index`](super::Member) of the node that has them.
    pub holder: u32,
    /// Whether that is the node that answered.
    pub locality: Locality,
    /// Expected time to load the whole run.
    pub est_load: Duration,
    /// A put is in flight; not readable yet.
    pub pending: bool,
}

/// The answer to a lookup.
#[derive(Debug, Clone)]
pub struct Lookup {
    /// Leading blocks that are readable now.
    pub prefix_blocks: u32,
    /// The longest prefix of present or pending blocks, in order.
    pub runs: Vec<Run>,
    /// Present runs after the first gap, if asked for.
    pub sparse: Vec<Run>,
    /// Sums to the number of hashes asked: checked on receipt.
    pub counts: TierCounts,
    /// Absent when none was asked for or nothing could be covered.
    pub lease: Option<Lease>,
    /// Compare with [`Members::epoch`](super::Members).
    pub members_epoch: u64,
    /// A member did not answer in time; there may be more.
    pub partial: bool,
}

impl Handle {
    /// Finds the longest present prefix of `hashes`.
    ///
    /// # Errors
    /// `Invalid` if the hashes have another length than declared, or are more than the server's
    /// limit; `UnknownNamespace` after a restart of the server.
    ///
    /// # Cancel safety
    /// Safe, except that a lease granted to a dropped call lasts until its deadline.
    pub async fn lookup(&self, hashes: &HashList, options: LookupOptions<'_>) -> Result<Lookup> {
        self.check(hashes)?;
        let limit = self.limits().lookup_hashes_max;
        if hashes.len() > limit {
            let given = hashes.len();
            return Err(Error::invalid(format!(
                "lookup: {given} hashes given, 1 to {limit} allowed"
            )));
        }
        let request = v1::LookupRequest {
            namespace_id: self.wire_id(),
            hashes: hashes.packed(),
            session_id: options.lease.map(|ask| ask.session.id()).unwrap_or_default(),
            lease: options
                .lease
                .map(|ask| v1::LeaseRequest { ttl_ms: millis(ask.ttl), bytes_max: ask.bytes_max }),
            sparse: options.sparse,
            local: options.local,
            reader_node: options.reader.0.to_owned(),
            reader_zone: options.reader.1.to_owned(),
        };
        let asked_at = Instant::now();
        let mut wire = self.client.wire();
        let reply = self.client.call(DOING, wire.lookup(self.client.request(request))).await?;
        let found = answer(reply, hashes.len(), options.lease, asked_at)?;
        self.remember(hashes, &found).await;
        Ok(found)
    }

    /// Remembers what is to be read from other members.
    async fn remember(&self, hashes: &HashList, found: &Lookup) {
        let runs = || found.runs.iter().chain(&found.sparse);
        let is_elsewhere = runs().any(|run| run.locality == Locality::Remote);
        let is_news = || found.members_epoch > self.client.server().members().epoch;
        if is_elsewhere
            && is_news()
            && let Err(error) = self.open_again().await
        {
            tracing::debug!(%error, "the members were not told anew");
        }
        let server = self.client.server();
        let members = server.members();
        let name = |holder| Some(members.member(holder)?.name.as_str().into());
        self.placements.note(hashes, runs(), name);
    }
}

impl Client {
    /// Gives a lease back: its blocks are touched tail first and may be evicted again.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered; an ended lease is a success.
    ///
    /// # Cancel safety
    /// Safe: releasing twice is a success.
    pub async fn release(&self, lease: Lease) -> Result<()> {
        let request = v1::ReleaseRequest { session_id: lease.session, lease_id: lease.id };
        let mut wire = self.wire();
        self.call("release lease", wire.release(self.request(request))).await.map(drop)
    }

    /// Moves a lease's deadline to `ttl` from now and returns the lease as it is then.
    ///
    /// # Errors
    /// `LeaseExpired` if it has ended: do the lookup again.
    ///
    /// # Cancel safety
    /// Safe: the lease lasts at least until its old deadline.
    pub async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<Lease> {
        const DOING: &str = "renew lease";
        let request = v1::RenewRequest {
            session_id: lease.session.clone(),
            lease_id: lease.id.clone(),
            ttl_ms: millis(ttl),
        };
        let asked_at = Instant::now();
        let mut wire = self.wire();
        let reply = self.call(DOING, wire.renew(self.request(request))).await?;
        let renewed =
            reply.lease.ok_or_else(|| broken_contract(DOING, "no lease in the answer"))?;
        Ok(lease_of(renewed, lease.session.clone(), asked_at))
    }
}

pub(super) fn answer(
    reply: v1::LookupResponse,
    asked: usize,
    ask: Option<LeaseAsk<'_>>,
    asked_at: Instant,
) -> Result<Lookup> {
    let counts = counts_of(reply.counts.unwrap_or_default());
    let sum: u64 = counts.to_array().into_iter().map(u64::from).sum();
    if usize::try_from(sum) != Ok(asked) || usize::try_from(reply.asked) != Ok(asked) {
        return Err(broken_contract(
            DOING,
            &format!("{asked} hashes asked, counts sum to {sum} of {}", reply.asked),
        ));
    }
    let readable = counts.dram.saturating_add(counts.nvme).saturating_add(counts.object);
    if reply.prefix_blocks > readable {
        let prefix = reply.prefix_blocks;
        return Err(broken_contract(
            DOING,
            &format!("a prefix of {prefix} blocks, but only {readable} of them on a tier"),
        ));
    }
    Ok(Lookup {
        prefix_blocks: reply.prefix_blocks,
        runs: reply.runs.into_iter().map(run_of).collect::<Result<_>>()?,
        sparse: reply.sparse.into_iter().map(run_of).collect::<Result<_>>()?,
        counts,
        lease: ask.and_then(|ask| Some(lease_of(reply.lease?, ask.session.id(), asked_at))),
        members_epoch: reply.members_epoch,
        partial: reply.partial,
    })
}

/// The deadline counts from before the call, so that it never ends later than the server's.
fn lease_of(wire: v1::Lease, session: Bytes, asked_at: Instant) -> Lease {
    Lease {
        id: wire.lease_id,
        session,
        blocks: wire.blocks,
        bytes: wire.bytes,
        deadline: asked_at + Duration::from_millis(wire.ttl_ms.into()),
    }
}

fn counts_of(wire: v1::TierCounts) -> TierCounts {
    TierCounts {
        dram: wire.dram,
        nvme: wire.nvme,
        object: wire.object,
        pending: wire.pending,
        miss: wire.miss,
    }
}

fn run_of(wire: v1::Run) -> Result<Run> {
    // A pending block has no tier yet; it will be in dram.
    let tier = match tier_of(wire.tier()) {
        None if !wire.pending => return Err(broken_contract(DOING, "a run without a tier")),
        tier => tier.unwrap_or(Tier::Dram),
    };
    let locality = match wire.locality() {
        v1::Locality::Remote => Locality::Remote,
        v1::Locality::Local | v1::Locality::Unspecified => Locality::Local,
    };
    let seconds = f64::from(wire.est_load_ms) / 1e3;
    Ok(Run {
        start: wire.start,
        end: wire.end,
        tier,
        holder: wire.holder,
        locality,
        est_load: Duration::try_from_secs_f64(seconds).unwrap_or_default(),
        pending: wire.pending,
    })
}

/// The tier that a wire value names.
pub(super) fn tier_of(wire: v1::Tier) -> Option<Tier> {
    match wire {
        v1::Tier::Dram => Some(Tier::Dram),
        v1::Tier::Nvme => Some(Tier::Nvme),
        v1::Tier::Object => Some(Tier::Object),
        v1::Tier::Unspecified => None,
    }
}

/// Whole milliseconds, rounded up so that a short time does not become "default".
pub(super) fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}
