"""Installs the chart on a running Kubernetes, and sees that it does what it says.

Prints a transcript: each step, what was seen, and how long it took. Ends with 1 at the first thing
that is not as it should be. run.sh starts the cluster and calls this.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python

RELEASE, NAMESPACE, NAME, REPLICAS = "kv", "cache", "kv-kvstrata", 3
READY_SECONDS = 180.0
VALUES: dict[str, Any] = {
    "replicas": REPLICAS,
    "image": {"repository": "docker.io/library/kvstrata", "pullPolicy": "Never"},
    "resources": {
        "requests": {"cpu": "100m", "memory": "384Mi"},
        "limits": {"cpu": "1", "memory": "384Mi"},
    },
    "nvme": {"size": "1Gi", "storageClassName": "disks"},
    "config": {"nvme": {"capacity": "256MiB"}},
}
STORAGE = """
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: { name: disks }
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
"""
DISK = """---
apiVersion: v1
kind: PersistentVolume
metadata: {{ name: disk-{number} }}
spec:
  storageClassName: disks
  capacity: {{ storage: 1Gi }}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  local: {{ path: {path} }}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchExpressions: [{{ key: kubernetes.io/hostname, operator: In, values: [node-1] }}]
"""


class Failed(Exception):
    """Something is not as it should be."""


class Cluster:
    """The cluster, by kubectl and Helm."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.helm = helm_python.Config(kubeconfig_path=options.kubeconfig, namespace=NAMESPACE)

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Runs kubectl in the namespace."""
        command = ["kubectl", "--kubeconfig", self.options.kubeconfig, "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def pods(self) -> dict[str, dict[str, Any]]:
        """The nodes' pods by name."""
        labels = f"app.kubernetes.io/name=kvstrata,app.kubernetes.io/instance={RELEASE}"
        found = json.loads(self.kubectl("get", "pods", "-l", labels, "-o", "json"))["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def until_ready(self, count: int = REPLICAS) -> None:
        """Waits until so many pods are ready, and no other is there."""

        def ready() -> bool:
            pods = self.pods().values()
            conditions = [c for p in pods for c in p["status"].get("conditions", [])]
            up = [c for c in conditions if c["type"] == "Ready" and c["status"] == "True"]
            leaving = [p for p in pods if "deletionTimestamp" in p["metadata"]]
            return len(pods) == len(up) == count and not leaving

        until(ready, f"{count} pods ready")

    def token(self) -> str:
        """The token that the chart has made."""
        secret = json.loads(self.kubectl("get", "secret", f"{NAME}-tokens", "-o", "json"))
        return base64.b64decode(secret["data"]["token"]).decode()

    def kvstrata(self, pod: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the binary against a pod's address."""
        address = self.pods()[pod]["status"].get("podIP", "127.0.0.1")
        variables = {"KVSTRATA_ENDPOINT": f"{address}:9400", "KVSTRATA_TOKEN": self.token()}
        command = [self.options.binary, *arguments]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=30, check=False
        )


class Load(threading.Thread):
    """Puts and gets on nodes, one after another, until it is stopped."""

    def __init__(self, cluster: Cluster, nodes: list[str]) -> None:
        super().__init__()
        self.cluster, self.nodes = cluster, nodes
        self.stopped = threading.Event()
        self.done, self.failures = 0, list[str]()

    def run(self) -> None:
        """The load."""
        with tempfile.NamedTemporaryFile() as value:
            value.write(b"x" * 1_000_000)
            value.flush()
            while not self.stopped.is_set():
                for node in self.nodes:
                    key = f"load-{self.done}"
                    steps = (("put", key, value.name), ("get", key, "--output", "/dev/null"))
                    for step in steps:
                        done = self.cluster.kvstrata(node, *step)
                        if done.returncode:
                            self.failures.append(f"{node}: {step[0]}: {done.stderr.strip()}")
                    self.done += 1

    def end(self) -> str:
        """Stops it; what it has done."""
        self.stopped.set()
        self.join()
        return f"{self.done} values put and got on {', '.join(self.nodes)}"


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {READY_SECONDS:.0f} s for: {what}")
        time.sleep(0.5)


def expect(holds: bool, fact: str) -> None:
    """Ends it all if a fact does not hold."""
    print(f"    {fact}: {'yes' if holds else 'NO'}", flush=True)
    if not holds:
        raise Failed(fact)


def install(cluster: Cluster) -> None:
    """The chart of the older commit, three pods ready."""
    cluster.helm.install(cluster.options.previous, RELEASE, VALUES, create_namespace=True)
    cluster.until_ready()
    uids = {p["spec"]["securityContext"]["runAsUser"] for p in cluster.pods().values()}
    expect(uids == {65532}, "three pods are ready, as user 65532")


def upgrade(cluster: Cluster) -> None:
    """To this chart, with what was put kept."""
    for pod in cluster.pods():
        done = cluster.kvstrata(pod, "put", "before", "/etc/hostname")
        expect(done.returncode == 0, f"a value is put on {pod} before the upgrade")
    changed = VALUES | {"config": {**VALUES["config"], "log": {"level": "debug"}}}
    cluster.helm.upgrade(cluster.options.chart, RELEASE, changed)
    wait_for_rollout(cluster)
    kept(cluster, "after the upgrade")


def wait_for_rollout(cluster: Cluster) -> None:
    """Until every pod is of the newest revision."""
    timeout = f"--timeout={READY_SECONDS:.0f}s"
    cluster.kubectl("rollout", "status", f"statefulset/{NAME}", timeout)
    cluster.until_ready()


def kept(cluster: Cluster, when: str) -> None:
    """Every node still has the value of before."""
    for pod in cluster.pods():
        done = cluster.kvstrata(pod, "get", "before")
        same = done.stdout == Path("/etc/hostname").read_text(encoding="utf-8")
        expect(done.returncode == 0 and same, f"{pod} has it {when}")


def helm_test(cluster: Cluster) -> None:
    """The chart's own test."""
    cluster.helm.test(RELEASE)
    pod = json.loads(cluster.kubectl("get", "pod", f"{NAME}-test", "-o", "json"))
    expect(pod["status"]["phase"] == "Succeeded", "the pod of helm test has succeeded")
    for container in [c["name"] for c in pod["spec"]["containers"]]:
        print(f"    {cluster.kubectl('logs', f'{NAME}-test', '-c', container).strip()}")


def delete_under_load(cluster: Cluster) -> None:
    """One pod deleted while the others work."""
    load = Load(cluster, [f"{NAME}-0", f"{NAME}-2"])
    load.start()
    time.sleep(2)
    before = cluster.pods()[f"{NAME}-1"]["metadata"]["uid"]
    started = time.monotonic()
    cluster.kubectl("delete", "pod", f"{NAME}-1", "--wait=true")
    print(f"    drained and gone after {time.monotonic() - started:.1f} s")
    cluster.until_ready()
    print(f"    three ready again after {time.monotonic() - started:.1f} s")
    print(f"    {load.end()}")
    expect(cluster.pods()[f"{NAME}-1"]["metadata"]["uid"] != before, "it is another pod")
    expect(load.done > 0 and not load.failures, f"no failure on the others {load.failures[:3]}")
    kept(cluster, "after the deletion")


def rollback(cluster: Cluster) -> None:
    """Back to the first revision."""
    cluster.helm.rollback(RELEASE, version=1)
    wait_for_rollout(cluster)
    kept(cluster, "after the rollback")


def uninstall(cluster: Cluster) -> None:
    """Everything goes but the claims and the secrets."""
    cluster.helm.uninstall(RELEASE)
    until(lambda: not cluster.pods(), "no pod is left")
    claims = cluster.kubectl("get", "pvc", "-o", "name").split()
    secrets = cluster.kubectl("get", "secret", "-o", "name").split()
    expect(len(claims) == REPLICAS, "the claims are kept")
    expect({f"secret/{NAME}-{s}" for s in ("identity", "tokens")} <= set(secrets), "so are secrets")


STEPS = (install, upgrade, helm_test, delete_under_load, rollback, uninstall)


def main() -> int:
    """All steps."""
    parser = argparse.ArgumentParser()
    for name in ("kubeconfig", "disks", "binary", "chart", "previous"):
        parser.add_argument(f"--{name}", required=True)
    cluster = Cluster(parser.parse_args())
    cluster.kubectl("version")
    disks = STORAGE
    for number in range(REPLICAS):
        path = Path(cluster.options.disks) / str(number)
        path.mkdir(parents=True, exist_ok=True)
        disks += DISK.format(number=number, path=path)
    cluster.kubectl("apply", "-f", "-", given=disks)
    for step in STEPS:
        print(f"{step.__name__}: {(step.__doc__ or '').strip()}", flush=True)
        started = time.monotonic()
        try:
            step(cluster)
        except (Failed, helm_python.HelmError, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", flush=True)
            return 1
        print(f"    {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
