"""What a lookup promises: only what is near, and what has come near by the deadline."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.engines import Counters, Promises
from kvstrata.engines.promises import find, positions, promised

HASHES = [bytes([number]) * 32 for number in range(10)]


def answer(runs: str, granted: Any = None) -> Any:
    """A lookup of ten blocks: d dram, n nvme, o object, p pending, . miss; capitals: elsewhere."""
    found: list[Any] = []
    tiers = {"d": "dram", "n": "nvme", "o": "object", "p": "dram"}
    for at, each in enumerate(runs):
        if each != ".":
            tier, pending, local = tiers[each.lower()], each in "pP", each.islower()
            run = SimpleNamespace(start=at, end=at + 1, tier=tier, pending=pending, local=local)
            found.append(run)
    prefix = next((at for at, each in enumerate(runs) if each in ".pP"), len(runs))
    gap = (runs + ".").index(".")
    return SimpleNamespace(
        prefix_blocks=prefix,
        runs=[run for run in found if run.end <= gap],
        sparse=[run for run in found if run.start > gap],
        lease=granted,
    )


def lease(blocks: int = 10) -> Any:
    """A lease that covers so many blocks."""
    return SimpleNamespace(blocks=blocks, expires_in=9.0)


class Link:
    """A link and its only space, which gives one answer after the other and then the last again."""

    def __init__(self, *answers: Any) -> None:
        self.settings = SimpleNamespace(timeout=0.2)
        self.counters = Counters()
        self.released: list[Any] = []
        self.prefetched: list[bytes] = []
        self.leased: list[float | None] = []
        self.answers = list(answers)

    def release(self, lease: Any) -> None:
        """Remembers it."""
        self.released.append(lease)

    def lookup_now(self, hashes: Any, lease: float | None = None, sparse: bool = False) -> Any:
        """The next answer."""
        self.leased.append(lease)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def prefetch_now(self, hashes: Any) -> None:
        """Remembers it."""
        self.prefetched += hashes

    def find(self) -> Any:
        """What is found in the end."""
        link: Any = self
        return find(link, link, HASHES, lease=5.0, sparse=True)


@pytest.mark.parametrize(
    ("runs", "prefix", "near"),
    [
        ("dddddddddd", 10, "dddddddddd"),
        ("ddnn......", 4, "dddd......"),
        ("ddnno.....", 4, "dddd......"),
        ("dpdd......", 1, "d.dd......"),
        ("oooooooooo", 0, ".........."),
        ("dd.n.o.p.d", 2, "dd.d.....d"),
        ("ddDNO.D...", 4, "dddd..d..."),
        ("ddPdd.....", 2, "dd.dd....."),
        ("..........", 0, ".........."),
    ],
)
def test_only_what_is_near_is_promised(runs: str, prefix: int, near: str) -> None:
    assert promised(answer(runs)) == prefix
    assert positions(answer(runs), 10) == [each == "d" for each in near]


def test_nothing_is_promised_by_a_lookup_that_failed() -> None:
    assert promised(None) == 0
    assert positions(None, 3) == [False] * 3
    assert Link(None).find() is None


def test_what_is_near_is_answered_at_once() -> None:
    granted = lease()
    link = Link(answer("ddnn......", granted))
    assert link.find().lease is granted
    assert (link.leased, link.released, link.prefetched) == ([5.0], [], [])


def test_nothing_is_fetched_or_waited_for_on_other_nodes() -> None:
    granted = lease(2)
    link = Link(answer("ddDNOOP...", granted))
    found = link.find()
    assert (promised(found), found.lease) == (4, granted)
    assert (link.leased, link.released, link.prefetched) == ([5.0], [], [])


def test_what_is_far_is_fetched_and_leased_when_it_has_come() -> None:
    first, last = lease(2), lease(5)
    far = answer("ddoop.....", first)
    link = Link(far, answer("dddop....."), answer("ddddd....."), answer("ddddd.....", last))
    found = link.find()
    assert promised(found) == 5
    assert found.lease is last
    assert link.released == [first]
    assert link.prefetched == HASHES[2:5]
    assert link.leased == [5.0, None, None, 5.0]


def test_what_does_not_come_is_a_miss_by_the_deadline() -> None:
    link = Link(answer("ddoo......"))
    begun = time.monotonic()
    found = link.find()
    assert 0.1 < time.monotonic() - begun < 2.0
    assert promised(found) == 2
    assert link.prefetched == HASHES[2:4]
    lost = Link(answer("ddoo......"), None, None)
    assert promised(lost.find()) == 0


def test_leases_end_with_their_last_key_or_by_themselves() -> None:
    link: Any = Link(None)
    promises = Promises(link)
    first: Any = lease()
    second: Any = lease(2)
    promises.hold("abcd", first)
    promises.hold("wxyz", second)
    promises.hold("q", None)
    promises.hold("q", lease(0))
    assert len(promises) == 2
    assert promises.of("a") is promises.of("d") is first
    # It covers only two.
    assert promises.of("x") is second
    assert promises.of("y") is None
    promises.loaded("abc")
    assert (promises.of("d"), link.released) == (first, [])
    promises.loaded("d")
    assert (promises.of("d"), link.released) == (None, [first])
    # Nobody loads the other: it ends, and the next one that is held has it forgotten.
    vars(second)["expires_in"] = 0
    assert promises.of("x") is None
    promises.hold("b", lease(1))
    assert len(promises) == 1
    assert link.released == [first]


def test_leases_are_bounded() -> None:
    link: Any = Link(None)
    promises = Promises(link)
    for number in range(5000):
        promises.hold([number], lease(1))
    assert len(promises) == 4096
    assert promises.of(0) is None
    assert promises.of(4999) is not None
    promises.loaded(range(5000))
    assert len(promises) == 0
