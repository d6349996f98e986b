"""The pod security standard "restricted", control by control, as Kubernetes documents it.

A control returns its complaints about a pod's metadata and spec. What the standard "baseline" has
in it is part of "restricted". The list is that of Kubernetes 1.37: a namespace that enforces an
older version asks for no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Spec = dict[str, Any]
Control = Callable[[Spec, Spec], list[str]]

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
}
SELINUX_TYPES = {
    None,
    "",
    "container_t",
    "container_init_t",
    "container_kvm_t",
    "container_engine_t",
}


def containers(spec: Spec) -> Iterator[Spec]:
    """All containers of a pod."""
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        yield from spec.get(kind, [])


def contexts(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """The security contexts of the pod and of its containers, by name."""
    yield "pod", spec.get("securityContext", {})
    for container in containers(spec):
        yield container["name"], container.get("securityContext", {})


def of_containers(spec: Spec, field: str, wanted: object) -> list[str]:
    """Complains of containers whose security context has another value."""
    return [
        f"{c['name']}: {field} is {found!r}, not {wanted!r}"
        for c in containers(spec)
        if (found := c.get("securityContext", {}).get(field)) != wanted
    ]


def effective(spec: Spec, field: str) -> list[tuple[str, Any]]:
    """What holds for each container: its own setting, else the pod's."""
    general = spec.get("securityContext", {}).get(field)
    return [(c["name"], c.get("securityContext", {}).get(field, general)) for c in containers(spec)]


def host_process(_metadata: Spec, spec: Spec) -> list[str]:
    """No Windows process of the host."""
    return [n for n, c in contexts(spec) if c.get("windowsOptions", {}).get("hostProcess")]


def host_namespaces(_metadata: Spec, spec: Spec) -> list[str]:
    """No namespaces of the host."""
    return [n for n in ("hostNetwork", "hostPID", "hostIPC") if spec.get(n)]


def privileged(_metadata: Spec, spec: Spec) -> list[str]:
    """No privileged container."""
    return [n for n, c in contexts(spec) if c.get("privileged")]


def capabilities(_metadata: Spec, spec: Spec) -> list[str]:
    """All capabilities dropped, none added but the one for low ports."""
    problems = []
    for container in containers(spec):
        found = container.get("securityContext", {}).get("capabilities", {})
        if "ALL" not in found.get("drop", []):
            problems.append(f"{container['name']} does not drop ALL")
        if set(found.get("add", [])) - {"NET_BIND_SERVICE"}:
            problems.append(f"{container['name']} adds {found['add']}")
    return problems


def host_ports(_metadata: Spec, spec: Spec) -> list[str]:
    """No ports of the host."""
    ports = [(c["name"], p) for c in containers(spec) for p in c.get("ports", [])]
    return [f"{name}: hostPort {p['hostPort']}" for name, p in ports if p.get("hostPort")]


def host_probes(_metadata: Spec, spec: Spec) -> list[str]:
    """Probes and hooks ask the pod, and nobody else."""
    problems = []
    for container in containers(spec):
        hooks = container.get("lifecycle", {})
        probes = ("livenessProbe", "readinessProbe", "startupProbe")
        asked = [container.get(p, {}) for p in probes] + list(hooks.values())
        handlers = [a.get(kind, {}) for a in asked for kind in ("httpGet", "tcpSocket")]
        problems += [f"{container['name']}: host {h['host']}" for h in handlers if h.get("host")]
    return problems


def app_armor(metadata: Spec, spec: Spec) -> list[str]:
    """No AppArmor profile that is weaker than the default."""
    prefix = "container.apparmor.security.beta.kubernetes.io/"
    problems = [
        f"{name}: {value}"
        for name, value in metadata.get("annotations", {}).items()
        if name.startswith(prefix)
        and value not in ("", "runtime/default")
        and not value.startswith("localhost/")
    ]
    return problems + [
        n
        for n, c in contexts(spec)
        if c.get("appArmorProfile", {}).get("type") not in (None, "RuntimeDefault", "Localhost")
    ]


def se_linux(_metadata: Spec, spec: Spec) -> list[str]:
    """No SELinux user or role, and no type but those of containers."""
    problems = []
    for name, context in contexts(spec):
        options = context.get("seLinuxOptions", {})
        if options.get("user") or options.get("role"):
            problems.append(f"{name}: SELinux user or role")
        if options.get("type") not in SELINUX_TYPES:
            problems.append(f"{name}: SELinux type {options['type']}")
    return problems


def proc_mount(_metadata: Spec, spec: Spec) -> list[str]:
    """/proc as ever."""
    return [n for n, c in contexts(spec) if c.get("procMount") not in (None, "Default")]


def sysctls(_metadata: Spec, spec: Spec) -> list[str]:
    """No sysctl but the safe ones."""
    set_here = spec.get("securityContext", {}).get("sysctls", [])
    return [s["name"] for s in set_here if s["name"] not in SAFE_SYSCTLS]


def volume_types(_metadata: Spec, spec: Spec) -> list[str]:
    """No volumes of the host, nor others that reach out of the cluster."""
    return [
        f"{v['name']} is {sorted(set(v) - {'name'})}"
        for v in spec.get("volumes", [])
        if not set(v) - {"name"} <= VOLUMES
    ]


def escalation(_metadata: Spec, spec: Spec) -> list[str]:
    """No process gets more rights than its parent."""
    return of_containers(spec, "allowPrivilegeEscalation", False)


def not_root(_metadata: Spec, spec: Spec) -> list[str]:
    """Nobody is root, and it is said."""
    return [
        f"{n}: runAsNonRoot is {v}" for n, v in effective(spec, "runAsNonRoot") if v is not True
    ]


def not_user_0(_metadata: Spec, spec: Spec) -> list[str]:
    """No user ID of root."""
    return [f"{n}: runAsUser is 0" for n, c in contexts(spec) if c.get("runAsUser") == 0]


def seccomp(_metadata: Spec, spec: Spec) -> list[str]:
    """A seccomp profile."""
    return [
        f"{name}: {profile}"
        for name, profile in effective(spec, "seccompProfile")
        if (profile or {}).get("type") not in ("RuntimeDefault", "Localhost")
    ]


CONTROLS: list[Control] = [
    host_process,
    host_namespaces,
    privileged,
    capabilities,
    host_ports,
    host_probes,
    app_armor,
    se_linux,
    proc_mount,
    sysctls,
    volume_types,
    escalation,
    not_root,
    not_user_0,
    seccomp,
]


def violations(metadata: Spec, spec: Spec) -> dict[str, list[str]]:
    """The controls that a pod violates, each with its complaints."""
    found = {control.__name__: control(metadata, spec) for control in CONTROLS}
    return {name: problems for name, problems in found.items() if problems}
