"""The HiCache backend under an engine that does what SGLang does, against real servers."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import Server, Start
from fake_sglang import PAGE, Pool, Rank, StorageConfig, extra_config, page_hashes, prefetch

import kvstrata
from kvstrata import InvalidError
from kvstrata.sglang import KvstrataStorage

DEADLINE = 20.0
"""Seconds after which a test gives up."""
PROMPT = list(range(1000, 1000 + 10 * PAGE))
LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
Make = Callable[..., Rank]


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the adapter asks of SGLang: that keys have salts, and the engine's arguments."""
    arguments: dict[str, Any] = {}
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.utils": {"storage_namespace_seed": page_hashes},
        "sglang.srt.runtime_context": {"get_server_args": lambda: SimpleNamespace(**arguments)},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__dict__.update(attributes, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return arguments


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes ranks, of a model that no other test has."""
    ranks: list[Rank] = []

    def maker(
        server: Server,
        pool: Pool | None = None,
        ours: Any = None,
        *,
        wait: bool = True,
        **said: Any,
    ) -> Rank:
        config = {"model_name": request.node.name} | said
        extra = extra_config(server.grpc, **(ours or {}))
        rank = Rank(StorageConfig(extra, **config), pool or Pool())
        ranks.append(rank)
        if wait:
            until(lambda: is_ready(rank))
        return rank

    yield maker
    for rank in ranks:
        rank.storage.close()


def until(holds: Callable[[], object]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.001)


def is_ready(rank: Rank) -> bool:
    """Whether its namespace is open."""
    return rank.storage._space is not None and rank.storage._space.ready


def raw(server: Server, rank: Rank) -> tuple[kvstrata.Client, kvstrata.Namespace]:
    """The namespace of a rank, for what an engine would not do. Close the client."""
    client = kvstrata.Client(server.grpc)
    assert rank.storage._space is not None
    return client, rank.storage._space.identity.open(client)


@pytest.mark.parametrize(("layout", "kv"), list(itertools.product(LAYOUTS, (1, 2))))
def test_pages_come_back_as_they_were(
    shared_server: Server, make: Make, layout: str, kv: int
) -> None:
    keys = page_hashes(PROMPT)
    mla = {"is_mla_model": kv == 1}
    writer = make(shared_server, Pool(layout, kv=kv), **mla)
    assert writer.backup(keys, first=3) == 10
    reader = make(shared_server, Pool(layout, kv=kv), **mla)
    # To other places in another engine's pool.
    assert prefetch([reader], keys, first=30) == 10
    counted = reader.storage.counters
    assert (counted["found_pages"], counted["loaded_pages"]) == (10, 10)
    assert counted["raised"] == 0
    assert len(reader.storage._promises) == 0


def test_a_long_prompt_takes_many_calls_and_its_tail_is_left_out(
    shared_server: Server, make: Make
) -> None:
    pool = {"page_size": 1, "pages": 400, "layer_num": 1}
    keys = page_hashes(range(300), page=1)
    writer = make(shared_server, Pool(**pool))  # type: ignore[arg-type]
    assert writer.backup(keys[:290]) == 290
    reader = make(shared_server, Pool(**pool))  # type: ignore[arg-type]
    assert prefetch([reader], keys) == 290
    # SGLang may also ask for all of them at once.
    assert reader.storage.batch_exists(keys) == 290
    # A page that is not full has no key.
    assert len(page_hashes(range(PAGE * 2 + 3))) == 2


def test_only_leading_pages_count(shared_server: Server, make: Make) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
    rank.backup(keys)
    client, namespace = raw(shared_server, rank)
    with client:
        assert namespace.remove([bytes.fromhex(keys[4])]) == 1
        assert rank.storage.batch_exists(keys) == 4
        assert rank.storage.batch_exists(keys[4:]) == 0
        assert rank.storage.batch_exists(keys[5:]) == 5


def test_a_page_lost_after_it_was_found_ends_the_load_there(
    shared_server: Server, make: Make
) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
    rank.backup(keys)
    assert rank.storage.batch_exists(keys) == 10
    client, namespace = raw(shared_server, rank)
    with client:
        namespace.remove([bytes.fromhex(keys[6])])
    results = rank.storage.batch_get_v1(keys, rank.pool.indices(range(10, 20)))
    assert results == [True] * 6 + [False] * 4
    assert all(rank.pool.holds(10 + at, keys[at]) for at in range(6))


def test_a_rank_that_lacks_its_share_makes_it_a_miss_for_all(
    shared_server: Server, make: Make
) -> None:
    keys = page_hashes(PROMPT)
    ranks = [make(shared_server, tp_rank=rank, tp_size=4) for rank in range(4)]
    for rank in ranks[:3]:
        assert rank.backup(keys) == 10
    assert [rank.storage.batch_exists(keys) for rank in ranks] == [0] * 4
    assert ranks[3].backup(keys[:7]) == 7
    # All give the same answer without asking each other.
    assert [rank.storage.batch_exists(keys) for rank in ranks] == [7] * 4
    assert prefetch(ranks, keys, first=20) == 7


def test_k_without_v_is_a_miss(shared_server: Server, make: Make) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
    client, namespace = raw(shared_server, rank)
    half = rank.pool.page_bytes // 2
    with client:
        put = namespace.put([bytes.fromhex(keys[0])], [bytes(half)], parts=[0])
        assert put.outcomes == ["part_stored"]
    assert rank.storage.batch_exists(keys) == 0
    assert rank.storage.batch_get_v1(keys[:1], rank.pool.indices([0])) == [False]
    assert rank.backup(keys[:2]) == 2
    assert rank.storage.batch_exists(keys) == 2


def test_mla_is_stored_once(shared_server: Server, make: Make) -> None:
    keys = page_hashes(PROMPT)
    ranks = [
        make(shared_server, Pool(kv=1), is_mla_model=True, tp_rank=rank, tp_size=8)
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
    shared_server: Server, make: Make
) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
    rank.backup(keys)
    rank.pool.kv_buffer[...] = 7
    assert prefetch([rank], keys, first=40) == 10


def test_what_shapes_the_bytes_keeps_engines_apart(
    shared_server: Server, make: Make, sglang: dict[str, Any]
) -> None:
    keys = page_hashes(PROMPT)
    base = make(shared_server)
    assert base.backup(keys) == 10
    assert prefetch([make(shared_server)], keys) == 10

    def differs(pool: Pool | None = None, ours: Any = None, **said: Any) -> None:
        assert prefetch([make(shared_server, pool, ours, **said)], keys) == 0, (pool, ours, said)

    differs(model_name="example/another")
    differs(ours={"weights": "revision-2"})
    differs(ours={"dtype": "fp8_e4m3"})
    differs(Pool(dtype="torch.float16"))
    differs(Pool(layout="page_first_direct"))
    differs(Pool(layout="page_head"))
    differs(Pool(layout="layer_first"))
    # The same bytes a page, otherwise divided.
    differs(Pool(layer_num=6, head_num=1))
    differs(Pool(head_num=1, head_dim=16))
    differs(tp_size=2)
    differs(pp_size=2)
    differs(pp_size=2, pp_rank=1)
    differs(attn_cp_size=2)
    differs(attn_cp_size=2, attn_cp_rank=1, tp_rank=1, tp_size=2)
    sglang["revision"] = "abc"
    differs()
    sglang.clear()
    sglang["speculative_algorithm"] = "EAGLE"
    differs()
    sglang.clear()
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        sglang["kv_cache_dtype"] = dtype
        differs(Pool(dtype="torch.uint8"))
    sglang.clear()
    assert prefetch([make(shared_server)], keys) == 10


def test_two_types_that_look_alike_in_the_pool_are_apart(
    shared_server: Server, make: Make, sglang: dict[str, Any]
) -> None:
    keys = page_hashes(PROMPT)
    sglang["kv_cache_dtype"] = "fp8_e4m3"
    assert make(shared_server, Pool(dtype="torch.uint8")).backup(keys) == 10
    sglang["kv_cache_dtype"] = "fp8_e5m2"
    assert prefetch([make(shared_server, Pool(dtype="torch.uint8"))], keys) == 0
    sglang["kv_cache_dtype"] = "auto"
    with pytest.raises(InvalidError, match=r"dtype: the pool has torch\.uint8"):
        make(shared_server, Pool(dtype="torch.uint8"))


def test_mla_of_another_number_of_ranks_is_not_shared(shared_server: Server, make: Make) -> None:
    keys = page_hashes(PROMPT)
    mla: dict[str, Any] = {"is_mla_model": True}
    assert make(shared_server, Pool(kv=1), tp_size=2, **mla).backup(keys) == 10
    assert prefetch([make(shared_server, Pool(kv=1), tp_size=4, **mla)], keys) == 0
    assert prefetch([make(shared_server, Pool(kv=1), tp_size=2, tp_rank=1, **mla)], keys) == 10


def test_stages_and_context_ranks_have_pages_of_their_own(
    shared_server: Server, make: Make
) -> None:
    keys = page_hashes(PROMPT)
    for size, rank in (("pp_size", "pp_rank"), ("attn_cp_size", "attn_cp_rank")):
        assert make(shared_server, **{size: 2, rank: 0}).backup(keys) == 10
        assert prefetch([make(shared_server, **{size: 2, rank: 1})], keys) == 0
        assert prefetch([make(shared_server, **{size: 2, rank: 0})], keys) == 10


def test_page_sizes_are_apart(shared_server: Server, make: Make) -> None:
    # Half the tokens of twice the layers: as long.
    assert make(shared_server).backup(page_hashes(PROMPT)) == 10
    other = make(shared_server, Pool(page_size=PAGE // 2, layer_num=6))
    assert prefetch([other], page_hashes(PROMPT)) == 0


def test_salts_extra_keys_and_pairs_have_keys_of_their_own(
    shared_server: Server, make: Make
) -> None:
    rank = make(shared_server)
    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra_key": "a"},
        {"extra_key": "image-1"},
        {"extra_key": "lora-1", "cache_salt": "a"},
        {"pairs": True},
    ]
    for at, variant in enumerate(variants):
        keys = page_hashes(PROMPT, **variant)[:9]
        assert rank.storage.batch_exists(keys) == 0, variant
        assert rank.backup(keys) == 9
        assert prefetch([rank], keys, first=20) == 9, at


def test_pictures_that_stand_in_the_same_place_are_apart(shared_server: Server, make: Make) -> None:
    # SGLang writes tokens that it has made of the picture where the picture stands.
    rank = make(shared_server)
    first, second = ([*PROMPT[:40], *[picture] * 20, *PROMPT[60:]] for picture in (71, 72))
    assert rank.backup(page_hashes(first)) == 10
    # Up to the page with the picture they are the same.
    assert prefetch([rank], page_hashes(second), first=20) == 2
    assert prefetch([rank], page_hashes(first), first=20) == 10


def test_engines_whose_keys_lack_salts_are_refused(
    shared_server: Server, make: Make, sglang: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.utils", ModuleType("older"))
    with pytest.raises(InvalidError, match=r"0\.5\.20 or newer required: keys of this one lack"):
        make(shared_server)
    with pytest.raises(InvalidError, match="unsalted: 'yes' given, true or false allowed"):
        make(shared_server, ours={"unsalted": "yes"})
    unsalted = make(shared_server, ours={"unsalted": True})
    assert unsalted.backup(page_hashes(PROMPT)) == 10
    sglang["enable_lora"] = True
    with pytest.raises(InvalidError, match=r"--enable-lora: .* older keys lack the adapter"):
        make(shared_server, ours={"unsalted": True})


def test_models_with_other_pools_are_refused(shared_server: Server, make: Make) -> None:
    config = StorageConfig(extra_config(shared_server.grpc))
    storage = KvstrataStorage(config, {})
    storage.register_mem_pool_host(Pool())
    storage.register_mem_host_pool_v2(Pool(), "kv")
    for pool in ("mamba", "swa", "indexer", "draft"):
        with pytest.raises(InvalidError, match=f"keeps {pool} beside its KV cache"):
            storage.register_mem_host_pool_v2(Pool(), pool)
    storage.close()


def test_a_pool_that_comes_while_requests_run_makes_all_a_miss(
    shared_server: Server, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
    assert rank.backup(keys) == 10
    kv = SimpleNamespace(name="kv", keys=keys, host_indices=rank.pool.indices(range(10)))
    indexer = SimpleNamespace(name="indexer", keys=keys[:3], host_indices=None)
    assert rank.storage.batch_exists_v2(keys).kv_hit_pages == 10
    assert rank.storage.batch_exists_v2(keys, [kv, indexer]).kv_hit_pages == 0
    results = rank.storage.batch_get_v2([kv, indexer])
    assert results == {"kv": [True] * 10, "indexer": [False] * 3}
    assert rank.storage.batch_set_v2([indexer]) == {"indexer": [False] * 3}

    rank.storage.register_mem_host_pool_v2(Pool(), "draft")
    assert "keeps draft beside its KV cache" in caplog.text
    assert rank.storage.batch_exists(keys) == 0
    assert rank.storage.batch_get_v1(keys, rank.pool.indices(range(10))) == [False] * 10
    assert rank.storage.batch_set_v1(keys, rank.pool.indices(range(10))) == [False] * 10


@pytest.mark.parametrize(
    ("ours", "said", "error"),
    [
        ({"interface_v1": 0}, {}, 'add "interface_v1": 1'),
        ({"endpiont": "x"}, {}, "endpiont: no such setting; there are .*unsalted"),
        ({"timeout": -1}, {}, "timeout: -1 given, above 0 to 3600 s allowed"),
        ({"weights": 3}, {}, "weights: 3 given, a text allowed"),
        ({"dtype": 3}, {}, "dtype: 3 given, a text allowed"),
        ({}, {"model_name": None}, "--served-model-name: not given"),
        ({}, {"dcp_size": 2, "is_mla_model": True}, "--dcp-size"),
    ],
)
def test_what_cannot_be_right_is_said_at_the_start(
    shared_server: Server, make: Make, ours: Any, said: Any, error: str
) -> None:
    with pytest.raises(InvalidError, match=error):
        make(shared_server, ours=ours, **said)


def test_other_layouts_are_refused(shared_server: Server, make: Make) -> None:
    pool = Pool()
    pool.layout = "page_unified"
    with pytest.raises(InvalidError, match=r"'page_unified' given, one of page_first, .*allowed"):
        make(shared_server, pool)


def test_nothing_is_ever_raised_and_every_answer_has_its_length(
    shared_server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
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


def test_the_oldest_interface_answers_and_does_nothing(shared_server: Server, make: Make) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
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


def test_a_server_that_comes_later_is_found(start: Start, make: Make) -> None:
    keys = page_hashes(PROMPT)
    server = start()
    server.kill()
    rank = make(server, wait=False)
    begun = time.monotonic()
    assert rank.backup(keys) == 0
    assert prefetch([rank], keys) == 0
    assert time.monotonic() - begun < 1.0
    server.start()
    until(lambda: is_ready(rank))
    assert rank.backup(keys) == 10
    assert prefetch([rank], keys, first=20) == 10


def test_a_killed_server_is_a_miss_and_hits_come_back(start: Start, make: Make) -> None:
    keys = page_hashes(PROMPT)
    server = start()
    rank = make(server)
    assert rank.backup(keys) == 10
    assert rank.storage.batch_exists(keys) == 10
    server.kill()
    begun = time.monotonic()
    assert rank.storage.batch_get_v1(keys, rank.pool.indices(range(10))) == [False] * 10
    assert prefetch([rank], keys) == 0
    assert rank.backup(keys) == 0
    assert time.monotonic() - begun < 3.0
    server.start()
    until(lambda: is_ready(rank))
    assert rank.backup(keys) == 10
    assert prefetch([rank], keys, first=20) == 10


def test_a_server_killed_in_the_middle_of_a_load_gives_right_pages_or_none(
    start: Start, make: Make
) -> None:
    keys = page_hashes(range(48 * PAGE))
    server = start()
    # Pages of 768 KiB.
    pool: dict[str, Any] = {"layer_num": 32, "head_num": 8, "head_dim": 48, "pages": 48}
    rank = make(server, Pool(**pool))
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


def test_a_server_that_hangs_costs_one_deadline(start: Start, make: Make) -> None:
    keys = page_hashes(PROMPT)
    server = start()
    rank = make(server)
    assert rank.backup(keys) == 10
    server.pause()
    begun = time.monotonic()
    assert prefetch([rank], keys) == 0
    assert time.monotonic() - begun < 3.0
    begun = time.monotonic()
    for _ in range(20):
        assert prefetch([rank], keys) == 0
    assert time.monotonic() - begun < 0.5, "who waits although the server is known to hang?"
    server.process.send_signal(signal.SIGCONT)
    until(lambda: is_ready(rank))
    assert prefetch([rank], keys, first=20) == 10


def test_one_rank_without_a_server_leaves_the_others_whole(start: Start, make: Make) -> None:
    keys = page_hashes(PROMPT)
    server, gone = start(), start()
    ranks = [make(server, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank in ranks:
        assert rank.backup(keys) == 10
    gone.kill()
    lost = make(gone, tp_rank=1, tp_size=2, wait=False)
    # The same number of calls on both, and the smaller answer.
    assert prefetch([ranks[0], lost], keys, first=20) == 0
    assert prefetch(ranks, keys, first=20) == 10


def test_what_has_moved_is_told_in_the_engines_own_record(
    shared_server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
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
    shared_server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
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


def test_leases_end_with_their_loads(shared_server: Server, make: Make) -> None:
    keys = page_hashes(PROMPT)
    rank = make(shared_server)
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
