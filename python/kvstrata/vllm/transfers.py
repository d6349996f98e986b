"""Loads and stores between the rows of vLLM's primary tier and the server, without a copy.

A job is cut into pieces, of which a few are under way at a time: so no call on the scheduler's
thread grows with the length of a prompt. The rows of a job are the server's until it is reported,
and it is reported exactly once, also if its request is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import CancelledError, ClosedError, Lease, UnavailableError, UnknownNamespaceError
from ..engines import Done, Link, Space
from .lookups import split_key

__all__ = ["Finished", "Job", "Transfers"]

PIECE_BLOCKS = 64
"""Blocks that are begun in one go, so that it takes a tenth of a millisecond."""
_PIECES = 4
"""Pieces of one job that are under way."""
_BEGUN_MAX = 4
"""Pieces that one call begins."""
AWAY = (UnavailableError, UnknownNamespaceError, CancelledError, ClosedError)
"""Errors that say nothing about the blocks."""


@dataclass(eq=False, slots=True)
class Job:
    """Blocks that vLLM wants moved: their keys, and their rows in the primary tier.

    Those of a store are in chain order. `lease_of` says under which lease a block was found,
    `parent_of` what comes before a block.
    """

    id: int
    request_id: str
    is_load: bool
    keys: Sequence[bytes]
    rows: Sequence[int]
    lease_of: Callable[[bytes], Lease | None] = lambda _: None
    parent_of: Callable[[bytes], bytes | None] = lambda _: None
    begun: float = field(default_factory=time.monotonic)
    at: int = 0
    """The first block that is in no piece yet."""
    under_way: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    last: dict[int, bytes] = field(default_factory=dict)
    """The hash that the next piece of a group follows."""
    is_away: bool = True
    """Whether nothing but a server that was away made pieces fall short."""

    @property
    def is_over(self) -> bool:
        """Whether all of it has ended."""
        return not self.under_way and self.at >= len(self.keys)


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended. `moved` are its blocks before the first of a group that was not."""

    job: Job
    moved: Sequence[bytes]
    failed: Sequence[bytes]
    seconds: float


@dataclass(eq=False, slots=True)
class _Piece:
    """Blocks of one group that are moved by one request."""

    job: Job
    group: int
    keys: list[bytes]
    rows: list[int]
    moved: int = 0


class Transfers:
    """See the module. All of it is called on the scheduler's thread, and none of it waits."""

    def __init__(self, link: Link, spaces: Mapping[int, Space], rows: list[memoryview]) -> None:
        self._link = link
        self._spaces = spaces
        self._rows = rows
        self._jobs: dict[int, Job] = {}
        self._finished: list[Finished] = []

    @property
    def is_busy(self) -> bool:
        """Whether rows are in use."""
        return bool(self._jobs)

    def begin(self, job: Job) -> None:
        """Takes a job, and begins its first piece."""
        self._jobs[job.id] = job
        self._advance(job, 1)

    def ended(self, done: Done) -> None:
        """A piece has ended: takes what it moved."""
        piece: _Piece = done.tag
        job = piece.job
        job.under_way -= 1
        if done.result is not None and job.is_load:
            piece.moved = done.result.prefix_blocks
        elif done.result is not None:
            # What the server did not take is its affair: the rows are vLLM's again.
            piece.moved = len(piece.keys)
            self._count(done.result.outcomes)
        if piece.moved < len(piece.keys):
            job.is_away &= isinstance(done.error, AWAY)
            self._give_up(job)
        self._end_if_over(job)

    def proceed(self) -> list[Finished]:
        """Begins further pieces; returns the jobs that have ended since the last time."""
        left = _BEGUN_MAX
        for job in list(self._jobs.values()):
            left -= self._advance(job, left)
        finished, self._finished = self._finished, []
        return finished

    def _advance(self, job: Job, most: int) -> int:
        begun = 0
        while job.at < len(job.keys) and job.under_way < _PIECES and begun < most:
            begun += 1
            for piece in self._cut(job):
                if self._begin_piece(piece):
                    job.under_way += 1
                else:
                    self._give_up(job)
        self._end_if_over(job)
        return begun

    def _cut(self, job: Job) -> list[_Piece]:
        """The next blocks, a piece for each group."""
        end = job.at + PIECE_BLOCKS
        pieces: dict[int, _Piece] = {}
        for key, row in zip(job.keys[job.at : end], job.rows[job.at : end], strict=True):
            group, _ = split_key(key)
            piece = pieces.get(group)
            if piece is None:
                piece = pieces[group] = _Piece(job, group, [], [])
            piece.keys.append(key)
            piece.rows.append(row)
        job.at = end
        job.pieces += pieces.values()
        return list(pieces.values())

    def _begin_piece(self, piece: _Piece) -> bool:
        space = self._spaces.get(piece.group)
        if space is None:
            return False
        job, first = piece.job, piece.keys[0]
        hashes = [split_key(key)[1] for key in piece.keys]
        rows = [self._rows[row] for row in piece.rows]
        if job.is_load:
            return space.load(hashes, rows, lease=job.lease_of(first), tag=piece)
        parent = job.last.get(piece.group) or job.parent_of(first)
        job.last[piece.group] = hashes[-1]
        return space.store(hashes, rows, parent=parent, tag=piece)

    def _give_up(self, job: Job) -> None:
        """A piece fell short: what is behind it is of no use, and is not begun."""
        job.at = max(job.at, len(job.keys))

    def _end_if_over(self, job: Job) -> None:
        if not job.is_over or self._jobs.pop(job.id, None) is None:
            return
        moved: Sequence[bytes] = job.keys
        failed: Sequence[bytes] = ()
        if len(job.keys) > sum(piece.moved for piece in job.pieces):
            moved, failed = _prefixes(job)
        name = "loaded" if job.is_load else "stored"
        self._link.counters.add(f"{name}_blocks", len(moved))
        if failed:
            self._link.counters.add(f"not_{name}_blocks", len(failed))
        self._finished.append(Finished(job, moved, failed, time.monotonic() - job.begun))

    def _count(self, outcomes: list[str]) -> None:
        for outcome in set(outcomes):
            self._link.counters.add(f"put_{outcome}_blocks", outcomes.count(outcome))


def _prefixes(job: Job) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The blocks before the first of each group that was not moved, and all others."""
    moved: list[bytes] = []
    broken: set[int] = set()
    for piece in job.pieces:
        if piece.group in broken:
            continue
        moved += piece.keys[: piece.moved]
        if piece.moved < len(piece.keys):
            broken.add(piece.group)
    whole = set(moved)
    return moved, [key for key in job.keys if key not in whole]
