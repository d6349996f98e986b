"""What LMCache's keys say, and which namespace holds their values.

```text
MODEL@RANK@GROUP@CHUNK[@SALT]     RANK: 8 hexadecimal digits, GROUP and CHUNK: hexadecimal
```
All but the chunk names the namespace, so that models, ranks and salts are counted apart. The block
is named by a hash of the whole key, so that no two keys are ever one block, whatever they look
like. Namespaces are opaque: a lookup comes before the first value, and no key says how long it is.
"""

from __future__ import annotations

import hashlib
import re
import threading

from .. import foreign_hash
from ..engines import Link, Opaque, Space

__all__ = ["Spaces", "block_of", "space_of"]

_KEY = re.compile(
    r"(?P<place>[^@\0]+@[0-9a-f]{8}@[0-9a-f]+)@(?P<chunk>[0-9a-f]+)(?:@(?P<salt>[^@/\\\0]+))?"
)
_NAME_BYTES_MAX = 1024
_SPACES_MAX = 1024
"""Namespaces opened: each costs the server a KiB for good. Further ones share one."""


def block_of(key: str) -> bytes:
    """The block of a key."""
    return foreign_hash(key.encode())


def space_of(key: str) -> str | None:
    """What a key says but its chunk; None for a key of another form.

    The salt is shown as a digest: who has read it could ask for what is stored under it.
    """
    read = _KEY.fullmatch(key)
    if read is None:
        return None
    salt = read["salt"]
    shown = f"@{hashlib.sha256(salt.encode()).hexdigest()[:32]}" if salt else ""
    return read["place"] + shown


class Spaces:
    """The namespaces of a connector, each opened by the first key that belongs to it."""

    def __init__(self, link: Link, label: str) -> None:
        self._link = link
        self._prefix = f"lmcache/{label}/"
        self._lock = threading.Lock()
        self._open: dict[str, Space] = {}

    def of(self, key: str) -> Space:
        """Where the value of a key is, or would be."""
        name = self._prefix + (space_of(key) or "")
        if len(name.encode()) > _NAME_BYTES_MAX:
            name = self._prefix
        with self._lock:
            if name not in self._open and len(self._open) >= _SPACES_MAX:
                self._link.counters.add("shared_namespace")
                name = self._prefix
            if name not in self._open:
                self._open[name] = self._link.open(Opaque(name))
            return self._open[name]
