"""The L2 connector under an adapter that does what LMCache's does, against real servers."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, Start
from fake_lmcache import CHUNK_BYTES, DEADLINE, Adapter, key

import kvstrata
from kvstrata import InvalidError
from kvstrata.lmcache import KvstrataConnector
from kvstrata.lmcache.keys import space_of

Make = Callable[..., Adapter]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes adapters."""
    adapters: list[Adapter] = []

    def maker(server: Server, **params: Any) -> Adapter:
        adapters.append(Adapter(server.grpc, **params))
        return adapters[-1]

    yield maker
    for adapter in adapters:
        adapter.connector.close()


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A model that no other test has."""
    return str(request.node.name)


def chunks(model: str, *numbers: int, **said: Any) -> list[str]:
    """Keys of chunks."""
    return [key(number, model=model, **said) for number in numbers]


def spaces(server: Server) -> set[str]:
    """The namespaces of a server by name."""
    with kvstrata.Client(server.grpc) as client:
        return {each["model"] for each in client.stats()["namespaces"]}


def test_values_come_back_as_they_were(shared_server: Server, make: Make, model: str) -> None:
    keys = chunks(model, *range(20))
    writer = make(shared_server)
    assert writer.exists(keys) == [False] * 20
    assert writer.load(keys) == [False] * 20
    assert writer.store(keys)
    reader = make(shared_server)
    # Also the first question of a connector waits until it can be answered.
    assert reader.exists(keys) == [True] * 20
    assert reader.load(keys) == [True] * 20
    assert len(reader.connector._promises) == 0
    # Again, as engines do.
    assert reader.store(keys)


def test_every_key_has_an_answer_of_its_own(shared_server: Server, make: Make, model: str) -> None:
    keys = chunks(model, *range(10))
    adapter = make(shared_server)
    adapter.store(keys)
    assert adapter.delete(keys[3:5])
    # A window of attention may need the last chunks only.
    there = [True] * 3 + [False] * 2 + [True] * 5
    assert adapter.exists(keys) == there
    assert adapter.load(keys) == there
    assert adapter.exists(list(reversed(keys))) == list(reversed(there))
    assert adapter.delete(keys)
    assert adapter.exists(keys) == [False] * 10


def test_a_batch_may_be_of_many_ranks_groups_and_salts(
    shared_server: Server, make: Make, model: str
) -> None:
    adapter = make(shared_server)
    said: list[dict[str, Any]] = [
        {"rank": rank, "group": group, "salt": salt}
        for rank in (0x02000200, 0x02010201)
        for group in (0, 1)
        for salt in ("", "user-1")
    ]
    rows = [chunks(model, *range(5), **each) for each in said]
    keys = [each for row in rows for each in row]
    assert adapter.store(keys)
    assert adapter.delete(rows[5])
    assert adapter.exists(keys) == [True] * 25 + [False] * 5 + [True] * 10
    assert adapter.load(keys) == [True] * 25 + [False] * 5 + [True] * 10
    names = {name for name in spaces(shared_server) if f"/{model}@" in name}
    assert len(names) == 8
    # Who reads the names learns no salt.
    assert not any("user-1" in name for name in names)


def test_what_keys_say_keeps_values_apart(shared_server: Server, make: Make, model: str) -> None:
    adapter = make(shared_server)
    assert adapter.store(chunks(model, 1, 2, 3))
    others = [
        chunks(f"{model}-fp8", 1, 2, 3),
        chunks(model, 1, 2, 3, rank=0x02000200),
        chunks(model, 1, 2, 3, group=1),
        chunks(model, 1, 2, 3, salt="a"),
        chunks(model, 4, 5, 6),
    ]
    for keys in others:
        assert adapter.exists(keys) == [False] * 3, keys
        assert adapter.load(keys) == [False] * 3, keys
    assert adapter.store(chunks(model, 1, salt="a"))
    assert adapter.exists(chunks(model, 1, salt="b")) == [False]
    # What they do not say, such as the LoRA adapter or the weights, is a person's to say.
    other = make(shared_server, label="weights-2")
    assert other.exists(chunks(model, 1, 2, 3)) == [False] * 3
    assert other.load(chunks(model, 1, 2, 3)) == [False] * 3
    assert adapter.load(chunks(model, 1, 2, 3)) == [True] * 3


@pytest.mark.parametrize(
    ("given", "space"),
    [
        ("org/m@01000100@0@00ff", "org/m@01000100@0"),
        ("org/m@01000100@0@00fe", "org/m@01000100@0"),
        ("org/m@01000100@1f@00fe", "org/m@01000100@1f"),
        ("m@1@0@00ff", None),
        ("m@01000100@0@", None),
        ("m@01000100@0@xyz", None),
        ("m@01000100@0@ff@", None),
        ("m@01000100@0@ff@a@b", None),
        ("@01000100@0@ff", None),
        ("", None),
        ("m@2@1@5a@bfloat16metadata", None),
    ],
)
def test_keys_are_read(given: str, space: str | None) -> None:
    assert space_of(given) == space


def test_salts_are_told_apart_and_not_shown() -> None:
    names = {space_of(f"m@01000100@0@ff@{salt}") for salt in ("a", "b", "00" * 16)}
    assert len(names) == 3
    assert all(name is not None and len(name.rsplit("@", 1)[1]) == 32 for name in names)


def test_keys_of_any_form_are_stored(shared_server: Server, make: Make, model: str) -> None:
    odd = [f"{model}{odd}" for odd in ("", "@2@1@5a@bfloat16", "\u00e9", "@" * 9, "m" * 3000)]
    # One whose parts are right, but too long for a name.
    odd.append(f"{model}{'m' * 2000}@01000100@0@ff")
    adapter = make(shared_server)
    assert adapter.store(odd)
    assert adapter.exists(odd) == [True] * len(odd)
    assert adapter.load(odd) == [True] * len(odd)


def test_salts_without_end_share_a_namespace_and_stay_apart(
    shared_server: Server, make: Make, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.lmcache.keys._SPACES_MAX", 3)
    adapter = make(shared_server)
    keys = [chunks(model, 1, salt=f"user-{user}")[0] for user in range(10)]
    assert adapter.store(keys[:9])
    assert adapter.exists(keys) == [True] * 9 + [False]
    assert adapter.load(keys) == [True] * 9 + [False]
    assert len({name for name in spaces(shared_server) if f"/{model}@" in name}) == 3


def test_a_value_of_another_length_makes_room_for_the_right_one(
    shared_server: Server, make: Make, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = chunks(model, *range(6))
    adapter = make(shared_server)
    assert adapter.store(keys[:3])
    assert adapter.store(keys[3:], CHUNK_BYTES * 2)
    assert adapter.load(keys) == [True] * 3 + [False] * 3
    assert adapter.load(keys[:3], CHUNK_BYTES * 2) == [False] * 3
    assert adapter.connector.counters["misfits"] == 6
    assert "values of another length removed" in caplog.text
    assert adapter.exists(keys) == [False] * 6
    assert adapter.store(keys)
    assert adapter.load(keys) == [True] * 6


def test_a_value_too_long_for_the_server_is_refused_and_the_others_stored(
    shared_server: Server, make: Make, model: str
) -> None:
    adapter = make(shared_server)
    assert not adapter.store(chunks(model, 1), 65 << 20)
    assert adapter.store(chunks(model, 2))
    assert adapter.exists(chunks(model, 1, 2)) == [False, True]


def test_settings_are_checked(shared_server: Server) -> None:
    for params, error in (
        ({"endpiont": "x"}, "endpiont: no such setting; there are .*label"),
        ({"label": 3}, "label: 3 given, a text of up to 256 allowed"),
        ({"path": "rdma"}, "path: 'rdma' given, one of auto"),
    ):
        with pytest.raises(InvalidError, match=error):
            KvstrataConnector(**params)


def test_a_server_that_comes_later_is_found(start: Start, make: Make, model: str) -> None:
    keys = chunks(model, *range(5))
    server = start()
    server.kill()
    adapter = make(server)
    begun = time.monotonic()
    assert adapter.exists(keys) == [False] * 5
    assert adapter.load(keys) == [False] * 5
    assert not adapter.store(keys)
    assert not adapter.delete(keys)
    assert time.monotonic() - begun < 5.0
    server.start()
    until(lambda: adapter.store(keys))
    assert adapter.load(keys) == [True] * 5


def test_a_killed_server_is_a_miss_and_hits_come_back(start: Start, make: Make, model: str) -> None:
    keys = chunks(model, *range(5))
    server = start()
    adapter = make(server)
    assert adapter.store(keys)
    assert adapter.exists(keys) == [True] * 5
    server.kill()
    begun = time.monotonic()
    assert adapter.load(keys) == [False] * 5
    assert adapter.exists(keys) == [False] * 5
    assert not adapter.store(keys)
    assert time.monotonic() - begun < 5.0
    server.start()
    until(lambda: adapter.store(keys))
    assert adapter.exists(keys) == [True] * 5
    assert adapter.load(keys) == [True] * 5


def test_a_server_killed_in_the_middle_of_a_load_gives_right_values_or_none(
    start: Start, make: Make, model: str
) -> None:
    keys = chunks(model, *range(16))
    length = 1 << 20
    server = start()
    adapter = make(server)
    assert adapter.store(keys, length)
    for _ in range(3):
        killer = threading.Timer(0.005, server.kill)
        killer.start()
        adapter.load(keys, length)  # checks what it has
        killer.join()
        server.start()
        until(lambda: adapter.store(keys, length))
    assert adapter.load(keys, length) == [True] * 16


def test_chunks_that_are_only_in_the_bucket_are_waited_for(
    start: Start, make: Make, model: str, tmp_path: Path
) -> None:
    nvme, bucket = tmp_path / "nvme", tmp_path / "bucket"
    for each in (nvme, bucket):
        each.mkdir()
    server = start(
        *(f"nvme.path={nvme}", "nvme.segment_bytes=4MiB", "nvme.daily_writes=none"),
        *(f"object.url=file://{bucket}", "object.pack_bytes=8MiB", "object.admission=all"),
        "node.name=node-0",
    )
    adapter = make(server)
    keys = chunks(model, *range(320))
    for at in range(0, 320, 32):
        assert adapter.store(keys[at : at + 32])

    def packed() -> int:
        with kvstrata.Client(server.grpc) as client:
            tiers = client.stats()["tiers"]
        return sum(tier["blocks"] for tier in tiers if tier["tier"] == "object")

    until(lambda: packed() >= 200)
    server.kill()
    shutil.rmtree(nvme)
    nvme.mkdir()
    server.start()
    # The node reads the names of its packs first.
    until(lambda: sum(adapter.exists(keys)) >= 200)
    there = adapter.exists(keys)
    assert adapter.load(keys) == there
    assert adapter.connector.counters["waited_blocks"] >= 200


def test_submitting_waits_for_nothing(start: Start, make: Make, model: str) -> None:
    server = start()
    adapter = make(server, timeout=0.5, load_timeout=2.0)
    assert adapter.store(chunks(model, 1))
    server.pause()
    connector, took, numbers = adapter.connector, [], []
    memory = memoryview(bytearray(CHUNK_BYTES))
    for _ in range(50):
        begun = time.monotonic()
        numbers.append(connector.submit_batch_exists(chunks(model, 1)))
        numbers.append(connector.submit_batch_get(chunks(model, 1), [memory]))
        numbers.append(connector.submit_batch_set(chunks(model, 1), [memory]))
        took.append(time.monotonic() - begun)
    # Half of them, so that a busy machine does not count.
    assert sorted(took)[25] < 0.003
    assert not any(adapter.wait(number, 1)[3] == [True] for number in numbers)


def test_a_server_that_hangs_costs_one_deadline(start: Start, make: Make, model: str) -> None:
    keys = chunks(model, *range(5))
    server = start()
    adapter = make(server, timeout=0.5, load_timeout=2.0)
    assert adapter.store(keys)
    server.pause()
    begun = time.monotonic()
    assert adapter.exists(keys) == [False] * 5
    assert time.monotonic() - begun < 5.0
    begun = time.monotonic()
    for _ in range(20):
        assert adapter.exists(keys) == [False] * 5
        assert adapter.load(keys) == [False] * 5
    assert time.monotonic() - begun < 3.0, "who waits although the server is known to hang?"
    server.process.send_signal(signal.SIGCONT)
    until(lambda: all(adapter.exists(keys)))
    assert adapter.load(keys) == [True] * 5


def test_a_slow_store_delays_no_lookup(start: Start, make: Make, model: str) -> None:
    server = start()
    adapter = make(server)
    assert adapter.exists(chunks(model, 1)) == [False]
    connector = adapter.connector
    release = threading.Event()
    for _ in range(4):
        connector._pools["set"].submit(release.wait)
    number = connector.submit_batch_set(chunks(model, 1), [memoryview(bytes(CHUNK_BYTES))])
    assert adapter.exists(chunks(model, 1)) == [False]
    assert number not in adapter.ended
    release.set()
    assert adapter.wait(number, 1)[1]
    assert adapter.exists(chunks(model, 1)) == [True]


def test_too_much_at_once_is_shed_and_all_of_it_ends(
    shared_server: Server, make: Make, model: str
) -> None:
    adapter = make(shared_server)
    connector = adapter.connector
    release = threading.Event()
    for _ in range(4):
        connector._pools["exists"].submit(release.wait)
    keys = chunks(model, 1, 2)
    numbers = [connector.submit_batch_exists(keys) for _ in range(300)]
    release.set()
    results = [adapter.wait(number, 2) for number in numbers]
    assert sum(result[1] for result in results) == 256
    assert connector.counters["exists_shed"] == 44
    assert adapter.store(keys)
    assert adapter.exists(keys) == [True, True]


def test_nothing_is_ever_raised(
    shared_server: Server, make: Make, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chunks(model, 1, 2)
    adapter = make(shared_server)
    assert adapter.store(keys)
    connector = adapter.connector
    # Fewer buffers than keys, read-only ones, a key that no text is.
    assert adapter.wait(connector.submit_batch_get(keys, []), 2)[3] == [False, False]
    assert not adapter.wait(connector.submit_batch_set(keys, []), 2)[1]
    rooms = [memoryview(bytes(CHUNK_BYTES))] * 2
    assert adapter.wait(connector.submit_batch_get(keys, rooms), 2)[3] == [False, False]
    assert adapter.exists([3, "\ud800"]) == [False, False]  # type: ignore[list-item]
    assert adapter.exists([]) == []
    with monkeypatch.context() as broken:
        broken.setattr("kvstrata.lmcache.connector.find", lambda *_, **__: 1 / 0)
        assert adapter.exists(keys) == [False, False]
    assert adapter.exists(keys) == [True, True]


def test_it_ends_at_once_and_for_good(start: Start, model: str) -> None:
    server = start()
    adapter = Adapter(server.grpc)
    assert adapter.store(chunks(model, 1))
    server.pause()
    adapter.connector.submit_batch_exists(chunks(model, 1))
    begun = time.monotonic()
    adapter.connector.close()
    assert time.monotonic() - begun < 5.0
    adapter.connector.close()
    assert adapter.connector.submit_batch_exists(chunks(model, 1)) > 0
    assert [each[1] for each in adapter.connector.drain_completions()][-1:] == [False]


def test_many_threads_at_once_lose_nothing(shared_server: Server, make: Make, model: str) -> None:
    # LMCache stores and loads from threads of its own.
    adapters = [make(shared_server) for _ in range(2)]
    failures: list[str] = []

    def run(adapter: Adapter, seed: int) -> None:
        chance = random.Random(seed)
        for turn in range(20):
            keys = chunks(model, *(chance.randrange(40) for _ in range(4)), salt=f"{turn % 3}")
            keys = list(dict.fromkeys(keys))
            if not adapter.store(keys) or not all(adapter.load(keys)):
                failures.append(f"turn {turn} of {seed}")

    threads = [
        threading.Thread(target=run, args=(adapter, seed)) for seed, adapter in enumerate(adapters)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def until(holds: Callable[[], object]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.01)
