"""Runs vLLM engines, one after another, for `engine.py`, which starts it and says what to do.

One command a line on stdin, as JSON: `{"do": NAME, ...}`; one answer a line on what was stdout.
vLLM's own output goes to stderr. Engines run in this process, so that it is imported once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
sys.path.insert(0, str(Path(__file__).parent))

import vllm  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402

_SETTLE = 60.0
"""Seconds after which transfers that do not end are an error."""


class Host:
    """The commands: each public method is one."""

    def __init__(self) -> None:
        self._llm: Any = None

    def open(self, **settings: Any) -> dict[str, Any]:
        """Makes an engine; `settings` are those of `vllm.LLM`."""
        begun = time.perf_counter()
        self._llm = vllm.LLM(**settings)
        return {"seconds": time.perf_counter() - begun}

    def close(self) -> dict[str, Any]:
        """Ends the engine."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            cleanup_dist_env_and_memory()
            gc.collect()
        return {}

    def generate(
        self, prompts: list[list[int] | str], tokens: int, salt: str | None = None
    ) -> dict[str, Any]:
        """Greedy tokens, their log-probabilities, and what the engine found in caches."""
        before = self._counted()
        begun = time.perf_counter()
        outputs = self._llm.generate(
            [
                ({"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt})
                | ({"cache_salt": salt} if salt else {})
                for prompt in prompts
            ],
            vllm.SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=1, ignore_eos=True),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begun
        after = self._counted()
        results = []
        for output in outputs:
            best = output.outputs[0]
            steps = zip(best.token_ids, best.logprobs, strict=True)
            chances = [step[token].logprob for token, step in steps]
            results.append(
                {
                    "prompt_tokens": len(output.prompt_token_ids),
                    "text": best.text,
                    "tokens": list(best.token_ids),
                    "logprobs": chances,
                    "reason": best.finish_reason,
                    "first_token": output.metrics.first_token_latency,
                }
            )
        counted = {name: after[name] - before.get(name, 0) for name in after}
        return {"results": results, "seconds": seconds, "counted": counted}

    def abort(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Gives up a request after so many steps."""
        engine = self._llm.llm_engine
        parameters = vllm.SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        request = f"aborted-{time.monotonic_ns()}"
        engine.add_request(request, {"prompt_token_ids": prompt}, parameters)
        for _ in range(steps):
            engine.step()
        engine.abort_request([request])
        engine.step()
        return {}

    def settle(self) -> dict[str, Any]:
        """Has the engine step until no block is on its way any more."""
        end = time.monotonic() + _SETTLE
        while self._is_busy():
            assert time.monotonic() < end, "transfers do not end"
            self._llm.llm_engine.step()
            time.sleep(0.001)
        return {}

    def empty(self) -> dict[str, Any]:
        """Forgets all blocks, in the engine's cache and in the primary tier."""
        with_primary = self._connector_worker() is None
        return {"done": self._llm.reset_prefix_cache(reset_connector=with_primary)}

    def tier(self) -> dict[str, Any]:
        """What the adapter counted so far, and the longest of its calls since it was asked last."""
        worker = self._connector_worker()
        if worker is not None:
            return self._halves(worker)
        tier = self._scheduler().connector.connector_scheduler.manager.secondary_tiers[0]
        return {
            **self._counts(tier._counters),
            "requests": len(tier._lookups._requests),
            "groups": len(tier._spaces),
            "ready": all(space.ready for space in tier._spaces.values()),
        }

    def _halves(self, worker: Any) -> dict[str, Any]:
        scheduler = self._scheduler().connector._scheduler
        counted = self._counts(scheduler._counters)
        moved = worker._counters.snapshot()
        counted["counts"] |= moved
        counted["counts"]["stored_blocks"] = moved.get("put_stored_blocks", 0)
        links = (scheduler._link, worker._link)
        return {
            **counted,
            "requests": len(scheduler._requests),
            "groups": worker._groups,
            "ready": all(space.ready for link in links for space in link._spaces),
        }

    def _counts(self, counters: Any) -> dict[str, Any]:
        slowest, counters._slowest = counters.slowest, 0.0
        return {"counts": counters.snapshot(), "slowest": slowest}

    def _is_busy(self) -> bool:
        worker = self._connector_worker()
        is_moving = worker is not None and worker.is_busy
        return is_moving or self._scheduler().connector.has_pending_push_work()

    def _connector_worker(self) -> Any:
        """The worker's half of `KvstrataConnector`, if the engine has that."""
        if not hasattr(self._scheduler().connector, "_plans"):
            return None
        return get_kv_transfer_group()._worker

    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _counted(self) -> dict[str, float]:
        """The counters of vLLM that are about caches."""
        counted = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            of_caches = ("prefix_cache", "offload", "kvstrata", "cached_by_source")
            if value is not None and any(part in metric.name for part in of_caches):
                labels = ",".join(
                    f"{name}={label}"
                    for name, label in sorted(metric.labels.items())
                    if name not in ("engine", "model_name")
                )
                counted[f"{metric.name}{{{labels}}}" if labels else metric.name] = value
        return counted


def main() -> None:
    """Does what it is told until stdin ends."""
    host = Host()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(host, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    host.close()


if __name__ == "__main__":
    main()
