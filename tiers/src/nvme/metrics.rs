//! What the nvme tier counts.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use crate::label_values;

label_values! {
    /// Whether the tier takes writes.
    StateLabel {
        /// It does.
        Ready = "ready",
        /// The disk is full.
        Full = "full",
        /// Writes failed a moment ago.
        Failing = "failing",
        /// A sync failed.
        ReadOnly = "read_only",
    }
}

label_values! {
    /// An operation of the disk.
    OpLabel {
        /// Reading.
        Read = "read",
        /// Writing.
        Write = "write",
        /// Making durable.
        Sync = "sync",
        /// Making a segment.
        Create = "create",
        /// The index.
        Index = "index",
    }
}

label_values! {
    /// What was damaged.
    DamageLabel {
        /// The first page of a segment.
        Segment = "segment",
        /// The header of a record.
        Header = "header",
        /// The bytes of a block.
        Payload = "payload",
        /// Tombstones or a namespace.
        Note = "note",
        /// An entry of the index.
        Index = "index",
    }
}

label_values! {
    /// Why a block was not taken.
    RejectLabel {
        /// The write budget of the day is short.
        Budget = "budget",
        /// The tier takes no writes now.
        State = "state",
        /// It does not fit into a segment.
        Size = "size",
        /// Writing it failed.
        Error = "error",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: StateLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Op {
    op: OpLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct What {
    what: DamageLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: RejectLabel,
}

fn family<L, M>(registry: &mut Registry, name: &str, help: &str) -> Family<L, M>
where
    L: Clone + std::hash::Hash + Eq,
    M: Default,
    Family<L, M>: prometheus_client::registry::Metric + Clone,
{
    let family = Family::default();
    registry.register(name, help, family.clone());
    family
}

/// The counters of the tier.
#[derive(Debug, Clone)]
pub struct NvmeMetrics {
    state: Family<State, Gauge>,
    errors: Family<Op, Counter>,
    damaged: Family<What, Counter>,
    rejected: Family<Reason, Counter>,
    /// Reads that did not come back in time.
    pub read_timeouts: Counter,
    /// Reads refused because too many were under way.
    pub reads_refused: Counter,
    /// Bytes of records written, by putting.
    pub appended_bytes: Counter,
    /// Bytes of records written again by reclaiming.
    pub moved_bytes: Counter,
    /// Bytes read by gets.
    pub read_bytes: Counter,
    /// Syncs of segments.
    pub syncs: Counter,
    /// Segments reclaimed.
    pub reclaimed_segments: Counter,
    /// Blocks that left because their segment was reclaimed.
    pub reclaimed_blocks: Counter,
    /// Times that reclaiming waited for a segment to be copied.
    pub held_reclaims: Counter,
    /// Segments reclaimed with blocks before they were copied, although somebody copies segments.
    pub uncopied_segments: Counter,
    /// Blocks found at the start.
    pub recovered_blocks: Counter,
    /// Entries of the index dropped at the start: their segment is gone or another one.
    pub stale_entries: Counter,
    /// Blocks whose description was written after they were.
    pub described_blocks: Counter,
    /// Blocks whose description was not written: too many were told at once, or the index took none.
    pub undescribed_blocks: Counter,
    /// Bytes read at the start.
    pub recovery_read_bytes: Counter,
    /// Seconds that the start took.
    pub recovery_seconds: Gauge<f64, AtomicU64>,
    /// Times that the index was made anew from the segments.
    pub index_rebuilds: Counter,
}

/// Every series whose labels are known exists from the start.
fn begin(
    errors: &Family<Op, Counter>,
    damaged: &Family<What, Counter>,
    rejected: &Family<Reason, Counter>,
) {
    for op in OpLabel::ALL {
        drop(errors.get_or_create_owned(&Op { op: *op }));
    }
    for what in DamageLabel::ALL {
        drop(damaged.get_or_create_owned(&What { what: *what }));
    }
    for reason in RejectLabel::ALL {
        drop(rejected.get_or_create_owned(&Reason { reason: *reason }));
    }
}

impl NvmeMetrics {
    /// Makes the counters and names them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kvstrata_nvme");
        let state =
            family(registry, "state", "1 for the state that the tier is in, 0 for the others");
        let errors: Family<Op, Counter> =
            family(registry, "errors", "Failed operations of the disk and of the index");
        let damaged: Family<What, Counter> =
            family(registry, "damaged", "Things on the disk that failed their checksum");
        let rejected: Family<Reason, Counter> =
            family(registry, "rejected_blocks", "Blocks that the tier did not take, by reason");
        begin(&errors, &damaged, &rejected);
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let read_timeouts = counter("read_timeouts", "Reads that did not come back in time");
        let reads_refused = counter(
            "reads_refused",
            "Reads refused because too many were under way for half a second",
        );
        let appended_bytes = counter("appended_bytes", "Bytes of records written by putting");
        let moved_bytes = counter("moved_bytes", "Bytes of records written again by reclaiming");
        let read_bytes = counter("read_bytes", "Bytes read by gets");
        let syncs = counter("syncs", "Syncs of segments");
        let reclaimed_segments = counter("reclaimed_segments", "Segments reclaimed");
        let reclaimed_blocks =
            counter("reclaimed_blocks", "Blocks that left because their segment was reclaimed");
        let held_reclaims =
            counter("held_reclaims", "Times that reclaiming waited for a segment to be copied");
        let help = "Segments reclaimed before they were copied to the object store";
        let uncopied_segments = counter("uncopied_segments", help);
        let recovered_blocks = counter("recovered_blocks", "Blocks found at the start");
        let stale_entries =
            counter("stale_entries", "Entries of the index dropped at the start as stale");
        let described_blocks =
            counter("described_blocks", "Blocks described while they were on the tier");
        let undescribed_blocks =
            counter("undescribed_blocks", "Blocks whose description will not survive a restart");
        let recovery_read_bytes = counter("recovery_read_bytes", "Bytes read at the start");
        let index_rebuilds =
            counter("index_rebuilds", "Times that the index was made anew from the segments");
        let recovery_seconds = Gauge::<f64, AtomicU64>::default();
        let help = "Seconds that finding the blocks took at the start";
        registry.register("recovery_seconds", help, recovery_seconds.clone());
        Self {
            state,
            errors,
            damaged,
            rejected,
            read_timeouts,
            reads_refused,
            appended_bytes,
            moved_bytes,
            read_bytes,
            syncs,
            reclaimed_segments,
            reclaimed_blocks,
            held_reclaims,
            uncopied_segments,
            recovered_blocks,
            stale_entries,
            described_blocks,
            undescribed_blocks,
            recovery_read_bytes,
            recovery_seconds,
            index_rebuilds,
        }
    }

    pub(super) fn show_state(&self, now: StateLabel) {
        for state in StateLabel::ALL {
            let gauge = self.state.get_or_create_owned(&State { state: *state });
            gauge.set(i64::from(*state == now));
        }
    }

    /// The state shown.
    #[must_use]
    pub fn state(&self) -> StateLabel {
        let shown = |state: &&StateLabel| {
            self.state.get_or_create_owned(&State { state: **state }).get() == 1
        };
        StateLabel::ALL.iter().find(shown).copied().unwrap_or(StateLabel::Ready)
    }

    /// Failed operations.
    #[must_use]
    pub fn errors(&self, op: OpLabel) -> Counter {
        self.errors.get_or_create_owned(&Op { op })
    }

    /// Things that failed their checksum.
    #[must_use]
    pub fn damaged(&self, what: DamageLabel) -> Counter {
        self.damaged.get_or_create_owned(&What { what })
    }

    /// Blocks that were not taken.
    #[must_use]
    pub fn rejected(&self, reason: RejectLabel) -> Counter {
        self.rejected.get_or_create_owned(&Reason { reason })
    }
}
