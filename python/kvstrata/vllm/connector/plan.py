"""What the two halves of the connector tell each other, in plain data that pickles.

```text
worker -> scheduler   Shape, once, when the cache is there; Progress, after every step
scheduler -> worker   Step, with every step
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...engines import Identity
from ...engines.identity import digest

__all__ = ["NULL_BLOCK", "Load", "Plan", "Progress", "Save", "Shape", "Step"]

NULL_BLOCK = 0
"""The id of the block that stands where a sliding window needs none."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a worker read from its tensors: `part_bytes` of each cache group, and how they lie."""

    part_bytes: tuple[int, ...]
    layout: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a block, and which of them are whose.

    A part is (cache group, shard). A shard is a worker, or those workers that hold the same bytes.
    """

    parts: tuple[tuple[int, int, int], ...]
    layout: str
    shards: Mapping[int, int]
    """The shard of each worker, by its rank."""
    writers: frozenset[int]
    """The workers that store; the others hold the same as one of these."""

    @classmethod
    def of(cls, shapes: Mapping[int, Shape], copies: int) -> Plan:
        """From the shapes of all workers by rank; each `copies` in a row hold the same bytes."""
        shards = {rank: rank // copies for rank in sorted(shapes)}
        writers = {shard: rank for rank, shard in reversed(shards.items())}
        groups = range(len(shapes[0].part_bytes))
        parts = tuple(
            (group, shard, shapes[writers[shard]].part_bytes[group])
            for group in groups
            for shard in sorted(writers)
        )
        layouts = {str(shard): shapes[rank].layout for shard, rank in writers.items()}
        same = set(layouts.values())
        layout = same.pop() if len(same) == 1 else digest(layouts)
        return cls(parts, layout, shards, frozenset(writers.values()))

    def parts_of(self, rank: int, groups: Sequence[int]) -> list[int]:
        """The indices of one worker's parts of some cache groups, ascending."""
        shards = len(self.writers)
        return [group * shards + self.shards[rank] for group in groups]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that a request waits for: for each hash one block id in every cache group."""

    hashes: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of a request that are computed when this step has run, behind `parent`."""

    request: str
    parent: bytes | None
    hashes: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Step:
    """What the workers have to do in one step."""

    number: int = 0
    identity: Identity | None = None
    plan: Plan | None = None
    loads: dict[str, Load] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    """Requests whose blocks may be overwritten from this step on."""
    finished: frozenset[str] = frozenset()
    """Requests whose blocks are kept until the workers say that they have been read."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker is; merged over all of them."""

    read_through: int
    """Of all steps up to this one nothing is left that reads the engine's blocks."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """How many blocks in front are good, for each load that has ended short of its own."""

    def merge(self, other: Progress) -> Progress:
        """Both workers at once: the one that is less far counts."""
        failed = dict(self.failed)
        for request, good in other.failed.items():
            failed[request] = min(good, failed.get(request, good))
        return Progress(min(self.read_through, other.read_through), failed)
