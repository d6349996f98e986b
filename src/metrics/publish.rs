//! The families of what routers are told.

use kvstrata_tiers::tier::Tier;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::labels::{ResyncReason, RouterEvent, RouterLabel, TierLabel};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByEvent {
    target: RouterLabel,
    r#type: RouterEvent,
    tier: TierLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    target: RouterLabel,
    reason: ResyncReason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTarget {
    target: RouterLabel,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct PublishMetrics {
    /// Times that batches were asked for again.
    pub gap_requests: Counter,
    events: Family<ByEvent, Counter>,
    blocks: Family<ByEvent, Counter>,
    resyncs: Family<ByReason, Counter>,
    cut: Family<ByTarget, Counter>,
    listeners: Family<ByTarget, Gauge>,
    shadow: Family<ByTarget, Gauge>,
    withheld: Family<ByTarget, Gauge>,
}

impl PublishMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            gap_requests: Counter::default(),
            events: Family::default(),
            blocks: Family::default(),
            resyncs: Family::default(),
            cut: Family::default(),
            listeners: Family::default(),
            shadow: Family::default(),
            withheld: Family::default(),
        };
        metrics.register_counters(registry);
        let Self { listeners, shadow, withheld, .. } = &metrics;
        for (name, help, family) in [
            ("router_listeners", "Routers that listen to what is announced now", listeners),
            ("shadow_entries", "Blocks that are announced to routers now", shadow),
            ("router_withheld_blocks", "Blocks that cannot be announced yet", withheld),
        ] {
            registry.register(name, help, family.clone());
        }
        metrics.create_all();
        metrics
    }

    fn register_counters(&self, registry: &mut Registry) {
        registry.register("router_events", "Events that routers were sent", self.events.clone());
        registry.register("router_event_blocks", "Blocks in these events", self.blocks.clone());
        registry.register(
            "router_resync",
            "Times that everything was withdrawn and announced again, by why",
            self.resyncs.clone(),
        );
        registry.register(
            "router_cut_listeners",
            "Listeners that were cut off because they were too slow",
            self.cut.clone(),
        );
        registry.register(
            "seq_gap_requests",
            "Times that a router asked for batches again",
            self.gap_requests.clone(),
        );
    }

    fn create_all(&self) {
        for &target in RouterLabel::ALL {
            for &r#type in RouterEvent::ALL {
                for &tier in TierLabel::ALL {
                    let labels = ByEvent { target, r#type, tier };
                    drop(self.events.get_or_create(&labels));
                    drop(self.blocks.get_or_create(&labels));
                }
            }
            for &reason in ResyncReason::ALL {
                drop(self.resyncs.get_or_create(&ByReason { target, reason }));
            }
            drop(self.cut.get_or_create(&ByTarget { target }));
            for family in [&self.listeners, &self.shadow, &self.withheld] {
                drop(family.get_or_create(&ByTarget { target }));
            }
        }
    }

    /// Records an event of so many blocks that was sent.
    pub fn record_event(
        &self,
        target: RouterLabel,
        r#type: RouterEvent,
        tier: Tier,
        blocks: usize,
    ) {
        let labels = ByEvent { target, r#type, tier: tier.into() };
        self.events.get_or_create(&labels).inc();
        self.blocks.get_or_create(&labels).inc_by(u64::try_from(blocks).unwrap_or(u64::MAX));
    }

    /// Records that everything is said again.
    pub fn record_resync(&self, target: RouterLabel, reason: ResyncReason) {
        self.resyncs.get_or_create(&ByReason { target, reason }).inc();
    }

    /// Records that somebody was cut off.
    pub fn record_cut(&self, target: RouterLabel) {
        self.cut.get_or_create(&ByTarget { target }).inc();
    }

    /// What one target shows, which is 0 and is taken away when it is dropped.
    #[must_use]
    pub fn shown(&self, target: RouterLabel) -> Shown {
        let of = |family: &Family<ByTarget, Gauge>| Part {
            gauge: family.get_or_create_owned(&ByTarget { target }),
            value: 0,
        };
        Shown {
            listeners: of(&self.listeners),
            announced: of(&self.shadow),
            withheld: of(&self.withheld),
        }
    }
}

/// What one target shows of itself.
#[derive(Debug)]
pub struct Shown {
    /// Who listens.
    pub listeners: Part,
    /// Blocks that are announced.
    pub announced: Part,
    /// Blocks that wait.
    pub withheld: Part,
}

/// A part of a gauge.
#[derive(Debug)]
pub struct Part {
    gauge: Gauge,
    value: i64,
}

impl Part {
    /// The part is this now.
    pub fn set(&mut self, value: usize) {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        self.gauge.inc_by(value - self.value);
        self.value = value;
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.gauge.dec_by(self.value);
    }
}
