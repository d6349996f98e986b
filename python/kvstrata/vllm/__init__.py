"""The adapters for vLLM. The setting to paste is in docs/engines/vllm.md.

`KvstrataTier` is a secondary tier of vLLM's `OffloadingConnector`, `KvstrataConnector` does without
that. Importing this imports neither vLLM nor anything that needs it: vLLM asks for a class by its
name, and gets it then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .versions import check

if TYPE_CHECKING:
    from .connector import KvstrataConnector
    from .tier import KvstrataTier

__all__ = ["KvstrataConnector", "KvstrataTier"]


def __getattr__(name: str) -> type:
    if name == "KvstrataConnector":
        check()
        from .connector import KvstrataConnector

        return KvstrataConnector
    if name == "KvstrataTier":
        check()
        from .tier import KvstrataTier

        return KvstrataTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
