"""The tier under a scheduler that does as vLLM's, and a real server."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import Server, Start
from fake_engine import FakeEngine, Request
from vllm.v1.kv_offload.base import LookupResult

import kvstrata
from kvstrata.engines.counters import CALL_BUDGET
from kvstrata.vllm.lookups import FAILED_FOR

Make = Callable[..., FakeEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines that are ended with the test."""
    engines: list[FakeEngine] = []

    def maker(endpoint: str, **settings: object) -> FakeEngine:
        engines.append(FakeEngine(endpoint, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield maker
    for engine in engines:
        engine.close()


def test_what_one_engine_stores_another_loads(server: Server, make: Make) -> None:
    make(server.grpc).ready().store("a", 100)
    other = make(server.grpc).ready()
    assert other.hits("a", 120) == 100
    assert other.counts["hit_dram_blocks"] == 100
    assert other.counts["miss_blocks"] == 20
    assert other.counts["loaded_blocks"] == 100


def test_a_lookup_is_open_until_the_batch_was_answered(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    engine.store("a", 3)
    request = Request("a", 3)
    assert engine.step((request, request.keys[0])) == [None]
    assert engine.counts["calls"] > 0
    assert engine.find(request) == 3


def test_groups_of_a_hybrid_model_are_kept_apart(server: Server, make: Make) -> None:
    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

    groups = (OffloadingGroupConfig(group_id=0), OffloadingGroupConfig(group_id=1))
    engine = make(server.grpc, config=OffloadingConfig(groups=groups)).ready()
    engine.store("a", 10, groups=2)
    request = Request("a", 10, groups=2)
    assert engine.find(request, 0) == 10
    assert engine.find(request, 1) == 10
    engine.settle()


def test_a_window_is_found_behind_a_gap(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    request = Request("a", 10)
    engine.offload(request, request.keys[0][6:])
    engine.settle()
    engine.forget()
    # Asked from the end, as vLLM does for sliding windows.
    window = Request("a", 10)
    results: list[LookupResult] = []

    def known() -> bool:
        engine.step()
        results[:] = [engine.lookup(key, window.context) for key in reversed(window.keys[0])]
        engine.step()
        return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results)

    engine.until(known)
    assert results == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 6


def test_a_block_that_leaves_between_lookup_and_load_is_a_miss(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    engine.store("a", 10)
    namespace = engine.tier._spaces[0]._namespace
    assert namespace is not None
    request = Request("a", 10)
    while engine.step((request, [])) and not _answered(engine, request):
        time.sleep(0.001)
    namespace.remove([request.keys[0][7][:-4]])
    assert engine.find(request) == 7
    load = next(result for result in engine.results.values() if result.successful_keys is not None)
    assert list(load.successful_keys or ()) == request.keys[0][:7]
    # It stays one for a while, for others too, though it is stored again.
    engine.settle()
    engine.offload(request, request.keys[0][7:8])
    engine.settle()
    engine.forget()
    assert engine.hits("a", 10) == 7
    assert engine.counts["failed_before_blocks"] > 0
    engine.tier._lookups._clock = lambda: time.monotonic() + FAILED_FOR + 1
    assert engine.hits("a", 10) == 10


def _answered(engine: FakeEngine, request: Request) -> bool:
    results = [engine.tier.lookup(key, request.context) for key in request.keys[0]]
    return LookupResult.RETRY not in results


def test_rows_are_the_tiers_until_the_job_is_reported(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    request = Request("a", 64)
    server.pause()
    job = engine.offload(request)
    for _ in range(20):
        engine.step()
        time.sleep(0.005)
    assert job in engine.jobs
    server.process.send_signal(signal.SIGCONT)
    engine.settle()
    engine.primary.fill(1)
    engine.forget()
    assert make(server.grpc).ready().hits("a", 64) == 64


@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_request_leaves_nothing(server: Server, make: Make, steps: int) -> None:
    engine = make(server.grpc).ready()
    engine.store("a", 80)
    request = Request("a", 80)
    for _ in range(steps):
        engine.step((request, request.keys[0]))
        time.sleep(0.002)
    engine.finish(request)
    engine.settle()
    assert not engine.tier._lookups._requests
    assert not engine.tier._loads
    until_no_lease(engine, server)
    engine.forget()
    assert engine.hits("a", 80) == 80


def until_no_lease(engine: FakeEngine, server: Server) -> None:
    """Waits until the server has none."""
    with kvstrata.Client(server.grpc) as client:
        engine.until(lambda: client.stats()["leases"] == 0)


def test_leases_end_with_the_load(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    engine.store("a", 20)
    request = Request("a", 20)
    assert engine.find(request) == 20
    engine.settle()
    until_no_lease(engine, server)


def test_an_idle_engine_is_kept_stepping_while_a_job_is_under_way(
    server: Server, make: Make
) -> None:
    engine = make(server.grpc).ready()
    engine.offload(Request("a", 10))
    assert engine.tier.has_pending_work()
    engine.settle()
    assert not engine.tier.has_pending_work()


def test_drain_waits_for_what_is_under_way(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    job = engine.offload(Request("a", 200))
    engine.tier.drain_jobs()
    engine.step()
    assert engine.results[job].success


@pytest.mark.parametrize("fault", ["absent", "killed", "stopped"])
def test_without_a_server_all_are_misses_and_nothing_waits(
    server: Server, make: Make, fault: str
) -> None:
    deadlines = {"timeout": 0.5, "load_timeout": 2.0, "store_timeout": 2.0}
    if fault == "absent":
        server.kill()
        engine = make(server.grpc, **deadlines)
    else:
        engine = make(server.grpc, **deadlines).ready()
        engine.store("a", 20)
        server.kill() if fault == "killed" else server.pause()
    began = time.monotonic()
    assert engine.hits("a", 20) == 0
    assert engine.hits("a", 20) == 0
    job = engine.offload(Request("b", 20))
    engine.settle()
    assert not engine.results[job].success
    assert time.monotonic() - began < 10.0
    engine.forget()
    _calls_are_short(engine)
    if fault == "stopped":
        server.process.send_signal(signal.SIGCONT)
    else:
        server.start()
    engine.ready().store("a", 20)
    assert engine.hits("a", 20) == 20


def test_a_server_that_is_killed_during_a_load_costs_the_blocks_that_are_left(
    server: Server, make: Make
) -> None:
    engine = make(server.grpc).ready()
    engine.store("a", 250)
    request = Request("a", 250)
    while not engine.jobs:
        engine.step((request, request.keys[0]))
    server.kill()
    assert engine.find(request) <= 250
    engine.settle()
    assert not engine.tier._lookups._failed, "the blocks are not at fault"
    server.start()
    engine.forget()
    engine.ready().store("b", 20)
    assert engine.hits("b", 20) == 20


def test_a_store_that_the_server_refuses_is_no_error(start: Start, make: Make) -> None:
    server = start()
    engine = make(server.grpc, rows=1200).ready()
    for number in range(6):
        job = engine.offload(Request(f"long{number}", 250))
        engine.settle()
        assert engine.results[job].success
        engine.forget()
    engine.store("a", 10)
    assert engine.hits("a", 10) == 10


def test_calls_of_the_scheduler_are_short(server: Server, make: Make) -> None:
    engine = make(server.grpc, rows=600).ready()
    engine.store("a", 500)
    for _ in range(10):
        assert engine.hits("a", 600) == 500
    assert engine.counts["calls"] > 6000
    _calls_are_short(engine)


def _calls_are_short(engine: FakeEngine) -> None:
    """The machine may take the processor away from a few; nothing may wait."""
    counts = engine.counts
    assert counts.get("slow_calls", 0) <= max(2, counts["calls"] // 100), counts
    assert engine.tier._counters.slowest < 100 * CALL_BUDGET


def test_stats_are_in_vllms_form(server: Server, make: Make) -> None:
    engine = make(server.grpc).ready()
    engine.store("a", 10)
    assert engine.hits("a", 12) == 10
    stats = engine.tier.get_stats()
    assert stats is not None
    blocks = stats.values["vllm:kv_offload_kvstrata_blocks"]
    assert blocks["stored",] == [10]
    assert blocks["hit_dram",] == [10]
    assert blocks["miss",] == [2]
    assert stats.values["vllm:kv_offload_kvstrata_ready"] == {(): [1]}
    assert stats.values["vllm:kv_offload_kvstrata_call_seconds"][()]
    assert stats.values.keys() <= engine.tier.build_metric_definitions({}).keys()
    again = engine.tier.get_stats()
    assert again is not None and "vllm:kv_offload_kvstrata_blocks" not in again.values


def test_after_shutdown_vllms_memory_is_free(server: Server) -> None:
    engine = FakeEngine(server.grpc).ready()
    engine.store("a", 10)
    view = engine.tier._primary_kv_view
    engine.close()
    view.release()
