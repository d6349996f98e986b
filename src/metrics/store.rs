//! Gauges of what the store holds, read from it when a page of metrics is made.

use kvstrata_tiers::{stack::Stack, tier::Tier};
use prometheus_client::{
    metrics::gauge::Gauge,
    registry::{Registry, Unit},
};

/// The gauges; clones share them.
#[derive(Debug, Clone, Default)]
pub struct StoreGauges {
    dram_capacity_bytes: Gauge,
    dram_used_bytes: Gauge,
    dram_blocks: Gauge,
    index_blocks: Gauge,
    index_bytes: Gauge,
    staging_bytes: Gauge,
    demote_queue_blocks: Gauge,
    nvme_capacity_bytes: Gauge,
    nvme_used_bytes: Gauge,
    nvme_blocks: Gauge,
    object_used_bytes: Gauge,
    object_blocks: Gauge,
}

impl StoreGauges {
    /// Names the gauges in `registry`.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let gauges = Self::default();
        let counts: [(&str, &str, &Gauge); 5] = [
            (
                "demote_queue_blocks",
                "Blocks that wait to be copied to nvme",
                &gauges.demote_queue_blocks,
            ),
            ("dram_blocks", "Readable blocks in dram", &gauges.dram_blocks),
            ("index_blocks", "Blocks in the index, on all tiers", &gauges.index_blocks),
            ("nvme_blocks", "Readable blocks on nvme", &gauges.nvme_blocks),
            ("object_blocks", "Readable blocks in the object store", &gauges.object_blocks),
        ];
        for (name, help, gauge) in counts {
            registry.register(name, help, gauge.clone());
        }
        let bytes: [(&str, &str, &Gauge); 7] = [
            ("dram_capacity", "Memory of the dram tier", &gauges.dram_capacity_bytes),
            ("dram_used", "Memory of the dram tier in use, whatever for", &gauges.dram_used_bytes),
            ("index", "Memory of the index", &gauges.index_bytes),
            (
                "nvme_capacity",
                "What the nvme tier may take of the disk",
                &gauges.nvme_capacity_bytes,
            ),
            ("nvme_used", "Records on nvme, dead ones too", &gauges.nvme_used_bytes),
            (
                "object_used",
                "Packs of this node in the object store, dead blocks too",
                &gauges.object_used_bytes,
            ),
            (
                "staging",
                "Memory of puts in flight, and of removed blocks that are still read",
                &gauges.staging_bytes,
            ),
        ];
        for (name, help, gauge) in bytes {
            registry.register_with_unit(name, help, Unit::Bytes, gauge.clone());
        }
        gauges
    }

    /// Shows what a stack holds.
    pub fn show(&self, stack: &Stack) {
        let usage = stack.usage();
        let colder = stack.colder_usage();
        let usage_of = |tier| {
            let found = colder.iter().find(|(other, _)| *other == tier);
            found.map(|(_, usage)| *usage).unwrap_or_default()
        };
        let (nvme, object) = (usage_of(Tier::Nvme), usage_of(Tier::Object));
        let pairs = [
            (&self.dram_capacity_bytes, usage.dram_capacity_bytes),
            (&self.dram_used_bytes, usage.dram_used_bytes),
            (&self.dram_blocks, usage.dram_blocks),
            (&self.index_blocks, usage.index_blocks),
            (&self.index_bytes, usage.index_bytes),
            (&self.staging_bytes, usage.staging_bytes),
            (&self.demote_queue_blocks, usage.demote_queue_blocks),
            (&self.nvme_capacity_bytes, nvme.capacity_bytes),
            (&self.nvme_used_bytes, nvme.used_bytes),
            (&self.nvme_blocks, nvme.blocks),
            (&self.object_used_bytes, object.used_bytes),
            (&self.object_blocks, object.blocks),
        ];
        for (gauge, value) in pairs {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    }
}
