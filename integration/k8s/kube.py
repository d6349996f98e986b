"""The cluster, as the checks see it: kubectl, Helm, pages of nodes, and a pod for clients in it."""

from __future__ import annotations

import base64
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import helm_python

RELEASE, NAMESPACE, NAME, REPLICAS = "kv", "cache", "kv-kvstrata", 3
NODES = [f"{NAME}-{ordinal}" for ordinal in range(REPLICAS)]
READY_SECONDS, COMMAND_SECONDS = 180.0, 120.0
# It mounts what engines mount; its own program does nothing.
CLIENT = f"""
apiVersion: v1
kind: Pod
metadata: {{ name: client }}
spec:
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  containers:
    - name: client
      image: localhost/client:1
      imagePullPolicy: Never
      env:
        - name: KVSTRATA_TOKEN
          valueFrom: {{ secretKeyRef: {{ name: {NAME}-tokens, key: token }} }}
      volumeMounts:
        - {{ name: tmp, mountPath: /tmp }}
        - {{ name: shm, mountPath: /dev/shm }}
  volumes:
    - {{ name: tmp, emptyDir: {{}} }}
    - {{ name: shm, emptyDir: {{ medium: Memory }} }}
"""


class Failed(Exception):
    """Something is not as it should be."""


def say(text: str) -> None:
    """A line of the transcript."""
    print(f"    {text}", flush=True)


def expect(holds: bool, fact: str, seen: object = None) -> None:
    """Ends it all if a fact does not hold; what was seen instead."""
    say(f"{fact}: {'yes' if holds else 'NO'}")
    if not holds:
        raise Failed(fact if seen is None else f"{fact}: {seen}")


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {READY_SECONDS:.0f} s for: {what}")
        time.sleep(0.5)


def endpoint(*pods: str) -> str:
    """Where clients reach pods, in this order."""
    return ",".join(f"{pod}.{NAME}-headless.{NAMESPACE}.svc:9400" for pod in pods)


class Cluster:
    """The cluster."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        self.helm = helm_python.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE)

    def command(self, *arguments: str) -> list[str]:
        """A command of kubectl in the namespace."""
        return ["kubectl", "--kubeconfig", self.kubeconfig, "-n", NAMESPACE, *arguments]

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Runs kubectl; what it says."""
        done = subprocess.run(
            self.command(*arguments), input=given, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Failed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def found(self, *arguments: str) -> Any:
        """What `kubectl get` finds."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def pods(self) -> dict[str, dict[str, Any]]:
        """The nodes' pods by name."""
        labels = f"app.kubernetes.io/name=kvstrata,app.kubernetes.io/instance={RELEASE}"
        return {pod["metadata"]["name"]: pod for pod in self.found("pods", "-l", labels)["items"]}

    def until_ready(self, count: int = REPLICAS) -> None:
        """Waits until so many pods are ready, and no other is there."""

        def ready() -> bool:
            pods = self.pods().values()
            conditions = [c for p in pods for c in p["status"].get("conditions", [])]
            up = [c for c in conditions if c["type"] == "Ready" and c["status"] == "True"]
            leaving = [p for p in pods if "deletionTimestamp" in p["metadata"]]
            return len(pods) == len(up) == count and not leaving

        until(ready, f"{count} pods ready")

    def until_rolled_out(self) -> None:
        """Waits until every pod is of the newest revision."""
        timeout = f"--timeout={READY_SECONDS:.0f}s"
        self.kubectl("rollout", "status", f"statefulset/{NAME}", timeout)
        self.until_ready()

    def events(self, reason: str) -> list[str]:
        """What Kubernetes says of pods, for one reason."""
        found = self.found("events", "--field-selector", f"reason={reason}")["items"]
        return [f"{event['involvedObject']['name']}: {event['message']}" for event in found]

    def start_client(self) -> None:
        """A pod for clients."""
        self.kubectl("apply", "-f", "-", given=CLIENT)
        self.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=60s")

    def client(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a command of kvstrata in the clients' pod."""
        return subprocess.run(
            self.command("exec", "-i", "client", "--", "/usr/bin/kvstrata", *arguments),
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    def put(self, key: str, value: str, *pods: str) -> None:
        """Puts a value, which must succeed."""
        done = self.client("put", key, "-", "--endpoint", endpoint(*pods), given=value)
        if done.returncode:
            raise Failed(f"put {key} on {pods[0]}: {done.stderr.strip()}")

    def get(self, key: str, *pods: str) -> str | None:
        """Gets a value; none if it is not there."""
        done = self.client("get", key, "--endpoint", endpoint(*pods))
        if done.returncode and "not stored" not in done.stderr:
            raise Failed(f"get {key} from {pods[0]}: {done.stderr.strip()}")
        return None if done.returncode else done.stdout

    def lookup(self, key: str, pod: str) -> dict[str, Any]:
        """What a node says of a key."""
        done = self.client("lookup", key, "--json", "--endpoint", endpoint(pod))
        if done.returncode:
            raise Failed(f"lookup {key} on {pod}: {done.stderr.strip()}")
        return json.loads(done.stdout)[0]

    def tiers(self, pod: str) -> dict[str, dict[str, Any]]:
        """The tiers of a node by name."""
        done = self.client("stats", "--json", "--endpoint", endpoint(pod))
        if done.returncode:
            raise Failed(f"stats of {pod}: {done.stderr.strip()}")
        return {tier["tier"]: tier for tier in json.loads(done.stdout)["tiers"]}

    def state(self, pod: str) -> dict[str, Any]:
        """What the console of a node shows to an operator."""
        secret = self.found("secret", f"{NAME}-tokens")
        token = base64.b64decode(secret["data"]["token"]).decode()
        address = self.pods()[pod]["status"]["podIP"]
        asked = urllib.request.Request(
            f"http://{address}:9401/console/state", headers={"authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)

    def members(self, pod: str) -> list[str]:
        """The members that a node lists."""
        return sorted(member["name"] for member in self.state(pod)["members"])
