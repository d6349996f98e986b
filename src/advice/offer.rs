//! What one engine would load: the pair of a candidate and the holders of its prompt's prefix.

use std::{collections::HashMap, time::Duration};

use kvstrata_tiers::tier::{Run, Tier};

use super::{Found, Others, Prefix};
use crate::{
    cluster::peers::Peer,
    costs::{Locality, TierState},
    members::Roster,
    node::Node,
    openers::Opener,
    score::{self, Assessment, LoadCost, Prefill, Settings, assess},
};

/// An engine that could take a prompt.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    /// As it calls itself; empty if `node` says enough.
    pub(crate) instance: String,
    /// The host it runs on; empty if `instance` says enough.
    pub(crate) node: String,
    /// Its zone; empty: as it said.
    pub(crate) zone: String,
    /// Leading blocks of the prompt that its device has.
    pub(crate) device_blocks: u32,
    /// Blocks of the requests that it decodes.
    pub(crate) decode_blocks: f64,
    /// Milliseconds until it would begin.
    pub(crate) queue_ms: f64,
    /// How long it takes to prefill; none: as the others.
    pub(crate) prefill: Option<Prefill>,
}

/// Consecutive blocks of one tier of one member that a candidate could load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Piece {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) tier: Tier,
    /// Index of the member.
    pub(crate) holder: u32,
    /// From where that is seen.
    pub(crate) locality: Locality,
    pub(crate) bytes: u64,
    pub(crate) cost: LoadCost,
}

/// What a candidate could load behind what its device has.
#[derive(Debug, Clone)]
pub(crate) struct Offer {
    /// Index of the prefix that is best for it.
    pub(crate) prefix: usize,
    /// Where the engine runs, as it said.
    pub(crate) host: String,
    /// From where this node is seen.
    pub(crate) locality: Locality,
    /// In order, from the end of the device's prefix on, without gaps.
    pub(crate) pieces: Vec<Piece>,
    segments: Vec<score::Segment>,
}

/// Who has opened the namespaces in which something of a prompt may be.
#[derive(Debug)]
pub(super) struct Known(Vec<Vec<Opener>>);

impl Known {
    /// All of them, by their own names, each once.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let mut named: Vec<(&str, &str)> = self
            .0
            .iter()
            .flatten()
            .map(|known| (known.instance.as_str(), known.host.as_str()))
            .collect();
        named.sort_unstable();
        named.dedup();
        let candidate = |(instance, node): (&str, &str)| Candidate {
            instance: instance.to_owned(),
            node: node.to_owned(),
            zone: String::new(),
            device_blocks: 0,
            decode_blocks: 0.0,
            queue_ms: 0.0,
            prefill: None,
        };
        named.into_iter().map(candidate).collect()
    }

    /// The latest of what the candidate may be that has opened the namespace of this prefix.
    fn find(&self, prefix: usize, candidate: &Candidate) -> Option<&Opener> {
        let is_it = |known: &&Opener| known.is_called(&candidate.instance, &candidate.node);
        self.0.get(prefix)?.iter().rev().find(is_it)
    }
}

impl Node {
    /// Whether blocks of this tier can be loaded.
    pub(super) fn can_load(&self, tier: Tier) -> bool {
        self.stack.has_tier(tier) && self.costs.state(tier) != TierState::Down
    }

    /// Who has opened the namespaces of what was found.
    pub(super) fn known(&self, found: &Found) -> Known {
        let of = |prefix: &Prefix| {
            let own = self.openers.of(prefix.namespace.index());
            found.others.openers(prefix.namespace.id(), own)
        };
        Known(found.prefixes.iter().map(of).collect())
    }

    /// What `candidate` could load of what was found, from the namespace that is best for it; none if it has
    /// opened none of them.
    pub(super) fn offer(
        &self,
        found: &Found,
        known: &Known,
        candidate: &Candidate,
        prefill: Option<Prefill>,
    ) -> Option<Offer> {
        let offers = found.prefixes.iter().enumerate().filter_map(|(at, prefix)| {
            let opener = known.find(at, candidate)?;
            let zone = match candidate.zone.as_str() {
                "" => &opener.zone,
                _ => &candidate.zone,
            };
            let place = (opener.host.as_str(), zone.as_str());
            let locality = self.costs.locality(place.0, place.1);
            let pieces = self.pieces((prefix, &found.others), candidate.device_blocks, place);
            let segments = pieces.iter().map(Piece::segment).collect();
            let host = opener.host.clone();
            Some(Offer { prefix: at, host, locality, pieces, segments })
        });
        let mut offers: Vec<Offer> = offers.collect();
        if offers.len() < 2 {
            return offers.pop();
        }
        // The first of equals.
        let worth = |offer: &Offer| match prefill {
            Some(prefill) => {
                offer.assess(found.total_blocks, candidate, prefill, &Settings::default()).saved_ms
            }
            None => f64::from(offer.blocks()),
        };
        offers
            .into_iter()
            .reduce(|best, next| if worth(&next) > worth(&best) { next } else { best })
    }

    /// What is left of a prefix behind the first `device` blocks, for an engine on a host in a zone.
    fn pieces(
        &self,
        (prefix, others): (&Prefix, &Others),
        device: u32,
        place: (&str, &str),
    ) -> Vec<Piece> {
        // Asked once each: runs may be many, and what they cost must not change within an answer.
        let mut asked: HashMap<(u32, Tier, u64), (Locality, Option<LoadCost>)> = HashMap::new();
        let piece = |(at, run): (usize, &Run)| {
            let start = run.start.max(device);
            let left = run.end.checked_sub(start).filter(|left| *left > 0)?;
            let blocks = (run.end - run.start).max(1);
            let block_bytes = run.bytes / u64::from(blocks);
            let (held, holder) = (prefix.held(at), prefix.holder(at));
            let ask = || match held.and_then(|held| others.member(held.holder)) {
                Some(member) => told_cost(member, run.tier, place, block_bytes),
                None => {
                    let locality = self.costs.locality(place.0, place.1);
                    (locality, Some(self.costs.load_cost(run.tier, locality, block_bytes)))
                }
            };
            let key = (holder, run.tier, block_bytes);
            let (locality, cost) = *asked.entry(key).or_insert_with(ask);
            let all = held.map_or(Duration::ZERO, |held| held.est_load);
            Some(Piece {
                start,
                end: run.end,
                tier: run.tier,
                holder,
                locality,
                bytes: block_bytes.saturating_mul(u64::from(left)),
                cost: cost.unwrap_or_else(|| spread(all, blocks)),
            })
        };
        prefix.runs.iter().enumerate().filter_map(piece).collect()
    }
}

/// How far a member is, and what loading from it costs, if it has told that and it is known how long blocks are.
fn told_cost(
    member: &Peer,
    tier: Tier,
    place: (&str, &str),
    block_bytes: u64,
) -> (Locality, Option<LoadCost>) {
    let locality = member.locality(place);
    let cost = (block_bytes > 0).then(|| member.told().load_cost(tier, locality, block_bytes));
    (locality, cost.flatten())
}

/// What each block costs if it is only known what all of them do.
fn spread(load: Duration, blocks: u32) -> LoadCost {
    let block_ms = 1e3 * load.as_secs_f64() / f64::from(blocks.max(1));
    LoadCost { queue_ms: 0.0, setup_ms: 0.0, block_ms }
}

impl Piece {
    /// How many blocks.
    pub(crate) fn blocks(&self) -> u32 {
        self.end - self.start
    }

    /// As it is scored. The tiers of each member are the sources.
    fn segment(&self) -> score::Segment {
        let tier = match self.tier {
            Tier::Dram => 0,
            Tier::Nvme => 1,
            Tier::Object => 2,
        };
        let source = self.holder.saturating_mul(3).saturating_add(tier);
        score::Segment { blocks: self.blocks(), tier: self.tier, source, cost: self.cost }
    }
}

impl Offer {
    /// How many blocks.
    pub(crate) fn blocks(&self) -> u32 {
        self.pieces.iter().map(Piece::blocks).sum()
    }

    /// As they are scored.
    pub(super) fn segments(&self) -> &[score::Segment] {
        &self.segments
    }

    /// Milliseconds to load all of it, one source after another.
    pub(super) fn load_ms(&self) -> f64 {
        let mut sources: Vec<u32> = Vec::new();
        let mut ms = 0.0;
        for segment in &self.segments {
            if !sources.contains(&segment.source) {
                sources.push(segment.source);
                ms += segment.cost.queue_ms + segment.cost.setup_ms;
            }
            ms += f64::from(segment.blocks) * segment.cost.block_ms;
        }
        ms
    }

    /// How many of each tier, hot to cold.
    pub(crate) fn by_tier(&self) -> [u32; 3] {
        Tier::ALL.map(|tier| {
            self.pieces.iter().filter(|piece| piece.tier == tier).map(Piece::blocks).sum()
        })
    }

    /// What the candidate would be like with it.
    pub(super) fn assess(
        &self,
        prompt_blocks: u32,
        candidate: &Candidate,
        prefill: Prefill,
        settings: &Settings,
    ) -> Assessment {
        assess_with(&self.segments, prompt_blocks, candidate, prefill, settings)
    }

    /// What loading from a tier of others costs, of each piece there is.
    pub(super) fn costs_of_others(&self, tier: Tier) -> impl Iterator<Item = LoadCost> {
        let is_meant = move |piece: &&Piece| piece.tier == tier && piece.holder != Roster::OWN;
        self.pieces.iter().filter(is_meant).map(|piece| piece.cost)
    }

    /// Bytes that are loaded from each tier of this node if the first `blocks` blocks are.
    pub(super) fn loads(&self, blocks: u32) -> Vec<(Tier, u64)> {
        let mut left = blocks;
        let mut loads: Vec<(Tier, u64)> = Vec::new();
        for piece in &self.pieces {
            let taken = piece.blocks().min(left);
            left -= taken;
            if piece.holder != Roster::OWN {
                continue;
            }
            let each = piece.bytes / u64::from(piece.blocks().max(1));
            let bytes = each.saturating_mul(u64::from(taken));
            match loads.iter_mut().find(|(tier, _)| *tier == piece.tier) {
                Some((_, known)) => *known = known.saturating_add(bytes),
                None if taken > 0 => loads.push((piece.tier, bytes)),
                None => {}
            }
        }
        loads
    }
}

/// What a candidate would be like that could load these.
pub(super) fn assess_with(
    segments: &[score::Segment],
    prompt_blocks: u32,
    candidate: &Candidate,
    prefill: Prefill,
    settings: &Settings,
) -> Assessment {
    let candidate = score::Candidate {
        device_blocks: candidate.device_blocks,
        decode_blocks: candidate.decode_blocks,
        queue_ms: candidate.queue_ms,
        prefill,
        segments,
    };
    assess(prompt_blocks, &candidate, settings)
}
