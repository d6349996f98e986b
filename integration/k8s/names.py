"""Answers for the names of Services and pods, in a cluster that has neither a DNS server nor
kube-proxy.

`POD.SERVICE.NAMESPACE.svc` is the pod's address, `SERVICE.NAMESPACE.svc` those of all ready pods of
a Service, also of one with an address of its own, to which nothing would lead. Everything else does
not exist.

Usage: names.py ADDRESS KUBECONFIG. Serves UDP on port 53 until it is stopped.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from typing import Any

TYPE_A, CLASS_IN, SECONDS = 1, 1, 1
ANSWER, NO_SUCH_NAME = 0x8580, 0x8583


def question(packet: bytes) -> tuple[str, int, bytes]:
    """The name that is asked for, the type of record, and the question as it stands."""
    labels, at = [], 12
    while length := packet[at]:
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    (kind,) = struct.unpack_from("!H", packet, at + 1)
    return ".".join(labels).lower(), kind, packet[12 : at + 5]


def endpoints(kubeconfig: str, namespace: str, service: str) -> list[Any]:
    """The addresses behind a Service, also of pods that are not ready where it lists them."""
    command = ["kubectl", "--kubeconfig", kubeconfig, "-n", namespace, "get", "endpoints", service]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        return []
    subsets = json.loads(done.stdout).get("subsets") or []
    return [address for subset in subsets for address in subset.get("addresses", [])]


def addresses(kubeconfig: str, name: str) -> list[str]:
    """What a name stands for."""
    labels = name.removesuffix(".cluster.local").split(".")
    if labels[-1] != "svc" or len(labels) not in (3, 4):
        return []
    *pod, service, namespace, _svc = labels
    found = endpoints(kubeconfig, namespace, service)
    return [a["ip"] for a in found if not pod or a.get("hostname") == pod[0]]


def reply(packet: bytes, kubeconfig: str) -> bytes:
    """The answer to one packet."""
    name, kind, asked = question(packet)
    found = addresses(kubeconfig, name)
    records = found if kind == TYPE_A else []
    flags = ANSWER if found else NO_SUCH_NAME
    head = packet[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
    body = b"".join(
        struct.pack("!HHHIH", 0xC00C, TYPE_A, CLASS_IN, SECONDS, 4) + socket.inet_aton(address)
        for address in records
    )
    return head + asked + body


def main() -> None:
    """Serves."""
    address, kubeconfig = sys.argv[1:3]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            packet, sender = server.recvfrom(4096)
            try:
                server.sendto(reply(packet, kubeconfig), sender)
            except (IndexError, struct.error) as error:
                print(f"not a question: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
