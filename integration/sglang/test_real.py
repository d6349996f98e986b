"""Our HiCache backend in SGLang's own controller; and our double of SGLang against the real one.

Run by `integration/sglang/check.sh`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Server
from controller import DIM, HEADS, LAYERS, PAGE, PAGES, Controller, config, mha_pool, mla_pool
from fake_sglang import Pool, extra_config, page_hashes
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

import kvstrata
from kvstrata.sglang.engine import server_argument

LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
MLA_LAYOUTS = ("page_first", "page_first_direct", "layer_first")
TOKENS = list(range(3000, 3000 + 200 * PAGE + 5))
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"cache_salt": "tenant-a"},
        {"extra_key": "lora"},
        {"extra_key": "e", "cache_salt": "s"},
        {"is_bigram": True},
    ],
)
def test_the_double_has_sglangs_keys(said: dict[str, Any]) -> None:
    ours = {("pairs" if name == "is_bigram" else name): given for name, given in said.items()}
    theirs = Controller.keys(None, TOKENS, **said)  # type: ignore[arg-type]
    assert page_hashes(TOKENS, PAGE, **ours) == theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_double_has_sglangs_pool(layout: str) -> None:
    real = mha_pool(layout)
    double = Pool(layout, PAGE, PAGES, LAYERS, HEADS, DIM)
    double.kv_buffer[...] = np.arange(double.kv_buffer.size).reshape(double.kv_buffer.shape)
    real.kv_buffer.view(torch.int16).copy_(
        torch.from_numpy(double.kv_buffer.view(np.int16).copy()).view(real.kv_buffer.shape)
    )
    indices = double.indices([3, 7])
    real_at, real_sizes = real.get_page_buffer_meta(torch.from_numpy(indices))
    at, sizes = double.get_page_buffer_meta(indices)
    assert real_sizes == sizes
    base = real.kv_buffer.data_ptr() - double.kv_buffer.ctypes.data
    assert [pointer - base for pointer in real_at] == at
    for index in (3 * PAGE, 7 * PAGE):
        page = real.get_data_page(index, flat=True).view(torch.int16).numpy()
        assert np.array_equal(page, double.get_data_page(index).view(np.int16))


@pytest.mark.parametrize(
    ("layout", "is_mla"),
    [(each, False) for each in LAYOUTS] + [(each, True) for each in MLA_LAYOUTS],
)
def test_pages_come_back_through_the_controller(
    shared_server: Server, layout: str, is_mla: bool
) -> None:
    said = {"model_name": f"real/{layout}/{is_mla}", "is_mla_model": is_mla}
    pool = mla_pool if is_mla else mha_pool
    extra = extra_config(shared_server.grpc)
    writer = Controller(pool(layout), config(extra, **said))
    writer.ready()
    assert writer.load(TOKENS) == (0, 0)
    assert writer.backup(TOKENS) == 200 * PAGE
    reader = Controller(pool(layout), config(extra, **said))
    reader.ready()
    assert reader.load(TOKENS) == (200 * PAGE, 200 * PAGE)
    assert reader.load(TOKENS[: 50 * PAGE]) == (50 * PAGE, 50 * PAGE)
    told = reader.storage_backend.get_stats()
    assert sum(told.prefetch_pgs) == 250
    assert reader.storage_backend.counters["raised"] == 0
    for controller in (writer, reader):
        controller.detach_storage_backend()


def test_a_page_that_is_lost_ends_the_prefix(shared_server: Server) -> None:
    extra = extra_config(shared_server.grpc)
    controller = Controller(mha_pool("page_first"), config(extra, model_name="real/lost"))
    controller.ready()
    controller.backup(TOKENS)
    identity = controller.storage_backend._space.identity
    with kvstrata.Client(shared_server.grpc) as client:
        identity.open(client).remove([bytes.fromhex(controller.keys(TOKENS)[150])])
    assert controller.load(TOKENS) == (150 * PAGE, 150 * PAGE)
    controller.detach_storage_backend()


def test_the_arguments_of_the_engine_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_argument("revision") is None
    given = {
        "revision": "a1b2c3",
        "kv_cache_dtype": "fp8_e4m3",
        "speculative_algorithm": "EAGLE",
        "enable_lora": True,
        "quantization_param_path": "scales.json",
    }
    arguments = ServerArgs(model_path="example/llama", **given)
    monkeypatch.setattr(get_context(), "_server_args", arguments)
    assert {name: server_argument(name) for name in given} == given
    assert server_argument("lora_paths") is None


def test_models_with_other_pools_are_refused_at_the_start(shared_server: Server) -> None:
    extra = extra_config(shared_server.grpc)
    controller = Controller(mha_pool("page_first"), config(extra))
    storage = controller.storage_backend
    storage._serving = False
    with pytest.raises(kvstrata.InvalidError, match="keeps mamba beside its KV cache"):
        storage.register_mem_host_pool_v2(object(), "mamba")
    controller.detach_storage_backend()


def test_two_ranks_go_on_in_step_when_one_fails(shared_server: Server, tmp_path: Path) -> None:
    extra = json.dumps(extra_config(shared_server.grpc))
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, HERE / "ranks.py", str(rank), store, extra])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=180) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    seen = [Path(f"{store}.{rank}").read_text() for rank in range(2)]
    assert seen[0] == seen[1]
    whole = 300 * PAGE
    expected = [
        ("stored", whole, 0),
        ("whole", whole, whole),
        ("no lookup", 0, 0),
        ("no load", whole, 0),
        ("whole again", whole, whole),
    ]
    assert seen[0] == "\n".join(map(repr, expected))
