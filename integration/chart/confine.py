"""Runs containers of rendered pods as a kubelet would, as far as one Linux host can: no image, no
cluster.

A container gets a root of its own with the binary, the libraries that it is linked to, and the few
files that the base image has; the root is read-only. Volumes are mounted where the manifest says,
files of ConfigMaps and Secrets with their mode and group. The process has the user, the
capabilities (none), the variables and the arguments of the manifest, cannot get more rights, and a
seccomp filter refuses io_uring, as the profile RuntimeDefault of newer runtimes does.

Needs root, and a mount and network namespace of its own, which `enter` makes.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]

MARK = "KVSTRATA_CHART_INSIDE"
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 38, 22, 24
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
EPERM = 1
# io_uring_setup, _enter and _register have the same numbers on x86-64 and on arm64.
IO_URING_CALLS = (425, 426, 427)
BPF_LOAD_WORD, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06
DEVICES = ("null", "zero", "random", "urandom")
IFF_UP, SIOCGIFFLAGS, SIOCSIFFLAGS = 1, 0x8913, 0x8914

libc = ctypes.CDLL(None, use_errno=True)


class SockFilter(ctypes.Structure):
    """One instruction of a filter."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class SockFprog(ctypes.Structure):
    """A filter."""

    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(SockFilter))]


def prctl(option: int, *arguments: object) -> int:
    """The system call; the caller looks at what it returns."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    result: int = libc.prctl(
        option, *(ctypes.c_void_p(a) if isinstance(a, int) else a for a in padded)
    )
    return result


def refuse_io_uring() -> None:
    """Installs a filter under which io_uring fails as not permitted."""
    checks = len(IO_URING_CALLS)
    code = [SockFilter(BPF_LOAD_WORD, 0, 0, 0)]
    code += [
        SockFilter(BPF_JUMP_EQUAL, checks - n, 0, call) for n, call in enumerate(IO_URING_CALLS)
    ]
    code.append(SockFilter(BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW))
    code.append(SockFilter(BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | EPERM))
    program = SockFprog(len(code), (SockFilter * len(code))(*code))
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filter")


def missing() -> str | None:
    """What keeps this host from running containers so; None if nothing does."""
    if os.geteuid() != 0:
        return "it needs root"
    for tool in ("unshare", "mount", "ldd"):
        if shutil.which(tool) is None:
            return f"it needs {tool}"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "mount", "-t", "tmpfs", "x", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def enter(parent: Path) -> int | None:
    """Starts this program again in namespaces of its own and returns its exit code; None inside.

    What it mounts is below a directory that is made in `parent`, and removed when the namespaces
    are gone, and with them the mounts: before that it would lead into the host.
    """
    if MARK in os.environ:
        bring_loopback_up()
        return None
    command = ["unshare", "--mount", "--net", "--propagation", "private", sys.executable, *sys.argv]
    with tempfile.TemporaryDirectory(prefix="chart-", dir=parent) as directory:
        Path(directory).chmod(0o755)
        return subprocess.run(command, env=os.environ | {MARK: directory}, check=False).returncode


def scratch(name: str) -> Path:
    """A new directory below that of `enter`."""
    directory = Path(os.environ[MARK]) / name
    directory.mkdir()
    return directory


def bring_loopback_up() -> None:
    """As every pod has it."""
    interface = struct.pack("16sh", b"lo", 0)
    with socket.socket() as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, interface)
        flags = struct.unpack("16sh", answer)[1] | IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags))


def mount(*arguments: str | Path) -> None:
    """Mounts something in the namespace of this process."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


@dataclass
class Cluster:
    """What pods refer to: objects by kind and name, and directories of volumes by their names."""

    directory: Path
    binary: Path
    objects: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    # Names that every pod resolves to this host.
    hosts: list[str] = field(default_factory=list)

    def add(self, manifests: list[Manifest]) -> None:
        """Takes ConfigMaps and Secrets in."""
        for found in manifests:
            key = (found["kind"], found["metadata"]["name"])
            if found["kind"] == "ConfigMap":
                self.objects[key] = {k: v.encode() for k, v in found["data"].items()}
            elif found["kind"] == "Secret":
                data = found["data"].items()
                self.objects[key] = {k: base64.b64decode(v) for k, v in data}

    def volume(self, pod: Pod, volume: Manifest) -> Path:
        """The directory of a volume: that of a claim or of the host is the same for all pods."""
        kind = next(k for k in volume if k != "name")
        if kind == "projected":
            return self.project(pod, volume["projected"], volume["name"])
        shared = {"hostPath": "path", "persistentVolumeClaim": "claimName"}.get(kind)
        name = volume[kind][shared].strip("/").replace("/", "-") if shared else None
        path = self.directory / f"{kind}-{name or pod.name + '-' + volume['name']}"
        if not path.exists():
            path.mkdir()
            # What a kubelet makes on the host is root's, other volumes are the pod's group's.
            group = 0 if kind == "hostPath" else pod.group
            os.chown(path, 0, group)
            path.chmod(0o755 if kind == "hostPath" else 0o2775)
        return path

    def project(self, pod: Pod, projected: Manifest, name: str) -> Path:
        """Files of ConfigMaps and Secrets, as the pod's group may read them."""
        path = self.directory / f"projected-{pod.name}-{name}"
        if path.exists():
            return path
        path.mkdir()
        for source in projected["sources"]:
            ((kind, wanted),) = source.items()
            data = self.objects[
                {"configMap": "ConfigMap", "secret": "Secret"}[kind], wanted["name"]
            ]
            for item in wanted["items"]:
                file = path / item["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data[item["key"]])
                os.chown(file, 0, pod.group)
                file.chmod(projected["defaultMode"])
        return path


@dataclass
class Pod:
    """One pod on this host."""

    cluster: Cluster
    name: str
    spec: Manifest
    node: str = "node-1"

    @property
    def group(self) -> int:
        """The group that owns its volumes."""
        return int(self.spec["securityContext"]["fsGroup"])

    def start(self, container: Manifest, log: Path) -> subprocess.Popen[bytes]:
        """Starts a container; what it prints goes to a file."""
        root = self.root(container)
        context = self.spec["securityContext"] | container["securityContext"]
        user, group = int(context["runAsUser"]), int(context["runAsGroup"])
        if context["runAsNonRoot"] and user == 0:
            raise ValueError(f"{container['name']}: a kubelet starts no root here")

        def confine() -> None:
            os.chroot(root)
            os.chdir("/")
            if container["securityContext"]["capabilities"]["drop"] == ["ALL"]:
                for capability in range(64):
                    prctl(PR_CAPBSET_DROP, capability)
            os.setgroups([self.group])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            os.umask(0o022)
            if not container["securityContext"]["allowPrivilegeEscalation"]:
                prctl(PR_SET_NO_NEW_PRIVS, 1)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            refuse_io_uring()

        with log.open("ab") as output:
            return subprocess.Popen(
                ["/usr/bin/kvstrata", *container["args"]],
                env=self.environment(container),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=confine,
            )

    def run(self, container: Manifest, timeout: float = 60) -> tuple[int, str]:
        """Runs a container to its end: its exit code, and what it printed."""
        log = self.cluster.directory / f"{self.name}-{container['name']}.log"
        log.unlink(missing_ok=True)
        process = self.start(container, log)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return code, log.read_text(encoding="utf-8", errors="replace")

    def environment(self, container: Manifest) -> dict[str, str]:
        """The variables, with what they refer to put in."""
        fields = {
            "metadata.name": self.name,
            "spec.nodeName": self.node,
            "status.podIP": "127.0.0.1",
        }
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            secret = self.cluster.objects["Secret", source["secretRef"]["name"]]
            values |= {key: value.decode() for key, value in secret.items()}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                secret = source["secretKeyRef"]
                value = self.cluster.objects["Secret", secret["name"]][secret["key"]].decode()
            else:
                value = variable["value"]
            for name, known in values.items():
                value = value.replace(f"$({name})", known)
            values[variable["name"]] = value
        return values

    def root(self, container: Manifest) -> Path:
        """A root file system with the image's files and the volumes, read-only but for these."""
        root = self.cluster.directory / f"root-{self.name}-{container['name']}"
        if root.exists():
            return root
        binary = self.cluster.binary
        linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+\.so\S*) \(", linked):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
        for directory in ("usr/bin", "etc", "proc", "dev", "tmp", "sys"):
            (root / directory).mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/kvstrata").touch()
        (root / "etc/passwd").write_text("root:x:0:0::/root:\nnonroot:x:65532:65532::/tmp:\n")
        names = " ".join(["localhost", *self.cluster.hosts])
        (root / "etc/hosts").write_text(f"127.0.0.1 {names}\n")
        mounts = {v["name"]: self.cluster.volume(self, v) for v in self.spec.get("volumes", [])}
        for found in container["volumeMounts"]:
            (root / found["mountPath"].lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("--bind", root, root)
        mount("--bind", binary, root / "usr/bin/kvstrata")
        mount("-t", "proc", "proc", root / "proc")
        mount("--rbind", "/sys", root / "sys")
        mount("-t", "tmpfs", "-o", "mode=755", "dev", root / "dev")
        for device in DEVICES:
            (root / "dev" / device).touch()
            mount("--bind", f"/dev/{device}", root / "dev" / device)
        for found in container["volumeMounts"]:
            target = root / found["mountPath"].lstrip("/")
            if found["name"] not in mounts:
                # A claim of a StatefulSet is named by the template.
                claim = {"name": found["name"], "persistentVolumeClaim": {"claimName": self.name}}
                mounts[found["name"]] = self.cluster.volume(self, claim)
            mount("--bind", mounts[found["name"]], target)
            if found.get("readOnly"):
                mount("-o", "remount,bind,ro", target)
        if container["securityContext"]["readOnlyRootFilesystem"]:
            mount("-o", "remount,bind,ro", root)
        return root
