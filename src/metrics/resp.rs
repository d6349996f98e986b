//! The families of the RESP listener.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::labels::{RespCommand, RespDrop};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCommand {
    command: RespCommand,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDrop {
    reason: RespDrop,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct RespMetrics {
    /// Connections open now.
    pub connections: Gauge,
    /// Connections that were ended because what came was no command.
    pub protocol_errors: Counter,
    /// Reads that found one of two values that belong together without the other.
    pub torn_reads: Counter,
    commands: Family<ByCommand, Counter>,
    dropped: Family<ByDrop, Counter>,
}

impl RespMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            connections: Gauge::default(),
            protocol_errors: Counter::default(),
            torn_reads: Counter::default(),
            commands: Family::default(),
            dropped: Family::default(),
        };
        registry.register(
            "resp_connections",
            "RESP connections open now",
            metrics.connections.clone(),
        );
        registry.register(
            "resp_protocol_errors",
            "RESP connections ended because what came was no command",
            metrics.protocol_errors.clone(),
        );
        registry.register(
            "resp_torn_reads",
            "Reads of one of two values that belong together, without the other",
            metrics.torn_reads.clone(),
        );
        registry.register("resp_commands", "RESP commands answered", metrics.commands.clone());
        registry.register(
            "resp_dropped_values",
            "Values answered with OK and not stored",
            metrics.dropped.clone(),
        );
        for &command in RespCommand::ALL {
            drop(metrics.commands.get_or_create(&ByCommand { command }));
        }
        for &reason in RespDrop::ALL {
            drop(metrics.dropped.get_or_create(&ByDrop { reason }));
        }
        metrics
    }

    /// Records a command.
    pub fn record_command(&self, command: RespCommand) {
        self.commands.get_or_create(&ByCommand { command }).inc();
    }

    /// Records a value that was not stored although its client was told OK.
    pub fn record_dropped(&self, reason: RespDrop) {
        self.dropped.get_or_create(&ByDrop { reason }).inc();
    }

    /// Values dropped so, since the start.
    #[must_use]
    pub fn dropped(&self, reason: RespDrop) -> u64 {
        self.dropped.get_or_create(&ByDrop { reason }).get()
    }
}
