"""Both adapters in a real vLLM: the same tokens as without it, from whatever tier they come."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Engine, Server, Start, prompt
from engine import BLOCK_TOKENS, Generated
from until import until

PROMPT = prompt(1)
BLOCKS = len(PROMPT) // BLOCK_TOKENS
ENOUGH = 0.95 * len(PROMPT)
"""External hits that vLLM has to count."""


def same(one: Generated, other: Generated) -> None:
    """The same tokens with the same probabilities, and none of them cut off."""
    assert [each.tokens for each in one.answers] == [each.tokens for each in other.answers]
    for ours, theirs in zip(one.answers, other.answers, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.reason == "length"


def come_back(engine: Engine) -> None:
    """Waits until the tier has reached its server again."""
    until("the tier has reached the server", lambda: bool(engine.tier()["ready"]))


def grown(engine: Engine, before: dict[str, int], name: str) -> int:
    """By how much the tier counted more."""
    return int(engine.tier()["counts"].get(name, 0)) - before.get(name, 0)


def test_blocks_outlive_the_engine_then_the_server_then_its_disk(
    engine: Engine, start: Start, logs: Path, tmp_path: Path
) -> None:
    nvme, bucket = tmp_path / "nvme", tmp_path / "bucket"
    for each in (nvme, bucket):
        each.mkdir()
    server = start(
        f"nvme.path={nvme}",
        "nvme.capacity=1GiB",
        "nvme.segment_bytes=8MiB",
        "nvme.daily_writes=none",
        f"object.url=file://{bucket}",
        "object.admission=all",
        "object.pack_bytes=8MiB",
        "node.name=node-0",
    )
    tier = {"endpoint": server.grpc}

    first = Engine(logs / "first.log", engine.adapter)
    first.open("smollm2")
    expected = first.generate(PROMPT)
    assert expected.external_hits == 0
    first.open("smollm2", tier=tier)
    same(first.generate(PROMPT), expected)
    first.settle()
    assert first.tier()["counts"]["stored_blocks"] == BLOCKS
    # What comes later closes the segments that the prompt lies in, and what is closed is packed.
    first.generate(prompt(2))
    first.settle()
    first.kill()

    engine.open("smollm2", tier=tier)
    come_back(engine)
    found_in(engine, expected, "hit_dram_blocks")

    until("all is on nvme", lambda: server.metric("kvstrata_nvme_blocks") >= 2 * BLOCKS)
    server.kill()
    server.start()
    found_in(engine, expected, "hit_nvme_blocks")

    until("all but the last segment is packed", lambda: in_bucket(server) >= 2 * BLOCKS - 6)
    server.kill()
    shutil.rmtree(nvme / "kvstrata-nvme")
    server.start()
    until("packs are found", lambda: in_bucket(server) >= 2 * BLOCKS - 6)
    found_in(engine, expected, "prefetched_blocks")


def in_bucket(server: Server) -> float:
    """Blocks that can be read from object."""
    return server.metric("kvstrata_object_blocks")


def found_in(engine: Engine, expected: Generated, counter: str) -> None:
    """An engine that knows nothing gets the whole prompt from there."""
    engine.empty()
    come_back(engine)
    before = engine.tier()["counts"]
    generated = engine.generate(PROMPT)
    same(generated, expected)
    assert generated.external_hits >= ENOUGH
    assert grown(engine, before, counter) >= BLOCKS, engine.tier()
    loaded = {
        "tier": "vllm:kv_offload_kvstrata_blocks{outcome=loaded}",
        "connector": "vllm:kvstrata_blocks{outcome=loaded}",
    }[engine.adapter]
    assert generated.counted[loaded] >= BLOCKS, generated.counted
    engine.settle()


def test_a_model_with_sliding_windows(engine: Engine, start: Start) -> None:
    """Its full and its windowed layers are in cache groups of their own."""
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}
    engine.open("tiny", hf_overrides=windows)
    expected = engine.generate(PROMPT)
    engine.open("tiny", hf_overrides=windows, tier={"endpoint": start().grpc})
    come_back(engine)
    assert engine.tier()["groups"] == 2
    same(engine.generate(PROMPT), expected)
    engine.settle()
    engine.empty()
    generated = engine.generate(PROMPT)
    same(generated, expected)
    assert generated.external_hits >= ENOUGH
