"""The half of the connector in each worker: it moves blocks.

```text
loads   kvstrata -> slots -> the engine's blocks. Each ends once, also if it falls short
saves   the engine's blocks -> slots -> kvstrata. Read as soon as there are slots for them
```

Both go in pieces, through slots of their own, so neither stands before the other and memory is
bounded. A block is read while its request holds it: the scheduler's half keeps the blocks of a
finished request until they have been read, and says who has lost theirs, whose saves are dropped.
What waits too long for a slot is dropped too: a save is worth less than the engine's memory.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from ...engines import Counters, Done, Identity, Link, Space
from .copier import Copier, DeviceCopier, Fence, HostCopier, Move
from .plan import NULL_BLOCK, Load, Progress, Save, Shape, Step
from .regions import Region, layout_of, regions_of

__all__ = ["WorkerHalf"]

log = logging.getLogger("kvstrata")

PIECE_BYTES = 32 << 20
"""What is asked for or put at a time: large enough for the wire, small enough to overlap."""
CLOSE_SECONDS = 5.0
"""How long an engine that ends waits for what it has computed to be stored."""

MakeCopier = Callable[[Sequence[Sequence[Region]], int, int], Copier]


@dataclass(eq=False, slots=True)
class _Load:
    request: str
    load: Load
    space: Space | None
    parts: Callable[[Sequence[int]], list[int]]
    """The indices of this worker's parts of some cache groups."""
    since: float
    spans: deque[tuple[int, int, tuple[int, ...]]] = field(default_factory=deque)
    """What is not asked for yet: first block, one past the last, cache groups."""
    under_way: int = 0
    good: int | None = None
    """Blocks in front of the first that could not be loaded."""

    def fell_short(self, at: int) -> None:
        self.good = at if self.good is None else min(self.good, at)
        self.spans.clear()

    @property
    def has_ended(self) -> bool:
        return not self.under_way and not self.spans


@dataclass(eq=False, slots=True)
class _Save:
    save: Save
    step: int
    since: float
    space: Space
    parts: list[int]
    at: int = 0
    """The first block that is not read yet."""


@dataclass(eq=False, slots=True)
class _Piece:
    """Some blocks in slots, on their way."""

    slots: list[int]
    first: int
    moves: list[Move]
    load: _Load | None = None
    save: _Save | None = None


class WorkerHalf:
    """See the module."""

    def __init__(
        self, link: Link, counters: Counters, rank: int, staging_bytes: int, *, windows: bool
    ) -> None:
        self._link, self._counters, self._rank = link, counters, rank
        self._staging_bytes, self._windows = staging_bytes, windows
        self._groups = 0
        self._copier: Copier | None = None
        self._shape: Shape | None = None
        self._spaces: dict[Identity, Space] = {}
        self._opened: set[Space] = set()
        self._load_slots: list[int] = []
        self._save_slots: list[int] = []
        self._loads: list[_Load] = []
        self._saves: deque[_Save] = deque()
        self._copying: list[tuple[Fence, _Piece]] = []
        self._stores = 0
        self._owed: set[str] = set()
        self._received: set[str] = set()
        self._errors: set[int] = set()
        self._failed: dict[str, int] = {}
        self._seen = 0

    def register(
        self,
        caches: dict[str, Any],
        groups: Sequence[Sequence[str]],
        blocks: int,
        make: MakeCopier | None = None,
    ) -> None:
        """The engine's tensors, by layer, and the layers of each cache group."""
        regions = regions_of(caches, groups, blocks)
        part_bytes = tuple(sum(region.bytes for region in each) for each in regions)
        if not all(part_bytes):
            raise ValueError("KvstrataConnector: a worker has no layer of one of the cache groups")
        self._groups = len(regions)
        self._shape = Shape(part_bytes, layout_of(regions))
        if make is None:
            device = regions[0][0].tensor.device.type
            make = HostCopier if device == "cpu" else DeviceCopier
        count = max(2, self._staging_bytes // sum(part_bytes))
        self._copier = make(regions, blocks, count)
        self._load_slots = list(range(count // 2))
        self._save_slots = list(range(count // 2, count))

    def shape(self) -> Shape | None:
        """What the scheduler's half has to know of the tensors."""
        return self._shape

    def preempt(self, step: Step) -> None:
        """Before anything of this step is written: forgets saves of blocks that are lost."""
        if step.preempted:
            self._drop(lambda save: save.save.request in step.preempted, "preempted_blocks")

    def load(self, step: Step) -> None:
        """Begins the loads of this step."""
        self._space(step)
        for request, load in step.loads.items():
            assert step.plan is not None
            parts = partial(step.plan.parts_of, self._rank)
            begun = _Load(request, load, self._space(step), parts, time.monotonic())
            begun.spans.extend(_spans(load, self._groups))
            self._loads.append(begun)
        self._ask()

    def save(self, step: Step) -> None:
        """What this step was to compute is computed: reads what is to be saved."""
        self._seen = step.number
        space, plan = self._space(step), step.plan
        if step.saves and plan and space and self._rank in plan.writers:
            parts, now = plan.parts_of(self._rank, range(self._groups)), time.monotonic()
            self._saves.extend(_Save(save, step.number, now, space, parts) for save in step.saves)
        self._read()
        if self._windows:
            # A window moves on with the next step, and its blocks go to others.
            self._drop(lambda save: True, "shed_blocks")

    def results(self, step: Step) -> tuple[set[str], set[str], set[str]]:
        """Requests whose blocks have been read, of those that are owed; whose loads have ended;
        and of these, where block ids say too little, those that fell short.
        """
        self._owed |= step.finished
        self._proceed()
        reading = {save.save.request for save in self._saves}
        sent = self._owed - reading
        self._owed -= sent
        received, self._received = self._received, set()
        failed = received & self._failed.keys() if self._groups > 1 else set()
        return sent, received, failed

    def errors(self) -> set[int]:
        """Blocks that could not be loaded, since the last time."""
        errors, self._errors = self._errors, set()
        return errors

    def progress(self) -> Progress:
        """How far this worker is."""
        saves = [*self._saves, *(piece.save for _, piece in self._copying if piece.save)]
        through = min((save.step - 1 for save in saves), default=self._seen)
        failed, self._failed = self._failed, {}
        return Progress(through, failed)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._loads or self._saves or self._copying or self._stores)

    def close(self) -> None:
        """Waits for what is being stored, for a bounded time."""
        end = time.monotonic() + CLOSE_SECONDS
        while self.is_busy and time.monotonic() < end:
            self._proceed()
            time.sleep(0.001)
        self._link.close()

    def _space(self, step: Step) -> Space | None:
        identity = step.identity
        if identity is None:
            return None
        if identity not in self._spaces:
            self._spaces[identity] = self._link.open(identity)
        return self._spaces[identity]

    def _is_coming(self, space: Space | None, since: float) -> bool:
        """Whether a namespace was never open yet, and will be in a moment."""
        if space is None or space in self._opened:
            return False
        if space.ready:
            self._opened.add(space)
            return False
        return time.monotonic() - since < self._link.settings.timeout

    def _proceed(self) -> None:
        for done in self._link.finished():
            self._ended(done)
        copying, self._copying = self._copying, []
        for fence, piece in copying:
            self._copied(fence, piece)
        self._ask()
        self._read()
        late = time.monotonic() - self._link.settings.timeout
        self._drop(lambda save: save.since < late, "shed_blocks")

    def _ask(self) -> None:
        """Asks for as much of the loads as there are slots for; takes those that have ended."""
        late = time.monotonic() - self._link.settings.load_timeout
        for load in self._loads:
            if load.spans and load.since < late:
                load.fell_short(load.spans[0][0])
                self._counters.add("load_late")
            if self._is_coming(load.space, load.since):
                continue
            while load.spans and self._load_slots:
                self._ask_piece(load)
        for load in [load for load in self._loads if load.has_ended]:
            self._loads.remove(load)
            self._finish(load)

    def _ask_piece(self, load: _Load) -> None:
        assert self._copier is not None
        start, end, groups = load.spans.popleft()
        size = min(end - start, self._piece_blocks, len(self._load_slots))
        if start + size < end:
            load.spans.appendleft((start + size, end, groups))
        slots = [self._load_slots.pop() for _ in range(size)]
        at = range(start, start + size)
        moves = [
            (slot, group, load.load.blocks[group][position])
            for slot, position in zip(slots, at, strict=True)
            for group in groups
        ]
        piece = _Piece(slots, start, moves, load)
        buffers = [self._copier.room(slot, group) for slot, group, _ in moves]
        hashes, parts = load.load.hashes[start : start + size], load.parts(groups)
        if load.space is not None and load.space.load(hashes, buffers, parts=parts, tag=piece):
            load.under_way += 1
        else:
            self._load_slots += slots
            load.fell_short(start)

    def _ended(self, done: Done) -> None:
        piece = done.tag
        if not isinstance(piece, _Piece):
            return
        if piece.load is None:
            self._stores -= 1
            self._save_slots += piece.slots
            if done.result is None:
                self._counters.add("not_stored_blocks", len(piece.slots))
            else:
                for outcome in set(done.result.outcomes):
                    self._counters.add(f"put_{outcome}_blocks", done.result.count(outcome))
            return
        whole = len(piece.slots)
        good = 0 if done.result is None else done.result.prefix_blocks
        if good < whole:
            piece.load.fell_short(piece.first + good)
        per_block = len(piece.moves) // whole
        piece.moves = piece.moves[: good * per_block]
        assert self._copier is not None
        self._copied(self._copier.write(piece.moves), piece)

    def _copied(self, fence: Fence, piece: _Piece) -> None:
        """Goes on with a piece if its copies are done, else later."""
        if not fence():
            self._copying.append((fence, piece))
        elif piece.load is not None:
            self._load_slots += piece.slots
            piece.load.under_way -= 1
        elif piece.save is not None:
            if self._is_coming(piece.save.space, piece.save.since):
                self._copying.append((fence, piece))
            elif self._store(piece, piece.save):
                self._stores += 1
            else:
                self._save_slots += piece.slots
                self._counters.add("not_stored_blocks", len(piece.slots))

    def _finish(self, load: _Load) -> None:
        self._received.add(load.request)
        count = len(load.load.hashes)
        good = count if load.good is None else load.good
        self._counters.add("loaded_blocks", good)
        if good < count:
            self._counters.add("not_loaded_blocks", count - good)
            self._failed[load.request] = good
            if self._groups == 1:
                self._errors.update(load.load.blocks[0][good:])

    def _read(self) -> None:
        """Reads as much of the saves as there are slots for."""
        assert self._copier is not None
        while self._saves and self._save_slots:
            save = self._saves[0]
            left = len(save.save.hashes) - save.at
            size = min(left, self._piece_blocks, len(self._save_slots))
            self._read_piece(save, size)
            if size == left:
                self._saves.popleft()

    def _read_piece(self, save: _Save, size: int) -> None:
        copier = self._copier
        assert copier is not None
        start, end = save.at, save.at + size
        save.at = end
        slots = [self._save_slots.pop() for _ in range(size)]
        moves = [
            (slot, group, save.save.blocks[group][position])
            for slot, position in zip(slots, range(start, end), strict=True)
            for group in range(self._groups)
        ]
        self._copied(copier.read(moves), _Piece(slots, start, moves, save=save))

    def _store(self, piece: _Piece, save: _Save) -> bool:
        copier, first, hashes = self._copier, piece.first, save.save.hashes
        assert copier is not None
        return save.space.store(
            hashes[first : first + len(piece.slots)],
            [copier.room(slot, group) for slot, group, _ in piece.moves],
            parent=hashes[first - 1] if first else save.save.parent,
            parts=save.parts,
            tag=piece,
        )

    @property
    def _piece_blocks(self) -> int:
        assert self._copier is not None
        return max(1, PIECE_BYTES // self._copier.slot_bytes)

    def _drop(self, is_meant: Callable[[_Save], bool], counter: str) -> None:
        kept = deque(save for save in self._saves if not is_meant(save))
        if len(kept) < len(self._saves):
            dropped = [save for save in self._saves if is_meant(save)]
            self._counters.add(counter, sum(len(each.save.hashes) - each.at for each in dropped))
            self._saves = kept


def _spans(load: Load, groups: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Blocks that the same cache groups want, in a row."""
    spans, at = [], 0

    def wanting(position: int) -> tuple[int, ...]:
        return tuple(group for group in range(groups) if load.blocks[group][position] != NULL_BLOCK)

    for wanted, positions in groupby(range(len(load.hashes)), wanting):
        count = len(list(positions))
        if wanted:
            spans.append((at, at + count, wanted))
        at += count
    return spans
