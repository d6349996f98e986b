"""What adapters stand on: never an error, never a wait, and hits again when the server is back."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import BLOCK_BYTES, Server, Start, hashes, value

import kvstrata
from kvstrata.engines import Counters, Done, Identity, Link, Opaque, Settings, Space
from kvstrata.engines.identity import digest

DEADLINE = 20.0
"""Seconds after which a test gives up."""
IDENTITY = Identity(
    model="engines",
    engine="vllm",
    dtype="bf16",
    block_tokens=16,
    parts=((0, 0, BLOCK_BYTES),),
    hash_algorithm="sha256",
)


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.001)


def ended(link: Link) -> Done:
    """The one request that ends next."""
    done: list[Done] = []

    def one() -> bool:
        done.extend(link.finished())
        return bool(done)

    until(one)
    assert len(done) == 1
    return done[0]


class Adapter:
    """A link and a space as an adapter has them."""

    def __init__(self, endpoint: str, **settings: object) -> None:
        self.counters = Counters()
        parsed, _ = Settings.parse({"endpoint": endpoint, "timeout": 0.5, **settings})
        self.link = Link(parsed, self.counters)
        self.space = self.link.open(IDENTITY)

    def ready(self) -> Space:
        """The space, as soon as requests are begun."""
        until(lambda: self.space.ready)
        return self.space

    def store(self, count: int) -> None:
        """Stores so many blocks."""
        values = [value(number) for number in range(count)]
        assert self.ready().store(hashes(count), values, tag="store")
        done = ended(self.link)
        assert done.error is None
        assert done.result.count("stored") == count

    def load(self, count: int) -> int:
        """How many of so many blocks can be loaded; their bytes are checked."""
        buffers = [bytearray(BLOCK_BYTES) for _ in range(count)]
        assert self.ready().load(hashes(count), buffers, tag="load")
        loaded = ended(self.link).result.prefix_blocks
        assert all(buffers[number] == value(number) for number in range(loaded))
        return int(loaded)


@pytest.fixture
def adapt() -> Iterator[Callable[..., Adapter]]:
    """Makes adapters."""
    adapters: list[Adapter] = []

    def make(endpoint: str, **settings: object) -> Adapter:
        adapters.append(Adapter(endpoint, **settings))
        return adapters[-1]

    yield make
    for adapter in adapters:
        adapter.link.close()


Adapt = Callable[..., Adapter]


def test_each_verb_ends_in_the_queue(shared_server: Server, adapt: Adapt) -> None:
    adapter = adapt(shared_server.grpc)
    adapter.store(3)
    assert adapter.load(4) == 3
    space, link = adapter.space, adapter.link

    assert space.lookup(hashes(4), lease=10.0, tag=7)
    found = ended(link)
    assert (found.verb, found.tag, found.error) == ("lookup", 7, None)
    assert (found.result.prefix_blocks, found.result.miss) == (3, 1)
    assert found.result.lease.blocks == 3
    link.release(found.result.lease)
    assert found.result.lease.expires_in == 0

    assert space.touch(hashes(4), tag=8)
    assert ended(link).result == 3
    assert space.prefetch(hashes(4), tag=9)
    assert ended(link).result == (3, 0)
    assert adapter.counters.snapshot() == {"opened": 1}


def test_calls_that_wait_give_what_was_found(shared_server: Server, adapt: Adapt) -> None:
    adapter = adapt(shared_server.grpc)
    space = adapter.ready()
    assert space.store_now(hashes(2, 50), [value(50), value(51)]) is not None
    found = space.lookup_now(hashes(3, 50))
    assert found is not None
    assert found.prefix_blocks == 2
    buffers = [bytearray(BLOCK_BYTES) for _ in range(3)]
    loaded = space.load_now(hashes(3, 50), buffers)
    assert loaded is not None
    assert loaded.prefix_blocks == 2
    assert buffers[1] == value(51)


def test_a_server_that_comes_later_is_used_as_soon_as_it_is_there(
    start: Start, adapt: Adapt
) -> None:
    server = start()
    server.kill()
    adapter = adapt(server.grpc)
    until(lambda: adapter.counters["lost"] == 1)
    assert not adapter.space.lookup(hashes(1), tag=0)
    assert adapter.space.lookup_now(hashes(1)) is None
    assert adapter.counters["lookup_not_ready"] == 2
    server.start()
    adapter.store(2)
    assert adapter.load(2) == 2


@pytest.mark.parametrize("other_port", [False, True])
def test_a_killed_server_is_a_miss_at_once_and_used_again_when_it_is_back(
    start: Start, adapt: Adapt, other_port: bool
) -> None:
    server = start()
    adapter = adapt(server.grpc)
    adapter.store(2)
    server.kill()
    buffers = [bytearray(BLOCK_BYTES)]
    begun = adapter.space.load(hashes(1), buffers, tag="gone")
    if begun:
        done = ended(adapter.link)
        assert done.tag == "gone"
        assert done.error is not None
    until(lambda: not adapter.space.ready)
    assert not adapter.space.load(hashes(1), buffers, tag="gone")
    assert adapter.counters["load_failed"] + adapter.counters["load_not_ready"] >= 1
    if other_port:
        server.bulk = "127.0.0.1:0"
    server.start()
    assert adapter.load(2) == 0, "it had only dram"
    adapter.store(2)
    assert adapter.load(2) == 2


def test_a_server_that_hangs_costs_one_deadline_and_is_used_again(
    start: Start, adapt: Adapt
) -> None:
    server = start()
    adapter = adapt(server.grpc)
    adapter.store(2)
    server.pause()
    assert adapter.space.lookup(hashes(2), tag="hung")
    done = ended(adapter.link)
    assert isinstance(done.error, kvstrata.DeadlineError)
    assert not adapter.space.lookup(hashes(2), tag="next")
    assert adapter.counters["lookup_deadline"] == 1
    assert adapter.counters["lookup_not_ready"] == 1
    server.process.send_signal(signal.SIGCONT)
    assert adapter.load(2) == 2


def test_another_node_is_used_when_the_one_it_was_at_is_gone(start: Start, adapt: Adapt) -> None:
    first, second = start(), start()
    adapter = adapt(f"{first.grpc},{second.grpc}")
    adapter.store(2)
    assert first.metric('kvstrata_put_blocks_total{outcome="stored"}') == 2
    first.kill()
    space = adapter.space
    space.lookup(hashes(1), tag="gone")
    until(lambda: bool(adapter.counters["lost"]) and space.ready)
    adapter.link.finished()
    assert adapter.load(2) == 0, "they were the other's"
    adapter.store(2)
    assert adapter.load(2) == 2
    assert second.metric('kvstrata_put_blocks_total{outcome="stored"}') == 2


def test_a_node_that_will_go_away_is_left_and_what_it_has_promised_is_loaded(
    start: Start, adapt: Adapt
) -> None:
    first, second = start("server.drain_grace=60s"), start()
    adapter = adapt(f"{first.grpc},{second.grpc}")
    adapter.store(3)
    space = adapter.space
    found = space.lookup_now(hashes(3), lease=50.0)
    assert found is not None
    lease = found.lease
    assert lease is not None
    assert lease.blocks == 3
    first.process.send_signal(signal.SIGTERM)
    until(lambda: adapter.counters["moved"] == 1)
    assert adapter.counters["lost"] == 0
    # The promise is the first one's, and everything else is now the second one's.
    buffers = [bytearray(BLOCK_BYTES) for _ in range(3)]
    loaded = space.load_now(hashes(3), buffers, lease=lease)
    assert loaded is not None
    assert loaded.prefix_blocks == 3
    assert buffers[2] == value(2)
    assert adapter.load(3) == 0
    adapter.store(3)
    assert adapter.load(3) == 3
    assert second.metric('kvstrata_put_blocks_total{outcome="stored"}') == 3
    # With the promise ends the last that the first one was there for.
    adapter.link.release(lease)
    del lease, found
    assert first.process.wait(DEADLINE) == 0
    assert adapter.load(3) == 3


def test_a_namespace_that_is_refused_does_not_keep_others_away(
    shared_server: Server, adapt: Adapt, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapt(shared_server.grpc)
    with caplog.at_level(logging.ERROR, "kvstrata"):
        bad = adapter.link.open(Identity("m", "vllm", "bf16", 0, ((0, 0, 1),), "sha256"))
        good = adapter.link.open(Opaque("m@0@0"))
        until(lambda: good.ready)
    assert isinstance(bad.refused, kvstrata.InvalidError)
    assert "block_tokens" in caplog.text
    assert not bad.ready
    assert adapter.counters["refused"] == 1
    key = [kvstrata.foreign_hash(b"key")]
    assert good.store_now(key, [b"value"]) is not None
    assert good.lookup_now(key) is not None


def test_more_requests_than_allowed_are_shed(start: Start, adapt: Adapt) -> None:
    server = start()
    adapter = adapt(server.grpc, timeout=5.0)
    space = adapter.ready()
    server.pause()
    begun = sum(space.lookup(hashes(1), tag=number) for number in range(4100))
    assert begun == 4096
    assert adapter.counters["lookup_shed"] == 4
    assert space.ready
    server.process.send_signal(signal.SIGCONT)
    done: list[Done] = []

    def all_ended() -> bool:
        done.extend(adapter.link.finished())
        return len(done) == begun

    until(all_ended)
    assert all(each.error is None for each in done)


def test_stores_do_not_stand_before_loads(start: Start, adapt: Adapt) -> None:
    server = start("dram.capacity=512MiB")
    adapter = adapt(server.grpc)
    adapter.store(1)
    # Long ones, so that the load has the time of many of them.
    long = adapter.link.open(Opaque("long"))
    until(lambda: long.ready)
    server.pause()
    value_of_all = bytes(8 << 20)
    for number in range(48):
        assert long.store(hashes(1, number), [value_of_all], tag="store")
    assert adapter.space.load(hashes(1), [bytearray(BLOCK_BYTES)], tag="load")
    server.process.send_signal(signal.SIGCONT)
    order: list[str] = []

    def all_ended() -> bool:
        done = adapter.link.finished()
        assert all(each.error is None for each in done)
        order.extend(each.tag for each in done)
        return len(order) == 49

    until(all_ended)
    assert order.index("load") < 32, "behind all stores that could move before it"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpont": "x"}, ["endpont", "endpoint"]),
        ({"timeout": 0}, ["timeout", "0", "above 0 to 3600"]),
        ({"timeout": True}, ["timeout", "True"]),
        ({"load_timeout": "long"}, ["load_timeout", "'long'"]),
        ({"path": "carrier"}, ["path", "'carrier'", "auto, grpc, bulk, shm"]),
        ({"endpoint": 9400}, ["endpoint", "9400"]),
        ({"token": 1234567}, ["token"]),
        ({"keep_tokens": "yes"}, ["keep_tokens", "'yes'", "true or false"]),
        ({"hash_schemes": ["dynamo", "vllm"]}, ["hash_schemes", "'vllm'", "vllm_u64"]),
        ({"hash_schemes": "llm_d,dynamo"}, ["hash_schemes", "a list of"]),
    ],
)
def test_a_bad_setting_is_named(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(kvstrata.InvalidError) as raised:
        Settings.parse(given)
    assert all(word in str(raised.value) for word in words)
    assert "1234567" not in str(raised.value)


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_ENDPOINT", "there:1")
    monkeypatch.setenv("KVSTRATA_TOKEN", "a-secret-of-some-length")
    monkeypatch.setenv("KVSTRATA_INSTANCE", "10.0.0.7:8000")
    monkeypatch.setenv("KVSTRATA_NODE", "gpu-7")
    monkeypatch.setenv("KVSTRATA_ZONE", "z")
    parsed, rest = Settings.parse({"timeout": 2, "mine": 3}, also=("mine", "other"))
    assert (parsed.endpoint, parsed.timeout, rest) == ("there:1", 2.0, {"mine": 3})
    assert parsed.token == "a-secret-of-some-length"
    assert "secret" not in repr(parsed)
    assert (parsed.instance, parsed.node, parsed.zone) == ("10.0.0.7:8000", "gpu-7", "z")
    assert Settings.parse({"endpoint": "here:1"})[0].endpoint == "here:1"


def test_schemes_of_tokens_keep_them() -> None:
    def of(**given: object) -> tuple[bool, tuple[str, ...]]:
        parsed, _ = Settings.parse(given)
        return parsed.keep_tokens, parsed.hash_schemes

    assert of() == (False, ())
    assert of(hash_schemes=["vllm_u64"]) == (False, ("vllm_u64",))
    assert of(hash_schemes=["vllm_u64", "dynamo"]) == (True, ("vllm_u64", "dynamo"))
    assert of(keep_tokens=True) == (True, ())


def test_a_digest_differs_where_a_field_does() -> None:
    fields = {"a": 1, "b": (2, "x")}
    assert digest(fields) == digest(dict(reversed(fields.items())))
    assert digest(fields) != digest({**fields, "a": "1"})
    assert digest({"a": "1;1:b=2"}) != digest({"a": "1", "b": "2"})


def test_the_longest_call_is_known() -> None:
    counters = Counters()
    for pause in (0.0, 0.002):
        with counters.call():
            time.sleep(pause)
    assert counters["calls"] == 2
    assert counters["slow_calls"] >= 1
    assert counters.slowest >= 0.002


def test_of_calls_that_come_often_the_longest_is_kept() -> None:
    counters = Counters()
    for pause in (0.0, 0.002, 0.0):
        with counters.call(often=True):
            time.sleep(pause)
    with counters.call():
        pass
    first, longest = counters.take_calls()
    assert longest >= 0.002 > first
    assert counters.take_calls() == []


def test_a_sparse_lookup_of_packed_hashes_sees_behind_a_gap(server: Server, adapt: Adapt) -> None:
    adapter = adapt(server.grpc)
    adapter.store(2)
    packed = bytearray(b"".join(hashes(1) + hashes(1, first=900) + hashes(1, first=1)))
    assert adapter.space.lookup(packed, sparse=True, tag="sparse")
    found = ended(adapter.link).result
    assert found.prefix_blocks == 1
    assert [(run.start, run.end) for run in found.sparse] == [(2, 3)]
