"""`KvstrataConnector`: vLLM keeps blocks at kvstrata, without a tier of its own between.

vLLM makes it in its scheduler and in each worker; the halves share nothing but what plan.py has. It
loads while other requests compute, and whatever goes wrong is a miss: the engine computes the
blocks itself.

```text
hooks.py      what vLLM calls            worker.py   moves blocks, through
scheduler.py  asks and plans             copier.py   slots of host memory, to and from
plan.py       what passes between them   regions.py  the bytes of a block in the engine's tensors
identity.py   what may be shared         stats.py    what is counted
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hooks import KvstrataConnector

__all__ = ["KvstrataConnector"]


def __getattr__(name: str) -> type:
    if name == "KvstrataConnector":
        from .hooks import KvstrataConnector

        return KvstrataConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
