"""Prefill on one vLLM, decode on another, which takes the blocks over: see run.sh and engines.py.

The first engine computes the prompt and one token, the second takes the blocks and goes on. A third
run, on an engine without kvstrata, shows that the tokens are the same and what they cost.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from engines import TOKENS, Server, prompt, started


def main() -> None:
    """Prints what each of the engines took."""
    text = prompt(main.__doc__)
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as home:
        server = Server(Path(home), "dram.capacity=1GiB")
        log = Path(home) / "vllm.log"
        try:
            print("starting two engines ...", flush=True)
            prefill, decode = (started(log, server.grpc) for _ in range(2))
            first = prefill.generate(text, tokens=1)
            begun = time.monotonic()
            prefill.settle()
            handed = time.monotonic() - begun
            second = decode.generate(text, tokens=TOKENS)
            prefill.kill()
            decode.kill()
            print("starting an engine without kvstrata ...", flush=True)
            alone = started(log, None)
            plain = alone.generate(text, tokens=TOKENS)
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
