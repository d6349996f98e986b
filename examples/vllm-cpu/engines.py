"""What both programs stand on: a long prompt, and engines with or without kvstrata.

Between vLLM and kvstrata all is as in production; between vLLM's cache and host memory a copy by
memcpy stands in for vLLM's worker, which needs a GPU (integration/vllm/cpu_spec.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "integration" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from engine import Engine, Generated
from server import REPOSITORY, Server

__all__ = ["TOKENS", "Engine", "Generated", "Server", "prompt", "started"]

TOKENS = 24
"""Of an answer."""
QUESTION = "\n\nIn one sentence, what is kvstrata?"


def prompt(about: str | None) -> str:
    """The beginning of README.md, as much of it as the command line says, and a question."""
    arguments = argparse.ArgumentParser(description=about)
    arguments.add_argument("--characters", type=int, default=6000, help="of README.md, as prompt")
    return (REPOSITORY / "README.md").read_text()[: arguments.parse_args().characters] + QUESTION


def started(log: Path, endpoint: str | None) -> Engine:
    """An engine, with kvstrata if there is an endpoint."""
    engine = Engine(log)
    tier = None if endpoint is None else {"endpoint": endpoint}
    engine.open("smollm2", tier=tier, max_model_len=4096)
    # An engine's first request takes longer, whatever it is.
    engine.generate("Hello", tokens=1)
    return engine
