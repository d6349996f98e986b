"""What a lookup promises an engine, and for how long.

Only what is in dram or nvme counts: object storage may take seconds, or fail. What is on it is
asked to be moved to dram first, and what another engine is putting just now is waited for; what
has come by the deadline of a lookup counts, the rest is a miss.

What other nodes have in dram or nvme counts as well. It is not leased: what is gone when it is
loaded makes the load a shorter one, as a lost server does.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from .. import Lease, Lookup, Run
from .link import Link, Space

__all__ = ["Promises", "find", "is_near", "positions", "promised"]

_POLL = 0.01
"""Seconds between lookups while blocks are on their way."""
_HELD_MAX = 4096
"""Leases kept at a time; the oldest is given up first."""


def promised(found: Lookup | None) -> int:
    """How many leading blocks can be loaded from dram or nvme now."""
    if found is None:
        return 0
    return next((run.start for run in found.runs if not is_near(run)), found.prefix_blocks)


def positions(found: Lookup | None, asked: int) -> list[bool]:
    """Which of the blocks asked for can be loaded from dram or nvme now."""
    near = [False] * asked
    for run in (*found.runs, *found.sparse) if found is not None else ():
        if is_near(run):
            near[run.start : run.end] = [True] * (run.end - run.start)
    return near


def find(
    link: Link, space: Space, hashes: Sequence[bytes], *, lease: float, sparse: bool = False
) -> Lookup | None:
    """Looks blocks up, leased for so many seconds, and waits for those that are on their way.

    All of it ends within `Settings.timeout`, or little more. For threads that may wait.
    """
    end = time.monotonic() + link.settings.timeout
    found = space.lookup_now(hashes, lease=lease, sparse=sparse)
    far = _far(found)
    if not far:
        return found
    link.counters.add("waited_blocks", sum(run.end - run.start for run in far))
    space.prefetch_now([each for run in far for each in hashes[run.start : run.end]])
    while far and time.monotonic() + _POLL < end:
        time.sleep(_POLL)
        far = _far(space.lookup_now(hashes, sparse=sparse))
    # Once more: the first lease does not cover what has come since.
    if found is not None:
        link.release(found.lease)
    return space.lookup_now(hashes, lease=lease, sparse=sparse)


def is_near(run: Run) -> bool:
    """Whether a run can be loaded from dram or nvme now."""
    return run.tier != "object" and not run.pending


def _far(found: Lookup | None) -> list[Run]:
    """What may come near: only the server that is asked brings its blocks nearer."""
    runs = (*found.runs, *found.sparse) if found else ()
    return [run for run in runs if run.local and not is_near(run)]


class Promises:
    """The leases of lookups whose loads have not come yet. Any thread may use it.

    A lease is given back when the last of its keys was loaded. Where an engine loads fewer than it
    looked up it ends by its deadline, and is forgotten here.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._leases: OrderedDict[int, tuple[Lease, Sequence[object]]] = OrderedDict()
        self._of: dict[object, int] = {}
        self._next = 0

    def hold(self, keys: Sequence[object], lease: Lease | None) -> None:
        """Keeps the lease of a lookup of these keys."""
        if lease is None or lease.blocks == 0:
            return
        covered = keys[: lease.blocks]
        with self._lock:
            self._forget()
            self._next += 1
            self._leases[self._next] = (lease, covered)
            self._of |= dict.fromkeys(covered, self._next)

    def of(self, key: object) -> Lease | None:
        """The lease that covers a key now."""
        with self._lock:
            held = self._leases.get(self._of.get(key, 0))
            return held[0] if held is not None and held[0].expires_in > 0 else None

    def loaded(self, keys: Sequence[object]) -> None:
        """These keys were loaded, or will not be: a lease whose last key is among them ends."""
        with self._lock:
            numbers = {self._of.pop(key, 0) for key in keys}
            ended = [
                number
                for number in numbers
                if number in self._leases and self._leases[number][1][-1] not in self._of
            ]
            leases = [self._drop(number) for number in ended]
        for lease in leases:
            self._link.release(lease)

    def __len__(self) -> int:
        """Leases that are kept."""
        with self._lock:
            return len(self._leases)

    def _drop(self, number: int) -> Lease:
        lease, keys = self._leases.pop(number)
        for key in keys:
            if self._of.get(key) == number:
                del self._of[key]
        return lease

    def _forget(self) -> None:
        """Drops what has ended by itself, and the oldest over the limit. Under the lock."""
        while self._leases:
            number, (lease, _) = next(iter(self._leases.items()))
            if lease.expires_in > 0 and len(self._leases) < _HELD_MAX:
                return
            # One over the limit ends by its deadline.
            self._drop(number)
