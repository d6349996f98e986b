"""Two ranks of one engine in two processes, which agree over gloo; one of them fails in between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from controller import Controller, config, mha_pool

TOKENS = list(range(5000, 5000 + 300 * 16))
"""More than two batches."""


def run(rank: int, store: str, extra: dict[str, Any]) -> None:
    """What one rank does. Writes what it has seen, a line a step, to `store`.RANK."""
    said = {"tp_rank": rank, "tp_size": 2, "model_name": "example/ranks"}
    file = torch.distributed.FileStore(store, 2)
    torch.distributed.init_process_group("gloo", store=file, rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    controller = Controller(mha_pool("page_first"), config(extra, **said), [group])
    controller.ready()
    seen = [("stored", controller.backup(TOKENS), 0)]
    torch.distributed.barrier()
    seen.append(("whole", *controller.load(TOKENS)))

    backend = controller.storage_backend
    fails = rank == 1
    if fails:
        # Its server is lost, for lookups first, then between lookup and load.
        space, backend._space = backend._space, None
    seen.append(("no lookup", *controller.load(TOKENS)))
    if fails:
        backend._space = space
        pages, backend._pages = backend._pages, None
    seen.append(("no load", *controller.load(TOKENS)))
    if fails:
        backend._pages = pages
    seen.append(("whole again", *controller.load(TOKENS)))
    torch.distributed.barrier()
    controller.detach_storage_backend()
    Path(f"{store}.{rank}").write_text("\n".join(map(repr, seen)))


if __name__ == "__main__":
    import json

    run(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
