"""The halves of the connector against a real server and an engine that is not (fake_vllm.py).

Numbers in comments are rows of docs/engines/cases.md.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from conftest import Server, Start
from fake_vllm import BLOCK_TOKENS, FakeEngine

import kvstrata

Engines = Callable[..., FakeEngine]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engines]:
    """Makes engines, of one model for each test."""
    made: list[FakeEngine] = []

    def make(server: Server, **settings: Any) -> FakeEngine:
        made.append(FakeEngine(server.grpc, **{"model": request.node.name, **settings}))
        made[-1].step()  # Workers learn with the first step which namespace to open.
        until(lambda: ready(made[-1]))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.001)


def has_few_waiting(engine: FakeEngine) -> bool:
    """Steps; whether more may come."""
    engine.step()
    return len(engine.waiting) <= 3


def ready(engine: FakeEngine) -> bool:
    """Whether both halves may use the server; the workers' know it after the first step."""
    links = [engine.scheduler._link, *(worker._link for worker in engine.workers)]
    return all(space.ready for link in links for space in link._spaces)


def tokens(count: int, first: int = 0) -> list[int]:
    """A prompt."""
    return list(range(first, first + count))


def fill(engine: FakeEngine, prompt: Sequence[int]) -> None:
    """Has an engine compute a prompt, and store it."""
    assert engine.generate("filling", prompt) == 0
    engine.settle()
    blocks = len(prompt) // BLOCK_TOKENS
    stored = (
        engine.worker_counters["put_stored_blocks"]
        + engine.worker_counters["put_part_stored_blocks"]
    )
    assert stored >= blocks


def is_stored_again(first: FakeEngine, other: FakeEngine, prompt: Sequence[int]) -> bool:
    """Whether another engine finds what one computes; until it does, either may have to connect."""
    first.generate(f"again {time.monotonic()}", prompt)
    first.settle()
    return other.generate(f"asks {time.monotonic()}", prompt) == len(prompt) - BLOCK_TOKENS


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
def test_what_one_engine_computed_another_loads(
    shared_server: Server, engine: Engines, order: str
) -> None:
    fill(engine(shared_server, order=order), tokens(101))
    other = engine(shared_server, order=order)
    assert other.generate("hit", tokens(101)) == 100
    assert other.generate("longer", [*tokens(101), 7, 8, 9]) == 100
    assert other.generate("other", [9, *tokens(100)]) == 0
    assert other.worker_counters["loaded_blocks"] == 50
    assert other.counters["hit_tokens"] == 200


def test_layouts_that_differ_share_nothing(shared_server: Server, engine: Engines) -> None:
    fill(engine(shared_server, order="BHNC"), tokens(40))
    assert engine(shared_server, order="BNHC").generate("other", tokens(40)) == 0


def test_one_token_is_left_to_compute(shared_server: Server, engine: Engines) -> None:
    fill(engine(shared_server), tokens(40))
    other = engine(shared_server)
    # 8: whole blocks only, whatever the length.
    for length in range(1, 41):
        whole = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert other.generate(f"of {length}", tokens(length)) == whole


def test_a_request_is_looked_up_once(shared_server: Server, engine: Engines) -> None:
    fill(engine(shared_server), tokens(40))
    other = engine(shared_server)
    other.generate("hit", tokens(40))
    assert other.asked["hit"] > 1
    assert other.counters["lookups"] == 1


def test_chunked_prefill_and_decoding_are_stored_whole(
    shared_server: Server, engine: Engines
) -> None:
    first = engine(shared_server, budget=7)  # 52
    first.generate("long", tokens(50), outputs=30)
    first.settle()
    text = first.requests.get("long")
    assert text is None
    prompt = tokens(50) + list(range(50, 80))
    assert engine(shared_server).generate("again", prompt) == 76


def test_a_prompt_larger_than_the_staging_goes_in_pieces(
    shared_server: Server, engine: Engines
) -> None:
    fill(engine(shared_server, staging_blocks=6, timeout=5.0), tokens(200))
    other = engine(shared_server, staging_blocks=6)
    assert other.generate("hit", tokens(200)) == 196


def test_blocks_are_kept_until_they_are_read(start: Start, engine: Engines) -> None:
    server = start()  # 1
    first = engine(server, staging_blocks=4, blocks=64, timeout=3.0)
    fill(first, tokens(8, 900))
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        first.scheduler.matched(first.add(name, tokens(41, 100 * number)), 0)
    until(lambda: all(first.scheduler.matched(each, 0)[0] == 0 for each in first.waiting))
    server.pause()
    for _ in range(40):
        first.step()
    assert len(first.ended) > 1
    assert first.requests, "nothing is kept though nothing could be read"
    server.process.send_signal(signal.SIGCONT)
    first.run(*names)
    first.settle()
    other = engine(server)
    hits = [other.generate(name, tokens(41, 100 * at)) for at, name in enumerate(names)]
    assert sum(hits) >= 40


def test_a_hanging_server_costs_bounded_memory_and_time(start: Start, engine: Engines) -> None:
    server = start()  # 37
    first = engine(server, staging_blocks=4, blocks=30, timeout=0.5, store_timeout=1.0)
    fill(first, tokens(8, 900))
    for number in range(8):
        first.scheduler.matched(first.add(f"r{number}", tokens(80, 100 * number)), 0)
    until(lambda: all(first.scheduler.matched(each, 0)[0] == 0 for each in first.waiting))
    server.pause()
    begun = time.monotonic()
    first.run()
    assert time.monotonic() - begun < 5
    assert first.worker_counters["shed_blocks"] + first.worker_counters["not_stored_blocks"] > 0
    assert first.counters.slowest < 0.3, "a call waited for the server"
    server.process.send_signal(signal.SIGCONT)
    other = engine(server, saves=False)
    until(lambda: is_stored_again(first, other, tokens(40, 5000)))


def test_a_server_that_is_absent_is_a_miss_and_used_when_it_comes(
    start: Start, engine: Engines
) -> None:
    server = start()  # 43
    server.kill()
    first = FakeEngine(server.grpc, model="absent")
    try:
        assert first.generate("alone", tokens(40)) == 0
        assert first.asked["alone"] == 1
        server.start()
        until(lambda: ready(first))
        fill(first, tokens(40))
        until(lambda: first.generate(f"again {time.monotonic()}", tokens(40)) == 36)
    finally:
        first.close()


def test_a_server_killed_after_a_hit_is_a_miss(start: Start, engine: Engines) -> None:
    server = start()
    fill(engine(server), tokens(80))
    other = engine(server)
    request = other.add("hit", tokens(80))
    while request.state != "loading":
        server_was_asked = other.counters["lookups"]
        other._schedule()
    assert server_was_asked
    server.kill()
    other.run()
    assert request.external == 76
    assert other.worker_counters["not_loaded_blocks"] == 19
    assert other.asked["hit"] >= 1
    server.start()
    until(lambda: ready(other))
    fill(other, tokens(60, 100))


@pytest.mark.parametrize("gone", [0, 5, 18])
@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_of_a_load_that_falls_short_the_front_is_used(
    shared_server: Server, engine: Engines, gone: int, windows: tuple[int | None, ...]
) -> None:
    # 2, 17: a block goes between lookup and load.
    fill(engine(shared_server, windows=windows, staging_blocks=64), tokens(80))
    other = engine(shared_server, windows=windows)
    request = other.add("hit", tokens(80))
    while not other.scheduler._loads:
        other._schedule()
    lost = request.block_hashes[gone]
    remove(shared_server, other, [lost])
    # The lease keeps it for this session; without it the block is gone.
    other.scheduler._release(other.scheduler._requests["hit"])
    until(lambda: not present(shared_server, other, lost))
    other.run()
    assert other.worker_counters["not_loaded_blocks"] == 19 - gone
    assert other.counters["loads_short"] == 1
    other.settle()
    assert present(shared_server, other, lost), "what was computed again is stored again"


def open_as(server: Server, engine: FakeEngine) -> tuple[kvstrata.Client, kvstrata.Namespace]:
    """The engine's namespace, by a client of its own."""
    client = kvstrata.Client(server.grpc)
    identity = engine.scheduler._identity
    assert identity is not None
    return client, identity.open(client)


def remove(server: Server, engine: FakeEngine, hashes: list[bytes]) -> None:
    """Takes blocks from the server."""
    client, namespace = open_as(server, engine)
    with client:
        namespace.remove(hashes)


def present(server: Server, engine: FakeEngine, hash_: bytes) -> bool:
    """Whether the server has a block."""
    client, namespace = open_as(server, engine)
    with client:
        return namespace.exists([hash_])[0]


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_time_frees_all(shared_server: Server, engine: Engines, steps: int) -> None:
    # 38
    fill(engine(shared_server), tokens(60))
    other = engine(shared_server)
    free = len(other.free)
    other.add("gone", tokens(80), outputs=40)
    other.add("stays", tokens(44))
    for _ in range(steps):
        other.step()
    if "gone" not in other.ended:
        other.abort("gone")
    other.run()
    other.settle()
    assert len(other.free) == free
    assert not other.scheduler._requests
    until(lambda: leases(shared_server) == 0)


def leases(server: Server) -> int:
    """How many leases the server holds."""
    with kvstrata.Client(server.grpc) as client:
        return int(client.stats()["leases"])


def test_a_preempted_request_is_saved_from_where_it_was_lost(
    shared_server: Server, engine: Engines
) -> None:
    first = engine(shared_server, budget=16, staging_blocks=2)  # 23, 40
    first.add("twice", tokens(60), outputs=20)
    for _ in range(30):
        first.step()
        if "twice" not in first.ended and first.requests["twice"].state == "running":
            first.preempt("twice")
            break
    first.step()
    first.run()
    first.settle()
    assert engine(shared_server).generate("again", tokens(60) + list(range(60, 80))) >= 56


def test_two_ranks_have_their_parts_and_a_block_without_one_is_none(
    shared_server: Server, engine: Engines
) -> None:
    first = engine(shared_server, ranks=2)  # 35
    first.workers[1]._rank = 7  # It holds part 1, and believes that it need not store it.
    first.generate("half", tokens(40))
    first.settle()
    assert first.worker_counters["put_part_stored_blocks"] == 10
    second = engine(shared_server, ranks=2)
    assert second.generate("miss", tokens(40)) == 0
    second.settle()
    assert engine(shared_server, ranks=2).generate("hit", tokens(40)) == 36
    assert engine(shared_server, ranks=1).generate("other", tokens(40)) == 0


def test_of_copies_one_is_stored_and_all_are_loaded(shared_server: Server, engine: Engines) -> None:
    first = engine(shared_server, ranks=4, copies=2)
    fill(first, tokens(40))
    counted = first.worker_counters
    assert counted["put_stored_blocks"] + counted["put_part_stored_blocks"] == 20
    assert engine(shared_server, ranks=4, copies=2).generate("hit", tokens(40)) == 36


def test_of_a_window_only_what_is_seen_is_loaded(shared_server: Server, engine: Engines) -> None:
    first = engine(shared_server, windows=(None, 8), budget=32, staging_blocks=64)
    fill(first, tokens(80))
    other = engine(shared_server, windows=(None, 8))
    assert other.generate("hit", tokens(80)) == 76


def test_the_first_request_of_an_engine_is_stored_too(
    shared_server: Server, engine: Engines
) -> None:
    # Its blocks are read while the workers still open the namespace, and its window moves on.
    first = FakeEngine(
        shared_server.grpc, model="first", windows=(None, 8), staging_blocks=64, budget=16
    )
    space = first.scheduler._space
    assert space is not None
    until(lambda: space.ready)
    fill(first, tokens(80))
    first.close()


def test_a_server_that_was_emptied_fills_again(start: Start, engine: Engines) -> None:
    server = start()
    first = engine(server)
    fill(first, tokens(40))
    server.kill()
    server.start()
    other = engine(server, saves=False)
    until(lambda: is_stored_again(first, other, tokens(40)))


def test_after_a_reset_nothing_old_is_loaded(shared_server: Server, engine: Engines) -> None:
    first = engine(shared_server)
    fill(first, tokens(40))
    first.scheduler.reset()
    until(lambda: ready(first))
    assert first.generate("new", tokens(40)) == 0
    first.settle()
    assert first.generate("newer", tokens(40)) == 36
    assert engine(shared_server).generate("other", tokens(40)) == 36


def test_a_consumer_stores_nothing_and_a_producer_loads_nothing(
    shared_server: Server, engine: Engines
) -> None:
    engine(shared_server, saves=False).generate("reads", tokens(40))
    producer = engine(shared_server, loads=False)
    assert producer.generate("writes", tokens(40)) == 0
    producer.settle()
    assert producer.generate("writes again", tokens(40)) == 0
    producer.settle()
    assert producer.worker_counters["put_stored_blocks"] == 10
    assert engine(shared_server, saves=False).generate("hit", tokens(40)) == 36


def test_many_requests_with_little_room_are_all_right(
    shared_server: Server, engine: Engines
) -> None:
    # 7: short of blocks, aborted and preempted at random, two engines in turn.
    chance = random.Random(7)
    engines = [engine(shared_server, blocks=40, budget=24, staging_blocks=8) for _ in range(2)]
    external = 0
    for number in range(120):
        each = engines[number % 2]
        prefix = tokens(chance.choice([24, 48]), 1000 * chance.randrange(4))
        each.add(f"{number}", [*prefix, *tokens(chance.randrange(1, 20), number)], outputs=5)
        for _ in range(chance.randrange(4)):
            each.step()
        running = [one.request_id for one in each.running]
        if running and chance.random() < 0.2:
            each.preempt(chance.choice(running))
        alive = [name for name in each.requests if name not in each.ended]
        if chance.random() < 0.1:
            each.abort(chance.choice(alive))
        until(partial(has_few_waiting, each))
    for each in engines:
        each.run()
        each.settle()
        assert len(each.free) == 39
        external += each.counters["hit_tokens"]
    assert external > 1000
    until(lambda: leases(shared_server) == 0)
