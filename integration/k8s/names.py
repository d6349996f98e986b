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
import ssl
import struct
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

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


class Api:
    """The API server, as the kubeconfig says."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        self.server = config["clusters"][0]["cluster"]["server"]
        self.headers = {"authorization": f"Bearer {config['users'][0]['user']['token']}"}
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    def endpoints(self, namespace: str, service: str) -> list[Any]:
        """The addresses behind a Service, also of pods that are not ready where it lists them."""
        url = f"{self.server}/api/v1/namespaces/{namespace}/endpoints/{service}"
        asked = urllib.request.Request(url, headers=self.headers)
        try:
            with urllib.request.urlopen(asked, timeout=2, context=self.context) as answer:
                subsets = json.load(answer).get("subsets") or []
        except OSError:
            return []
        return [address for subset in subsets for address in subset.get("addresses", [])]


def addresses(api: Api, name: str) -> list[str]:
    """What a name stands for."""
    labels = name.removesuffix(".cluster.local").split(".")
    if labels[-1] != "svc" or len(labels) not in (3, 4):
        return []
    *pod, service, namespace, _svc = labels
    found = api.endpoints(namespace, service)
    return [a["ip"] for a in found if not pod or a.get("hostname") == pod[0]]


def reply(packet: bytes, api: Api) -> bytes:
    """The answer to one packet."""
    name, kind, asked = question(packet)
    found = addresses(api, name)
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
    address, api = sys.argv[1], Api(Path(sys.argv[2]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            packet, sender = server.recvfrom(4096)
            try:
                server.sendto(reply(packet, api), sender)
            except (IndexError, struct.error) as error:
                print(f"not a question: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
