"""For each alert of the chart series that must set it off, as tests of promtool: it fires once it
has waited, with its texts, and not before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prometheus import JOB, NAMESPACE

POD = "kvstrata-1"
HEALTHY_MINUTES = 40


@dataclass
class Sign:
    """Series by their name and labels, with values a minute apart, and what the alert names."""

    series: dict[str, str]
    labels: str = "pod"
    minutes: int = 0
    """When it is first true, if not at once."""


def rises(by: int) -> str:
    """A counter that grows by so many in a minute."""
    return f"0+{by}x2000"


ONCE = f"0x{HEALTHY_MINUTES} 1x300"
"""A counter of something that happens once."""
ALWAYS = "1x2000"
DAY = 24 * 60
SIGNS = {
    "KvstrataNodeDown": Sign({"up": "0x2000"}, "pod, job, namespace"),
    "KvstrataCorruptBlocks": Sign(
        {'kvstrata_corrupt_blocks_total{tier="nvme"}': ONCE}, "pod, tier", HEALTHY_MINUTES
    ),
    "KvstrataNvmeDamaged": Sign(
        {'kvstrata_nvme_damaged_total{what="payload"}': ONCE}, "pod, what", HEALTHY_MINUTES
    ),
    "KvstrataRequestPanics": Sign({"kvstrata_request_panics_total": ONCE}, minutes=HEALTHY_MINUTES),
    "KvstrataNvmeTakesNoWrites": Sign(
        {'kvstrata_nvme_state{state="full"}': ALWAYS}, "pod, job, namespace, state"
    ),
    "KvstrataTierDown": Sign(
        {'kvstrata_tier_state{tier="nvme",state="down"}': ALWAYS},
        "pod, job, namespace, tier, state",
    ),
    "KvstrataTierDegraded": Sign(
        {'kvstrata_tier_state{tier="object",state="degraded"}': ALWAYS},
        "pod, job, namespace, tier, state",
    ),
    "KvstrataHitRatioDropped": Sign(
        {
            'kvstrata_lookup_blocks_total{answer="miss"}': f"0+100x{DAY} {100 * DAY}+900x300",
            "kvstrata_lookup_asked_blocks_total": rises(1000),
        },
        "",
        DAY + 16,
    ),
    "KvstrataHashRootMismatch": Sign(
        {"kvstrata_hash_root_mismatches": ALWAYS}, "pod, job, namespace"
    ),
    "KvstrataLeasesExpire": Sign(
        {
            'kvstrata_leases_ended_total{reason="expired"}': rises(3),
            "kvstrata_leases_granted_total": rises(10),
        },
        minutes=1,
    ),
    "KvstrataMemoryLeased": Sign(
        {"kvstrata_leased_bytes": "8x2000", "kvstrata_dram_capacity_bytes": "10x2000"},
        "pod, job, namespace",
    ),
    "KvstrataOnlyCopiesEvicted": Sign(
        {
            "kvstrata_evicted_only_copy_blocks_total": rises(6),
            "kvstrata_nvme_capacity_bytes": ALWAYS,
        },
        minutes=1,
    ),
    "KvstrataNvmeErrors": Sign({'kvstrata_nvme_errors_total{op="write"}': rises(1)}, "pod, op", 1),
    "KvstrataReadsTooSlow": Sign(
        {
            'kvstrata_get_missed_blocks_total{reason="timeout"}': rises(6),
            'kvstrata_get_blocks_total{tier="nvme"}': rises(100),
        },
        minutes=1,
    ),
    "KvstrataObjectStoreAway": Sign(
        {"kvstrata_object_breaker_open": ALWAYS}, "pod, job, namespace"
    ),
    "KvstrataObjectErrors": Sign(
        {
            'kvstrata_object_requests_total{op="get",outcome="throttled"}': rises(6),
            'kvstrata_object_requests_total{op="get",outcome="ok"}': rises(90),
        },
        minutes=1,
    ),
    "KvstrataSegmentsNotCopied": Sign(
        {"kvstrata_nvme_uncopied_segments_total": ONCE}, minutes=HEALTHY_MINUTES
    ),
    "KvstrataRouterTooSlow": Sign(
        {'kvstrata_router_cut_listeners_total{target="dynamo"}': rises(1)}, "pod, target", 1
    ),
    "KvstrataReloadFailed": Sign(
        {'kvstrata_reloads_total{what="tls",outcome="failed"}': ONCE},
        "pod, what",
        HEALTHY_MINUTES,
    ),
    "KvstrataClientsRefused": Sign(
        {
            'kvstrata_unauthenticated_requests_total{door="grpc",reason="wrong"}': rises(6000),
            'kvstrata_tls_failures_total{door="grpc"}': "0x2000",
        },
        minutes=1,
    ),
}


def labelled(series: str) -> tuple[str, dict[str, str]]:
    """A series of this release, and its labels."""
    name, _, given = series.partition("{")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', given))
    labels |= {"job": JOB, "namespace": NAMESPACE, "pod": POD}
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}", labels


def minutes_of(duration: str) -> int:
    """`15m` as a number."""
    assert re.fullmatch(r"\d+m", duration), duration
    return int(duration[:-1])


def signs_file(rules: dict[str, Any]) -> dict[str, Any]:
    """A file of tests: each alert of the rules has some."""
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert {alert["alert"] for alert in alerts} == set(SIGNS), (
        "each alert needs a sign, and no other"
    )
    return {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [sign_test(alert, SIGNS[alert["alert"]]) for alert in alerts],
    }


def sign_test(alert: dict[str, Any], sign: Sign) -> dict[str, Any]:
    """That it does not fire before it has waited, and does then."""
    named = [labelled(series) for series in sign.series]
    labels = {label: value for _, all_of in named for label, value in all_of.items()}
    kept = {name.strip() for name in sign.labels.split(",") if name.strip()}
    labels = {label: value for label, value in labels.items() if label in kept}
    waits = minutes_of(alert.get("for", "0m"))
    expected = {
        "exp_labels": labels | alert["labels"],
        "exp_annotations": {
            name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
            for name, text in alert["annotations"].items()
        },
    }
    before = sign.minutes + waits - 1
    cases = [(sign.minutes + waits + 3, [expected])]
    if before >= 0:
        cases.insert(0, (before, []))
    return {
        "name": alert["alert"],
        "interval": "1m",
        "input_series": [
            {"series": series, "values": values}
            for (series, _), values in zip(named, sign.series.values(), strict=True)
        ],
        "alert_rule_test": [
            {"alertname": alert["alert"], "eval_time": f"{minute}m", "exp_alerts": alerts}
            for minute, alerts in cases
        ],
    }
