"""All that is asked of SGLang itself, and what differs between its versions.

Without SGLang the adapter can be imported all the same, which is what its unit tests do.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from .. import InvalidError

__all__ = ["HiCacheStorage", "check", "found", "metrics", "nothing_found", "server_argument"]

VERSIONS = "0.5.20 or newer"
"""Since this version keys differ where cache salts, extra keys or LoRA adapters differ."""


def _attribute(module: str, name: str) -> Any:
    """What SGLang has under this name, None where it has nothing."""
    try:
        return getattr(importlib.import_module(f"sglang.srt.{module}"), name, None)
    except ImportError:
        return None


HiCacheStorage: Any = _attribute("mem_cache.hicache_storage", "HiCacheStorage") or object


def server_argument(name: str) -> Any:
    """An argument of the engine, None where it cannot be known."""
    for module, function in (
        ("runtime_context", "get_server_args"),
        ("server_args", "get_global_server_args"),
    ):
        ask = _attribute(module, function)
        try:
            if ask is not None:
                return getattr(ask(), name, None)
        except Exception:  # not set in this process, or not so any more
            continue
    return None


def check(config: Any, *, unsalted: bool = False, lora: str | None = None) -> None:
    """Raises `InvalidError` where keys say too little to tell pages apart."""
    if not isinstance(unsalted, bool):
        raise InvalidError(f"unsalted: {unsalted!r} given, true or false allowed")
    if lora not in (None, "by_name"):
        raise InvalidError(f'lora: {lora!r} given, "by_name" allowed')
    if getattr(config, "dcp_size", 1) > 1:
        raise InvalidError("--dcp-size: pages of decode context parallelism are not stored yet")
    if not config.model_name:
        raise InvalidError("--served-model-name: not given, but it tells models apart")
    has_lora = server_argument("enable_lora") or server_argument("lora_paths")
    if _attribute("mem_cache.utils", "storage_namespace_seed") is not None:
        if has_lora and lora is None:
            raise InvalidError(
                "--enable-lora: keys have the name and path of an adapter, not its weights. If "
                'these mean the same weights wherever they are used, say "lora": "by_name"'
            )
        return
    if has_lora:
        raise InvalidError(f"--enable-lora: SGLang {VERSIONS} required, older keys lack adapters")
    if not unsalted:
        raise InvalidError(
            f"SGLang {VERSIONS} required: keys of this one lack cache salts and extra keys. Where "
            'no request has any, say "unsalted": true'
        )


def found(pages: int) -> Any:
    """What `batch_exists_v2` answers."""
    hits = {"kv": pages} if pages else {}
    answer = _attribute("mem_cache.hicache_storage", "PoolTransferResult")
    if answer is None:
        return SimpleNamespace(kv_hit_pages=pages, extra_pool_hit_pages=hits)
    return answer(pages, hits)


def nothing_found() -> Any:
    """What `batch_exists_v2` answers when it failed."""
    return found(0)


def metrics(loaded: Any, stored: Any) -> Any:
    """SGLang's own record of what has moved, None where it has another."""
    record = _attribute("observability.metrics_collector", "StorageMetrics")
    if record is None:
        return None
    return record(
        prefetch_pgs=loaded.pages,
        backup_pgs=stored.pages,
        prefetch_bandwidth=loaded.rates,
        backup_bandwidth=stored.rates,
    )
