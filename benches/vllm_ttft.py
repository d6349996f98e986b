"""How much sooner the first token comes if the blocks of a prompt are in kvstrata.

A real vLLM 0.32 on a CPU (scripts/vllm-env.sh), SmolLM2-135M in float32, one thread, one request
at a time. For each length: the time to the first token of a prompt that nobody has seen, of the
same prompt in an engine that has forgotten it while kvstrata has its blocks in dram, or on nvme,
and of the same prompt once more, from the engine's own cache, which is the floor. Medians; a table
in Markdown.

Not measured: a GPU, whose prefill is faster, and so are its copies; more than one request.

    VLLM_ENV=target/vllm-env python benches/vllm_ttft.py
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))

from engine import Engine
from server import Server

LENGTHS = (257, 1025, 2049, 4097)
ROUNDS = 3


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of its own."""
    draw = random.Random(seed)
    return [draw.randrange(1, 40_000) for _ in range(tokens)]


def ready(engine: Engine) -> None:
    """Waits until the tier has reached its server."""
    while not engine.tier()["ready"]:
        time.sleep(0.02)


def first_token(engine: Engine, ids: list[int], *, found: bool) -> float:
    """The time to the first token; whether blocks came from kvstrata must be as expected."""
    generated = engine.generate(ids, tokens=1)
    assert (generated.external_hits >= 0.95 * (len(ids) - 32)) is found, generated.counted
    engine.settle()
    return generated.answers[0].first_token


def measure(engine: Engine, server: Server, length: int) -> dict[str, float]:
    """Medians for one length."""
    times: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        ids = prompt(1000 * length + number, length)
        times.setdefault("computed", []).append(first_token(engine, ids, found=False))
        times.setdefault("engine", []).append(first_token(engine, ids, found=False))
        engine.empty()
        times.setdefault("dram", []).append(first_token(engine, ids, found=True))
        while server.metric("kvstrata_demote_queue_blocks"):
            time.sleep(0.05)
        time.sleep(1.0)
        server.kill()
        server.start()
        engine.empty()
        ready(engine)
        times.setdefault("nvme", []).append(first_token(engine, ids, found=True))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as home:
        nvme = Path(home) / "nvme"
        nvme.mkdir()
        server = Server(
            Path(home),
            "dram.capacity=2GiB",
            f"nvme.path={nvme}",
            "nvme.capacity=8GiB",
            "nvme.daily_writes=none",
            "node.name=node-0",
        )
        engine = Engine(Path(home) / "vllm.log")
        try:
            tier = {"endpoint": server.grpc}
            engine.open("smollm2", tier=tier, max_model_len=LENGTHS[-1] + 64)
            ready(engine)
            first_token(engine, prompt(0, 65), found=False)
            print("| tokens | computed | dram | nvme | engine's own | dram sooner by | nvme |")
            print("|---|---|---|---|---|---|---|")
            for length in LENGTHS:
                of = measure(engine, server, length)
                print(
                    f"| {length - 1} | {of['computed']:.2f} s | {of['dram']:.3f} s "
                    f"| {of['nvme']:.3f} s | {of['engine']:.3f} s "
                    f"| {of['computed'] / of['dram']:.1f} | {of['computed'] / of['nvme']:.1f} |",
                    flush=True,
                )
        finally:
            engine.kill()
            server.close()


if __name__ == "__main__":
    main()
