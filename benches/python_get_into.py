"""The Python half of benches/python.rs: gets into memory of its own whenever it is told to.

The first line on stdin has the hashes. For each one after it, it prints the seconds that one get of
all blocks took, or what was missing.
"""

from __future__ import annotations

import sys
import time

import kvstrata


def main(endpoint: str, path: str, model: str, block_bytes: int) -> None:
    """Opens the namespace of the bench and answers until the end of input."""
    hashes = bytes.fromhex(sys.stdin.readline())
    with kvstrata.Client(endpoint, path=path) as client:  # type: ignore[arg-type]
        namespace = client.open_namespace(
            model=model,
            engine="bench",
            dtype="bytes",
            block_tokens=16,
            parts=[(0, 0, block_bytes)],
            hash_algorithm="blake3",
        )
        count = len(hashes) // 32
        memory = memoryview(bytearray(b"\1" * (count * block_bytes)))
        buffers = [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
        print("ready", flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            got = namespace.get_into(hashes, buffers)
            seconds = time.perf_counter() - began
            print(seconds if got.blocks == count else got.misses, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
