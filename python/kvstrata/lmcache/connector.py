"""`KvstrataConnector`: the client object that LMCache's `native_plugin` L2 adapter drives.

LMCache submits batches, is told by a descriptor that some have ended, and drains them. Threads here
make the calls, some for each kind, so that a slow store delays no lookup. Every batch that was
submitted ends exactly once, with a result for every key: what went wrong is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import GetResult, InvalidError
from ..engines import Counters, Link, Promises, Settings, Space
from ..engines.promises import find, positions
from .keys import Spaces, block_of

__all__ = ["KvstrataConnector"]

log = logging.getLogger("kvstrata")

_THREADS = 4
"""For each kind of batch."""
_WAITING_MAX = 256
"""Batches of one kind under way or waiting; more are misses at once."""
_LABEL_MAX = 256
_STORED = ("stored", "part_stored", "duplicate", "duplicate_differs", "pending")
"""Outcomes of a put after which the value is there, or will be."""

Completion = tuple[int, bool, str, list[bool] | None]
"""Number of the batch, whether it succeeded, why not, and a result for each key."""


class _Share:
    """The keys of a batch that belong to one namespace."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.hashes: list[bytes] = []


class KvstrataConnector:
    """Made by LMCache with `adapter_params`: the settings of all adapters, and `label`.

    `label` stands for what shapes the bytes and is not in LMCache's keys: revision of the weights,
    type of the KV cache, LoRA adapters. Values of two labels are apart.
    """

    def __init__(self, **adapter_params: Any) -> None:
        """Raises `InvalidError` for a setting that there is not; the server may come later."""
        settings, rest = Settings.parse(adapter_params, also=("label",))
        label = rest.get("label", "")
        if not isinstance(label, str) or len(label) > _LABEL_MAX:
            raise InvalidError(f"label: {label!r} given, a text of up to {_LABEL_MAX} allowed")
        self.counters = Counters()
        self._link = Link(settings, self.counters, name="lmcache")
        self._spaces = Spaces(self._link, label)
        self._promises = Promises(self._link)
        self._ended: deque[Completion] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._number = 0
        self._closed = False
        self._pools = {
            kind: ThreadPoolExecutor(_THREADS, thread_name_prefix=f"kvstrata-{kind}")
            for kind in ("exists", "get", "set", "delete")
        }
        self._waiting = dict.fromkeys(self._pools, 0)

    def event_fd(self) -> int:
        """Readable while `drain_completions` has something to say."""
        return self._event

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks which values can be loaded; what can stays so for as long as a load may take."""
        return self._submit("exists", keys, lambda: self._exists(keys))

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Loads values, each into a buffer of exactly its length."""
        return self._submit("get", keys, lambda: self._get(keys, buffers))

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Stores values. Their memory must stay as it is until the batch has ended."""
        return self._submit("set", keys, lambda: self._set(keys, buffers))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes values from every tier."""
        return self._submit("delete", keys, lambda: self._delete(keys))

    def drain_completions(self) -> list[Completion]:
        """The batches that have ended since the last time."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._event >= 0:
                os.eventfd_read(self._event)
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        """Ends the connection, and what is under way with it. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._link.close()
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        log.info("kvstrata: the connector ends: %s", self.counters.snapshot())
        with self._lock:
            os.close(self._event)
            self._event = -1

    def _submit(
        self, kind: str, keys: Sequence[str], run: Callable[[], tuple[bool, str, list[bool]]]
    ) -> int:
        with self._lock:
            self._number += 1
            number = self._number
            is_taken = not self._closed and self._waiting[kind] < _WAITING_MAX
            if is_taken:
                self._waiting[kind] += 1
        if is_taken:
            self._pools[kind].submit(self._run, kind, number, len(keys), run)
        else:
            self.counters.add(f"{kind}_shed")
            self._end((number, False, "closed, or too much under way", [False] * len(keys)))
        return number

    def _run(
        self, kind: str, number: int, keys: int, run: Callable[[], tuple[bool, str, list[bool]]]
    ) -> None:
        try:
            completion = (number, *run())
        except Exception as error:
            self.counters.add("raised")
            log.exception("kvstrata: a batch of LMCache failed: %s", kind)
            completion = (number, False, str(error), [False] * keys)
        with self._lock:
            self._waiting[kind] -= 1
        self._end(completion)

    def _end(self, completion: Completion) -> None:
        self._ended.append(completion)
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def _exists(self, keys: Sequence[str]) -> tuple[bool, str, list[bool]]:
        there = [False] * len(keys)
        lease = self._link.settings.load_timeout
        for space, share in self._shares(keys):
            found = find(self._link, space, share.hashes, lease=lease, sparse=True)
            for at, is_there in zip(share.at, positions(found, len(share.at)), strict=True):
                there[at] = is_there
            self._promises.hold(share.hashes, found.lease if found is not None else None)
        self._count("exists", there)
        return True, "", there

    def _get(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> tuple[bool, str, list[bool]]:
        loaded = [False] * len(keys)
        for space, share in self._shares(keys):
            rooms = [buffers[at] for at in share.at]
            lease = self._promises.of(share.hashes[0])
            got = space.load_now(share.hashes, rooms, lease=lease, stop_at_miss=False)
            self._promises.loaded(share.hashes)
            if got is None:
                continue
            for each, at in enumerate(share.at):
                loaded[at] = got.found[each] and got.lengths[each] == rooms[each].nbytes
            self._remove_misfits(space, share, got, rooms)
        self._count("get", loaded)
        return True, "", loaded

    def _remove_misfits(
        self, space: Space, share: _Share, got: GetResult, rooms: Sequence[memoryview]
    ) -> None:
        """Removes values of another length: nobody with this geometry could ever store its own."""
        misfits = [
            share.hashes[each]
            for each, room in enumerate(rooms)
            if got.found[each] and got.lengths[each] != room.nbytes
        ]
        for start, end, reason in got.misses:
            misfits += share.hashes[start:end] if reason == "too_long" else []
        if misfits:
            self.counters.add("misfits", len(misfits))
            log.warning(
                "kvstrata: %d values of another length removed: types or chunk sizes differ under "
                "one model's name; give each a `label`",
                len(misfits),
            )
            space.remove_now(misfits)

    def _set(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> tuple[bool, str, list[bool]]:
        stored = [False] * len(keys)
        for space, share in self._shares(keys):
            put = space.store_now(share.hashes, [buffers[at] for at in share.at])
            for each, at in enumerate(share.at if put is not None else ()):
                stored[at] = put is not None and put.outcomes[each] in _STORED
        self._count("set", stored)
        refused = stored.count(False)
        why = f"{refused} of {len(keys)} values were not stored" if refused else ""
        return not refused, why, stored

    def _delete(self, keys: Sequence[str]) -> tuple[bool, str, list[bool]]:
        removed = [False] * len(keys)
        for space, share in self._shares(keys):
            is_done = space.remove_now(share.hashes) is not None
            for at in share.at:
                removed[at] = is_done
        return all(removed), "" if all(removed) else "the server is away", removed

    def _shares(self, keys: Sequence[str]) -> list[tuple[Space, _Share]]:
        """The keys by their namespaces, as far as those are usable."""
        shares: dict[Space, _Share] = {}
        for at, key in enumerate(keys):
            share = shares.setdefault(self._spaces.of(key), _Share())
            share.at.append(at)
            share.hashes.append(block_of(key))
        timeout = self._link.settings.timeout
        return [(space, share) for space, share in shares.items() if space.wait(timeout)]

    def _count(self, kind: str, results: Sequence[bool]) -> None:
        self.counters.add(f"{kind}_asked", len(results))
        self.counters.add(f"{kind}_done", sum(results))
