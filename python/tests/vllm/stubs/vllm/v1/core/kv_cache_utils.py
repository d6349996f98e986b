"""The root of hash chains."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def resolve_none_hash_seed(hash_fn: Callable[[Any], bytes]) -> str:
    """What the root is made from."""
    return os.environ.get("PYTHONHASHSEED", "vllm-none-hash")
