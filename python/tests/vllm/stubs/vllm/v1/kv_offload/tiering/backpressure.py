"""Detectors of slow tiers, which are vLLM's affair."""


class BackpressureDetector:
    """One of them."""
