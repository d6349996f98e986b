"""The versions of vLLM that the adapters are made for and tested with."""

from __future__ import annotations

__all__ = ["TESTED", "check"]

TESTED = ("0.32",)
"""What an adapter stands on is called experimental by vLLM and changes with most releases: methods
get other names, other arguments, other meanings. So a version is taken when the tests have run with
it, and not before.
"""


def check() -> str:
    """Which of those is installed. Raises `ImportError` if none is."""
    import vllm

    version = str(vllm.__version__)
    release = ".".join(version.split(".")[:2])
    if release not in TESTED:
        raise ImportError(
            f"kvstrata.vllm works with vLLM {', '.join(TESTED)}, and this is {version}: "
            "install one of those, or a kvstrata that names this one in docs/engines/vllm.md"
        )
    return release
