"""What the optional manifests must hold: network policy, certificate, monitor, test pod,
dashboards.

As policy.py: a rule returns its complaints, and holds where there is nothing to complain about
because the manifest is not there.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase

import standards
from manifests import (
    Manifest,
    config,
    environment,
    is_agent,
    of_kind,
    pod,
    server,
    template,
    workload,
)
from policy import Rule

NAMED_BY = {"secretName": "Secret", "claimName": "PersistentVolumeClaim"}


def ports(manifests: list[Manifest]) -> dict[str, int]:
    """The ports of a node by their names."""
    return {p["name"]: p["containerPort"] for p in server(manifests)["ports"]}


def peers(manifests: list[Manifest]) -> set[tuple[int, str]]:
    """What nodes of a cluster reach of one another."""
    here = ports(manifests)
    if "gossip" not in here:
        return set()
    return {(here["gossip"], "UDP"), (here["grpc"], "TCP"), (here["bulk"], "TCP")}


def network_policy_lets_through(manifests: list[Manifest]) -> list[str]:
    """A network policy lets clients to all ports but gossip, others to the pages only, nodes to one
    another, and the node to what it needs: DNS, the object store, the engines whose events it
    reads, routers that it tells."""
    problems = []
    events = config(manifests).get("events", {})
    targets = events.get("publish", "none").split(";")
    addresses = re.compile(r"tcp://[^,;]+:(\d+)")
    listens = {int(p) for t in targets if t.startswith("dynamo=") for p in addresses.findall(t)}
    connects = {int(p) for p in addresses.findall(events.get("subscribe", "none"))}
    connects |= {int(p) for t in targets if t.startswith("llm-d=") for p in addresses.findall(t)}
    for policy in of_kind(manifests, "NetworkPolicy"):
        spec, here = policy["spec"], ports(manifests)
        if spec["policyTypes"] != ["Ingress", "Egress"]:
            problems.append(f"types are {spec['policyTypes']}")

        def opens(rule: Manifest) -> set[tuple[int, str]]:
            return {(p["port"], p["protocol"]) for p in rule["ports"]}

        opened, between = [opens(rule) for rule in spec["ingress"]], peers(manifests)
        pages = {(here["http"], "TCP")}
        every = {(port, "TCP") for name, port in here.items() if name != "gossip"}
        every |= {(port, "TCP") for port in listens}
        needed = [every, pages] + ([between] if between else [])
        if opened != needed:
            problems.append(f"ingress to {opened}, needed: {needed}")
        nodes = [{"podSelector": {"matchLabels": spec["podSelector"]["matchLabels"]}}]
        for way, rules in (("from", spec["ingress"]), ("to", spec["egress"])):
            found = [r.get(way) for r in rules if "ports" in r and opens(r) == between]
            if between and found != [nodes]:
                problems.append(f"peers: {way} {found}, needed: {nodes}")
        problems += [
            f"ingress from everybody to {r['ports']}" for r in spec["ingress"] if not r["from"]
        ]
        out = {(p["port"], p["protocol"]) for r in spec["egress"] for p in r.get("ports", [])}
        wanted = {(53, "UDP"), (53, "TCP")}
        wanted |= {(port, "TCP") for port in connects} | peers(manifests)
        if re.match("(s3|gs|az)", config(manifests).get("object", {}).get("url", "none")):
            wanted.add((443, "TCP"))
        if out != wanted:
            problems.append(f"egress to {out}, needed: {wanted}")
    return problems


def certificate_is_for_every_address(manifests: list[Manifest]) -> list[str]:
    """A certificate is for the Services and the nodes, and written where the nodes read it."""
    problems = []
    for certificate in of_kind(manifests, "Certificate"):
        spec, namespace = certificate["spec"], certificate["metadata"]["namespace"]
        names = [f"{s['metadata']['name']}.{namespace}.svc" for s in of_kind(manifests, "Service")]
        hosts = [n for n in names if "-headless." not in n]
        if not is_agent(manifests):
            hosts += [f"node-0.{n}" for n in names if "-headless." in n]
        advertised = config(manifests).get("node", {}).get("advertise")
        hosts += [advertised.split(":")[0]] if advertised else []
        problems += [
            f"no name for {host}"
            for host in hosts
            if not any(fnmatchcase(host, name) for name in spec["dnsNames"])
        ]
        if spec["secretName"] not in referenced(manifests)["Secret"]:
            problems.append(f"nobody reads the Secret {spec['secretName']}")
        if "server auth" not in spec["usages"]:
            problems.append(f"usages are {spec['usages']}")
        if spec["privateKey"].get("rotationPolicy") != "Always":
            problems.append("the key stays when the certificate is renewed")
    return problems


def monitor_scrapes_each_node_once(manifests: list[Manifest]) -> list[str]:
    """A ServiceMonitor selects one Service, with a token and by TLS where nodes want them."""
    problems = []
    for monitor in of_kind(manifests, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        found = [
            s for s in of_kind(manifests, "Service") if selector <= s["metadata"]["labels"].items()
        ]
        if len(found) != 1:
            problems.append(f"{len(found)} Services are scraped")
        (endpoint,) = monitor["spec"]["endpoints"]
        settings = config(manifests)
        if (endpoint["port"], endpoint["path"]) != ("http", "/metrics"):
            problems.append(f"asks {endpoint['path']} of {endpoint['port']}")
        if ("authorization" in endpoint) != ("tokens_file" in settings["auth"]):
            problems.append(f"a token: {'authorization' in endpoint}")
        if (endpoint.get("scheme") == "https") != ("tls" in settings):
            problems.append(f"scheme {endpoint.get('scheme')}")
        if "tls" in settings and not endpoint.get("tlsConfig", {}).get("serverName"):
            problems.append("the certificate is not for the pods' addresses, by which it asks")
    return problems


def test_asks_every_node(manifests: list[Manifest]) -> list[str]:
    """The test puts, gets and compares on each node, of at most five, with what nodes ask for."""
    problems = []
    for test in of_kind(manifests, "Pod"):
        spec, nodes = test["spec"], workload(manifests)
        asked: dict[str, list[str]] = {}
        for container in standards.containers(spec):
            variables = environment(container)
            asked.setdefault(variables["KVSTRATA_ENDPOINT"], []).append(container["args"][0])
            wanted = {"KVSTRATA_TOKEN"} if "tokens_file" in config(manifests)["auth"] else set()
            if "client_ca_file" in config(manifests).get("tls", {}):
                wanted |= {"KVSTRATA_TLS_CERT", "KVSTRATA_TLS_KEY"}
            if missing := wanted - set(variables):
                problems.append(f"{container['name']} has no {missing}")
        problems += [f"{a}: {w}" for a, w in asked.items() if w != ["put", "get", "put"]]
        scheme = "https://" if "tls" in config(manifests) else ""
        port = ports(manifests)["grpc"]
        name, namespace = nodes["metadata"]["name"], nodes["metadata"]["namespace"]
        hosts = [f"{name}.{namespace}"]
        if not is_agent(manifests):
            service = nodes["spec"]["serviceName"]
            count = min(5, nodes["spec"]["replicas"])
            hosts = [f"{name}-{n}.{service}.{namespace}" for n in range(count)]
        if list(asked) != [f"{scheme}{host}.svc:{port}" for host in hosts]:
            problems.append(f"asks {list(asked)}, the nodes are {hosts}")
    return problems


def pods_keep_apart(manifests: list[Manifest]) -> list[str]:
    """What keeps pods apart is about these pods."""
    labels = template(manifests)["metadata"]["labels"]
    anti = pod(manifests).get("affinity", {}).get("podAntiAffinity", {})
    terms = [t for kind in anti.values() for t in kind]
    terms = [t.get("podAffinityTerm", t) for t in terms]
    terms += pod(manifests).get("topologySpreadConstraints", [])
    return [
        f"{t['topologyKey']} is about {t['labelSelector']}"
        for t in terms
        if not t["labelSelector"]["matchLabels"].items() <= labels.items()
    ]


def referenced(manifests: list[Manifest]) -> dict[str, set[str]]:
    """The names of what pods refer to, by kind."""
    found: dict[str, set[str]] = {
        k: set() for k in ("ConfigMap", "Secret", "ServiceAccount", "PersistentVolumeClaim")
    }

    def walk(node: object) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item)
        if not isinstance(node, dict):
            return
        for key, value in node.items():
            if key in ("configMap", "secret", "secretRef", "secretKeyRef", "credentials"):
                kind = "ConfigMap" if key == "configMap" else "Secret"
                found[kind].add(value.get("name") or value.get("secretName"))
            elif key in NAMED_BY:
                found[NAMED_BY[key]].add(value)
            elif key == "serviceAccountName":
                found["ServiceAccount"].add(value)
            walk(value)

    for manifest in manifests:
        if manifest["kind"] != "Certificate":
            walk(manifest.get("spec", {}))
    return found


def references_lead_somewhere(manifests: list[Manifest]) -> list[str]:
    """What the chart names after the release, it makes: Secrets, ConfigMaps, the account."""
    made = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    made |= {("Secret", c["spec"]["secretName"]) for c in of_kind(manifests, "Certificate")}
    release = workload(manifests)["metadata"]["name"]
    return [
        f"{kind} {name} is not made"
        for kind, names in referenced(manifests).items()
        for name in names
        if name.startswith(release) and (kind, name) not in made
    ]


def dashboards_are_dashboards(manifests: list[Manifest]) -> list[str]:
    """A ConfigMap of dashboards has files of JSON, each with a uid of its own, and a label."""
    problems = []
    for found in of_kind(manifests, "ConfigMap"):
        if not found["metadata"]["name"].endswith("-dashboards"):
            continue
        uids = [json.loads(text)["uid"] for text in found["data"].values()]
        if not uids or len(set(uids)) != len(uids):
            problems.append(f"uids are {uids}")
        if "grafana_dashboard" not in found["metadata"]["labels"]:
            problems.append("no label by which Grafana finds it")
    return problems


RULES: list[Rule] = [
    network_policy_lets_through,
    certificate_is_for_every_address,
    monitor_scrapes_each_node_once,
    test_asks_every_node,
    pods_keep_apart,
    references_lead_somewhere,
    dashboards_are_dashboards,
]
