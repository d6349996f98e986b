"""The HiCache backend under an engine that does what SGLang does, against real servers."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import Server, Start
from fake_sglang import (
    PAGE,
    PROMPT,
    MakeRank,
    Pool,
    StorageConfig,
    extra_config,
    is_ready,
    page_hashes,
    prefetch,
    raw,
    until,
)

from kvstrata.sglang import KvstrataStorage

pytest_plugins = ["sglang_fixtures"]
LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")


@pytest.mark.parametrize(("layout", "kv"), list(itertools.product(LAYOUTS, (1, 2))))
def test_pages_come_back_as_they_were(
    shared_server: Server, make_rank: MakeRank, layout: str, kv: int
) -> None:
    keys = page_hashes(PROMPT)
    mla = {"is_mla_model": kv == 1}
    writer = make_rank(shared_server, Pool(layout, kv=kv), **mla)
    assert writer.backup(keys, first=3) == 10
    reader = make_rank(shared_server, Pool(layout, kv=kv), **mla)
    # To other places in another engine's pool.
    assert prefetch([reader], keys, first=30) == 10
    counted = reader.storage.counters
    assert (counted["found_pages"], counted["loaded_pages"]) == (10, 10)
    assert counted["raised"] == 0
    assert len(reader.storage._promises) == 0


def test_a_long_prompt_takes_many_calls_and_its_tail_is_left_out(
    shared_server: Server, make_rank: MakeRank
) -> None:
    pool = {"page_size": 1, "pages": 400, "layer_num": 1}
    keys = page_hashes(range(300), page=1)
    writer = make_rank(shared_server, Pool(**pool))  # type: ignore[arg-type]
    assert writer.backup(keys[:290]) == 290
    reader = make_rank(shared_server, Pool(**pool))  # type: ignore[arg-type]
    assert prefetch([reader], keys) == 290
    # SGLang may also ask for all of them at once.
    assert reader.storage.batch_exists(keys) == 290
    # A page that is not full has no key.
    assert len(page_hashes(range(PAGE * 2 + 3))) == 2


def test_only_leading_pages_count(shared_server: Server, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    rank.backup(keys)
    client, namespace = raw(shared_server, rank)
    with client:
        assert namespace.remove([bytes.fromhex(keys[4])]) == 1
        assert rank.storage.batch_exists(keys) == 4
        assert rank.storage.batch_exists(keys[4:]) == 0
        assert rank.storage.batch_exists(keys[5:]) == 5


def test_a_page_lost_after_it_was_found_ends_the_load_there(
    shared_server: Server, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    rank.backup(keys)
    assert rank.storage.batch_exists(keys) == 10
    client, namespace = raw(shared_server, rank)
    with client:
        namespace.remove([bytes.fromhex(keys[6])])
    results = rank.storage.batch_get_v1(keys, rank.pool.indices(range(10, 20)))
    assert results == [True] * 6 + [False] * 4
    assert all(rank.pool.holds(10 + at, keys[at]) for at in range(6))


def test_a_rank_that_lacks_its_share_makes_it_a_miss_for_all(
    shared_server: Server, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    ranks = [make_rank(shared_server, tp_rank=rank, tp_size=4) for rank in range(4)]
    for rank in ranks[:3]:
        assert rank.backup(keys) == 10
    assert [rank.storage.batch_exists(keys) for rank in ranks] == [0] * 4
    assert ranks[3].backup(keys[:7]) == 7
    # All give the same answer without asking each other.
    assert [rank.storage.batch_exists(keys) for rank in ranks] == [7] * 4
    assert prefetch(ranks, keys, first=20) == 7


def test_k_without_v_is_a_miss(shared_server: Server, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    client, namespace = raw(shared_server, rank)
    half = rank.pool.page_bytes // 2
    with client:
        put = namespace.put([bytes.fromhex(keys[0])], [bytes(half)], parts=[0])
        assert put.outcomes == ["part_stored"]
    assert rank.storage.batch_exists(keys) == 0
    assert rank.storage.batch_get_v1(keys[:1], rank.pool.indices([0])) == [False]
    assert rank.backup(keys[:2]) == 2
    assert rank.storage.batch_exists(keys) == 2


def test_mla_is_stored_once(shared_server: Server, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    ranks = [
        make_rank(shared_server, Pool(kv=1), is_mla_model=True, tp_rank=rank, tp_size=8)
        for rank in range(8)
    ]
    for rank in ranks:
        # Also if a replica is asked to store, which SGLang does not do.
        rank.pool.fill(0, keys[0])
        assert rank.storage.batch_set_v1(keys[:1], rank.pool.indices([0])) == [True]
    assert [rank.storage.counters["stored_pages"] for rank in ranks] == [1] + [0] * 7
    ranks[0].backup(keys)
    assert prefetch(ranks, keys, first=20) == 10


def test_memory_may_change_as_soon_as_a_store_has_returned(
    shared_server: Server, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    rank.backup(keys)
    rank.pool.kv_buffer[...] = 7
    assert prefetch([rank], keys, first=40) == 10


def test_nothing_is_ever_raised_and_every_answer_has_its_length(
    shared_server: Server, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    storage, indices = rank.storage, rank.pool.indices
    assert rank.backup(keys) == 10
    # Fewer places than pages, no tensor, keys that are none.
    assert storage.batch_get_v1(keys, indices(range(3))) == [False] * 10
    assert storage.batch_set_v1(keys, indices(range(3))) == [False] * 10
    assert storage.batch_get_v1(keys, None) == [False] * 10
    assert storage.batch_set_v1(keys, None) == [False] * 10
    odd = [*keys[:2], "not hexadecimal", "ab", *keys[4:]]
    assert storage.batch_exists(odd) == 2
    assert storage.batch_get_v1(odd, indices(range(10))) == [False] * 10
    assert storage.batch_set_v1(odd, indices(range(10))) == [False] * 10
    assert storage.batch_exists([]) == 0
    assert storage.batch_get_v1([], indices([])) == []
    assert storage.batch_set_v1([], indices([])) == []
    # Something inside fails.
    with monkeypatch.context() as broken:
        broken.setattr("kvstrata.sglang.storage.find", lambda *_, **__: 1 / 0)
        assert storage.batch_exists(keys) == 0
        broken.setattr(rank.pool, "get_page_buffer_meta", lambda *_: 1 / 0)
        assert storage.batch_get_v1(keys, indices(range(10))) == [False] * 10
    assert storage.counters["raised"] >= 4
    assert storage.batch_exists(keys) == 10
    # What came before the pool did: nothing is known, nothing is found.
    early = KvstrataStorage(StorageConfig(extra_config(shared_server.grpc)), {})
    assert early.batch_exists(keys) == 0
    assert early.batch_get_v1(keys, None) == [False] * 10
    assert early.batch_set_v1(keys, None) == [False] * 10
    early.close()


def test_the_oldest_interface_answers_and_does_nothing(
    shared_server: Server, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    rank.backup(keys[:1])
    storage = rank.storage
    assert storage.exists(keys[0])
    assert not storage.exists(keys[1])
    assert storage.get(keys[0]) is None  # type: ignore[func-returns-value]
    assert storage.batch_get(keys) == [None] * 10
    assert not storage.set(keys[1])
    assert not storage.batch_set(keys)
    assert not storage.clear()
    assert storage.exists(keys[0])


def test_a_server_that_comes_later_is_found(start: Start, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    server = start()
    server.kill()
    rank = make_rank(server, wait=False)
    begun = time.monotonic()
    assert rank.backup(keys) == 0
    assert prefetch([rank], keys) == 0
    assert time.monotonic() - begun < 5.0
    server.start()
    until(lambda: is_ready(rank))
    assert rank.backup(keys) == 10
    assert prefetch([rank], keys, first=20) == 10


def test_a_killed_server_is_a_miss_and_hits_come_back(start: Start, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    server = start()
    rank = make_rank(server)
    assert rank.backup(keys) == 10
    assert rank.storage.batch_exists(keys) == 10
    server.kill()
    begun = time.monotonic()
    assert rank.storage.batch_get_v1(keys, rank.pool.indices(range(10))) == [False] * 10
    assert prefetch([rank], keys) == 0
    assert rank.backup(keys) == 0
    assert time.monotonic() - begun < 5.0
    server.start()
    until(lambda: is_ready(rank))
    assert rank.backup(keys) == 10
    assert prefetch([rank], keys, first=20) == 10


def test_a_server_killed_in_the_middle_of_a_load_gives_right_pages_or_none(
    start: Start, make_rank: MakeRank
) -> None:
    keys = page_hashes(range(48 * PAGE))
    server = start()
    # Pages of 768 KiB.
    pool: dict[str, Any] = {"layer_num": 32, "head_num": 8, "head_dim": 48, "pages": 48}
    rank = make_rank(server, Pool(**pool))
    assert rank.backup(keys) == 48
    for _ in range(3):
        killer = threading.Timer(0.005, server.kill)
        killer.start()
        loaded = prefetch([rank], keys)  # checks what it has
        killer.join()
        assert 0 <= loaded <= 48
        server.start()
        until(lambda: is_ready(rank))
        assert rank.backup(keys) == 48
    assert prefetch([rank], keys) == 48


def test_a_server_that_hangs_costs_one_deadline(start: Start, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    server = start()
    rank = make_rank(server, ours={"timeout": 0.5, "load_timeout": 2.0})
    assert rank.backup(keys) == 10
    server.pause()
    begun = time.monotonic()
    assert prefetch([rank], keys) == 0
    assert time.monotonic() - begun < 5.0
    begun = time.monotonic()
    for _ in range(20):
        assert prefetch([rank], keys) == 0
    assert time.monotonic() - begun < 3.0, "who waits although the server is known to hang?"
    server.process.send_signal(signal.SIGCONT)
    until(lambda: is_ready(rank))
    assert prefetch([rank], keys, first=20) == 10


def test_one_rank_without_a_server_leaves_the_others_whole(
    start: Start, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    server, gone = start(), start()
    ranks = [make_rank(server, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank in ranks:
        assert rank.backup(keys) == 10
    gone.kill()
    lost = make_rank(gone, tp_rank=1, tp_size=2, wait=False)
    # The same number of calls on both, and the smaller answer.
    assert prefetch([ranks[0], lost], keys, first=20) == 0
    assert prefetch(ranks, keys, first=20) == 10


def test_what_has_moved_is_told_in_the_engines_own_record(
    shared_server: Server, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    rank.backup(keys)
    prefetch([rank], keys, first=20)
    assert rank.storage.get_stats() is None
    rank.backup(keys[:3])
    prefetch([rank], keys[:3], first=20)
    collector = ModuleType("metrics_collector")
    collector.__dict__["StorageMetrics"] = SimpleNamespace
    monkeypatch.setitem(sys.modules, "sglang.srt.observability", ModuleType("observability"))
    monkeypatch.setitem(sys.modules, "sglang.srt.observability.metrics_collector", collector)
    told: Any = rank.storage.get_stats()
    assert (told.prefetch_pgs, told.backup_pgs) == ([3], [3])
    assert all(rate > 0 for rate in told.prefetch_bandwidth)
    told = rank.storage.get_stats()
    assert told.prefetch_pgs == []


def test_a_page_knows_the_one_before_it_where_sglang_says_which(
    shared_server: Server, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    parents: list[bytes | None] = []
    space = rank.storage._space
    assert space is not None
    store = space.store_now

    def noted(*given: Any, parent: bytes | None, **named: Any) -> Any:
        parents.append(parent)
        return store(*given, parent=parent, **named)

    monkeypatch.setattr(space, "store_now", noted)
    for before in (None, [], keys[:3], ["no key"]):
        extra = SimpleNamespace(prefix_keys=before)
        assert rank.storage.batch_set_v1(keys[3:4], rank.pool.indices([3]), extra) == [True]
    assert parents == [None, None, bytes.fromhex(keys[2]), None]


def test_leases_end_with_their_loads(shared_server: Server, make_rank: MakeRank) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
    rank.backup(keys)
    promises = rank.storage._promises
    assert rank.storage.batch_exists(keys) == 10
    assert len(promises) == 1
    assert rank.storage.batch_get_v1(keys[:4], rank.pool.indices(range(4))) == [True] * 4
    assert len(promises) == 1
    assert rank.storage.batch_get_v1(keys[4:], rank.pool.indices(range(4, 10))) == [True] * 6
    assert len(promises) == 0
    rank.storage.close()
    rank.storage.close()
    assert rank.storage.batch_exists(keys) == 0
