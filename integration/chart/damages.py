"""One way after another to break each rule: of the defaults, of everything, of agents."""

from __future__ import annotations

from collections.abc import Callable

import cluster
import extras
import policy
import standards
from manifests import (
    Manifest,
    claim,
    generated_secrets,
    named,
    of_kind,
    one,
    pod,
    server,
    template,
    test_pod,
    workload,
)
from policy import NVME, SOCKET, Rule

Damage = Callable[[list[Manifest]], object]

# Of the rules of every rendering.
DAMAGES: list[tuple[Rule, Damage]] = [
    (policy.pods_are_restricted, lambda m: pod(m)["securityContext"].pop("seccompProfile")),
    (policy.pods_are_restricted, lambda m: pod(m)["securityContext"].update(runAsUser=0)),
    (policy.pods_are_restricted, lambda m: pod(m).update(hostNetwork=True)),
    (policy.pods_are_restricted, lambda m: server(m)["securityContext"].pop("capabilities")),
    (policy.pods_have_no_rights_and_no_links, lambda m: pod(m).pop("automountServiceAccountToken")),
    (policy.pods_have_no_rights_and_no_links, lambda m: pod(m).update(enableServiceLinks=True)),
    (policy.volumes_are_safe, lambda m: server(m)["volumeMounts"][0].pop("readOnly")),
    (
        policy.volumes_are_safe,
        lambda m: pod(m)["volumes"][0]["projected"].update(defaultMode=0o444),
    ),
    (policy.volumes_are_safe, lambda m: pod(m)["volumes"].append({"name": "x", "hostPath": {}})),
    (policy.volumes_are_safe, lambda m: server(m)["volumeMounts"].append({"name": "x"})),
    (policy.nvme_has_its_volume, lambda m: workload(m)["spec"].pop("volumeClaimTemplates")),
    (policy.nvme_has_its_volume, lambda m: claim(m)["spec"].update(accessModes=["ReadWriteMany"])),
    (
        policy.nvme_has_its_volume,
        lambda m: claim(m)["metadata"]["labels"].update({"helm.sh/chart": "1"}),
    ),
    (policy.nvme_has_its_volume, lambda m: server(m)["volumeMounts"].pop(1)),
    (policy.nvme_has_its_volume, lambda m: server(m)["volumeMounts"][1].update(readOnly=True)),
    (policy.nvme_has_its_volume, lambda m: server(m)["volumeMounts"][1].update(mountPath="/x")),
    (
        policy.nvme_has_its_volume,
        lambda m: pod(m)["volumes"].append({"name": NVME, "emptyDir": {"sizeLimit": "1Gi"}}),
    ),
    (policy.probes_ask_the_server, lambda m: server(m).pop("livenessProbe")),
    (
        policy.probes_ask_the_server,
        lambda m: server(m)["readinessProbe"]["httpGet"].update(path="/livez"),
    ),
    (policy.grace_exceeds_drain, lambda m: pod(m).update(terminationGracePeriodSeconds=20)),
    (policy.memory_is_guaranteed, lambda m: server(m)["resources"].pop("limits")),
    (
        policy.memory_is_guaranteed,
        lambda m: server(m)["resources"]["requests"].update(memory="1Gi"),
    ),
    (policy.ports_agree, lambda m: server(m)["ports"][0].pop("protocol")),
    (policy.ports_agree, lambda m: server(m)["ports"][0].update(containerPort=1)),
    (policy.ports_agree, lambda m: of_kind(m, "Service")[0]["spec"]["ports"][1].pop("protocol")),
    (policy.ports_agree, lambda m: of_kind(m, "Service")[1]["spec"]["ports"].pop()),
    (
        policy.selectors_are_stable,
        lambda m: of_kind(m, "Service")[0]["spec"]["selector"].update(v="1"),
    ),
    (
        policy.selectors_are_stable,
        lambda m: template(m)["metadata"]["labels"].update({"helm.sh/chart": "kvstrata-0.1.0"}),
    ),
    (
        policy.selectors_are_stable,
        lambda m: one(m, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/name": "other"}
        ),
    ),
    (policy.workload_starts_together, lambda m: workload(m)["spec"].pop("podManagementPolicy")),
    (policy.workload_starts_together, lambda m: workload(m)["spec"].update(serviceName="x")),
    (policy.workload_starts_together, lambda m: of_kind(m, "Service")[0]["spec"].pop("clusterIP")),
    (policy.command_reads_the_config, lambda m: server(m)["args"].pop()),
    (policy.nodes_are_told_apart, lambda m: server(m)["env"][0].update(valueFrom=None)),
    (policy.nodes_are_told_apart, lambda m: server(m)["env"].reverse()),
    (policy.nodes_are_told_apart, lambda m: server(m)["env"][3].update(value="localhost:9400")),
    (
        policy.command_reads_the_config,
        lambda m: server(m)["volumeMounts"][0].update(mountPath="/x"),
    ),
    (
        policy.command_reads_the_config,
        lambda m: pod(m)["volumes"][0]["projected"]["sources"].pop(),
    ),
    (
        policy.others_are_kept_out,
        lambda m: named(m, "ConfigMap", "kvstrata")["data"].update({"config.toml": "[auth]\n"}),
    ),
    (
        policy.others_are_kept_out,
        lambda m: named(m, "ConfigMap", "kvstrata")["data"].update(
            {"config.toml": "[auth]\nallow_anonymous = false\n"}
        ),
    ),
    (
        policy.protocols_are_named,
        lambda m: of_kind(m, "Service")[0]["spec"]["ports"][0].pop("appProtocol"),
    ),
    (policy.image_is_pinned, lambda m: server(m).update(image="kvstrata:latest")),
    (policy.image_is_pinned, lambda m: server(m).update(image="kvstrata")),
    (policy.secrets_are_kept, lambda m: of_kind(m, "Secret")[0]["metadata"]["annotations"].clear()),
    (
        policy.secrets_are_kept,
        lambda m: server(m)["env"].append({"value": generated_secrets(m)[0]}),
    ),
    (
        policy.pods_are_restricted,
        lambda m: first(test_pod(m))["securityContext"].pop("capabilities"),
    ),
    (policy.pods_are_restricted, lambda m: pod(m)["volumes"][0].update(hostPath={"path": "/"})),
    (policy.pods_write_nowhere_else, lambda m: server(m)["securityContext"].clear()),
    (policy.pods_write_nowhere_else, lambda m: pod(m)["securityContext"].update(fsGroup=1)),
    (policy.pods_write_nowhere_else, lambda m: pod(m)["securityContext"].pop("runAsUser")),
    (
        policy.pods_have_no_rights_and_no_links,
        lambda m: one(m, "ServiceAccount").pop("automountServiceAccountToken"),
    ),
    (policy.agents_share_a_socket, lambda m: pod(m)["volumes"].append({"name": SOCKET})),
    (policy.image_is_pinned, lambda m: test_pod(m)["containers"][0].update(image="kvstrata:0.0.1")),
    (
        policy.selectors_are_stable,
        lambda m: one(m, "Pod")["metadata"]["labels"].update(template(m)["metadata"]["labels"]),
    ),
    (policy.nodes_are_told_apart, lambda m: server(m)["env"].pop(1)),
    (cluster.peers_find_one_another, lambda m: server(m)["ports"].pop()),
    (cluster.peers_find_one_another, lambda m: server(m)["ports"][3].update(protocol="TCP")),
    (
        cluster.peers_find_one_another,
        lambda m: named(m, "Service", "-headless")["spec"]["ports"].pop(),
    ),
    (
        cluster.peers_find_one_another,
        lambda m: named(m, "Service", "kv-kvstrata")["spec"]["ports"].append({"name": "gossip"}),
    ),
    (cluster.peers_find_one_another, lambda m: server(m)["env"].pop(2)),
    (cluster.peers_find_one_another, lambda m: server(m)["env"][4].update(value="10.0.0.1:9403")),
    (cluster.peers_find_one_another, lambda m: server(m)["env"][5].update(value="elsewhere:9403")),
    (cluster.nodes_leave_before_they_end, lambda m: server(m).pop("lifecycle")),
    (
        cluster.nodes_leave_before_they_end,
        lambda m: server(m)["lifecycle"]["preStop"]["exec"]["command"].pop(),
    ),
    (cluster.nodes_leave_before_they_end, lambda m: server(m)["env"].pop()),
    (cluster.nodes_leave_before_they_end, lambda m: server(m)["volumeMounts"].pop()),
    (
        cluster.nodes_leave_before_they_end,
        lambda m: next(v for v in pod(m)["volumes"] if v["name"] == "admin").update(hostPath={}),
    ),
    (
        cluster.nodes_leave_before_they_end,
        lambda m: pod(m).update(terminationGracePeriodSeconds=31),
    ),
]

FULL_DAMAGES: list[tuple[Rule, Damage]] = [
    (
        extras.network_policy_lets_through,
        lambda m: one(m, "NetworkPolicy")["spec"]["policyTypes"].pop(),
    ),
    (
        extras.network_policy_lets_through,
        lambda m: one(m, "NetworkPolicy")["spec"]["ingress"][0]["ports"].pop(),
    ),
    (
        extras.network_policy_lets_through,
        lambda m: one(m, "NetworkPolicy")["spec"]["ingress"][1].update({"from": []}),
    ),
    *(
        (
            extras.network_policy_lets_through,
            lambda m, n=n: one(m, "NetworkPolicy")["spec"]["egress"].pop(n),
        )
        for n in range(4)
    ),
    (
        extras.network_policy_lets_through,
        lambda m: one(m, "NetworkPolicy")["spec"]["ingress"].pop(),
    ),
    *(
        (
            extras.network_policy_lets_through,
            lambda m, n=n, w=w: one(m, "NetworkPolicy")["spec"][n][0 - (w == "from")].update(
                {w: [{"podSelector": {}}]}
            ),
        )
        for n, w in (("ingress", "from"), ("egress", "to"))
    ),
    (
        extras.certificate_is_for_every_address,
        lambda m: one(m, "Certificate")["spec"].update(dnsNames=["kv-kvstrata.cache.svc"]),
    ),
    (
        extras.certificate_is_for_every_address,
        lambda m: one(m, "Certificate")["spec"].update(secretName="other"),
    ),
    (
        extras.certificate_is_for_every_address,
        lambda m: one(m, "Certificate")["spec"].update(usages=["client auth"]),
    ),
    (
        extras.certificate_is_for_every_address,
        lambda m: one(m, "Certificate")["spec"]["privateKey"].pop("rotationPolicy"),
    ),
    (
        extras.monitor_scrapes_each_node_once,
        lambda m: one(m, "ServiceMonitor")["spec"]["selector"]["matchLabels"].popitem(),
    ),
    *(
        (
            extras.monitor_scrapes_each_node_once,
            lambda m, key=key: one(m, "ServiceMonitor")["spec"]["endpoints"][0].pop(key),
        )
        for key in ("authorization", "scheme", "tlsConfig")
    ),
    (
        extras.monitor_scrapes_each_node_once,
        lambda m: one(m, "ServiceMonitor")["spec"]["endpoints"][0].update(port="grpc"),
    ),
    (extras.test_asks_every_node, lambda m: test_pod(m)["containers"].pop()),
    (extras.test_asks_every_node, lambda m: test_pod(m)["containers"][0]["env"].pop(1)),
    (extras.test_asks_every_node, lambda m: workload(m)["spec"].update(replicas=4)),
    (extras.test_asks_every_node, lambda m: server(m)["ports"][0].update(containerPort=1)),
    (
        extras.pods_keep_apart,
        lambda m: pod(m)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(
            {"app.kubernetes.io/name": "other"}
        ),
    ),
    (extras.references_lead_somewhere, lambda m: m.remove(named(m, "Secret", "-tokens"))),
    (extras.references_lead_somewhere, lambda m: m.remove(one(m, "Certificate"))),
    (extras.references_lead_somewhere, lambda m: m.remove(one(m, "ServiceAccount"))),
    (
        extras.dashboards_are_dashboards,
        lambda m: named(m, "ConfigMap", "-dashboards")["data"].clear(),
    ),
    (
        extras.dashboards_are_dashboards,
        lambda m: named(m, "ConfigMap", "-dashboards")["metadata"]["labels"].clear(),
    ),
]

AGENT_DAMAGES: list[tuple[Rule, Damage]] = [
    (policy.pods_are_restricted, lambda m: server(m)["securityContext"].pop("capabilities")),
    (policy.pods_are_restricted, lambda m: pod(m).update(hostIPC=True)),
    (cluster.peers_find_one_another, lambda m: server(m)["ports"].append({"name": "gossip"})),
    (policy.agents_share_a_socket, lambda m: server(m)["volumeMounts"].pop()),
    (policy.agents_share_a_socket, lambda m: pod(m)["volumes"][-1]["hostPath"].update(path="/x")),
    (policy.nodes_are_told_apart, lambda m: server(m)["env"].reverse()),
    (
        policy.workload_starts_together,
        lambda m: of_kind(m, "Service")[1]["spec"].update(internalTrafficPolicy="Cluster"),
    ),
]

# (control, a way to violate it)
STANDARD_DAMAGES: list[tuple[standards.Control, Callable[[Manifest, Manifest], object]]] = [
    (
        standards.host_process,
        lambda _m, s: s["securityContext"].update(windowsOptions={"hostProcess": True}),
    ),
    (standards.host_namespaces, lambda _m, s: s.update(hostNetwork=True)),
    (standards.host_namespaces, lambda _m, s: s.update(hostPID=True)),
    (standards.privileged, lambda _m, s: first(s)["securityContext"].update(privileged=True)),
    (standards.capabilities, lambda _m, s: first(s)["securityContext"].pop("capabilities")),
    (
        standards.capabilities,
        lambda _m, s: first(s)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    ),
    (standards.host_ports, lambda _m, s: first(s)["ports"][0].update(hostPort=9400)),
    (
        standards.host_probes,
        lambda _m, s: first(s)["livenessProbe"]["httpGet"].update(host="127.0.0.1"),
    ),
    (
        standards.app_armor,
        lambda m, _s: m["annotations"].update(
            {"container.apparmor.security.beta.kubernetes.io/kvstrata": "unconfined"}
        ),
    ),
    (
        standards.app_armor,
        lambda _m, s: first(s)["securityContext"].update(appArmorProfile={"type": "Unconfined"}),
    ),
    (
        standards.se_linux,
        lambda _m, s: s["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
    ),
    (
        standards.se_linux,
        lambda _m, s: s["securityContext"].update(seLinuxOptions={"user": "root"}),
    ),
    (standards.proc_mount, lambda _m, s: first(s)["securityContext"].update(procMount="Unmasked")),
    (
        standards.sysctls,
        lambda _m, s: s["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]),
    ),
    (standards.volume_types, lambda _m, s: s["volumes"].append({"name": "x", "hostPath": {}})),
    (standards.volume_types, lambda _m, s: s["volumes"].append({"name": "x", "nfs": {}})),
    (
        standards.escalation,
        lambda _m, s: first(s)["securityContext"].pop("allowPrivilegeEscalation"),
    ),
    (standards.not_root, lambda _m, s: first(s)["securityContext"].update(runAsNonRoot=False)),
    (standards.not_user_0, lambda _m, s: first(s)["securityContext"].update(runAsUser=0)),
    (standards.seccomp, lambda _m, s: s["securityContext"].pop("seccompProfile")),
    (
        standards.seccomp,
        lambda _m, s: first(s)["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    ),
]


def first(spec: Manifest) -> Manifest:
    """The first container of a pod."""
    found: Manifest = spec["containers"][0]
    return found
