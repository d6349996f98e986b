"""What the chart's dashboards show: panels, their queries and their units, row by row.

`@` in a query stands for what is selected at the top of a dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Panel:
    """One chart: queries by their legends, where `@` stands for the selection."""

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""
    kind: str = "timeseries"
    stacked: bool = False


@dataclass
class Row:
    """Panels under one question."""

    title: str
    panels: list[Panel] = field(default_factory=list)


def rate(name: str, by: str, where: str = "") -> str:
    """How fast a counter grows, summed by labels."""
    return f"sum by ({by}) (rate({name}{{{where}@}}[$__rate_interval]))"


def total(name: str, where: str = "") -> str:
    """How fast a counter grows, all together."""
    return f"sum(rate({name}{{{where}@}}[$__rate_interval]))"


def level(name: str) -> str:
    """A gauge, summed over nodes."""
    return f"sum({name}{{@}})"


def quantile(part: float, name: str, by: str, where: str = "") -> str:
    """A quantile of a histogram, by labels."""
    return f"histogram_quantile({part}, {rate(f'{name}_bucket', f'le, {by}', where)})"


LASTING = 'op!~"session|router_watch|router_watch_tiers",'
MISSED = total("kvstrata_lookup_blocks_total", 'answer="miss",')
HITS = f"1 - {MISSED} / {total('kvstrata_lookup_asked_blocks_total')}"

OVERVIEW = [
    Row(
        "Is it worth it?",
        [
            Panel(
                "Hit ratio",
                "percentunit",
                {"hits": HITS},
                "Of the blocks asked for in lookups, those that were on some tier.",
            ),
            Panel(
                "Lookups by answer",
                "ops",
                {"{{answer}}": rate("kvstrata_lookup_blocks_total", "answer")},
                "Blocks a second.",
                stacked=True,
            ),
            Panel(
                "Delivered by tier",
                "Bps",
                {"{{tier}}": rate("kvstrata_get_bytes_total", "tier")},
                stacked=True,
            ),
            Panel(
                "Offered blocks by outcome",
                "ops",
                {"{{outcome}}": rate("kvstrata_put_blocks_total", "outcome")},
                stacked=True,
            ),
            Panel("Received", "Bps", {"puts": total("kvstrata_put_bytes_total")}),
            Panel(
                "Reads that brought nothing",
                "ops",
                {"{{reason}}": rate("kvstrata_get_missed_blocks_total", "reason")},
                "Blocks asked for in gets and not delivered.",
            ),
        ],
    ),
    Row(
        "Is it quick?",
        [
            Panel(
                "Time to have one block in hand",
                "s",
                {
                    "{{tier}} p50": quantile(0.5, "kvstrata_get_load_seconds", "tier"),
                    "{{tier}} p99": quantile(0.99, "kvstrata_get_load_seconds", "tier"),
                },
            ),
            Panel(
                "Calls, p99",
                "s",
                {"{{op}}": quantile(0.99, "kvstrata_rpc_seconds", "op", LASTING)},
                "Not those that last: sessions, and routers that follow what changes.",
            ),
            Panel(
                "Under way",
                "short",
                {
                    "calls": level("kvstrata_calls_in_flight"),
                    "sessions": level("kvstrata_sessions"),
                    "gRPC connections": level("kvstrata_connections"),
                    "bulk connections": level("kvstrata_bulk_connections"),
                    "RESP connections": level("kvstrata_resp_connections"),
                },
            ),
        ],
    ),
    Row(
        "Is it full?",
        [
            Panel(
                "Memory of blocks",
                "bytes",
                {
                    "capacity": level("kvstrata_dram_capacity_bytes"),
                    "used": level("kvstrata_dram_used_bytes"),
                    "under lease": level("kvstrata_leased_bytes"),
                    "puts in flight": level("kvstrata_staging_bytes"),
                },
            ),
            Panel(
                "Nvme",
                "bytes",
                {
                    "capacity": level("kvstrata_nvme_capacity_bytes"),
                    "used": level("kvstrata_nvme_used_bytes"),
                },
            ),
            Panel(
                "Readable blocks",
                "short",
                {
                    "dram": level("kvstrata_dram_blocks"),
                    "nvme": level("kvstrata_nvme_blocks"),
                    "object": level("kvstrata_object_blocks"),
                },
            ),
            Panel(
                "Blocks that leave memory",
                "ops",
                {
                    "{{reason}}": rate("kvstrata_evicted_blocks_total", "reason"),
                    "only copies": total("kvstrata_evicted_only_copy_blocks_total"),
                },
                "Only copies: no other tier had them.",
            ),
            Panel(
                "Leases that end",
                "ops",
                {"{{reason}}": rate("kvstrata_leases_ended_total", "reason")},
                "Many expired ones: a client forgets to release.",
            ),
            Panel("Waiting for nvme", "short", {"blocks": level("kvstrata_demote_queue_blocks")}),
        ],
    ),
    Row(
        "Is it well?",
        [
            Panel(
                "Damage",
                "short",
                {
                    "corrupt, {{tier}}": "sum by (tier) "
                    "(increase(kvstrata_corrupt_blocks_total{@}[$__range]))",
                    "on disk, {{what}}": "sum by (what) "
                    "(increase(kvstrata_nvme_damaged_total{@}[$__range]))",
                    "panics": "sum(increase(kvstrata_request_panics_total{@}[$__range]))",
                },
                "In the whole time shown. Should be 0; none of it was delivered.",
                kind="stat",
            ),
            Panel(
                "State of nvme",
                "short",
                {"{{state}}": "sum by (state) (kvstrata_nvme_state{@})"},
                "Nodes in each state. Not ready: it serves and takes no writes.",
            ),
            Panel(
                "Clients refused",
                "ops",
                {
                    "{{door}}: {{reason}}": rate(
                        "kvstrata_unauthenticated_requests_total", "door, reason"
                    ),
                    "{{door}}: TLS": rate("kvstrata_tls_failures_total", "door"),
                },
            ),
        ],
    ),
]

TIERS = [
    Row(
        "What loading costs",
        [
            Panel(
                "Bandwidth of loads",
                "Bps",
                {"{{tier}}": "avg by (tier) (kvstrata_tier_load_bytes_per_second{@})"},
                "What routers are told; assumed until something was loaded.",
            ),
            Panel(
                "Queued for loading",
                "bytes",
                {"{{tier}}": "sum by (tier) (kvstrata_tier_queued_bytes{@})"},
                "Gets, prefetches, and what routers have reserved.",
            ),
            Panel(
                "Estimate over truth, p50",
                "short",
                {"{{tier}}": quantile(0.5, "kvstrata_tier_estimate_ratio", "tier")},
                "Should be near 1.",
            ),
            Panel(
                "Tiers that are not well",
                "short",
                {
                    "{{tier}} {{state}}": "sum by (tier, state) "
                    '(kvstrata_tier_state{state=~"degraded|down",@})'
                },
                "Nodes.",
            ),
        ],
    ),
    Row(
        "Nvme",
        [
            Panel(
                "Writes",
                "Bps",
                {
                    "of puts": total("kvstrata_nvme_appended_bytes_total"),
                    "by reclaiming": total("kvstrata_nvme_moved_bytes_total"),
                },
                "Write amplification: 1 + reclaiming / puts.",
                stacked=True,
            ),
            Panel("Reads", "Bps", {"gets": total("kvstrata_nvme_read_bytes_total")}),
            Panel(
                "Copied from memory",
                "ops",
                {"{{urgency}}": rate("kvstrata_demoted_blocks_total", "urgency")},
            ),
            Panel(
                "Not copied",
                "ops",
                {"{{reason}}": rate("kvstrata_undemoted_blocks_total", "reason")},
            ),
            Panel(
                "Failures of the disk",
                "ops",
                {
                    "{{op}}": rate("kvstrata_nvme_errors_total", "op"),
                    "read too slow": total("kvstrata_nvme_read_timeouts_total"),
                    "read refused": total("kvstrata_nvme_reads_refused_total"),
                },
            ),
            Panel(
                "Recovery at the last start",
                "s",
                {"{{pod}}": "max by (pod) (kvstrata_nvme_recovery_seconds{@})"},
                kind="stat",
            ),
        ],
    ),
    Row(
        "Object store",
        [
            Panel(
                "Requests by outcome",
                "reqps",
                {"{{outcome}}": rate("kvstrata_object_requests_total", "outcome")},
                stacked=True,
            ),
            Panel(
                "Time of a request, p99",
                "s",
                {"{{op}}": quantile(0.99, "kvstrata_object_request_seconds", "op")},
            ),
            Panel(
                "Traffic",
                "Bps",
                {
                    "sent": total("kvstrata_object_written_bytes_total"),
                    "received": total("kvstrata_object_read_bytes_total"),
                },
            ),
            Panel("Packs", "bytes", {"used": level("kvstrata_object_used_bytes")}),
            Panel(
                "Cost of requests, a day",
                "currencyUSD",
                {
                    "at object.prices": "86400 * "
                    + total("kvstrata_object_request_cost_dollars_total")
                },
                "Neither storage nor traffic.",
            ),
            Panel(
                "Not sent, and sent again",
                "reqps",
                {
                    "not sent: {{reason}}": rate("kvstrata_object_unsent_requests_total", "reason"),
                    "retries": total("kvstrata_object_retried_requests_total"),
                },
            ),
        ],
    ),
    Row(
        "Events of engines",
        [
            Panel(
                "Batches",
                "ops",
                {"{{outcome}}": rate("kvstrata_event_batches_total", "outcome")},
                "lost, broken: docs/events.md.",
            ),
            Panel(
                "Blocks",
                "ops",
                {
                    "told of": total("kvstrata_event_told_blocks_total"),
                    "described": total("kvstrata_event_described_blocks_total"),
                },
            ),
            Panel("Engines", "short", {"listened to": level("kvstrata_event_sources")}),
        ],
    ),
    Row(
        "What routers know",
        [
            Panel(
                "Index of other hash schemes",
                "bytes",
                {"{{scheme}}": "sum by (scheme) (kvstrata_scheme_index_bytes{@})"},
            ),
            Panel(
                "Blocks without a name in a scheme",
                "ops",
                {
                    "{{scheme}}: {{reason}}": rate(
                        "kvstrata_scheme_unindexed_blocks_total", "scheme, reason"
                    )
                },
                "full: more than the index may take.",
            ),
            Panel(
                "Descriptions on nvme",
                "ops",
                {
                    "kept": total("kvstrata_nvme_described_blocks_total"),
                    "not kept": total("kvstrata_nvme_undescribed_blocks_total"),
                },
                "Routers do not hear of blocks whose description a restart does not bring back.",
            ),
            Panel(
                "Blocks in events",
                "ops",
                {
                    "{{target}}: {{type}} {{tier}}": rate(
                        "kvstrata_router_event_blocks_total", "target, type, tier"
                    )
                },
            ),
            Panel(
                "Announced now",
                "short",
                {
                    "{{target}}": "sum by (target) (kvstrata_shadow_entries{@})",
                    "{{target}}, withheld": "sum by (target) (kvstrata_router_withheld_blocks{@})",
                    "{{target}}, listeners": "sum by (target) (kvstrata_router_listeners{@})",
                },
            ),
            Panel(
                "Announced again, and cut off",
                "ops",
                {
                    "{{target}}: {{reason}}": rate(
                        "kvstrata_router_resync_total", "target, reason"
                    ),
                    "{{target}}: cut off": rate("kvstrata_router_cut_listeners_total", "target"),
                    "asked again": total("kvstrata_seq_gap_requests_total"),
                },
            ),
        ],
    ),
]

DASHBOARDS = {
    "kvstrata": ("kvstrata", OVERVIEW),
    "kvstrata-tiers": ("kvstrata: tiers", TIERS),
}
