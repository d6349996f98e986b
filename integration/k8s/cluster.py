"""Installs the chart on a running Kubernetes, and sees that it does what it says.

Prints a transcript: each step, what was seen, and how long it took. Ends with 1 at the first thing
that is not as it should be. run.sh starts the cluster and calls this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helm_python
import yaml

from kube import NAME, NODES, RELEASE, REPLICAS, Cluster, Failed, endpoint, expect, say, until
from load import ENGINES, Engines, Values, fill

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
# The pod that is deleted.
GONE = NODES[1]
# What a node says from the hook to its end, in this order.
LEAVES = (
    "an operator has the node leave",
    "drain started",
    "handing over what is hottest",
    "handed over",
    "drained",
    "SIGTERM received",
    "stopped",
)
LEFT_IN_CHART = "statefulset,service,poddisruptionbudget,serviceaccount,configmap,pod"


def version(chart: Path) -> str:
    """A chart's version."""
    return yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))["version"]


def value_of(pod: str) -> str:
    """What is put on one node at the beginning."""
    return f"put on {pod} before everything else\n" * 100


def has_kept(cluster: Cluster, when: str) -> None:
    """Every node still has the value that was put on it."""
    for pod in NODES:
        found = cluster.lookup(f"value-{pod}", pod)
        own = (found["holder"], found["locality"]) == (pod, "local")
        same = cluster.get(f"value-{pod}", pod) == value_of(pod)
        expect(own and same, f"{when} {pod} has its value, on {found['place']}, byte by byte")


def nobody_was_killed(cluster: Cluster) -> None:
    """No container had to be started again, no probe of liveness and no hook has failed."""
    statuses = [s for pod in cluster.pods().values() for s in pod["status"]["containerStatuses"]]
    restarts = sum(status["restartCount"] for status in statuses)
    hooks = cluster.events("FailedPreStopHook")
    expect(restarts == 0 and not hooks, "no container was restarted, no hook failed", hooks)


def install(cluster: Cluster, charts: argparse.Namespace) -> None:
    """The chart of an older commit."""
    cluster.helm.install(charts.previous, RELEASE, VALUES, create_namespace=True)
    cluster.until_ready()
    users = {p["spec"]["securityContext"]["runAsUser"] for p in cluster.pods().values()}
    expect(users == {65532}, f"{REPLICAS} pods of chart {version(charts.previous)} are ready")
    alone = all(cluster.members(pod) == [pod] for pod in NODES)
    expect(alone, "each is a cache of its own, as in that chart")
    cluster.start_client()
    for pod in NODES:
        cluster.put(f"value-{pod}", value_of(pod), pod)
    has_kept(cluster, "at the start")


def upgrade(cluster: Cluster, charts: argparse.Namespace) -> None:
    """To this chart, pod by pod, on the same claims."""
    cluster.helm.upgrade(charts.chart, RELEASE, VALUES)
    cluster.until_rolled_out()
    deployed = cluster.helm.status(RELEASE)
    say(f"revision {deployed['revision']} of the release is {deployed['status']}")
    for pod in cluster.pods().values():
        hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        if hook[1:] != ["drain", "--wait"]:
            raise Failed(f"the hook is {hook}")
    expect(True, f"{REPLICAS} pods of chart {version(charts.chart)} are ready, with its hook")
    has_kept(cluster, "after the upgrade")
    nobody_was_killed(cluster)


def one_cluster(cluster: Cluster, _charts: argparse.Namespace) -> None:
    """The pods are members of one cluster."""
    until(lambda: all(cluster.members(pod) == NODES for pod in NODES), "all list one another")
    for pod in NODES:
        expect(cluster.members(pod) == NODES, f"{pod} lists {', '.join(cluster.members(pod))}")
    for pod in NODES[1:]:
        key = f"value-{NODES[0]}"
        until(lambda pod=pod, key=key: cluster.lookup(key, pod)["holder"] is not None, "filters")
        found = cluster.lookup(key, pod)
        remote = (found["holder"], found["locality"]) == (NODES[0], "remote")
        same = cluster.get(key, pod) == value_of(NODES[0])
        expect(remote and same, f"what {NODES[0]} has is found and read by way of {pod}")
    doctor = cluster.client("doctor", "--endpoint", endpoint(*NODES))
    for line in doctor.stdout.splitlines():
        say(f"| {line}")
    expect(doctor.returncode == 0, "kvstrata doctor finds no problem")


def helm_test(cluster: Cluster, _charts: argparse.Namespace) -> None:
    """The chart's own test: put, get and compare on each node."""
    cluster.helm.test(RELEASE, timeout=120)
    pod = cluster.found("pod", f"{NAME}-test")
    names = [c["name"] for c in pod["spec"]["initContainers"] + pod["spec"]["containers"]]
    for name in names:
        said = cluster.kubectl("logs", f"{NAME}-test", "-c", name).strip()
        say(f"{name}: {said or 'ended with 0'}")
    expect(pod["status"]["phase"] == "Succeeded", "the pod of helm test has succeeded")
    expect(len(names) == 3 * REPLICAS, "it has tried all nodes")


def left_well(log: Path, grace: int) -> None:
    """The log of a pod that is gone: the hook had it drain, in time."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line]
    said = {line["message"]: line for line in lines if line["message"] in LEAVES}
    for message in LEAVES:
        if message not in said:
            raise Failed(f"{GONE} has not said: {message}")
    times = [said[message]["timestamp"] for message in LEAVES]
    expect(times == sorted(times), f"{GONE} said in this order: {'; '.join(LEAVES)}")
    handed = said["handed over"]
    say(
        f"handed over: {handed['blocks']} blocks, {handed['present']} more were there already, "
        f"{handed['refused']} refused; drained after {said['drained']['took_ms']} ms"
    )
    seconds = moment(said["stopped"]) - moment(said[LEAVES[0]])
    in_time = said["stopped"]["tasks_late"] == 0 and seconds < grace
    expect(in_time, f"from the hook to the end {seconds:.2f} s, of a grace period of {grace} s")


def moment(line: dict[str, Any]) -> float:
    """When a line was logged, in seconds of its day."""
    hours, minutes, seconds = line["timestamp"].rstrip("Z").partition("T")[2].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def recovered(cluster: Cluster, pod: str) -> int:
    """How many blocks a node has found on its disk at its start."""
    lines = map(json.loads, cluster.kubectl("logs", pod).splitlines())
    return next(line["blocks"] for line in lines if line["message"] == "nvme tier recovered")


def delete_under_load(cluster: Cluster, _charts: argparse.Namespace) -> None:
    """One pod deleted while engines and a client of values work on all of them."""
    first = fill(cluster)
    say(f"{ENGINES} engines fill the nodes: {first}")
    expect(not first.wrong(), "nothing is wrong with that", first.wrong())
    engines, values = Engines(cluster), Values(cluster, [GONE, NODES[0], NODES[2]])
    engines.start()
    values.start()
    try:
        until(lambda: len(engines.since(0)) >= 1, "a pass of the engines")
        homes = {m["name"]: m["engines"] for m in cluster.state(NODES[0])["members"]}
        expect(homes[GONE] > 0, f"{GONE} is the home of {homes[GONE]} engines")
        old, stored = cluster.pods()[GONE], cluster.tiers(GONE)["nvme"]["blocks"]
        with tempfile.NamedTemporaryFile() as log:
            follow = cluster.command("logs", "--follow", GONE)
            with subprocess.Popen(follow, stdout=log, stderr=subprocess.DEVNULL) as following:
                started = time.monotonic()
                cluster.kubectl("delete", "pod", GONE, "--wait=true")
                say(f"{GONE} is gone {time.monotonic() - started:.1f} s after kubectl delete")
                following.wait(timeout=30)
            left_well(Path(log.name), old["spec"]["terminationGracePeriodSeconds"])
        cluster.until_ready()
        ready = time.monotonic()
        say(f"{REPLICAS} ready again {ready - started:.1f} s after kubectl delete")
        new = cluster.pods()[GONE]
        expect(new["metadata"]["uid"] != old["metadata"]["uid"], "it is another pod")
        warm = recovered(cluster, GONE)
        expect(warm >= stored > 0, f"it has {warm} blocks on nvme; before it had {stored}")
        until(lambda: cluster.members(NODES[0]) == NODES, "it is a member again")
        until(lambda: len(engines.since(ready)) >= 2, "two passes of the engines")
    finally:
        engines.end()
        values.end()
    has_kept(cluster, "after the deletion")
    judge(engines, values, started, ready)
    homes = {m["name"]: m["engines"] for m in cluster.state(NODES[0])["members"]}
    expect(homes[GONE] > 0, f"{GONE} is the home of {homes[GONE]} engines again")
    nobody_was_killed(cluster)


def judge(engines: Engines, values: Values, started: float, ready: float) -> None:
    """What the load has seen."""
    for one in engines.passes:
        say(f"{one.started - started:+6.1f} s  {one}")
    wrong = [text for one in engines.passes for text in one.wrong()]
    expect(not wrong, "no wrong byte, no broken lease, all counts add up", wrong)
    stops = [one.stopped for one in engines.passes if one.stopped]
    leaving = all("draining" in stop for stop in stops)
    expect(leaving, f"passes that stopped, each because a home in it left: {len(stops)}", stops)
    back = engines.since(ready)[-1].report
    expect(back["hit_ratio"] > 0.99, f"hits are back: {back['hit_ratio']:.2%} of blocks asked")
    count = len(values.values)
    fact = f"{count} values put and got by way of all three, no other bytes, no error"
    expect(count > 0 and not values.failures, fact, values.failures[:3])
    there = all(values.found(key) for key in values.values)
    fact = f"{values.missed} of them were a miss at first, all are there now"
    expect(there and not values.failures, fact, values.failures[:3])


def mend_hook(cluster: Cluster) -> None:
    """Takes away what Kubernetes 1.20 leaves of the hook, which the older chart has not.

    Its server-side apply, by which Helm 4 works, keeps a structure whose fields it has removed; a
    pod with an empty hook is refused. Since structured-merge-diff 4.1 the structure goes, too.
    """
    spec = cluster.found("statefulset", NAME)["spec"]["template"]["spec"]
    left = spec["containers"][0].get("lifecycle")
    if left is None:
        return
    fact = "this Kubernetes has left an empty hook, with which no pod can start"
    expect(left == {"preStop": {}}, fact, left)
    path = "/spec/template/spec/containers/0/lifecycle"
    patch = json.dumps([{"op": "remove", "path": path}])
    cluster.kubectl("patch", "statefulset", NAME, "--type", "json", "--patch", patch)
    say(f"kubectl patch statefulset {NAME} --type json --patch '{patch}'")


def rollback(cluster: Cluster, charts: argparse.Namespace) -> None:
    """Back to the first revision."""
    cluster.helm.rollback(RELEASE, version=1)
    mend_hook(cluster)
    cluster.until_rolled_out()
    for line in cluster.helm.history(RELEASE):
        say(f"revision {line['revision']}: {line['status']}, chart {line['chart_version']}")
    alone = all(cluster.members(pod) == [pod] for pod in NODES)
    expect(alone, f"{REPLICAS} pods of chart {version(charts.previous)} are ready, each alone")
    has_kept(cluster, "after the rollback")
    nobody_was_killed(cluster)


def uninstall(cluster: Cluster, _charts: argparse.Namespace) -> None:
    """Everything goes but claims, secrets, and what helm test made."""
    cluster.kubectl("delete", "pod", "client", "--wait=true")
    cluster.helm.uninstall(RELEASE)
    until(lambda: not cluster.pods(), "no pod is left")
    mine = ("-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    left = set(cluster.kubectl("get", LEFT_IN_CHART, *mine).split())
    test = {f"configmap/{NAME}-test", f"pod/{NAME}-test"}
    expect(left <= test, f"what is left of the chart is of helm test: {', '.join(sorted(left))}")
    claims = cluster.found("pvc")["items"]
    bound = [c["metadata"]["name"] for c in claims if c["status"]["phase"] == "Bound"]
    expect(sorted(bound) == [f"nvme-{pod}" for pod in NODES], f"claims stay: {', '.join(bound)}")
    secrets = cluster.kubectl("get", "secret", *mine).split()
    kept = [f"secret/{NAME}-{name}" for name in ("identity", "tokens")]
    expect(sorted(secrets) == kept, f"secrets stay: {', '.join(secrets)}")


def again(cluster: Cluster, charts: argparse.Namespace) -> None:
    """This chart on the claims and secrets that were left."""
    cluster.helm.install(charts.chart, RELEASE, VALUES)
    cluster.until_ready()
    cluster.start_client()
    until(lambda: all(cluster.members(pod) == NODES for pod in NODES), "all list one another")
    expect(True, f"{REPLICAS} pods are ready, and one cluster")
    has_kept(cluster, "after an uninstall and an install")
    nobody_was_killed(cluster)
    cluster.kubectl("delete", "pod", "client", "--wait=true")
    cluster.helm.uninstall(RELEASE)
    until(lambda: not cluster.pods(), "no pod is left")


Step = Callable[[Cluster, argparse.Namespace], None]
STEPS: tuple[Step, ...] = (
    install,
    upgrade,
    one_cluster,
    helm_test,
    delete_under_load,
    rollback,
    uninstall,
    again,
)
EXPECTED = (
    Failed,
    helm_python.HelmError,
    subprocess.TimeoutExpired,
    urllib.error.URLError,
)


def prepare(cluster: Cluster, disks: Path) -> None:
    """A disk for each pod, in the way of Kubernetes; says what runs here."""
    volumes = STORAGE
    for number in range(REPLICAS):
        path = disks / str(number)
        path.mkdir(parents=True, exist_ok=True)
        volumes += DISK.format(number=number, path=path)
    cluster.kubectl("apply", "-f", "-", given=volumes)
    node = cluster.found("nodes")["items"][0]["status"]["nodeInfo"]
    print(f"Kubernetes {node['kubeletVersion']}, {node['containerRuntimeVersion']}", flush=True)


def main() -> int:
    """All steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", required=True)
    for name in ("disks", "chart", "previous"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    cluster = Cluster(options.kubeconfig)
    prepare(cluster, options.disks)
    for step in STEPS:
        print(f"\n{step.__name__}: {(step.__doc__ or '').strip()}", flush=True)
        started = time.monotonic()
        try:
            step(cluster, options)
        except EXPECTED as error:
            print(f"FAILED: {error}", flush=True)
            return 1
        say(f"{time.monotonic() - started:.1f} s")
    print("\nall steps passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
