//! What the tier counts of packs and blocks; requests are in [`metrics`](super::metrics).

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

/// The counters of packs and their blocks.
#[derive(Debug, Clone, Default)]
pub struct PackMetrics {
    /// Packs uploaded.
    pub packs_made: Counter,
    /// Packs named in the log: those that a start finds.
    pub named_packs: Counter,
    /// Blocks in them.
    pub packed_blocks: Counter,
    /// Bytes of these blocks before they were encoded.
    pub packed_bytes: Counter,
    /// Bytes that they take in the packs.
    pub stored_bytes: Counter,
    /// Blocks that were packed again, because their packs were given up.
    pub repacked_blocks: Counter,
    /// Bytes that they take in their new packs.
    pub repacked_bytes: Counter,
    /// Packs that could not be made or uploaded; tried again.
    pub pack_failures: Counter,
    /// Requests for runs of blocks that were read.
    pub read_runs: Counter,
    /// Blocks in them.
    pub read_run_blocks: Counter,
    /// Reads refused because too many were waiting.
    pub reads_refused: Counter,
    /// Reads that took too long.
    pub read_timeouts: Counter,
    /// Blocks whose bytes were wrong twice.
    pub wrong_blocks: Counter,
    /// Packs whose objects somebody else had deleted.
    pub lost_packs: Counter,
    /// Packs that left: too old, too empty, or too many.
    pub dropped_packs: Counter,
    /// Blocks that left with them.
    pub collected_blocks: Counter,
    /// Objects of packs deleted.
    pub deleted_packs: Counter,
    /// Ordinals of nodes that are gone that this node has now, or is about to have.
    pub adopted_ordinals: Gauge,
    /// Times that it took one.
    pub adoptions: Counter,
    /// Times that another node took one of them.
    pub given_back: Counter,
}

impl PackMetrics {
    /// Makes the counters and names them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kvstrata_object");
        let metrics = Self::default();
        for (name, help, counter) in [
            ("packs_made", "Packs uploaded", &metrics.packs_made),
            ("named_packs", "Packs named in the log", &metrics.named_packs),
            ("packed_blocks", "Blocks in packs that were uploaded", &metrics.packed_blocks),
            ("packed_bytes", "Bytes of these blocks", &metrics.packed_bytes),
            ("stored_bytes", "Bytes that they take in the packs", &metrics.stored_bytes),
            ("repacked_blocks", "Blocks that were packed again", &metrics.repacked_blocks),
            ("repacked_bytes", "Bytes that they take in the packs", &metrics.repacked_bytes),
            ("pack_failures", "Packs that could not be made or uploaded", &metrics.pack_failures),
            ("read_runs", "Ranges of packs that were read", &metrics.read_runs),
            ("read_run_blocks", "Blocks read in them", &metrics.read_run_blocks),
            ("reads_refused", "Reads refused because too many waited", &metrics.reads_refused),
            ("read_timeouts", "Reads that took too long", &metrics.read_timeouts),
            ("wrong_blocks", "Blocks whose bytes were wrong twice", &metrics.wrong_blocks),
            ("lost_packs", "Packs that somebody else had deleted", &metrics.lost_packs),
            (
                "dropped_packs",
                "Packs that left: too old, too empty, or too many",
                &metrics.dropped_packs,
            ),
            ("collected_blocks", "Blocks that left with their packs", &metrics.collected_blocks),
            ("deleted_packs", "Objects of packs deleted", &metrics.deleted_packs),
            ("adoptions", "Times that packs of a node that is gone were taken", &metrics.adoptions),
            ("given_back", "Times that another node took such packs", &metrics.given_back),
        ] {
            registry.register(name, help, counter.clone());
        }
        registry.register(
            "adopted_ordinals",
            "Nodes that are gone whose packs this node has",
            metrics.adopted_ordinals.clone(),
        );
        metrics
    }
}
