"""`KvstrataStorage`: pages of SGLang's host memory, to and from kvstrata.

SGLang calls from threads of its own, on every rank with the same keys, and reduces the answers to
the smallest. So each call answers with exactly as many results as it was asked for and within a
deadline, whatever happens, and takes no step that the other ranks do not take: there are no
collectives here.

All ranks of one tensor-parallel group put their pieces into the same blocks. A block is there when
all of them are, so no rank finds what another one is missing, nor K without its V.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import GetResult, InvalidError
from ..engines import Counters, Link, Promises, Settings, Space
from ..engines.promises import find, promised
from . import engine
from .identity import Place, identity_of
from .pages import Pages, pages_of

__all__ = ["KvstrataStorage"]

log = logging.getLogger("kvstrata")

_CHECKED = ("lora", "unsalted")
_SETTINGS = (*_CHECKED, "dtype", "weights")
_THEIRS = (
    "allocator",
    "backend_name",
    "class_name",
    "hicache_storage_pass_prefix_keys",
    "interface_v1",
    "module_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "tp_lcm_size",
)
"""What else stands in the same JSON, for SGLang itself."""
_STORED = ("stored", "part_stored", "duplicate", "duplicate_differs", "pending")
"""Outcomes of a put after which the page is there, or will be."""
_ASKED_MAX = 65_536
"""Pages of one lookup; SGLang asks for a whole prompt at once, and a page may be one token."""
_HASH_BYTES = 32
_GB = 1e9

_T = TypeVar("_T")


def _contained(nothing: Callable[..., _T]) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Answers `nothing(storage, *arguments)` and counts, where a call raises: the thread of SGLang
    that called would end with it, and the cache with the thread.
    """

    def wrap(call: Callable[..., _T]) -> Callable[..., _T]:
        @functools.wraps(call)
        def contained(storage: KvstrataStorage, *given: Any, **named: Any) -> _T:
            try:
                return call(storage, *given, **named)
            except Exception:
                storage.counters.add("raised")
                log.exception("kvstrata: %s failed", call.__name__)
                return nothing(storage, *given, **named)

        return contained

    return wrap


def _no_pages(_storage: object, keys: Sequence[str], *_: object, **__: object) -> list[bool]:
    return [False] * len(keys)


class KvstrataStorage(engine.HiCacheStorage):  # type: ignore[misc]
    """The backend that SGLang makes, one for each rank."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises `InvalidError`, before the engine serves, for what cannot be stored rightly."""
        given = dict(storage_config.extra_config or {})
        if not given.get("interface_v1"):
            raise InvalidError('interface_v1: not given; add "interface_v1": 1 to the extra config')
        ours = {name: value for name, value in given.items() if name not in _THEIRS}
        settings, rest = Settings.parse(ours, also=_SETTINGS)
        engine.check(storage_config, **{name: rest[name] for name in _CHECKED if name in rest})
        self.counters = Counters()
        self._config = storage_config
        self._said = rest
        self._stats = _Stats()
        self._serving = False
        self._refusal: str | None = None
        self._pages: Pages | None = None
        self._space: Space | None = None
        self._place = Place.of(storage_config)
        self._link = Link(settings, self.counters, name=f"sglang-{self._place}")
        self._promises = Promises(self._link)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learns where pages are, and opens their namespace."""
        self.mem_pool_host = mem_pool_host
        self._pages = pages_of(mem_pool_host)
        identity, self._parts = identity_of(self._config, self._place, self._pages, self._said)
        self._space = self._link.open(identity)
        log.info("kvstrata: pages of %s are stored as %s", self._place, identity)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuses models with more than one pool: their KV is useless without the others."""
        if str(host_pool_name) == "kv":
            return
        why = (
            f"this model keeps {host_pool_name} beside its KV cache, and only KV is stored: leave "
            "out --hicache-storage-backend, or the draft model, for it"
        )
        if not self._serving:
            raise InvalidError(why)
        # Requests run already: everything is a miss from now on.
        self._refusal = why
        log.error("kvstrata: %s", why)

    def on_host_pools_registered(self) -> None:
        """All pools are known: requests may come."""
        self._serving = True

    @_contained(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages can be loaded; they stay for as long as a load may take."""
        self.counters.add("asked_pages", len(keys))
        space = self._usable()
        hashes = _hashes(keys)
        if space is None or not hashes:
            return 0
        lease = self._link.settings.load_timeout
        found = find(self._link, space, hashes[:_ASKED_MAX], lease=lease)
        pages = promised(found)
        self._promises.hold(keys[:pages], found.lease if found is not None else None)
        self.counters.add("found_pages", pages)
        return pages

    @_contained(_no_pages)
    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into the host pool, up to the first that is missing."""
        space, hashes = self._usable(), _hashes(keys)
        try:
            if not keys or space is None or self._pages is None or len(hashes) < len(keys):
                return [False] * len(keys)
            begun = time.perf_counter()
            rooms = self._pages.rooms(host_indices, len(keys))
            lease = self._promises.of(keys[0])
            got = space.load_now(hashes, rooms, parts=self._parts, lease=lease)
        finally:
            self._promises.loaded(keys)
        loaded = _leading(got)
        self._pages.landed(host_indices, rooms, loaded)
        self.counters.add("loaded_pages", loaded)
        self.counters.add("missed_pages", len(keys) - loaded)
        self._stats.loaded.add(loaded, loaded * sum(self._pages.sizes), begun)
        return [True] * loaded + [False] * (len(keys) - loaded)

    @_contained(_no_pages)
    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages from the host pool, which stay as they are until this returns."""
        if self._place.is_replica:
            # Another rank stores the same bytes.
            return [True] * len(keys)
        space, hashes = self._usable(), _hashes(keys)
        if not keys or space is None or self._pages is None or len(hashes) < len(keys):
            return [False] * len(keys)
        begun = time.perf_counter()
        values = self._pages.buffers(host_indices, len(keys))
        parent = _parent(extra_info)
        put = space.store_now(hashes, values, parts=self._parts, parent=parent)
        if put is None:
            return [False] * len(keys)
        stored = [outcome in _STORED for outcome in put.outcomes]
        self.counters.add("stored_pages", sum(stored))
        self.counters.add("refused_pages", len(keys) - sum(stored))
        self._stats.stored.add(sum(stored), put.sent_bytes, begun)
        return stored

    # The interface of models with several pools, which are refused: SGLang asks nevertheless.

    @_contained(lambda *_, **__: engine.nothing_found())
    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Nothing, if other pools than KV are asked for."""
        others = [each for each in pool_transfers or () if str(each.name) != "kv"]
        pages = 0 if others else self.batch_exists(keys, extra_info)
        return engine.found(pages)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Nothing but KV."""
        return self._each(self.batch_get_v1, transfers, extra_info)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Nothing but KV."""
        return self._each(self.batch_set_v1, transfers, extra_info)

    def _each(
        self, call: Callable[..., list[bool]], transfers: Any, extra_info: Any
    ) -> dict[Any, list[bool]]:
        return {
            each.name: call(each.keys or [], each.host_indices, extra_info)
            if str(each.name) == "kv"
            else [False] * len(each.keys or [])
            for each in transfers or ()
        }

    # The oldest interface, which copies every page. SGLang does not use it with `interface_v1`.

    def exists(self, key: str) -> bool:
        """Whether one page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: see `batch_get_v1`."""

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Nothing: see `batch_get_v1`."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing: see `batch_set_v1`."""
        return False

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Nothing: see `batch_set_v1`."""
        return False

    def clear(self) -> bool:
        """Removes nothing: blocks are shared with other engines."""
        log.warning("kvstrata: clear: not done, blocks are shared with other engines")
        return False

    @_contained(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """What has moved since the last time, for SGLang's own metrics."""
        return engine.metrics(*self._stats.take())

    @_contained(lambda *_, **__: None)
    def close(self) -> None:
        """Ends the connection. May be called again."""
        self._link.close()
        log.info("kvstrata: %s ends: %s", self._place, self.counters.snapshot())

    def _usable(self) -> Space | None:
        self._serving = True
        return self._space if self._refusal is None else None


def _hashes(keys: Sequence[str]) -> list[bytes]:
    """The keys up to the first that is none of SGLang's hashes."""
    hashes = []
    for key in keys:
        try:
            digest = bytes.fromhex(key)
        except ValueError:
            break
        if len(digest) != _HASH_BYTES:
            break
        hashes.append(digest)
    return hashes


def _leading(got: GetResult | None) -> int:
    return got.prefix_blocks if got is not None else 0


def _parent(extra_info: Any) -> bytes | None:
    """The page before the first of a call, where SGLang says which it is."""
    before = getattr(extra_info, "prefix_keys", None)
    found = _hashes(before[-1:]) if before else []
    return found[0] if found else None


class _Moved:
    """Pages and rates of calls, in SGLang's units."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.rates: list[float] = []

    def add(self, pages: int, moved: int, begun: float) -> None:
        if pages:
            self.pages.append(pages)
            self.rates.append(moved / _GB / max(time.perf_counter() - begun, 1e-6))
            del self.pages[:-1000], self.rates[:-1000]


class _Stats:
    def __init__(self) -> None:
        self.loaded = _Moved()
        self.stored = _Moved()

    def take(self) -> tuple[_Moved, _Moved]:
        loaded, self.loaded = self.loaded, _Moved()
        stored, self.stored = self.stored, _Moved()
        return loaded, stored
