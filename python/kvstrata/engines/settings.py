"""What a person says to an adapter: where the server is, and how long to wait for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast

from .. import Client, InvalidError

__all__ = ["Settings"]

_PATHS = ("auto", "grpc", "bulk", "shm")
_FOREVER = 3600.0
_VARIABLES = tuple(
    (name, f"KVSTRATA_{name.upper()}") for name in ("endpoint", "token", "instance", "node", "zone")
)
_SCHEMES = ("vllm_u64", "sglang_i64", "dynamo", "llm_d")
_OF_TOKENS = frozenset(("dynamo", "llm_d"))


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the server. Every adapter takes these, by these names, all of them optional.

    - `endpoint`: `host:port` of gRPC, of several nodes of a cluster with commas between them; also
      from KVSTRATA_ENDPOINT. Default 127.0.0.1:9400, where a server without configuration listens.
    - `token`: also from KVSTRATA_TOKEN, which keeps it out of command lines.
    - `instance`: what routers call this engine, such as `host:port` of its API; also from
      KVSTRATA_INSTANCE. Without it no router can be told what loading costs this engine. In a
      cluster it decides which node is the engine's home, so all ranks of an engine must name the
      same. Default: the host's name, which in a pod is the pod's.
    - `node`, `zone`: the machine it runs on, by default the host's name, and its zone; also from
      KVSTRATA_NODE and KVSTRATA_ZONE. In a pod the node is the Kubernetes node's name.
    - `path`: the way that blocks take, `auto` (the best there is), `shm`, `bulk` or `grpc`.
    - `tls_ca`, `tls_cert`, `tls_key`: PEM files; `tls_server_name`: the name in the certificate.
    - `timeout`: seconds that a lookup may take before it is a miss. Default 1: a router's answer
      takes a millisecond, and what takes a second is not there.
    - `load_timeout`: seconds for a load as a whole, 10: longer than a prefill is of no use.
    - `store_timeout`: seconds for a store, 30: its memory is the engine's until it has ended.
    - `hash_schemes`: other names by which routers may ask for blocks: a list of `vllm_u64`,
      `sglang_i64`, `dynamo`, `llm_d`. Default none, because they take memory of the server.
    - `keep_tokens`: whether the server keeps token ids that it is told, which are prompts;
      event publishers need them. Default: if `dynamo` or `llm_d` is among the schemes.
    """

    endpoint: str = "127.0.0.1:9400"
    token: str | None = field(default=None, repr=False)
    instance: str | None = None
    node: str | None = None
    zone: str | None = None
    path: Literal["auto", "grpc", "bulk", "shm"] = "auto"
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    timeout: float = 1.0
    load_timeout: float = 10.0
    store_timeout: float = 30.0
    hash_schemes: tuple[str, ...] = ()
    keep_tokens: bool = False

    @classmethod
    def parse(
        cls, given: Mapping[str, Any], also: Collection[str] = ()
    ) -> tuple[Self, dict[str, Any]]:
        """The settings, and apart from them those named by `also`, which the adapter has besides.

        Raises `InvalidError`, which names the field, the value and what is allowed.
        """
        ours = {each.name for each in fields(cls)}
        unknown = [name for name in given if name not in ours and name not in also]
        if unknown:
            allowed = ", ".join(sorted(ours | set(also)))
            raise InvalidError(f"{unknown[0]}: no such setting; there are {allowed}")
        values: dict[str, Any] = {
            name: os.environ[variable] for name, variable in _VARIABLES if os.environ.get(variable)
        }
        values |= {name: _checked(name, value) for name, value in given.items() if name in ours}
        values.setdefault("keep_tokens", not _OF_TOKENS.isdisjoint(values.get("hash_schemes", ())))
        return cls(**values), {name: given[name] for name in also if name in given}

    def connect(self, name: str) -> Client:
        """A client with these settings. Raises a `kvstrata.Error`."""
        return Client(
            self.endpoint,
            path=self.path,
            token=self.token,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_server_name=self.tls_server_name,
            name=name,
            instance=self.instance or socket.gethostname(),
            node=self.node,
            zone=self.zone,
            timeout=self.timeout,
            connect_timeout=min(self.timeout, 5.0),
            stall_timeout=min(self.load_timeout, 30.0),
            transfer_timeout=max(self.load_timeout, self.store_timeout),
        )


def _checked(name: str, value: object) -> object:
    if name == "path" and value not in _PATHS:
        raise InvalidError(f"path: {value!r} given, one of {', '.join(_PATHS)} allowed")
    if name.endswith("timeout"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < cast(float, value) <= _FOREVER:
            raise InvalidError(f"{name}: {value!r} given, above 0 to {_FOREVER:.0f} s allowed")
        return float(cast(float, value))
    if name == "keep_tokens":
        if not isinstance(value, bool):
            raise InvalidError(f"keep_tokens: {value!r} given, true or false allowed")
        return value
    if name == "hash_schemes":
        return _schemes(value)
    if not isinstance(value, str) or not value:
        shown = "a value of another type or none" if name == "token" else repr(value)
        raise InvalidError(f"{name}: {shown} given, a text allowed")
    return value


def _schemes(given: object) -> tuple[str, ...]:
    schemes = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for scheme in schemes:
        if scheme not in _SCHEMES:
            allowed = ", ".join(_SCHEMES)
            raise InvalidError(f"hash_schemes: {scheme!r} given, a list of {allowed} allowed")
    return schemes
