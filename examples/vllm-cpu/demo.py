"""Sends a long prompt to vLLM, restarts it, sends the prompt again: see run.sh and engines.py."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from engines import TOKENS, Generated, Server, prompt, started


def ask(text: str, endpoint: str, log: Path) -> Generated:
    """A new engine answers, is given the time to store, and ends."""
    print("starting vLLM ...", flush=True)
    engine = started(log, endpoint)
    answer = engine.generate(text, tokens=TOKENS)
    engine.settle()
    engine.kill()
    return answer


def main() -> None:
    """Prints both times to the first token."""
    text = prompt(main.__doc__)
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as home:
        server = Server(Path(home), "dram.capacity=1GiB")
        try:
            log = Path(home) / "vllm.log"
            first, second = (ask(text, server.grpc, log) for _ in range(2))
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
