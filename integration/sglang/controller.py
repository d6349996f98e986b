"""SGLang's own cache controller with its own host pools, on a CPU, around our backend.

Only what would move bytes between a GPU and the host pool is left out: it is not asked for here.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from queue import Empty, Queue
from threading import Event
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 3, 2, 8, 400
DEADLINE = 30.0
"""Seconds after which a check gives up."""


def mha_pool(layout: str) -> Any:
    """SGLang's host pool for keys and values."""
    layer = [torch.zeros((PAGE, HEADS, DIM), dtype=torch.bfloat16) for _ in range(LAYERS)]
    pointers = torch.tensor([each.data_ptr() for each in layer], dtype=torch.uint64)
    buffers = KVBuffers(
        k=tuple(layer),
        v=tuple(layer),
        k_data_ptrs=pointers,
        v_data_ptrs=pointers,
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.bfloat16,
        device=layer[0].device,
    )
    return MHATokenToKVPoolHost(info, **_sizes(layout))


def mla_pool(layout: str) -> Any:
    """SGLang's host pool for latent attention."""
    width = HEADS * DIM
    layer = [torch.zeros((PAGE, 1, width), dtype=torch.bfloat16) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(layer),
        data_ptrs=torch.tensor([each.data_ptr() for each in layer], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=width - 4,
        qk_rope_head_dim=4,
        kv_cache_dim=width,
        dtype=torch.bfloat16,
        device=layer[0].device,
    )
    return MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **_sizes(layout))


def _sizes(layout: str) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": PAGE,
        "start_layer": 0,
        "end_layer": LAYERS,
        "host_token_capacity": PAGES * PAGE,
    }


def config(extra: dict[str, Any], **said: Any) -> HiCacheStorageConfig:
    """The storage config of one rank."""
    given: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "example/real",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**(given | said))


class Controller(HiCacheController):  # type: ignore[misc]
    """SGLang's controller, attached to our backend as SGLang attaches it, with its threads."""

    def __init__(self, pool: Any, storage: HiCacheStorageConfig, groups: Sequence[Any] = ()):
        """Makes what the threads of storage use; the base's way asks for a GPU."""
        self.host_memory_mode = "cache"
        self.mem_pool_host = self.storage_host_pool = pool
        self.page_size = PAGE
        self.enable_storage = False
        self.storage_stop_event = Event()
        self.prefetch_hits_sync_groups = []
        self.prefetch_completion_sync_groups = []
        self._groups = list(groups)
        self._config = storage
        with get_parallel().override(attn_dcp_size=1):
            self.attach_storage_backend("dynamic")

    def _generate_storage_config(self, *_: Any) -> HiCacheStorageConfig:
        return self._config

    def _create_sync_groups(self) -> list[Any]:
        return self._groups

    def _destroy_sync_groups(self, groups: Any) -> None:
        pass

    def ready(self) -> None:
        """Waits until the backend has reached its server."""
        end = time.monotonic() + DEADLINE
        while not self.storage_backend._space.ready:
            assert time.monotonic() < end
            time.sleep(0.001)

    def keys(self, tokens: Sequence[int], **said: Any) -> list[str]:
        """SGLang's own keys of the full pages of a prompt."""
        key = RadixKey(array("q", tokens), **said).page_aligned(PAGE)
        return get_storage_hash_str(key, None, page_size=PAGE)

    def backup(self, tokens: Sequence[int]) -> int:
        """Has a prompt's pages stored; returns the tokens that were."""
        keys = self.keys(tokens)
        at = self.mem_pool_host.alloc(len(keys) * PAGE)
        for number, key in enumerate(keys):
            self.fill(int(at[number * PAGE]), key)
        self.write_storage(at, list(tokens), keys)
        operation = _get(self.ack_backup_queue)
        self.mem_pool_host.free(at)
        # The next that has these pages must have got them from us.
        self.mem_pool_host.kv_buffer.zero_()
        return int(operation.completed_tokens) if not self.backup_skip else len(keys) * PAGE

    def load(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Loads a prompt; returns the tokens found and loaded on all ranks. Bytes are checked."""
        key = RadixKey(array("q", tokens)).page_aligned(PAGE)
        operation = self.prefetch("request", key, None, None)
        operation = _get(self.prefetch_hit_queue)
        hits = int(operation.storage_hit_count)
        operation.host_indices = self.mem_pool_host.alloc(hits)
        self.prefetch_buffer.put(operation)
        tokens_loaded = 0
        while True:
            ack = _get(self.ack_prefetch_queue)
            if ack.completed_req:
                break
            tokens_loaded = ack.completed_tokens
        for number, name in enumerate(self.keys(tokens)[: tokens_loaded // PAGE]):
            assert self.holds(int(operation.host_indices[number * PAGE]), name), number
        self.mem_pool_host.free(operation.host_indices)
        return hits, tokens_loaded

    def fill(self, index: int, key: str) -> None:
        """Writes what only this page of this rank has."""
        self.mem_pool_host.set_from_flat_data_page(index, self._content(key))

    def holds(self, index: int, key: str) -> bool:
        """Whether a page has what `fill` writes."""
        page = self.mem_pool_host.get_data_page(index, flat=True)
        return bool(torch.equal(page, self._content(key)))

    def _content(self, key: str) -> torch.Tensor:
        rank = 0 if self._config.is_mla_model else self._config.tp_rank
        chance = torch.Generator().manual_seed(int(key[:12], 16) + rank)
        like = self.mem_pool_host.get_dummy_flat_data_page()
        return torch.randint(0, 1000, like.shape, generator=chance).to(like.dtype)


def _get(queue: Queue[Any]) -> Any:
    try:
        return queue.get(timeout=DEADLINE)
    except Empty:
        raise AssertionError("a thread of the controller does not answer") from None
