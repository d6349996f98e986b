"""What the HiCache backend keeps apart, and what it refuses because it could not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import Server
from fake_sglang import (
    PAGE,
    PROMPT,
    Arguments,
    MakeRank,
    Pool,
    StorageConfig,
    extra_config,
    page_hashes,
    prefetch,
)

from kvstrata import InvalidError
from kvstrata.sglang import KvstrataStorage

pytest_plugins = ["sglang_fixtures"]


def test_what_shapes_the_bytes_keeps_engines_apart(
    shared_server: Server, make_rank: MakeRank, sglang: Arguments
) -> None:
    keys = page_hashes(PROMPT)
    base = make_rank(shared_server)
    assert base.backup(keys) == 10
    assert prefetch([make_rank(shared_server)], keys) == 10

    def differs(pool: Pool | None = None, ours: Any = None, **said: Any) -> None:
        assert prefetch([make_rank(shared_server, pool, ours, **said)], keys) == 0, (
            pool,
            ours,
            said,
        )

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
    sglang["quantization"] = "awq"
    differs()
    sglang.clear()
    sglang["json_model_override_args"] = '{"rope_theta": 5}'
    differs()
    sglang.clear()
    sglang["speculative_algorithm"] = "EAGLE"
    differs()
    sglang.clear()
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        sglang["kv_cache_dtype"] = dtype
        differs(Pool(dtype="torch.uint8"))
    sglang.clear()
    assert prefetch([make_rank(shared_server)], keys) == 10


def test_weights_are_told_apart_by_their_commit_or_their_bytes(
    shared_server: Server, make_rank: MakeRank, sglang: Arguments, tmp_path: Path
) -> None:
    keys = page_hashes(PROMPT)
    nothing = {"weights": None}
    sglang |= {"model_path": "example/hub", "revision": "main"}
    with pytest.raises(InvalidError, match=r"weights: SGLang does not say which .* 'main'"):
        make_rank(shared_server, ours=nothing)
    sglang["revision"] = "a" * 40
    assert make_rank(shared_server, ours=nothing).backup(keys) == 10
    assert prefetch([make_rank(shared_server, ours=nothing)], keys) == 10
    sglang["revision"] = "b" * 40
    assert prefetch([make_rank(shared_server, ours=nothing)], keys) == 0

    sglang["model_path"] = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"one run")
    assert make_rank(shared_server, ours=nothing).backup(keys) == 10
    assert prefetch([make_rank(shared_server, ours=nothing)], keys) == 10
    (tmp_path / "model.safetensors").write_bytes(b"another")
    assert prefetch([make_rank(shared_server, ours=nothing)], keys) == 0


def test_two_types_that_look_alike_in_the_pool_are_apart(
    shared_server: Server, make_rank: MakeRank, sglang: Arguments
) -> None:
    keys = page_hashes(PROMPT)
    sglang["kv_cache_dtype"] = "fp8_e4m3"
    assert make_rank(shared_server, Pool(dtype="torch.uint8")).backup(keys) == 10
    sglang["kv_cache_dtype"] = "fp8_e5m2"
    assert prefetch([make_rank(shared_server, Pool(dtype="torch.uint8"))], keys) == 0
    sglang["kv_cache_dtype"] = "auto"
    with pytest.raises(InvalidError, match=r"dtype: the pool has torch\.uint8"):
        make_rank(shared_server, Pool(dtype="torch.uint8"))


def test_mla_of_another_number_of_ranks_is_not_shared(
    shared_server: Server, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    mla: dict[str, Any] = {"is_mla_model": True}
    assert make_rank(shared_server, Pool(kv=1), tp_size=2, **mla).backup(keys) == 10
    assert prefetch([make_rank(shared_server, Pool(kv=1), tp_size=4, **mla)], keys) == 0
    assert prefetch([make_rank(shared_server, Pool(kv=1), tp_size=2, tp_rank=1, **mla)], keys) == 10


def test_stages_and_context_ranks_have_pages_of_their_own(
    shared_server: Server, make_rank: MakeRank
) -> None:
    keys = page_hashes(PROMPT)
    for size, rank in (("pp_size", "pp_rank"), ("attn_cp_size", "attn_cp_rank")):
        assert make_rank(shared_server, **{size: 2, rank: 0}).backup(keys) == 10
        assert prefetch([make_rank(shared_server, **{size: 2, rank: 1})], keys) == 0
        assert prefetch([make_rank(shared_server, **{size: 2, rank: 0})], keys) == 10


def test_page_sizes_are_apart(shared_server: Server, make_rank: MakeRank) -> None:
    # Half the tokens of twice the layers: as long.
    assert make_rank(shared_server).backup(page_hashes(PROMPT)) == 10
    other = make_rank(shared_server, Pool(page_size=PAGE // 2, layer_num=6))
    assert prefetch([other], page_hashes(PROMPT)) == 0


def test_salts_extra_keys_and_pairs_have_keys_of_their_own(
    shared_server: Server, make_rank: MakeRank
) -> None:
    rank = make_rank(shared_server)
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


def test_pictures_that_stand_in_the_same_place_are_apart(
    shared_server: Server, make_rank: MakeRank
) -> None:
    # SGLang writes tokens that it has made of the picture where the picture stands.
    rank = make_rank(shared_server)
    first, second = ([*PROMPT[:40], *[picture] * 20, *PROMPT[60:]] for picture in (71, 72))
    assert rank.backup(page_hashes(first)) == 10
    # Up to the page with the picture they are the same.
    assert prefetch([rank], page_hashes(second), first=20) == 2
    assert prefetch([rank], page_hashes(first), first=20) == 10


def test_engines_whose_keys_lack_salts_are_refused(
    shared_server: Server, make_rank: MakeRank, sglang: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.utils", ModuleType("older"))
    with pytest.raises(InvalidError, match=r"0\.5\.20 or newer required: keys of this one lack"):
        make_rank(shared_server)
    with pytest.raises(InvalidError, match="unsalted: 'yes' given, true or false allowed"):
        make_rank(shared_server, ours={"unsalted": "yes"})
    unsalted = make_rank(shared_server, ours={"unsalted": True})
    assert unsalted.backup(page_hashes(PROMPT)) == 10
    sglang["enable_lora"] = True
    with pytest.raises(InvalidError, match=r"--enable-lora: .* older keys lack adapters"):
        make_rank(shared_server, ours={"unsalted": True})


def test_adapters_known_by_name_only_are_a_persons_to_allow(
    shared_server: Server, make_rank: MakeRank, sglang: Arguments
) -> None:
    with pytest.raises(InvalidError, match="lora: 'digest' given, \"by_name\" allowed"):
        make_rank(shared_server, ours={"lora": "digest"})
    for argument in ("enable_lora", "lora_paths"):
        sglang.clear()
        sglang[argument] = ["adapter=path"]
        with pytest.raises(InvalidError, match="--enable-lora: keys have the name and path"):
            make_rank(shared_server)
        rank = make_rank(shared_server, ours={"lora": "by_name"})
        assert rank.backup(page_hashes(PROMPT, extra_key=argument)) == 10


def test_models_with_other_pools_are_refused(shared_server: Server, make_rank: MakeRank) -> None:
    config = StorageConfig(extra_config(shared_server.grpc))
    storage = KvstrataStorage(config, {})
    storage.register_mem_pool_host(Pool())
    storage.register_mem_host_pool_v2(Pool(), "kv")
    for pool in ("mamba", "swa", "indexer", "draft"):
        with pytest.raises(InvalidError, match=f"keeps {pool} beside its KV cache"):
            storage.register_mem_host_pool_v2(Pool(), pool)
    storage.close()


def test_a_pool_that_comes_while_requests_run_makes_all_a_miss(
    shared_server: Server, make_rank: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    keys = page_hashes(PROMPT)
    rank = make_rank(shared_server)
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
        ({"weights": None}, {}, "weights: SGLang does not say which revision of None"),
        ({"dtype": 3}, {}, "dtype: 3 given, a text allowed"),
        ({}, {"model_name": None}, "--served-model-name: not given"),
        ({}, {"dcp_size": 2, "is_mla_model": True}, "--dcp-size"),
    ],
)
def test_what_cannot_be_right_is_said_at_the_start(
    shared_server: Server, make_rank: MakeRank, ours: Any, said: Any, error: str
) -> None:
    with pytest.raises(InvalidError, match=error):
        make_rank(shared_server, ours=ours, **said)


def test_other_layouts_are_refused(shared_server: Server, make_rank: MakeRank) -> None:
    pool = Pool()
    pool.layout = "page_unified"
    with pytest.raises(InvalidError, match=r"'page_unified' given, one of page_first, .*allowed"):
        make_rank(shared_server, pool)
