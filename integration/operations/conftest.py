"""A machine with the three nodes of docs/operations.md, and the bucket that they use."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from machine import Machine, missing
from page import Section, differences, sections
from server import BINARY, REPOSITORY

PAGE = REPOSITORY / "docs" / "operations.md"
WEED = REPOSITORY / ".venv" / "bin" / "weed"
NODES = range(3)
DISKS = [f"/mnt/cache/{node}" for node in NODES]
OF_BUCKET = {
    "AWS_ENDPOINT": "http://127.0.0.1:8333",
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "testsecret",
}
BUCKET = """
mkdir -p bucket
TMPDIR=$PWD/bucket weed -logtostderr=true server -ip=127.0.0.1 -ip.bind=127.0.0.1 \
  -dir="$PWD/bucket" -master.telemetry=false -master.volumeSizeLimitMB=1024 -volume.max=50 \
  -s3 -s3.config="$PWD/s3.json" -s3.port=8333 -s3.port.iceberg=0 -s3.port.lance=0 \
  >>bucket.log 2>&1 & echo $! >bucket.pid
"""
FILER = "http://127.0.0.1:8888/buckets/kvstrata/"


class Operator:
    """Who has this page before them, and the machine under their hands."""

    def __init__(self, home: Path) -> None:
        self.page = sections(PAGE)
        self.machine = Machine(
            home,
            {"kvstrata": BINARY, "weed": WEED},
            hosts=["localhost", "kvstrata-0.kvstrata"],
            disks=DISKS,
        )
        self.machine.environment |= OF_BUCKET
        credentials = [{"accessKey": "test", "secretKey": "testsecret"}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        (home / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.machine.run("openssl rand -hex 32 >identity; chmod 600 identity")
        (config,) = self.page["The nodes of this page"].files
        for node in NODES:
            self.configure(node, self.of_node(config, node))

    @staticmethod
    def of_node(config: str, node: int) -> str:
        """What the page says of the others: the next names, hosts, zones, ports and disks."""
        seeds = next(line for line in config.splitlines() if line.startswith("seeds"))
        config = config.replace("kvstrata-0", f"kvstrata-{node}").replace("host-0", f"host-{node}")
        config = config.replace('"zone-a"', f'"zone-{"abc"[node]}"').replace(DISKS[0], DISKS[node])
        for port in "013":
            config = config.replace(f'"127.0.0.1:940{port}"', f'"127.0.0.1:94{node}{port}"')
        return "\n".join(seeds if at.startswith("seeds") else at for at in config.splitlines())

    def configure(self, node: int, more: str) -> None:
        """Writes more into a node's file."""
        with (self.machine.home / f"node-{node}.toml").open("a") as file:
            file.write(more + "\n")

    def start_bucket(self) -> None:
        """Starts the store; as new, or with what it has."""
        self.machine.run(BUCKET)
        made = f"curl -sf -X POST {FILER} -o /dev/null -w '%{{http_code}}'"
        listed = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8333/kvstrata"
        self.machine.until_says(f"{made} || true; {listed} || true", "403")

    def does(self, heading: str, only: slice = slice(None)) -> list[str]:
        """Types the commands under a heading, all or some; returns what they have printed."""
        section: Section = self.page[heading]
        assert section.commands[only], f"no commands under {heading}"
        said = []
        for command in section.commands[only]:
            said.append(self.machine.run(command.script))
            if command.printed is not None:
                wrong = differences(command.printed, said[-1])
                assert wrong is None, f"{command.script}\n{wrong}"
        return said

    def end(self, node: int) -> None:
        """Kills a node, and returns when it is gone."""
        process = f'"$(cat node-{node}.pid)"'
        self.machine.run(f"kill -9 {process}")
        self.machine.until(
            lambda: not self.machine.succeeds(f"kill -0 {process}"), f"the end of node {node}"
        )

    def start(self, node: int) -> None:
        """Starts a node, as the page does."""
        command = f"kvstrata serve --config node-{node}.toml >>node-{node}.log 2>&1"
        self.machine.run(f"{command} & echo $! >node-{node}.pid")

    def lose_disk(self, node: int) -> None:
        """Kills a node and starts it again with an empty disk."""
        self.end(node)
        self.machine.run('umount "$1" && mount "$1"', DISKS[node])
        self.start(node)
        self.machine.until_says(f"curl -s http://127.0.0.1:94{node}1/readyz", "ok")

    def epochs(self, ordinal: int) -> int:
        """How often somebody took or released an ordinal, as the bucket has it."""
        url = f"{FILER}blocks/v1/prod/epochs/{ordinal:05}/?limit=1000"
        found = json.loads(self.machine.run(f"curl -sf -H 'Accept: application/json' '{url}'"))
        return sum(not entry["FullPath"].endswith("/alive") for entry in found["Entries"] or [])

    def metric(self, node: int, series: str) -> float:
        """A series of a node."""
        text = self.machine.run(f"curl -s http://127.0.0.1:94{node}1/metrics")
        values = [line.split()[1] for line in text.splitlines() if line.startswith(f"{series} ")]
        return float(values[0]) if values else 0.0

    def problems(self, node: int) -> str:
        """What the console of a node says is wrong."""
        text = self.machine.run(f"curl -s http://127.0.0.1:94{node}1/console/state")
        return json.dumps(json.loads(text)["problems"])

    def replay(self, requests: int, block_bytes: str = "16KiB") -> str:
        """Load of so many engines that each node is the home of some, whatever comes of it."""
        said = self.machine.run(
            f"kvstrata replay load.jsonl.zst --requests {requests} --block-bytes {block_bytes} "
            "--clients 6 --endpoint 127.0.0.1:9400,127.0.0.1:9410 2>&1 || true"
        )
        assert re.search(r"^wrong bytes +0$", said, re.MULTILINE), said
        return said

    def until(self, what: str, node: int, series: str, least: float) -> None:
        """Waits until a series of a node is as large as that."""
        try:
            self.machine.until(lambda: self.metric(node, series) >= least, what)
        except AssertionError as never:
            said = self.machine.run(f"kvstrata stats --endpoint 127.0.0.1:94{node}0 2>&1 || true")
            log = "\n".join(self.machine.file(f"node-{node}.log").splitlines()[-20:])
            raise AssertionError(f"{never} at node {node}\n{said}\n{log}") from None


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One for all tests of the page, which come in its order."""
    why = missing() or (None if WEED.exists() else "no .venv/bin/weed")
    if why is not None:
        print(f"SKIPPED (operations: its commands do not run here, {why})", file=sys.stderr)
        pytest.skip(why)
    home = tmp_path_factory.mktemp("operations")
    operator = Operator(home)
    try:
        operator.start_bucket()
        yield operator
    finally:
        operator.machine.close()
        shutil.rmtree(home, ignore_errors=True)
