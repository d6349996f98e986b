"""Sends a long prompt to vLLM, restarts it, sends the prompt again: see run.sh.

Between vLLM and kvstrata all is as in production; between vLLM's cache and host memory a copy by
memcpy stands in for vLLM's worker, which needs a GPU (integration/vllm/cpu_spec.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "integration" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from engine import Engine, Generated
from server import REPOSITORY, Server

QUESTION = "\n\nIn one sentence, what is kvstrata?"


def ask(prompt: str, endpoint: str, log: Path) -> Generated:
    """A new engine answers, is given the time to store, and ends."""
    print("starting vLLM ...", flush=True)
    engine = Engine(log)
    engine.open("smollm2", tier={"endpoint": endpoint}, max_model_len=4096)
    # An engine's first request takes longer, whatever it is.
    engine.generate("Hello", tokens=1)
    answer = engine.generate(prompt, tokens=24)
    engine.settle()
    engine.kill()
    return answer


def main() -> None:
    """Prints both times to the first token."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--characters", type=int, default=6000, help="of README.md, as prompt")
    prompt = (REPOSITORY / "README.md").read_text()[: arguments.parse_args().characters] + QUESTION
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as home:
        server = Server(Path(home), "dram.capacity=1GiB")
        try:
            log = Path(home) / "vllm.log"
            first, second = (ask(prompt, server.grpc, log) for _ in range(2))
        finally:
            server.close()
    tokens = first.answers[0].prompt_tokens
    print(f"\nprompt: {tokens} tokens, answer: {first.answers[0].text.strip()!r}")
    for name, run in (("first engine", first), ("restarted engine", second)):
        seconds = run.answers[0].first_token
        print(f"{name:17} first token after {seconds:6.2f} s, {run.external_hits:5} tokens found")
    same = first.answers[0].tokens == second.answers[0].tokens
    print("the answers are the same" if same else "THE ANSWERS DIFFER")
    sys.exit(0 if same and second.external_hits else 1)


if __name__ == "__main__":
    main()
