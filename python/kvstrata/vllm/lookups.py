"""Which blocks the server has: asked for in one batch a step, answered block by block.

vLLM asks for one block after another, and again in every step until all are known. Blocks of a
request are gathered while a step lasts, looked up together with a lease when it ends, and unknown
until the answer is there. A hit is a block in dram or on nvme. One in object is prefetched, and is
a hit once it has come; one that somebody is just putting is waited for; both for a bounded time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .. import Lease, Lookup, Run
from ..engines import Done, Link, Space

__all__ = ["HIT", "MISS", "UNKNOWN", "Lookups", "split_key"]

UNKNOWN, HIT, MISS = 0, 1, 2
FAILED_FOR = 30.0
"""Seconds that a block is a miss after it could not be loaded: else it would be tried for ever."""
_FAILED_MAX = 65_536
"""Failed blocks that are remembered; with more, the oldest are tried again."""
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 0.1
"""Seconds until blocks that are on their way are looked up again; they double."""
HASH_BYTES, _GROUP_BYTES = 32, 4


def split_key(key: bytes) -> tuple[int, bytes]:
    """The cache group and the block hash of vLLM's key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big"), key[:-_GROUP_BYTES]


@dataclass(eq=False, slots=True)
class Ask:
    """Blocks of one group that a request asked for in one step."""

    space: Space
    packed: bytearray = field(default_factory=bytearray)
    """The hashes, one after another."""
    positions: list[int] = field(default_factory=list)
    index: dict[bytes, int] = field(default_factory=dict)
    verdicts: bytearray = field(default_factory=bytearray)
    is_sparse: bool = False
    is_forgotten: bool = False
    lease: Lease | None = None
    prefetched: bytearray = field(default_factory=bytearray)
    answered: float | None = None
    wait: float = _FIRST_WAIT
    again: float = 0.0

    def add(self, key: bytes, hash_: bytes, position: int) -> None:
        """One more block."""
        self.index[key] = len(self.positions)
        self.packed += hash_
        self.positions.append(position)

    def seal(self) -> None:
        """All blocks are there. In chain order; asked for from the end, a window is wanted."""
        ascending = sorted(self.positions)
        if ascending != self.positions:
            self.is_sparse = True
            keys = list(self.index)
            order = sorted(range(len(keys)), key=self.positions.__getitem__)
            self.packed = bytearray().join(self.hashes(at, at + 1) for at in order)
            self.positions = ascending
            self.index = {keys[at]: number for number, at in enumerate(order)}
        self.verdicts = bytearray(len(ascending))
        self.prefetched = bytearray(len(ascending))

    def hashes(self, start: int, end: int) -> bytearray:
        """Some of the hashes, packed."""
        return self.packed[start * HASH_BYTES : end * HASH_BYTES]

    def settle(self, start: int, end: int, verdict: int) -> int:
        """Decides what is not decided yet; returns how many blocks that were."""
        before = self.verdicts[start:end]
        count = before.count(UNKNOWN)
        self.verdicts[start:end] = before.replace(bytes([UNKNOWN]), bytes([verdict]))
        return count

    @property
    def is_settled(self) -> bool:
        """Whether nothing is unknown."""
        return UNKNOWN not in self.verdicts


@dataclass(eq=False, slots=True)
class _Request:
    asks: list[Ask] = field(default_factory=list)
    gathering: dict[int, Ask] = field(default_factory=dict)


class Lookups:
    """See the module. All of it is called on the scheduler's thread, and none of it waits."""

    def __init__(
        self,
        link: Link,
        spaces: Mapping[int, Space],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._spaces = spaces
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._gathered: list[tuple[_Request, Ask]] = []
        self._waiting: set[Ask] = set()
        self._under_way = 0
        self._failed: dict[bytes, float] = {}

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come; with it comes a lease that must not be forgotten."""
        return self._under_way > 0

    def verdict(self, request_id: str, key: bytes, position: int) -> int:
        """Whether the server has the block, if that is known by now."""
        if self._failed and self._has_failed(key):
            return MISS
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        for ask in request.asks:
            at = ask.index.get(key)
            if at is not None:
                return ask.verdicts[at]
        group, hash_ = split_key(key)
        space = self._spaces.get(group)
        if space is None or not space.ready:
            self._link.counters.add("not_ready_blocks")
            return MISS
        gathering = request.gathering.get(group)
        if gathering is None:
            gathering = request.gathering[group] = Ask(space)
            self._gathered.append((request, gathering))
        if key not in gathering.index:
            gathering.add(key, hash_, position)
        return UNKNOWN

    def flush(self) -> None:
        """The step ends: looks up what it gathered, and what was on its way before."""
        for request, ask in self._gathered:
            if not ask.is_forgotten:
                ask.seal()
                request.asks.append(ask)
                request.gathering.clear()
                self._begin(ask)
        self._gathered.clear()
        if self._waiting:
            now = self._clock()
            for ask in [ask for ask in self._waiting if ask.again <= now]:
                self._waiting.discard(ask)
                self._begin(ask)

    def ended(self, done: Done) -> None:
        """A lookup has ended: takes its answer."""
        ask: Ask = done.tag
        found: Lookup | None = done.result
        self._under_way -= 1
        if ask.is_forgotten:
            self._link.release(found.lease if found is not None else None)
            return
        self._link.release(ask.lease)
        ask.lease = None
        if found is None:
            self._miss(ask, 0, len(ask.positions))
            return
        ask.lease = found.lease
        now = self._clock()
        if ask.answered is None:
            ask.answered = now
        on_their_way = self._take(ask, [*found.runs, *found.sparse], now)
        end = 0
        for run in [*on_their_way, None]:
            self._miss(ask, end, run.start if run is not None else len(ask.positions))
            end = run.end if run is not None else end
        if on_their_way:
            ask.again, ask.wait = now + ask.wait, min(ask.wait * 2, _LONGEST_WAIT)
            self._waiting.add(ask)

    def lost(self, request_id: str, keys: Iterable[bytes], *, is_away: bool) -> None:
        """Blocks could not be loaded: to this request they are misses.

        To every request for a while, unless it was only that the server `is_away`.
        """
        until = self._clock() + FAILED_FOR
        request = self._requests.get(request_id)
        for key in keys:
            for ask in request.asks if request is not None else ():
                at = ask.index.get(key)
                if at is not None:
                    ask.verdicts[at] = MISS
            if not is_away:
                self._failed.pop(key, None)
                self._failed[key] = until
        while len(self._failed) > _FAILED_MAX:
            del self._failed[next(iter(self._failed))]

    def loaded(self, request_id: str) -> None:
        """Nothing of a request is being loaded: gives up the leases that it needs no more."""
        request = self._requests.get(request_id)
        for ask in request.asks if request is not None else ():
            if ask.is_settled:
                self._link.release(ask.lease)
                ask.lease = None

    def hash_at(self, request_id: str, group: int, position: int) -> bytes | None:
        """The hash of the request's block that ends with this token, if it was asked for."""
        request = self._requests.get(request_id)
        space = self._spaces.get(group)
        for ask in request.asks if request is not None else ():
            at = bisect_left(ask.positions, position)
            if ask.space is space and at < len(ask.positions) and ask.positions[at] == position:
                return bytes(ask.hashes(at, at + 1))
        return None

    def forget(self, request_id: str) -> None:
        """A request has finished or was aborted: gives up its leases."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for ask in (*request.asks, *request.gathering.values()):
            ask.is_forgotten = True
            self._waiting.discard(ask)
            self._link.release(ask.lease)
            ask.lease = None

    def _begin(self, ask: Ask) -> None:
        settings = self._link.settings
        begun = ask.space.lookup(
            ask.packed,
            lease=settings.load_timeout + settings.timeout,
            sparse=ask.is_sparse,
            tag=ask,
        )
        if begun:
            self._under_way += 1
        else:
            self._miss(ask, 0, len(ask.positions))

    def _take(self, ask: Ask, runs: list[Run], now: float) -> list[Run]:
        """Settles what can be read now; returns the runs that are worth waiting for."""
        settings = self._link.settings
        waited = now - (ask.answered or now)
        waiting: list[Run] = []
        for run in runs:
            if run.pending:
                if waited < settings.timeout:
                    waiting.append(run)
            elif run.tier == "object":
                # Only the server that is asked brings its blocks nearer.
                is_patient = run.local and waited < settings.load_timeout
                if is_patient and self._prefetch(ask, run):
                    waiting.append(run)
            else:
                self._count(f"hit_{run.tier}_blocks", ask.settle(run.start, run.end, HIT))
                self._count("prefetched_blocks", ask.prefetched[run.start : run.end].count(1))
                ask.prefetched[run.start : run.end] = bytes(run.end - run.start)
        return waiting

    def _prefetch(self, ask: Ask, run: Run) -> bool:
        """Has blocks brought from object, once; returns whether that was begun."""
        if ask.prefetched[run.start]:
            return True
        if not ask.space.prefetch(ask.hashes(run.start, run.end), tag=None):
            return False
        ask.prefetched[run.start : run.end] = b"\1" * (run.end - run.start)
        return True

    def _miss(self, ask: Ask, start: int, end: int) -> None:
        self._count("miss_blocks", ask.settle(start, end, MISS))

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            self._link.counters.add(name, blocks)

    def _has_failed(self, key: bytes) -> bool:
        until = self._failed.get(key)
        if until is None:
            return False
        if self._clock() < until:
            self._link.counters.add("failed_before_blocks")
            return True
        del self._failed[key]
        return False
