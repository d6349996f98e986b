//! What the servers of a replay hold and have counted, all together.

use kvstrata_tiers::error::{Error, Result};

use crate::client::{Client, ClientOptions, Stats, TierTotals};

/// Asks every server that the replay was given.
pub(super) struct Watcher(Vec<Client>);

impl Watcher {
    /// Connects to each of `endpoints`; those that cannot be reached are left out unless all are.
    pub(super) async fn connect(endpoints: &str, options: &ClientOptions) -> Result<Self> {
        let (mut clients, mut failed) = (Vec::new(), None);
        for endpoint in endpoints.split(',').map(str::trim).filter(|each| !each.is_empty()) {
            match Client::connect(endpoint, options.clone()).await {
                Ok(client) => clients.push(client),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if clients.is_empty() => Err(error),
            None if clients.is_empty() => Err(Error::invalid("endpoint: none given")),
            _ => Ok(Self(clients)),
        }
    }

    /// How many servers there are, as far as those that were asked know.
    pub(super) fn servers(&self) -> usize {
        let known = self.0.iter().map(|client| client.members().list.len()).max();
        known.unwrap_or(0).max(self.0.len())
    }

    /// Their sums.
    pub(super) async fn stats(&self) -> Result<Stats> {
        let mut sum = Stats::default();
        for client in &self.0 {
            sum = join(sum, client.stats().await?);
        }
        Ok(sum)
    }
}

/// The sums of what a replay looks at.
fn join(mut sum: Stats, one: Stats) -> Stats {
    for tier in one.tiers {
        match sum.tiers.iter_mut().find(|known| known.tier == tier.tier) {
            None => sum.tiers.push(tier),
            Some(known) => {
                known.capacity_bytes += tier.capacity_bytes;
                known.used_bytes += tier.used_bytes;
                known.blocks += tier.blocks;
                known.evicted_blocks += tier.evicted_blocks;
                known.get_blocks += tier.get_blocks;
                known.get_bytes += tier.get_bytes;
            }
        }
    }
    let TierTotals { asked, dram, nvme, object, pending, miss } = one.lookups;
    sum.lookups.asked += asked;
    sum.lookups.dram += dram;
    sum.lookups.nvme += nvme;
    sum.lookups.object += object;
    sum.lookups.pending += pending;
    sum.lookups.miss += miss;
    sum.index_blocks += one.index_blocks;
    sum.leases += one.leases;
    sum.staging_bytes += one.staging_bytes;
    sum.duplicate_differs += one.duplicate_differs;
    sum.corrupt += one.corrupt;
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::TierStats;

    #[test]
    fn sums_are_over_all_servers_and_tiers() {
        let tier = |tier: &str, blocks| TierStats {
            tier: tier.to_owned(),
            blocks,
            evicted_blocks: 10 * blocks,
            ..TierStats::default()
        };
        let one = Stats { tiers: vec![tier("dram", 1), tier("nvme", 2)], ..Stats::default() };
        let two = Stats { tiers: vec![tier("dram", 4)], leases: 3, ..Stats::default() };
        let sum = join(join(Stats::default(), one), two);
        let blocks: Vec<_> = sum.tiers.iter().map(|t| (t.blocks, t.evicted_blocks)).collect();
        assert_eq!((blocks, sum.leases), (vec![(5, 50), (2, 20)], 3));
    }
}
