"""A server process, for whatever tests need one.

`KVSTRATA_BINARY` names its program; else it is the one that `cargo build` leaves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
BINARY = Path(os.environ.get("KVSTRATA_BINARY", TARGET / "debug" / "kvstrata"))


def freeze(process: int) -> None:
    """Stops a process, and returns when it stands still."""
    os.kill(process, signal.SIGSTOP)
    threads = list(Path(f"/proc/{process}/task").iterdir())
    while any((at / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for at in threads):
        time.sleep(0.001)


class Server:
    """A server process with dram only, killed at the end."""

    def __init__(self, home: Path, *settings: str) -> None:
        self.home = home
        self.settings = settings
        self.grpc = "127.0.0.1:0"
        self.bulk = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Starts it; again on the same ports as before."""
        listen = ["--grpc-listen", self.grpc, "--http-listen", "127.0.0.1:0"]
        settings = [f"server.bulk_listen={self.bulk}", "dram.capacity=64MiB", *self.settings]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        self.process = subprocess.Popen(
            [BINARY, "serve", "--print-addresses", *listen, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.home / "server.log").open("ab"),
            env={
                "HOME": str(self.home),
                "XDG_CONFIG_HOME": str(self.home),
                "PATH": "/usr/bin:/bin",
            },
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server did not start: {(self.home / 'server.log').read_text()}"
        addresses = json.loads(line)
        self.grpc = addresses["grpc"]
        self.http = addresses["http"]
        self.bulk = addresses.get("bulk") or self.bulk
        self.resp = addresses.get("resp")
        self.gossip = addresses.get("gossip")

    def kill(self) -> None:
        """Ends it at once, whatever it is doing."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Stops it: it keeps its connections and answers nothing."""
        freeze(self.process.pid)

    def go_on(self) -> None:
        """Ends the pause."""
        self.process.send_signal(signal.SIGCONT)

    def metric(self, name: str) -> float:
        """The value of a series, as `name{label="value"}`, or the sum of all of a name."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        series = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return sum(float(value) for each, value in series if name in (each, each.split("{")[0]))

    def resident_kib(self) -> int:
        """Its resident memory that is its own, without dram."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("RssAnon:")]
        return int(line.split()[1])

    def close(self) -> None:
        """Ends it if it still runs."""
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
