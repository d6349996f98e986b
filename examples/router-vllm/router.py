"""Two vLLM engines behind `kvstrata router`: see run.sh.

Shows, and fails if it is not so: a first request is slow, the same system prompt is fast on the
engine that has it, another one goes to the other engine, batches of events that were missed are
replayed, an engine that was killed and restarted finds its prefix in kvstrata, and requests go on
when kvstrata is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "integration" / "vllm"))

from engine import BLOCK_TOKENS, ENVIRONMENT, offloading
from server import BINARY, REPOSITORY, Server

START = 300.0
"""Seconds for engines to start; together on two cores they take more than a minute."""
MODEL = "smollm2"
LOG_LINES = 40
"""Shown of each log if something is not as it should be."""


class Answer(NamedTuple):
    """What a client sees of a completion."""

    route: dict[str, str]
    first_token: float
    text: str


def until(what: str, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            failed(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Vllm:
    """`vllm serve` with kvstrata as its tier, publishing events."""

    def __init__(self, name: str, home: Path, kvstrata: str) -> None:
        self.name = name
        self.log = home / f"vllm-{name}.log"
        self.kvstrata = kvstrata
        self.http, self.events, self.replay = (free_port() for _ in range(3))
        self.start()

    def start(self) -> None:
        """Starts it, and does not wait until it answers."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        specification = REPOSITORY / "integration" / "vllm"
        tier = offloading({"endpoint": self.kvstrata})
        self.shared = Path(f"/dev/shm/vllm_offload_{tier['engine_id']}.mmap")
        settings = {
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(self.http),
            "--dtype": "float32",
            "--block-size": str(BLOCK_TOKENS),
            "--max-model-len": "4096",
            "--max-num-seqs": "4",
            "--prefix-caching-hash-algo": "sha256_cbor",
            "--kv-events-config": json.dumps(events),
            "--kv-transfer-config": json.dumps(tier),
        }
        flags = [part for setting in settings.items() for part in setting]
        self.process = subprocess.Popen(
            [
                ENVIRONMENT / "venv/bin/python",
                "-m",
                "vllm.entrypoints.cli.main",
                "serve",
                ENVIRONMENT / "models" / MODEL,
                "--enforce-eager",
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "PYTHONPATH": f"{specification}:{os.environ.get('PYTHONPATH', '')}",
                "KVSTRATA_INSTANCE": f"127.0.0.1:{self.http}",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
                "KMP_BLOCKTIME": "0",
            },
        )

    @property
    def flag(self) -> str:
        """As the router is told of it."""
        events = f"events=tcp://127.0.0.1:{self.events},replay=tcp://127.0.0.1:{self.replay}"
        return f"http://127.0.0.1:{self.http},name={self.name},{events}"

    def kill(self) -> None:
        """Ends it at once, with the processes that it has started, and removes what it leaves."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.shared.unlink(missing_ok=True)


class Router:
    """`kvstrata router` in front of engines."""

    def __init__(self, home: Path, kvstrata: str, mode: str, engines: list[Vllm]) -> None:
        flags = [part for engine in engines for part in ("--engine", engine.flag)]
        self.process = subprocess.Popen(
            [
                BINARY,
                "router",
                *("--listen", "127.0.0.1:0", "--print-addresses", "--mode", mode),
                *("--kvstrata", kvstrata, "--tiers-deadline", "100ms"),
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(home / "router.log").open("ab"),
        )
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["http"]

    def get(self, path: str) -> str:
        """The body of a page."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def engine(self, name: str) -> dict[str, Any]:
        """What it knows of an engine."""
        engines: list[dict[str, Any]] = json.loads(self.get("/engines"))
        return next(engine for engine in engines if engine["engine"] == name)

    def metric(self, series: str) -> float:
        """The value of a series."""
        lines = self.get("/metrics").splitlines()
        found = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(series + " ")]
        return float(found[0])

    def chat(self, system: str, question: str) -> Answer:
        """Asks, and reads the answer as it comes."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {
            "model": MODEL,
            "messages": messages,
            "stream": True,
            "max_tokens": 8,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://{self.address}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        begun, first, text = time.monotonic(), 0.0, ""
        with urllib.request.urlopen(request, timeout=120) as answer:
            fields = answer.headers["x-kvstrata-route"].split("; ")
            route = dict(field.split("=", 1) for field in fields)
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                first = first or time.monotonic() - begun
                text += json.loads(data)["choices"][0]["delta"].get("content") or ""
        return Answer(route, first, text)


def system_prompt(start: int, characters: int) -> str:
    """A long text that has no beginning in common with one from elsewhere."""
    return (REPOSITORY / "ARCHITECTURE.md").read_text()[start : start + characters]


def show(what: str, answer: Answer) -> None:
    """One line of the table."""
    route = answer.route
    parts = " ".join(f"{name} {route[name]:>3}" for name in ("device", "dram", "nvme", "computed"))
    print(
        f"{what:34} engine {route['engine']}  first token after {answer.first_token:6.2f} s  "
        f"{parts}  tiers {route['tiers']}",
        flush=True,
    )


def failed(what: str) -> None:
    """Ends the program."""
    sys.exit(f"NOT AS IT SHOULD BE: {what}")


def demonstrate(router: Router, engines: list[Vllm], server: Server, characters: int) -> None:
    """The story, with its checks."""
    one, other = system_prompt(0, characters), system_prompt(characters, characters)
    for engine in engines:
        router_up(router, engine)
    # An engine's first request takes longer, whatever it is.
    for engine in engines:
        router.chat(f"{engine.name} is warm. " * 20, "Hello")
    names = [engine.name for engine in engines]
    until(
        "both have told how long their blocks are",
        lambda: all(router.engine(name)["block_tokens"] == BLOCK_TOKENS for name in names),
    )
    first = router.chat(one, "What is the first word?")
    show("first request", first)
    home = first.route["engine"]
    blocks = int(first.route["blocks"])
    until("the blocks are told of", lambda: router.engine(home)["device_blocks"] >= blocks)
    second = router.chat(one, "And what is the last word of all?")
    show("same system prompt", second)
    if second.route["engine"] != home or second.first_token > first.first_token / 2:
        failed("the same system prompt was not fast on the same engine")
    elsewhere = router.chat(other, "What is the first word?")
    show("another system prompt", elsewhere)
    if elsewhere.route["engine"] == home:
        failed("the other system prompt went to the same engine")
    second_router = Router(server.home, server.grpc, "device-only", engines)
    try:
        for engine in engines:
            router_up(second_router, engine)
        second_router.chat("A batch of events.", "Which is the first that it sees? " * 20)
        second_router.chat("Another one.", "Which is the first of the other? " * 20)
        replayed = 'kvstrata_event_batches_total{outcome="replayed"}'
        until("batches are replayed", lambda: second_router.metric(replayed) >= 2)
        later = second_router
        until("the blocks are known", lambda: later.engine(home)["device_blocks"] >= blocks)
        late = second_router.chat(one, "Do you know it, too?")
        show("a router that came later", late)
        if int(late.route["device"]) < blocks // 2:
            failed("a router that came later has not learned what was before")
    finally:
        second_router.process.kill()
    time.sleep(2)
    victim = next(engine for engine in engines if engine.name == home)
    victim.kill()
    during = router.chat("Short.", "Is anybody there?")
    show("while that engine is dead", during)
    if during.route["engine"] == home:
        failed("a dead engine was asked")
    victim.start()
    router_up(router, victim)
    router.chat("It is warm again. " * 20, "Hello")
    again = router.chat(one, "And once more, please?")
    show("after its restart", again)
    if again.first_token > first.first_token / 2:
        failed("the prefix was computed again")
    server.kill()
    for number in range(3):
        without = router.chat(one, f"Question {number} without kvstrata?")
        show("kvstrata killed", without)


def router_up(router: Router, engine: Vllm) -> None:
    """Waits until the router sends requests to an engine, or the engine has ended."""

    def up() -> bool:
        if engine.process.poll() is not None:
            failed(f"vLLM has ended:\n{engine.log.read_text()[-3000:]}")
        return bool(router.engine(engine.name)["up"])

    until(f"engine {engine.name} is up", up, START)


def main() -> None:
    """Starts everything, and ends it."""
    arguments = argparse.ArgumentParser(description=main.__doc__)
    arguments.add_argument("--mode", default="timed", help="of the router")
    arguments.add_argument("--characters", type=int, default=5000, help="of each system prompt")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as directory:
        home = Path(directory)
        server = Server(home, "dram.capacity=2GiB")
        print("starting two engines ...", flush=True)
        engines = [Vllm(name, home, server.grpc) for name in ("a", "b")]
        router = Router(home, server.grpc, options.mode, engines)
        try:
            demonstrate(router, engines, server, options.characters)
        except BaseException:
            for log in sorted(home.glob("*.log")):
                print(f"--- {log.name}", *log.read_text().splitlines()[-LOG_LINES:], sep="\n")
            raise
        finally:
            router.process.kill()
            router.process.wait()
            for engine in engines:
                engine.kill()
            server.kill()
    print("all as it should be")


if __name__ == "__main__":
    main()
