"""Compares what copies blocks by addresses with what copies them by tensors, in tensors of torch.

The second is for GPUs. Here it runs on tensors in host memory, so streams, events and pinned memory
have no part in it.
"""

from __future__ import annotations

import random

import torch

from kvstrata.vllm.connector.copier import Copier, DeviceCopier, HostCopier
from kvstrata.vllm.connector.regions import regions_of

BLOCKS, HEADS, TOKENS, WIDTH, SLOTS = 12, 3, 8, 10, 6
ORDERS = {
    # Physical order of the dimensions -> the permutation back to blocks, heads, tokens, contents.
    "BHNC": (0, 1, 2, 3),
    "BNHC": (0, 2, 1, 3),
    "HBNC": (1, 0, 2, 3),
}
SIZES = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH}


def tensor(order: str, dtype: torch.dtype) -> torch.Tensor:
    """A cache of random numbers, in a storage that begins before it."""
    sizes = [SIZES[name] for name in order]
    storage = torch.randn(7 + torch.Size(sizes).numel()).to(dtype)
    return storage[7:].view(sizes).permute(ORDERS[order])


def packed(layers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers that lie within each other: all of a block, then all of the next."""
    storage = torch.randn(BLOCKS, layers, HEADS, TOKENS, WIDTH).to(dtype)
    return [storage[:, layer] for layer in range(layers)]


def split(dtype: torch.dtype) -> torch.Tensor:
    """A cache whose kernels take half blocks."""
    return torch.randn(2 * BLOCKS, HEADS, TOKENS // 2, WIDTH).to(dtype)


def check() -> None:
    """Raises `AssertionError` if they differ, or do not give back what they took."""
    for dtype in (torch.float32, torch.bfloat16):
        for order in ORDERS:
            compare([[tensor(order, dtype), tensor(order, dtype)], [tensor(order, dtype)]])
        compare([packed(3, dtype)])
        compare([[split(dtype), split(dtype)]])


def compare(groups: list[list[torch.Tensor]]) -> None:
    """One set of caches."""
    caches = {
        f"{at}.{number}": each
        for at, group in enumerate(groups)
        for number, each in enumerate(group)
    }
    names = [[f"{at}.{number}" for number in range(len(group))] for at, group in enumerate(groups)]
    regions = regions_of(caches, names, BLOCKS)
    both: list[Copier] = [kind(regions, BLOCKS, SLOTS) for kind in (HostCopier, DeviceCopier)]
    draw = random.Random(1)
    blocks = draw.sample(range(BLOCKS), SLOTS)
    moves = [(slot, group, blocks[slot]) for slot in range(SLOTS) for group in range(len(groups))]
    for copier in both:
        assert copier.read(moves)()
    rooms = [[bytes(copier.room(slot, group)) for slot, group, _ in moves] for copier in both]
    assert rooms[0] == rooms[1]
    assert len(set(rooms[0])) == len(moves)
    before = [taken(caches, block) for block in blocks]
    for copier in both:
        for each in caches.values():
            each.zero_()
        others = [(slot, group, blocks[slot - 1]) for slot, group, _ in moves]
        assert copier.write(others)()
        after = [taken(caches, blocks[slot - 1]) for slot in range(SLOTS)]
        assert after == before
        untouched = set(range(BLOCKS)) - set(blocks)
        assert not any(any(any(part) for part in taken(caches, block)) for block in untouched)


def taken(caches: dict[str, torch.Tensor], block: int) -> list[bytes]:
    """The bytes of a block in each layer, by torch."""
    found = []
    for each in caches.values():
        ratio = each.shape[0] // BLOCKS
        mine = each[block * ratio : (block + 1) * ratio].contiguous()
        found.append(bytes(mine.view(torch.uint8).flatten().tolist()))
    return found


if __name__ == "__main__":
    check()
