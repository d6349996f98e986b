"""Hash functions by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any


def get_hash_fn_by_name(name: str) -> Callable[[Any], bytes]:
    """A function that differs from those of other names."""

    def hash_of(value: Any) -> bytes:
        return hashlib.sha256(f"{name}:{value!r}".encode()).digest()

    return hash_of
