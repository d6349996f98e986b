"""What SGLang does around a HiCache backend, without torch, a GPU or SGLang.

Hashes, pools, the order of calls and the reduction over ranks are those of SGLang 0.5.23:
`integration/sglang/check.py` compares them with SGLang's own.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from conftest import Server

import kvstrata
from kvstrata.sglang import KvstrataStorage

PAGE = 16
"""Tokens of a page in most tests."""
BATCH = 128
"""Pages of one call."""
PROMPT = list(range(1000, 1000 + 10 * PAGE))
DEADLINE = 20.0
"""Seconds after which a test gives up."""
Arguments = dict[str, Any]
"""Those of the engine."""


def page_hashes(
    tokens: Sequence[int],
    page: int = PAGE,
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    pairs: bool = False,
) -> list[str]:
    """The keys of the full pages of a prompt; a last page that is not full has none.

    With `pairs`, as some speculation has it, a unit is a token and the next one.
    """
    singles: list[tuple[int, ...]] = [(each,) for each in tokens]
    units = list(pairwise(tokens)) if pairs else singles
    before = _seed(extra_key, cache_salt)
    hashes = []
    for start in range(0, len(units) - page + 1, page):
        digest = hashlib.sha256(before)
        for unit in units[start : start + page]:
            digest.update(struct.pack(f"<{len(unit)}I", *unit))
        before = digest.digest()
        hashes.append(digest.hexdigest())
    return hashes


def _seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for each in (extra_key, cache_salt):
        if each is None:
            digest.update(b"\0")
        else:
            digest.update(b"\1" + len(each).to_bytes(8, "little") + each.encode())
    return digest.digest()


class Tensor(np.ndarray[Any, Any]):
    """An array with the few methods of a tensor that are asked for."""

    def numel(self) -> int:
        """Elements."""
        return self.size

    def element_size(self) -> int:
        """Bytes of one."""
        return self.itemsize


@dataclass
class Pool:
    """A host pool for keys and values, in the layouts of SGLang's own; 2 bytes an element."""

    layout: str = "page_first"
    page_size: int = PAGE
    pages: int = 64
    layer_num: int = 3
    head_num: int = 2
    head_dim: int = 8
    dtype: str = "torch.bfloat16"
    kv: int = 2
    """K and V; 1 with MLA."""
    kv_buffer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Allocates it."""
        layers, heads, dim, page = self.layer_num, self.head_num, self.head_dim, self.page_size
        shapes = {
            "layer_first": (layers, self.pages * page, heads, dim),
            "page_first": (self.pages * page, layers, heads, dim),
            "page_first_direct": (self.pages, layers, page, heads, dim),
            "page_head": (self.pages, heads, page, layers, dim),
        }
        self.kv_buffer = np.zeros((self.kv, *shapes[self.layout]), np.uint16).view(Tensor)

    @property
    def page_bytes(self) -> int:
        """Of K and V together."""
        return self.kv_buffer.nbytes // self.pages

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Pointer and length of each piece of the pages that begin at these tokens."""
        assert len(indices) % self.page_size == 0
        token = self.head_num * self.head_dim * 2
        half = self.kv_buffer.nbytes // self.kv
        pieces = []
        for first in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                layer = self.pages * self.page_size * token
                starts = [first * token + layer * each for each in range(self.layer_num)]
            else:
                starts = [first * token * self.layer_num]
            pieces += [start + half * each for start in starts for each in range(self.kv)]
        size = self.page_size * token * (1 if self.layout == "layer_first" else self.layer_num)
        base = self.kv_buffer.ctypes.data
        return [base + piece for piece in pieces], [size] * len(pieces)

    def page(self, number: int) -> np.ndarray[Any, Any]:
        """A page as it lies there."""
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, number * self.page_size : (number + 1) * self.page_size]
        if self.layout == "page_first":
            return self.kv_buffer[:, number * self.page_size : (number + 1) * self.page_size]
        return self.kv_buffer[:, number]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        """A copy of a page."""
        assert flat
        return self.page(index // self.page_size).flatten().view(Tensor)

    def get_dummy_flat_data_page(self) -> Tensor:
        """Memory for a page."""
        return np.zeros(self.page_bytes // 2, np.uint16).view(Tensor)

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        """Spreads a page."""
        page = self.page(index // self.page_size)
        page[...] = data_page.reshape(page.shape)

    def fill(self, number: int, key: str, rank: int = 0) -> None:
        """Writes what only this page of this rank has."""
        seed = f"{key} {rank}".encode()
        content = np.frombuffer(hashlib.shake_128(seed).digest(self.page_bytes), np.uint16)
        page = self.page(number)
        page[...] = content.reshape(page.shape)

    def holds(self, number: int, key: str, rank: int = 0) -> bool:
        """Whether a page has what `fill` writes."""
        other = replace(self, pages=1)
        other.fill(0, key, rank)
        return bool(np.array_equal(self.page(number), other.page(0)))

    def indices(self, numbers: Sequence[int]) -> np.ndarray[Any, Any]:
        """Token positions of pages, as SGLang gives them."""
        firsts = np.asarray(numbers, np.int64) * self.page_size
        return (firsts[:, None] + np.arange(self.page_size)).reshape(-1)


@dataclass
class StorageConfig:
    """SGLang's `HiCacheStorageConfig`."""

    extra_config: dict[str, Any] | None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = True
    is_page_first_layout: bool = True
    model_name: str | None = "example/llama"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0


def extra_config(endpoint: str, **ours: Any) -> dict[str, Any]:
    """What a person pastes."""
    theirs = {
        "backend_name": "kvstrata",
        "module_path": "kvstrata.sglang",
        "class_name": "KvstrataStorage",
        "interface_v1": 1,
        "allocator": "shm",
        "prefetch_threshold": 64,
    }
    # A busy machine is no fault of the server's.
    return theirs | {"endpoint": endpoint, "timeout": 10.0, "weights": "v1"} | ours


@dataclass
class Rank:
    """One rank of an engine: its pool and its backend."""

    config: StorageConfig
    pool: Pool
    storage: KvstrataStorage = field(init=False)

    def __post_init__(self) -> None:
        """Makes the backend as SGLang does."""
        self.storage = KvstrataStorage(self.config, {})
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()

    @property
    def seed(self) -> int:
        """Whose bytes these are: those of the first rank, where all ranks have the same."""
        return 0 if self.config.is_mla_model else self.config.tp_rank

    def backup(self, keys: Sequence[str], first: int = 0) -> int:
        """Writes pages into the pool and has them stored; returns how many were, as SGLang counts.

        A replica is not asked to store.
        """
        done = 0
        if self.config.is_mla_model and self.config.tp_rank > 0:
            return len(keys)
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            numbers = range(first + start, first + start + len(batch))
            for number, key in zip(numbers, batch, strict=True):
                self.pool.fill(number, key, self.seed)
            results = self.storage.batch_set_v1(batch, self.pool.indices(numbers))
            assert len(results) == len(batch)
            if not all(results):
                break
            done += len(batch)
        return done


MakeRank = Callable[..., Rank]


def prefetch(ranks: Sequence[Rank], keys: Sequence[str], first: int = 0) -> int:
    """Loads a prompt on all ranks; returns the pages that all have. Their bytes are checked.

    Each rank makes the same calls whatever the others find, and the smallest answer counts.
    """
    hits = len(keys)
    for rank in ranks:
        found = 0
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            answer = rank.storage.batch_exists(batch)
            assert 0 <= answer <= len(batch)
            found += answer
            if answer < len(batch):
                break
        hits = min(hits, found)
    loaded = hits
    for rank in ranks:
        loaded = min(loaded, _load(rank, keys[:hits], first))
    for rank in ranks:
        for number, key in enumerate(keys[:loaded], start=first):
            assert rank.pool.holds(number, key, rank.seed), f"page {number} of rank {rank.seed}"
    return loaded


def _load(rank: Rank, keys: Sequence[str], first: int) -> int:
    done = 0
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        numbers = range(first + start, first + start + len(batch))
        results = rank.storage.batch_get_v1(batch, rank.pool.indices(numbers))
        assert len(results) == len(batch)
        leading = results.index(False) if False in results else len(results)
        assert not any(results[leading:])
        done += leading
        if leading < len(batch):
            break
    return done


def until(holds: Callable[[], object]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.001)


def is_ready(rank: Rank) -> bool:
    """Whether its namespace is open."""
    return rank.storage._space is not None and rank.storage._space.ready


def raw(server: Server, rank: Rank) -> tuple[kvstrata.Client, kvstrata.Namespace]:
    """The namespace of a rank, for what an engine would not do. Close the client."""
    client = kvstrata.Client(server.grpc)
    assert rank.storage._space is not None
    return client, rank.storage._space.identity.open(client)
