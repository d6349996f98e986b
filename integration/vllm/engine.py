"""A process with real vLLM engines, for tests and benches. Needs nothing of vLLM itself.

`VLLM_ENV` names what `scripts/vllm-env.sh` has made.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ENVIRONMENT = Path(os.environ.get("VLLM_ENV", HERE.parents[1] / "target" / "vllm-env"))
BLOCK_TOKENS = 32
"""The smallest blocks that vLLM has on a CPU."""
PRIMARY_BYTES = 256 << 20
"""Of vLLM's primary tier, in /dev/shm."""


class Answer(NamedTuple):
    """What came of a prompt."""

    prompt_tokens: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    reason: str
    first_token: float
    """Seconds until the first token was there."""


class Generated(NamedTuple):
    """What came of prompts that were given together, and what vLLM counted meanwhile."""

    answers: list[Answer]
    seconds: float
    counted: dict[str, float]

    @property
    def external_hits(self) -> int:
        """Tokens that came from outside of the engine's own cache."""
        return int(self.counted.get("vllm:external_prefix_cache_hits", 0))


class Engine:
    """One process; `open` makes an engine in it. `log` has what vLLM says."""

    def __init__(self, log: Path, adapter: str = "tier") -> None:
        self.adapter = adapter
        self._log = log.open("ab")
        self._ids: list[str] = []
        self._process = subprocess.Popen(
            [ENVIRONMENT / "venv/bin/python", HERE / "host.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **{
                    name: os.environ[name]
                    for name in ("PATH", "HOME", "PYTHONPATH", "TMPDIR")
                    if name in os.environ
                },
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # More threads than cores that are free wait for each other by spinning.
                "OMP_NUM_THREADS": "1",
                "KMP_BLOCKTIME": "0",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        )

    def open(
        self,
        model: str,
        *,
        tier: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> float:
        """Makes an engine in place of the one before; returns how many seconds that took.

        `tier` are settings of what `adapter` says, of `KvstrataTier` or `KvstrataConnector`;
        `transfer` is another `kv_transfer_config` instead.
        """
        self.do("close")
        if tier is not None:
            transfer = offloading(tier) if self.adapter == "tier" else connector(tier)
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            "disable_log_stats": False,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 1280,
            "max_num_seqs": 4,
            "seed": 0,
            **({} if transfer is None else {"kv_transfer_config": transfer}),
        }
        if transfer is not None and "engine_id" in transfer:
            self._ids.append(transfer["engine_id"])
        path = str(ENVIRONMENT / "models" / model)
        answer = self.do("open", model=path, **{**defaults, **settings})
        return float(answer["seconds"])

    def close(self) -> None:
        """Ends the engine, and not the process."""
        self.do("close")

    def generate(
        self, *prompts: list[int] | str, tokens: int = 8, salt: str | None = None
    ) -> Generated:
        """Greedy tokens for each of the prompts, which are given together."""
        self.ask("generate", prompts=prompts, tokens=tokens, salt=salt)
        return self.generated()

    def generated(self) -> Generated:
        """The answer to a `generate` that was asked for."""
        answer = self.answer()
        answers = [Answer(**each) for each in answer["results"]]
        return Generated(answers, answer["seconds"], answer["counted"])

    def abort(self, prompt: list[int], *, steps: int) -> None:
        """Gives a prompt and aborts it after so many steps."""
        self.do("abort", prompt=prompt, steps=steps)

    def settle(self) -> None:
        """Waits until no block is on its way."""
        self.do("settle")

    def empty(self) -> None:
        """Has the engine forget all its blocks, as if it were new."""
        assert self.do("empty")["done"]

    def tier(self) -> dict[str, Any]:
        """`counts`, `slowest`, `ready`, `requests` and `groups` of the tier."""
        return self.do("tier")

    def do(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One command of `host.py`."""
        self.ask(name, **arguments)
        return self.answer()

    def ask(self, name: str, **arguments: Any) -> None:
        """Gives a command and does not wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to a command that was given."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine's process has ended: see {self._log.name}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def kill(self) -> None:
        """Ends the process at once, and removes what it leaves in /dev/shm."""
        self._process.kill()
        self._process.wait()
        for name in self._ids:
            Path(f"/dev/shm/vllm_offload_{name}.mmap").unlink(missing_ok=True)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._log.close()


def connector(settings: dict[str, Any]) -> dict[str, Any]:
    """A `kv_transfer_config` with kvstrata's own connector."""
    return {
        "kv_connector": "KvstrataConnector",
        "kv_connector_module_path": "kvstrata.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def offloading(tier: dict[str, Any]) -> dict[str, Any]:
    """A `kv_transfer_config` with kvstrata as the secondary tier, for a CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": f"test-{uuid.uuid4().hex[:8]}",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_spec",
            "cpu_bytes_to_use": PRIMARY_BYTES,
            "secondary_tiers": [{"type": "KvstrataTier", "module_path": "kvstrata.vllm", **tier}],
        },
    }
