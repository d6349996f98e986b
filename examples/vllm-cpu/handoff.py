"""Prefill on one vLLM, decode on another: kvstrata hands the blocks over. See run.sh.

The first engine computes the prompt and one token, the second takes the blocks and goes on. A third
run, on an engine without kvstrata, shows that the tokens are the same and what they cost.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "integration" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from engine import Engine
from server import REPOSITORY, Server

QUESTION = "\n\nIn one sentence, what is kvstrata?"
TOKENS = 24


def started(log: Path, endpoint: str | None) -> Engine:
    """An engine, with kvstrata if there is an endpoint."""
    engine = Engine(log)
    tier = None if endpoint is None else {"endpoint": endpoint}
    engine.open("smollm2", tier=tier, max_model_len=4096)
    # An engine's first request takes longer, whatever it is.
    engine.generate("Hello", tokens=1)
    return engine


def main() -> None:
    """Prints what each of the engines took."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--characters", type=int, default=6000, help="of README.md, as prompt")
    prompt = (REPOSITORY / "README.md").read_text()[: arguments.parse_args().characters] + QUESTION
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as home:
        server = Server(Path(home), "dram.capacity=1GiB")
        log = Path(home) / "vllm.log"
        try:
            print("starting two engines ...", flush=True)
            prefill, decode = (started(log, server.grpc) for _ in range(2))
            first = prefill.generate(prompt, tokens=1)
            begun = time.monotonic()
            prefill.settle()
            handed = time.monotonic() - begun
            second = decode.generate(prompt, tokens=TOKENS)
            prefill.kill()
            decode.kill()
            print("starting an engine without kvstrata ...", flush=True)
            alone = started(log, None)
            plain = alone.generate(prompt, tokens=TOKENS)
            alone.kill()
        finally:
            server.close()
    tokens = plain.answers[0].prompt_tokens
    print(f"\nprompt: {tokens} tokens, answer: {second.answers[0].text.strip()!r}")
    computed = first.answers[0].first_token
    print(
        f"prefill engine   {computed:6.2f} s to compute the prompt, then {handed:.2f} s to store it"
    )
    print(
        f"decode engine    {second.answers[0].first_token:6.2f} s to its first token, "
        f"{second.external_hits} tokens handed over"
    )
    print(f"one engine alone {plain.answers[0].first_token:6.2f} s to its first token")
    same = second.answers[0].tokens == plain.answers[0].tokens
    print("the answers are the same" if same else "THE ANSWERS DIFFER")
    sys.exit(0 if same and second.external_hits >= 0.95 * (tokens - 1) // 32 * 32 else 1)


if __name__ == "__main__":
    main()
