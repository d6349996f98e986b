"""What vLLM calls of the connector, and what is refused at the start: on stand-ins of vLLM."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_engine  # noqa: F401  brings the stand-ins
import pytest
from conftest import Server
from fake_vllm import BLOCK_TOKENS, LAYERS, PAGE, Request, Tensor
from vllm.config import KVTransferConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

import kvstrata
from kvstrata.vllm import KvstrataConnector
from kvstrata.vllm.connector.identity import Options, check, identify
from kvstrata.vllm.connector.plan import Plan, Progress, Shape
from kvstrata.vllm.connector.stats import SLOWEST, KvstrataMetrics, KvstrataStats

BLOCKS = 16
FULL = FullAttentionSpec(block_size=BLOCK_TOKENS)
NAMES = [f"layers.{layer}" for layer in range(LAYERS)]


def caches(*specs: KVCacheSpec, **fields: Any) -> KVCacheConfig:
    """One cache group for each."""
    groups = [KVCacheGroupSpec(NAMES, spec) for spec in specs or (FULL,)]
    return KVCacheConfig(BLOCKS, groups, **fields)


def config(**transfer: Any) -> VllmConfig:
    """An engine with the connector."""
    return VllmConfig(kv_transfer_config=KVTransferConfig(**transfer))


# Tests look behind what vLLM sees.
Pair = tuple[Any, Any]


@pytest.fixture
def pair(shared_server: Server) -> Iterator[Callable[[], Pair]]:
    """Makes a connector as a scheduler and as a worker have it."""
    made: list[Any] = []

    def make() -> Pair:
        engine = config(kv_connector_extra_config={"endpoint": shared_server.grpc})
        for role in KVConnectorRole:
            made.append(KvstrataConnector(engine, role, caches()))
        scheduler, worker = made[-2:]
        worker.register_kv_caches({name: Tensor(BLOCKS) for name in NAMES})
        told = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        return scheduler, worker

    yield make
    for each in made:
        each.shutdown()


def step(scheduler: Any, worker: Any, **output: Any) -> Any:
    """One step as vLLM takes it; returns what the worker's results were."""
    blank: dict[str, Any] = {"preempted_req_ids": set(), "num_scheduled_tokens": {}}
    meta = scheduler.build_connector_meta(SimpleNamespace(**{**blank, **output}))
    meta = pickle.loads(pickle.dumps(meta))
    worker.handle_preemptions(meta)
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    worker.wait_for_layer_load(NAMES[0])
    worker.save_kv_layer(NAMES[0], None, None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    results.errors = worker.get_block_ids_with_load_errors()
    scheduler.update_connector_output(
        SimpleNamespace(
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
    )
    return results


def test_a_block_goes_out_and_comes_back(pair: Callable[[], Pair]) -> None:
    scheduler, worker = pair()
    request = Request("out", list(range(9)), 9)
    while (found := scheduler.get_num_new_matched_tokens(request, 0)) == (None, False):
        step(scheduler, worker)
    assert found == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    held = SimpleNamespace(get_block_ids=lambda name: ([5, 6, 7],))
    scheduled = {"num_scheduled_tokens": {"out": 9}, "kv_connector_block_state": held}
    for block in (5, 6):
        for tensor in worker._worker._copier._pieces[0]:
            tensor[0][block * PAGE : (block + 1) * PAGE] = bytes([block]) * PAGE
    while not scheduler._scheduler._space.ready:
        step(scheduler, worker)
    step(scheduler, worker, **scheduled)
    kept, parameters = scheduler.request_finished_all_groups(request, ([5, 6, 7],))
    assert parameters is None
    results = step(scheduler, worker)
    assert results.finished_sending == ({"out"} if kept else set())
    while worker._worker.is_busy or scheduler.has_pending_push_work():
        step(scheduler, worker)

    other, receiver = pair()
    again = Request("in", list(range(9)), 9)
    while other.get_num_new_matched_tokens(again, 0) != (8, True):
        step(other, receiver)
        if other.get_num_new_matched_tokens(again, 0) == (0, False):
            other.request_finished(again, [])
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    other.update_state_after_alloc(again, blocks, 8)
    assert other.get_external_cache_hit_sources(again, 8) == {"host": 8}
    results = step(other, receiver)
    while not results.finished_recving:
        results = step(other, receiver)
    assert (results.finished_recving, results.failed_recving, results.errors) == (
        {"in"},
        set(),
        set(),
    )
    layer = receiver._worker._copier._pieces[0][0][0]
    assert bytes(layer[PAGE : 3 * PAGE]) == bytes([5]) * PAGE + bytes([6]) * PAGE
    stats = other.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["hit_tokens"] == 8
    assert other.requires_kv_delivery is False


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "failure policy": (
        {"engine": config(kv_load_failure_policy="fail")},
        ["kv_load_failure_policy", "'fail'", "'recompute'"],
    ),
    "hash algorithm": ({"algorithm": "xxhash"}, ["prefix_caching_hash_algo", "'xxhash'", "sha256"]),
    "a state": ({"caches": caches(MambaSpec(BLOCK_TOKENS))}, ["MambaSpec", "KvstrataTier"]),
    "block sizes": (
        {"caches": caches(FULL, FullAttentionSpec(8))},
        ["[4, 8]", "KvstrataTier"],
    ),
    "finer hashes": ({"caches": caches(hash_block_size=2)}, ["prefix_match_unit", "2", "4"]),
    "context parallel": (
        {"parallel": ParallelConfig(decode_context_parallel_size=2)},
        ["decode_context_parallel_size", "2", "1 allowed"],
    ),
    "staging": ({"given": {"staging_bytes": 0}}, ["staging_bytes", "0", "1 to"]),
    "staging in words": ({"given": {"staging_bytes": "1G"}}, ["staging_bytes", "'1G'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(name: str) -> None:
    change, words = REFUSED[name]
    engine = change.get("engine", config())
    engine = replace(engine, parallel_config=change.get("parallel", ParallelConfig()))
    if "algorithm" in change:
        cache = replace(engine.cache_config, prefix_caching_hash_algo=change["algorithm"])
        engine = replace(engine, cache_config=cache)
    with pytest.raises(kvstrata.InvalidError) as raised:
        tokens = check(engine, change.get("caches", caches()))
        identify(engine, tokens, Options.parse(change.get("given", {})))
    assert all(word in str(raised.value) for word in words), raised.value


def test_windows_and_full_attention_are_served() -> None:
    assert check(config(), caches(FULL, SlidingWindowSpec(BLOCK_TOKENS))) == BLOCK_TOKENS
    assert check(config(kv_role="kv_producer", kv_load_failure_policy="fail"), caches()) == 4


def test_drafted_tokens_are_not_stored(shared_server: Server) -> None:
    engine = replace(
        config(kv_connector_extra_config={"endpoint": shared_server.grpc}),
        speculative_config=SpeculativeConfig(),
    )
    connector = KvstrataConnector(engine, KVConnectorRole.SCHEDULER, caches())
    assert connector._scheduler is not None
    assert connector._scheduler._prompt_only
    connector.shutdown()


def test_everything_that_shapes_bytes_is_in_the_name() -> None:
    def name(
        shape: Shape, engine: VllmConfig | None = None, copies: int = 1, ranks: int = 1
    ) -> Any:
        plan = Plan.of(dict.fromkeys(range(ranks), shape), copies)
        return identify(engine or config(), 4, Options.parse({}))(plan)

    shape = Shape((128,), "3x uint8 H2 N4")
    names = {
        name(shape),
        name(Shape((256,), shape.layout)),
        name(Shape((128,), "3x uint8 N4 H2")),
        name(shape, ranks=2),
        name(shape, replace(config(), parallel_config=ParallelConfig(tensor_parallel_size=2))),
        name(Shape((128, 128), shape.layout)),
    }
    assert len(names) == 6
    copied = name(shape, copies=2, ranks=2)
    assert copied.parts == name(shape).parts, "copies are one part"


def test_of_several_workers_the_one_that_is_less_far_counts() -> None:
    merged = Progress(5, {"a": 3, "b": 1}).merge(Progress(4, {"a": 2}))
    assert merged == Progress(4, {"a": 2, "b": 1})


def test_what_is_counted_is_summed_and_exported() -> None:
    stats = KvstrataStats({"calls": 2, SLOWEST: 10}).aggregate(
        KvstrataStats({"calls": 3, "loaded_blocks": 1, SLOWEST: 7})
    )
    assert stats.data == {"calls": 5, "loaded_blocks": 1, SLOWEST: 10}
    seen: dict[tuple[object, ...], float] = {}

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
            self.name = name

        def labels(self, *labels: object) -> SimpleNamespace:
            def see(value: float) -> None:
                seen[(self.name, *labels)] = value

            return SimpleNamespace(inc=see, set=see)

    kinds: Any = {"gauge": Metric, "counter": Metric}
    KvstrataMetrics(None, kinds, ["engine"], {0: ["e0"]}).observe(stats.data)
    assert seen == {
        ("vllm:kvstrata_events", "e0", "calls"): 5,
        ("vllm:kvstrata_blocks", "e0", "loaded"): 1,
        ("vllm:kvstrata_slowest_call_microseconds", "e0"): 10,
    }
