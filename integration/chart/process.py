"""Runs what the chart renders, without a cluster: the nodes' container, and that of `helm test`.

The containers run as confine.py says: the manifest's user, no capability, a read-only root, no
io_uring. For several sets of values the node must become ready as its probes ask, pass `helm test`,
show its metrics to whoever has the token only, drain by its hook, stop within its grace period, and
have what was put after a restart. What must not pass, another token, other bytes, is tried, too.
The memory that the chart demands is compared with what the server demands.

Usage: process.py [BINARY]. Needs root and namespaces, and says so where it cannot run.
"""

from __future__ import annotations

import copy
import http.client
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from pathlib import Path

import helm_python

import confine
import manifests as find
import values as sets
from check import Tally, refusal, render
from confine import Cluster, Pod
from manifests import Manifest
from values import Values

REPOSITORY = Path(__file__).resolve().parents[2]
READY_SECONDS, POLL_SECONDS = 60.0, 0.1
SMALL: Values = {"memory": {"limit": "384MiB"}, "nvme": {"capacity": "256MiB"}}
OWN_TOKEN = "operator-" + "0123456789abcdef" * 2

SCENARIOS: dict[str, Values] = {
    "defaults": {"config": SMALL},
    "own secrets, TLS, certificates of clients, RESP": {
        "config": SMALL | {"server": {"resp_listen": "0.0.0.0:9405"}},
        "identity": {"existingSecret": "own"},
        "auth": {"existingSecret": "own", "operatorToken": {"secret": "own"}},
        "tls": {"secret": "own", "clientCertificates": True},
        "helmTest": {"clientSecret": "own"},
        "nvme": {"volume": "emptyDir", "size": "1Gi"},
    },
    "no tokens, an object store": {
        "config": SMALL | {"object": {"url": "file:///var/lib/kvstrata/bucket"}},
        "object": {"credentialsSecret": "bucket"},
        "auth": {"enabled": False},
    },
    "agents": sets.AGENT | {"config": SMALL},
}


def openssl(directory: Path, *arguments: str) -> None:
    """Runs it quietly."""
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def own_secret(directory: Path, hosts: list[str]) -> dict[str, bytes]:
    """A Secret as somebody would make it: identity, tokens, a certificate for nodes and clients."""
    names = ",".join(f"DNS:{host}" for host in hosts)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl(
        directory, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca"
    )
    openssl(directory, "req", *key[:-2], "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=kv")
    extensions = f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n"
    (directory / "ext").write_text(extensions + "basicConstraints=critical,CA:FALSE\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(
        directory, "x509", "-req", "-in", "tls.csr", *signed, "-extfile", "ext", "-out", "tls.crt"
    )
    files = {name: (directory / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")}
    tokens = f"default {OWN_TOKEN} operator\n".encode()
    return files | {"identity": b"ab" * 32, "tokens": tokens, "token": OWN_TOKEN.encode()}


class Node:
    """A node's pod, started and stopped as a kubelet would."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        (self.container,) = pod.spec["containers"]
        self.log = pod.cluster.directory / "node.log"
        self.process = pod.start(self.container, self.log)

    def ask(self, path: str, token: str | None = None) -> int:
        """The status of a page on the http port; 0 while nobody answers."""
        ports = {p["name"]: p["containerPort"] for p in self.container["ports"]}
        headers = {"authorization": f"Bearer {token}"} if token else {}
        probe = self.container["readinessProbe"]["httpGet"]
        connection = http.client.HTTPConnection("127.0.0.1", ports[probe["port"]], timeout=5)
        if probe.get("scheme") == "HTTPS":
            # As a kubelet: it does not look at the certificate.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(
                "127.0.0.1", ports[probe["port"]], timeout=5, context=context
            )
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def until_ready(self) -> bool:
        """Whether its readiness probe succeeds in time."""
        page = self.container["readinessProbe"]["httpGet"]["path"]
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.ask(page) == 200:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def status(self) -> dict[str, str]:
        """What the kernel says of the process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))

    def stop(self) -> int | None:
        """Ends it by its hook and SIGTERM, as a kubelet does; its exit code, or None if it has
        outlasted its grace period."""
        started, grace = time.monotonic(), self.pod.spec["terminationGracePeriodSeconds"]
        hook = self.container["lifecycle"]["preStop"]["exec"]["command"]
        code, said = self.pod.run(self.container | {"args": hook[1:]}, grace)
        if code != 0 or "drained" not in said or self.ask("/readyz") != 503:
            raise AssertionError(f"the hook ended with {code}: {said}")
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(grace - (time.monotonic() - started))
        except subprocess.TimeoutExpired:
            return None

    def told(self) -> str:
        """What it has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def cluster_for(directory: Path, binary: Path, found: list[Manifest]) -> Cluster:
    """What the pods of one rendering refer to."""
    cluster = Cluster(directory, binary)
    cluster.add(found)
    namespace = find.workload(found)["metadata"]["namespace"]
    name = find.workload(found)["metadata"]["name"]
    headless = find.named(found, "Service", "-headless")["metadata"]["name"]
    services = [f"{service}.{namespace}.svc" for service in (name, headless)]
    cluster.hosts = [*services, f"{name}-0.{services[1]}"]
    bucket = {"AWS_REGION": b"eu-west-1"}
    for secret, data in (("own", own_secret(directory, cluster.hosts)), ("bucket", bucket)):
        cluster.add([{"kind": "Secret", "metadata": {"name": secret}, "data": encoded(data)}])
    return cluster


def encoded(data: dict[str, bytes]) -> dict[str, str]:
    """As a Secret has it."""
    return {key: b64encode(value).decode() for key, value in data.items()}


def check_confined(tally: Tally, name: str, node: Node) -> None:
    """The process is what the manifest says: user, group, no rights, no way to get any."""
    context, status = node.pod.spec["securityContext"], node.status()
    for field, wanted in (("Uid", context["runAsUser"]), ("Gid", context["runAsGroup"])):
        tally.expect(
            set(status[field].split()) == {str(wanted)}, f"{name}: {field} {status[field]}"
        )
    for field in ("CapEff", "CapPrm", "CapBnd", "CapInh"):
        tally.expect(int(status[field], 16) == 0, f"{name}: {field} is {status[field]}")
    tally.expect((status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), f"{name}: {status}")
    variables = Path(f"/proc/{node.process.pid}/environ").read_text(encoding="utf-8")
    given = "AWS_REGION=eu-west-1" in variables.split("\0")
    tally.expect(given == ("envFrom" in node.container), f"{name}: credentials: {given}")
    mounts = Path(f"/proc/{node.process.pid}/mountinfo").read_text(encoding="utf-8").splitlines()
    root = node.pod.root(node.container)
    options = next(line.split()[5] for line in mounts if line.split()[4] in ("/", str(root)))
    tally.expect("ro" in options.split(","), f"{name}: the root is mounted {options}")


def check_helm_test(tally: Tally, name: str, cluster: Cluster, found: list[Manifest]) -> Pod:
    """The pod of `helm test` ends well, and it would not with another token or other bytes."""
    test = Pod(cluster, "test", find.test_pod(found))
    steps = test.spec["initContainers"] + test.spec["containers"]
    for step in steps:
        code, told = test.run(step)
        tally.expect(code == 0, f"{name}: {step['name']} ended with {code}: {told}")
    tally.expect("with the same bytes" in told, f"{name}: the last step said {told!r}")
    other = steps[-1] | {"name": "other-bytes", "args": ["put", "helm-test", "/etc/hosts"]}
    code, told = test.run(other)
    tally.expect(code != 0 and "other bytes" in told, f"{name}: other bytes: {code}, {told}")
    if any(e["name"] == "KVSTRATA_TOKEN" for e in steps[0]["env"]):
        wrong = copy.deepcopy(steps[1]) | {"name": "wrong-token"}
        for variable in wrong["env"]:
            if variable["name"] == "KVSTRATA_TOKEN":
                variable.pop("valueFrom")
                variable["value"] = "x" * 64
        code, told = test.run(wrong)
        refused = code != 0 and "token" in told
        tally.expect(refused, f"{name}: with another token: {code}, {told}")
    return test


def check_metrics(tally: Tally, name: str, node: Node, token: str | None) -> None:
    """Metrics are there for whoever shows the token that the ServiceMonitor shows."""
    tally.expect(node.ask("/metrics", token) == 200, f"{name}: no metrics")
    wanted = 401 if token else 200
    tally.expect(node.ask("/metrics") == wanted, f"{name}: metrics without a token")
    tally.expect(node.ask("/livez") == 200, f"{name}: /livez wants a token")


def check_engine_beside_agent(tally: Tally, test: Pod, agent: Pod) -> None:
    """A pod that mounts the agent's directory as the notes say reads blocks by shared memory."""
    spec = copy.deepcopy(test.spec)
    engine = copy.deepcopy(spec["containers"][0])
    spec["securityContext"] |= {
        "runAsUser": 0,
        "runAsGroup": 0,
        "fsGroup": 0,
        "runAsNonRoot": False,
    }
    engine["securityContext"]["runAsNonRoot"] = False
    volumes = [v for v in agent.spec["volumes"] if v["name"] == "socket"]
    path = volumes[0]["hostPath"]["path"]
    spec["volumes"] += volumes
    stranger = copy.deepcopy(engine)
    engine["volumeMounts"].append({"name": "socket", "mountPath": path})
    for name, container in (("engine", engine), ("stranger", stranger)):
        pod = Pod(test.cluster, name, spec)
        code, told = pod.run(container | {"args": ["doctor"], "name": name})
        line = next((x for x in told.splitlines() if "shared memory" in x), told)
        shared = line.startswith("ok")
        tally.expect(shared == (name == "engine"), f"agents: {name}: exit code {code}, {line!r}")


def check_scenario(tally: Tally, name: str, found: list[Manifest], binary: Path) -> None:
    """One rendering, run."""
    directory = confine.scratch(re.sub(r"\W+", "-", name))
    cluster = cluster_for(directory, binary, found)
    pod = Pod(cluster, f"{find.workload(found)['metadata']['name']}-0", find.pod(found))
    node = Node(pod)
    try:
        ready = node.until_ready()
        tally.expect(ready, f"{name}: not ready; it said:\n{node.told()}")
        if not ready:
            return
        check_confined(tally, name, node)
        test = check_helm_test(tally, name, cluster, found)
        auth = find.config(found)["auth"]
        secret = next((k for k in cluster.objects if k[1].endswith("-tokens")), ("Secret", "own"))
        token = cluster.objects[secret]["token"].decode() if "tokens_file" in auth else None
        check_metrics(tally, name, node, token)
        if find.is_agent(found):
            check_engine_beside_agent(tally, test, pod)
        tally.expect(node.stop() == 0, f"{name}: SIGTERM: {node.process.returncode}")
        refused = "set up an io_uring: Operation not permitted" in node.told()
        tally.expect(refused, f"{name}: io_uring was not refused")
        leaked = [s for s in (token, OWN_TOKEN) if s and s in node.told()]
        tally.expect(not leaked, f"{name}: a token is in the log")
        node = Node(pod)
        tally.expect(node.until_ready(), f"{name}: not ready again:\n{node.told()}")
        get = next(c for c in test.spec["initContainers"] if c["args"][0] == "get")
        code, told = test.run(get)
        tally.expect(code == 0, f"{name}: after a restart: {told}")
        tally.expect(node.stop() == 0, f"{name}: SIGTERM: {node.process.returncode}")
    finally:
        node.process.kill()


def accepts(binary: Path, config: Values, limit: str) -> str | None:
    """What the server says against a configuration with so much memory; None if it takes it."""
    flags = [f"{s}.{k}={v}" for s, keys in config.items() for k, v in keys.items()]
    given = [x for flag in [*flags, f"memory.limit={limit}"] for x in ("--set", flag)]
    done = subprocess.run(
        [binary, "serve", "--check", *given], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else done.stderr


def check_memory(tally: Tally, chart: helm_python.Chart, binary: Path) -> None:
    """The least memory that the chart demands is the least that the server demands."""
    cases: dict[str, Values] = {
        "no nvme": {"nvme": {"enabled": False}},
        "nvme": {},
        "object": {"config": {"object": {"url": "s3://bucket", "pack_bytes": "64MiB"}}},
        "dram": {"config": {"dram": {"capacity": "1.5GiB"}}},
        "much dram": {"config": {"dram": {"capacity": "300GiB"}}},
    }
    for name, values in cases.items():
        said = refusal(lambda v=values: render(chart, v | {"resources": sets.memory("64Mi")}))
        least = re.search(r"take (\d+)Mi", said or "")
        tally.expect(least is not None, f"memory, {name}: the chart says {said}")
        if least is None:
            continue
        mebibytes = int(least[1])
        found = render(chart, values | {"resources": sets.memory(f"{mebibytes}Mi")})
        config = {s: k for s, k in find.config(found).items() if s in ("nvme", "object", "dram")}
        refused = accepts(binary, config, f"{mebibytes}MiB")
        tally.expect(refused is None, f"memory, {name}: {mebibytes} MiB are not enough: {refused}")
        refused = accepts(binary, config, f"{mebibytes - 1}MiB")
        tally.expect(refused is not None, f"memory, {name}: less than {mebibytes} MiB would do")


def check_configurations(tally: Tally, chart: helm_python.Chart, binary: Path) -> None:
    """The server takes the configuration of every good set of values, at that much memory."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.toml"
        for name, values in sets.GOOD.items():
            found = render(chart, values)
            maps = [m for m in find.of_kind(found, "ConfigMap") if "config.toml" in m["data"]]
            file.write_text(maps[0]["data"]["config.toml"], encoding="utf-8")
            memory = find.server(found)["resources"]["limits"]["memory"]
            limit = find.config(found).get("memory", {}).get("limit", f"{memory}B")
            command = [
                binary,
                "serve",
                "--check",
                "--config",
                file,
                "--set",
                f"memory.limit={limit}",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            tally.expect(done.returncode == 0, f"{name}: the server refuses: {done.stderr}")


def main() -> int:
    """Runs all scenarios."""
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "target" / "debug" / "kvstrata"
    binary = given.resolve(strict=True)
    tally = Tally()
    why = confine.missing()
    if why is None and (code := confine.enter(binary.parent)) is not None:
        return code
    with helm_python.Chart.load(str(REPOSITORY / "helm" / "kvstrata")) as chart:
        check_memory(tally, chart, binary)
        check_configurations(tally, chart, binary)
        for name, values in SCENARIOS.items():
            if why is None:
                started = time.monotonic()
                check_scenario(tally, name, render(chart, values), binary)
                print(f"{time.monotonic() - started:6.1f} s  {name}")
    if why is not None:
        print(f"SKIPPED (chart: its pods do not run here, {why})", file=sys.stderr)
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
