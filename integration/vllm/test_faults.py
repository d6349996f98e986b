"""What goes wrong beside a real vLLM costs speed: every request ends, with the right tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Engine, Server, Start, prompt
from engine import BLOCK_TOKENS, Generated
from test_tier import come_back, grown, same
from until import until

PROMPTS = [prompt(10), prompt(11, 513), prompt(12, 257)]
BLOCKS = sum(len(each) // BLOCK_TOKENS for each in PROMPTS)
TIMEOUT, LOAD_TIMEOUT, STORE_TIMEOUT = 0.5, 2.0, 3.0
"""Deadlines of the tier, in seconds."""
CALL_BUDGET = 0.001
SLACK = 10.0
"""Seconds that the model itself may take on a busy machine."""


def tier_of(server: Server, **settings: Any) -> dict[str, Any]:
    """The tier's settings."""
    timeouts = {"timeout": TIMEOUT, "load_timeout": LOAD_TIMEOUT, "store_timeout": STORE_TIMEOUT}
    return {"endpoint": server.grpc, **timeouts, **settings}


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Generated:
    """What the model says without kvstrata."""
    engine.open("tiny")
    return engine.generate(*PROMPTS)


def right(engine: Engine, expected: Generated) -> Generated:
    """All requests end in time and as without kvstrata, by an engine that knows nothing."""
    engine.settle()
    engine.empty()
    generated = engine.generate(*PROMPTS)
    same(generated, expected)
    assert generated.seconds < TIMEOUT + LOAD_TIMEOUT + STORE_TIMEOUT + SLACK
    return generated


def hits_again(engine: Engine, expected: Generated) -> None:
    """What is stored now is found again."""
    come_back(engine)
    right(engine, expected)
    until("hits are back", lambda: right(engine, expected).external_hits >= BLOCKS * BLOCK_TOKENS)
    calls_were_short(engine)


def calls_were_short(engine: Engine) -> None:
    """A busy machine takes the processor away from a few calls; none of them waited."""
    tier = engine.tier()
    counts = tier["counts"]
    assert counts.get("slow_calls", 0) <= max(10, counts["calls"] // 10), tier
    assert tier["slowest"] < 0.1 * TIMEOUT, tier


def test_a_server_that_comes_later(engine: Engine, start: Start, expected: Generated) -> None:
    server = start()
    server.kill()
    engine.open("tiny", tier=tier_of(server))
    assert right(engine, expected).external_hits == 0
    server.start()
    hits_again(engine, expected)


@pytest.fixture
def filled(engine: Engine, start: Start, expected: Generated) -> Iterator[Server]:
    """A server that has the prompts' blocks, and an engine with that tier."""
    server = start()
    engine.open("tiny", tier=tier_of(server))
    hits_again(engine, expected)
    yield server
    engine.close()


def test_a_server_that_is_killed(engine: Engine, filled: Server, expected: Generated) -> None:
    filled.kill()
    assert right(engine, expected).external_hits == 0
    assert right(engine, expected).external_hits == 0
    filled.start()
    hits_again(engine, expected)


def test_a_server_that_is_killed_while_it_answers(
    engine: Engine, filled: Server, expected: Generated
) -> None:
    for delay in (0.0, 0.005, 0.02, 0.05):
        engine.settle()
        engine.empty()
        come_back(engine)
        engine.ask("generate", prompts=PROMPTS, tokens=8)
        time.sleep(delay)
        filled.kill()
        same(engine.generated(), expected)
        filled.start()
        hits_again(engine, expected)


def test_a_server_that_stands_still(engine: Engine, filled: Server, expected: Generated) -> None:
    filled.pause()
    assert right(engine, expected).external_hits == 0
    assert right(engine, expected).external_hits == 0
    filled.go_on()
    hits_again(engine, expected)


@contextmanager
def stuttering(server: Server) -> Iterator[None]:
    """Has the server run a tenth of the time only."""
    over = threading.Event()

    def stutter() -> None:
        while not over.is_set():
            server.pause()
            over.wait(0.09)
            server.go_on()
            over.wait(0.01)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_server_that_is_slow(engine: Engine, filled: Server, expected: Generated) -> None:
    with stuttering(filled):
        right(engine, expected)
        right(engine, expected)
    hits_again(engine, expected)


def test_hits_that_cannot_be_loaded(
    engine: Engine, start: Start, expected: Generated, tmp_path: Path
) -> None:
    """The server promises what its disk has, and the disk gives back other bytes."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    server = start(f"nvme.path={nvme}", "nvme.capacity=512MiB", "node.name=node-0")
    engine.open("tiny", tier=tier_of(server))
    hits_again(engine, expected)
    until("all is on nvme", lambda: server.metric("kvstrata_nvme_blocks") >= BLOCKS)
    server.kill()
    server.start()
    come_back(engine)
    for segment in (nvme / "kvstrata-nvme" / "segments").iterdir():
        damage(segment)
    before = engine.tier()["counts"]
    right(engine, expected)
    assert grown(engine, before, "hit_nvme_blocks") > 0
    assert grown(engine, before, "not_loaded_blocks") > 0
    # They were put again, and are tried again when they have been misses for a while.
    engine.open("tiny", tier=tier_of(server))
    hits_again(engine, expected)


def damage(segment: Path) -> None:
    """Flips a bit in every page of a file."""
    with segment.open("r+b") as file:
        length = segment.stat().st_size
        for at in range(2048, length, 4096):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"block_size": 64},
        {"prefix_caching_hash_algo": "sha256"},
        {"tier": {"weights": "another"}},
    ],
    ids=["dtype", "block size", "hash algorithm", "weights"],
)
def test_engines_that_differ_share_nothing(
    engine: Engine, filled: Server, settings: dict[str, Any]
) -> None:
    others = {name: value for name, value in settings.items() if name != "tier"}
    engine.open("tiny", tier=tier_of(filled, **settings.get("tier", {})), **others)
    come_back(engine)
    assert engine.generate(*PROMPTS).external_hits == 0


def test_tenants_share_nothing(engine: Engine, filled: Server, expected: Generated) -> None:
    engine.empty()
    salted = engine.generate(PROMPTS[0], salt="a")
    assert salted.external_hits == 0
    assert salted.answers[0].tokens == expected.answers[0].tokens
    engine.settle()
    engine.empty()
    assert engine.generate(PROMPTS[0], salt="b").external_hits == 0
    engine.settle()
    engine.empty()
    assert engine.generate(PROMPTS[0], salt="a").external_hits >= len(PROMPTS[0]) - BLOCK_TOKENS


def test_requests_that_are_aborted_leave_nothing(
    engine: Engine, filled: Server, expected: Generated
) -> None:
    for steps in range(8):
        engine.empty()
        engine.abort(PROMPTS[0], steps=steps)
        engine.settle()
    assert engine.tier()["requests"] == 0
    until("leases end", lambda: filled.metric("kvstrata_leases") == 0)
    assert right(engine, expected).external_hits >= BLOCKS * BLOCK_TOKENS


def test_a_cache_that_is_too_small(engine: Engine, filled: Server, expected: Generated) -> None:
    """Prompts are computed in pieces, preempted, and their blocks evicted all the time."""
    engine.open(
        "tiny", tier=tier_of(filled), num_gpu_blocks_override=44, max_num_batched_tokens=128
    )
    come_back(engine)
    for _ in range(2):
        same(engine.generate(*PROMPTS), expected)
    calls_were_short(engine)
