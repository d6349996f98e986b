"""Which engines share blocks, and which are refused: by what the namespaces are made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import vllm
from conftest import Server
from fake_engine import FakeEngine
from vllm.config import CacheConfig, LoRAConfig, ModelConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

import kvstrata
from kvstrata.engines import Identity
from kvstrata.vllm import versions
from kvstrata.vllm.identity import identities

ROW_BYTES = fake_engine.ROW_BYTES
BASE = OffloadingConfig()


def identity(
    config: OffloadingConfig = BASE, engine: VllmConfig | None = None, **given: Any
) -> Identity:
    """The namespace of the first group."""
    return identities(config, engine or VllmConfig(), ROW_BYTES, given)[0]


def model(**fields: Any) -> VllmConfig:
    """An engine with another model."""
    return VllmConfig(model_config=ModelConfig(**fields))


CONFIGS: dict[str, dict[str, Any]] = {
    "model": {"model": OffloadingModelConfig(name="example/other")},
    "dtype": {"model": OffloadingModelConfig(dtype="fp8_e4m3")},
    "block size": {"groups": (OffloadingGroupConfig(tokens_per_block=32),)},
    "blocks in a chunk": {"cache": OffloadingCacheConfig(blocks_per_chunk=2)},
    "hash size": {"cache": OffloadingCacheConfig(tokens_per_hash=8)},
    "layers": {"groups": (OffloadingGroupConfig(layer_names=("layers.0",)),)},
    "groups": {"groups": (OffloadingGroupConfig(), OffloadingGroupConfig(group_id=1))},
    "tensor parallel": {"parallel": OffloadingParallelConfig(world_size=2, tp_size=2)},
    "pipeline parallel": {"parallel": OffloadingParallelConfig(world_size=2, pp_size=2)},
    "context parallel": {"parallel": OffloadingParallelConfig(world_size=2, dcp_size=2)},
    "layout": {"kv_cache_layout": "BLHNC"},
    "canonical layout": {"canonical_layout": True},
    "one copy for all ranks": {"replicated_layout": True},
    "bytes of a worker": {"worker_kv_bytes_per_block": 8192},
}
ENGINES = {
    "revision": model(revision="f" * 40),
    "quantization": model(quantization="awq"),
    "overrides": model(hf_overrides={"rope_theta": 5.0}),
    "hash algorithm": VllmConfig(cache_config=CacheConfig("sha256")),
    "drafter": VllmConfig(speculative_config=SpeculativeConfig()),
    "another drafter": VllmConfig(speculative_config=SpeculativeConfig(model="example/third")),
}


def test_everything_that_shapes_bytes_makes_another_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = identity()
    assert identity() == base
    others = [identity(dataclasses.replace(BASE, **fields)) for fields in CONFIGS.values()]
    others += [identity(engine=engine) for engine in ENGINES.values()]
    others.append(identity(weights="another"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    others.append(identity())
    assert len({base, *others}) == len(others) + 1


def test_engines_that_differ_do_not_hit_each_other(server: Server) -> None:
    engine = FakeEngine(server.grpc).ready()
    engine.store("a", 10)
    other = FakeEngine(
        server.grpc, config=dataclasses.replace(BASE, kv_cache_layout="BLHNC")
    ).ready()
    assert other.hits("a", 10) == 0
    assert engine.hits("a", 10, salt="tenant-b") == 0
    assert engine.hits("a", 10) == 10
    for each in (engine, other):
        each.close()


def test_another_hash_seed_is_warned_about(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeEngine(server.grpc).ready().close()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    FakeEngine(server.grpc).ready().close()
    assert "hash root" in caplog.text


def test_weights_in_a_directory_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(5 << 20))
    of_directory = model(model=str(tmp_path), revision=None)
    first = identity(engine=of_directory)
    assert identity(engine=of_directory) == first
    weights.write_bytes(bytes(1 << 20) + b"\1" * (4 << 20))
    assert identity(engine=of_directory) != first


@pytest.mark.parametrize(
    ("engine", "given", "says"),
    [
        (model(revision=None), {}, "weights: vLLM does not say which revision"),
        (model(revision="main"), {}, "weights: vLLM does not say which revision"),
        (VllmConfig(cache_config=CacheConfig("xxhash")), {}, "prefix_caching_hash_algo: 'xxhash'"),
        (VllmConfig(lora_config=LoRAConfig()), {}, "lora: LoRA is on"),
        (VllmConfig(), {"lora": "yes"}, "lora: 'yes' given"),
        (VllmConfig(), {"weights": 3}, "weights: 3 given"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(
    engine: VllmConfig, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(kvstrata.InvalidError, match=says):
        identity(engine=engine, **given)


def test_what_a_person_vouches_for_is_taken() -> None:
    assert identity(engine=model(revision=None), weights="v1")
    assert identity(engine=VllmConfig(lora_config=LoRAConfig()), lora="by_name")


def test_blocks_that_are_too_long_are_refused() -> None:
    with pytest.raises(kvstrata.InvalidError, match="block_size: a block has 67108865 bytes"):
        identities(BASE, VllmConfig(), (64 << 20) + 1, {})


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(kvstrata.InvalidError, match="endpont: no such setting"):
        FakeEngine("127.0.0.1:1", endpont="x")


def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check()
    for version in ("0.31.2", "0.33.0", "0.3", "0.320.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(ImportError, match=f"this is {version}"):
            versions.check()
