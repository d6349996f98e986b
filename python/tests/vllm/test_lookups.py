"""What becomes of blocks that are not there yet: with answers that a server gives in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvstrata.engines import Counters, Done, Link, Settings, Space
from kvstrata.vllm.lookups import HIT, MISS, UNKNOWN, Lookups

KEYS = [hashlib.sha256(bytes([number])).digest() + bytes(4) for number in range(6)]
HASHES = b"".join(key[:32] for key in KEYS)


@dataclass
class Run:
    """A run of a lookup's answer."""

    start: int
    end: int
    tier: str = "dram"
    pending: bool = False
    local: bool = True


@dataclass
class Found:
    """A lookup's answer."""

    runs: list[Run]
    sparse: list[Run] = field(default_factory=list)
    lease: Any = None


class Double:
    """A link with one space that has to be told what comes of requests."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.counters = Counters()
        self.ready = True
        self.asked: list[tuple[bytes, object]] = []
        self.prefetched: list[bytes] = []
        self.released: list[object] = []
        self.now = 100.0
        self.lookups = Lookups(cast(Link, self), {0: cast(Space, self)}, clock=lambda: self.now)

    def lookup(self, hashes: bytearray, *, tag: object, lease: float, sparse: bool) -> bool:
        """As `Space.lookup`."""
        self.asked.append((bytes(hashes), tag))
        return True

    def prefetch(self, hashes: bytearray, *, tag: object) -> bool:
        """As `Space.prefetch`."""
        self.prefetched.append(bytes(hashes))
        return True

    def release(self, lease: object) -> None:
        """As `Link.release`."""
        if lease is not None:
            self.released.append(lease)

    def answer(self, found: Found | None) -> None:
        """The request that was asked first has this answer."""
        _, tag = self.asked.pop(0)
        self.lookups.ended(Done("lookup", tag, found, None))

    def verdicts(self) -> list[int]:
        """What is known of all blocks."""
        return [self.lookups.verdict("request", key, 16 * (at + 1)) for at, key in enumerate(KEYS)]

    def step(self, seconds: float = 0.0) -> None:
        """Time goes by, and a step ends."""
        self.now += seconds
        self.lookups.flush()


@pytest.fixture
def double() -> Iterator[Double]:
    """One that was asked for all blocks."""
    double = Double()
    assert double.verdicts() == [UNKNOWN] * 6
    assert not double.asked
    double.step()
    yield double
    double.lookups.forget("request")
    double.lookups.flush()
    assert not double.lookups._waiting


def test_a_step_is_one_lookup(double: Double) -> None:
    assert [hashes for hashes, _ in double.asked] == [HASHES]
    double.step()
    assert len(double.asked) == 1
    double.answer(Found([Run(0, 2), Run(2, 5, "nvme")], lease="lease"))
    assert double.verdicts() == [HIT] * 5 + [MISS]
    double.lookups.loaded("request")
    assert double.released == ["lease"]
    assert double.counters.snapshot() == {
        "hit_dram_blocks": 2,
        "hit_nvme_blocks": 3,
        "miss_blocks": 1,
    }


def test_blocks_in_object_are_hits_once_they_have_come(double: Double) -> None:
    double.answer(Found([Run(0, 1), Run(1, 4, "object")], lease="first"))
    assert double.verdicts() == [HIT] + [UNKNOWN] * 3 + [MISS] * 2
    assert double.prefetched == [HASHES[32:128]]
    double.step()
    assert not double.asked, "it is not asked again at once"
    double.step(0.01)
    double.answer(Found([Run(0, 3), Run(3, 4, "object")], lease="second"))
    assert double.released == ["first"]
    assert double.verdicts() == [HIT] * 3 + [UNKNOWN] + [MISS] * 2
    double.step(0.1)
    double.answer(Found([Run(0, 4)], lease="third"))
    assert double.verdicts() == [HIT] * 4 + [MISS] * 2
    assert len(double.prefetched) == 1
    assert double.counters["prefetched_blocks"] == 3


def test_blocks_that_do_not_come_are_misses_in_time(double: Double) -> None:
    double.answer(Found([Run(0, 4, "object")]))
    double.step(double.settings.load_timeout - 0.1)
    double.answer(Found([Run(0, 4, "object")]))
    assert double.verdicts()[0] == UNKNOWN
    double.step(0.2)
    double.answer(Found([Run(0, 4, "object")]))
    assert double.verdicts() == [MISS] * 6
    double.step(1.0)
    assert not double.asked


def test_blocks_of_other_nodes_are_hits_and_waited_for_by_nobody(double: Double) -> None:
    runs = [Run(0, 2), Run(2, 3, local=False), Run(3, 4, "nvme", local=False)]
    double.answer(Found([*runs, Run(4, 6, "object", local=False)]))
    assert double.verdicts() == [HIT] * 4 + [MISS] * 2
    assert not double.prefetched


def test_blocks_that_are_being_stored_are_waited_for(double: Double) -> None:
    double.answer(Found([Run(0, 2), Run(2, 4, pending=True)]))
    assert double.verdicts() == [HIT] * 2 + [UNKNOWN] * 2 + [MISS] * 2
    double.step(0.01)
    double.answer(Found([Run(0, 4)]))
    assert double.verdicts() == [HIT] * 4 + [MISS] * 2


def test_a_store_that_does_not_end_is_a_miss(double: Double) -> None:
    double.answer(Found([Run(0, 4, pending=True)]))
    double.step(double.settings.timeout + 0.1)
    double.answer(Found([Run(0, 4, pending=True)]))
    assert double.verdicts() == [MISS] * 6


def test_a_failed_lookup_is_a_miss(double: Double) -> None:
    double.answer(None)
    assert double.verdicts() == [MISS] * 6
    double.lookups.forget("request")
    assert double.verdicts() == [UNKNOWN] * 6, "another request asks again"


def test_the_lease_of_a_request_that_is_gone_is_given_up(double: Double) -> None:
    double.lookups.forget("request")
    double.answer(Found([Run(0, 6)], lease="late"))
    assert double.released == ["late"]


def test_while_the_server_is_away_nothing_is_asked(double: Double) -> None:
    double.ready = False
    assert double.lookups.verdict("other", KEYS[0], 16) == MISS
    double.answer(None)
    double.step()
    assert not double.asked
    assert double.counters["not_ready_blocks"] == 1


def test_what_comes_before_a_block_is_known(double: Double) -> None:
    assert double.lookups.hash_at("request", 0, 32) == KEYS[1][:32]
    assert double.lookups.hash_at("request", 0, 33) is None
    assert double.lookups.hash_at("request", 1, 32) is None
    assert double.lookups.hash_at("other", 0, 32) is None
