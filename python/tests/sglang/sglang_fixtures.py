"""What the tests of the HiCache backend share: ranks, and what the adapter asks of SGLang."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import Server
from fake_sglang import (
    Arguments,
    MakeRank,
    Pool,
    Rank,
    StorageConfig,
    extra_config,
    is_ready,
    page_hashes,
    until,
)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """What the adapter asks of SGLang: that keys have salts, and the engine's arguments."""
    arguments: Arguments = {}
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
def make_rank(request: pytest.FixtureRequest, sglang: Arguments) -> Iterator[MakeRank]:
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
