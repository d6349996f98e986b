"""Sets of values for the chart: good ones, and bad ones with a word of their refusal."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]


def memory(amount: str) -> Values:
    """Resources with so much memory."""
    return {"requests": {"memory": amount}, "limits": {"memory": amount}}


AGENT: Values = {"mode": "agent", "nvme": {"volume": "hostPath", "hostPath": "/mnt/nvme/kvstrata"}}
ISSUED: Values = {"certManager": {"enabled": True, "issuerRef": {"name": "ca"}}}

# Everything that can be switched on.
FULL: Values = {
    "replicas": 3,
    "config": {
        "object": {"url": "s3://bucket/cache"},
        "events": {"subscribe": "tcp://vllm-0.vllm:5557,model=m,replay=tcp://vllm-0.vllm:5558"},
    },
    "tls": ISSUED,
    "networkPolicy": {"enabled": True},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "spread": {"host": "required", "zone": "required"},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/kv"}},
}

GOOD: dict[str, Values] = {
    "defaults": {},
    "large": {
        "replicas": 3,
        "resources": {
            "requests": {"cpu": 8, "memory": "256Gi"},
            "limits": {"cpu": 8, "memory": "256Gi"},
        },
        "config": {
            "server": {"drain_grace": "1m30s", "grpc_listen": "[::]:7400"},
            "memory": {"limit": "200GiB"},
            "dram": {"capacity": "160GiB"},
            "identity": {"shared_tenant": True},
            "lease": {"ttl_default": "30s", "ttl_max": "10m", "session_bytes_max": "auto"},
            "node": {"zone": "a", "advertise": "cache.example:7400"},
            "events": {
                "subscribe": "tcp://vllm-0.vllm:5557,model=org/m;tcp://vllm-1.vllm:5557,model=org/m",
                "publish": "llm-d=tcp://epp:5557,model=org/m;dynamo=tcp://*:5600,model=org/m",
                "publish_state": "none",
            },
            "nvme": {"segment_bytes": "512MiB", "daily_writes": "none", "engine": "pread"},
            "object": {"url": "s3://bucket/cache", "ttl": "1d", "admission": "all"},
        },
        "object": {"credentialsSecret": "bucket"},
        "nvme": {"size": "3Ti", "storageClassName": "local-nvme", "path": "/data/kv"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "cache", "operator": "Exists"}],
        "priorityClassName": "high",
    },
    "everything": FULL,
    "own secret and image": {
        "identity": {"existingSecret": "mine", "key": "hex"},
        "image": {
            "repository": "images.example/kvstrata",
            "digest": "sha256:" + "0" * 64,
            "pullSecrets": [{"name": "pull"}],
        },
    },
    "own tokens, and TLS": {
        "auth": {"existingSecret": "mine", "key": "file"},
        "tls": {"secret": "from-elsewhere"},
    },
    "own tokens, watched": {
        "auth": {"existingSecret": "mine", "operatorToken": {"secret": "ops", "key": "t"}},
        "metrics": {"serviceMonitor": {"enabled": True}},
    },
    "RESP": {"tls": {"secret": "certs"}, "config": {"server": {"resp_listen": "0.0.0.0:9405"}}},
    "RESP in the clear": {
        "config": {"server": {"resp_listen": "0.0.0.0:6379", "resp_plain": True}},
    },
    "certificates of clients": {"tls": {"secret": "certs", "clientCertificates": True}},
    "certificates of clients, tested": {
        "tls": ISSUED | {"clientCertificates": True},
        "config": {"node": {"advertise": "cache.example:9400"}},
        "helmTest": {"clientSecret": "tester"},
    },
    "a public CA": {"tls": {"secret": "certs", "ca": ""}},
    "no tokens": {"auth": {"enabled": False}, "networkPolicy": {"enabled": True}},
    "the node's disk": {"nvme": {"volume": "emptyDir", "size": "7Gi"}},
    "a share of the node's disk": {
        "nvme": {"volume": "emptyDir", "size": "512Mi"},
        "config": {"nvme": {"capacity": "256MiB"}},
    },
    "a claim that goes": {"nvme": {"volume": "ephemeral", "storageClassName": "local"}},
    "a claim of one's own": {"nvme": {"volume": "existing", "existingClaim": "disk"}},
    "a directory of the host": {"nvme": {"volume": "hostPath", "hostPath": "/mnt/kv"}},
    "no nvme": {"nvme": {"enabled": False}},
    "agents": AGENT,
    "agents of a user": AGENT | {"agent": {"runAsUser": 1000, "socketDirectory": "/srv/kv"}},
    "agents, copying": {
        "mode": "agent",
        "nvme": {"volume": "ephemeral"},
        "config": {"server": {"shared_memory": False}},
        "tls": ISSUED,
        "networkPolicy": {"enabled": True},
        "metrics": FULL["metrics"],
    },
    "least memory": {"resources": memory("140Mi"), "nvme": {"enabled": False}},
    "events for routers": {
        "networkPolicy": {"enabled": True},
        "config": {
            "events": {
                "subscribe": "tcp://vllm-0.vllm:5557,model=m",
                "publish": "dynamo=tcp://0.0.0.0:5600,replay=tcp://0.0.0.0:5601,model=m,worker=w;"
                "llm-d=tcp://epp.llm:5558,model=m",
                "publish_state": "none",
            }
        },
    },
    "a cluster among others": {
        "replicas": 5,
        "config": {
            "cluster": {
                "name": "blue",
                "listen": "[::]:7403",
                "seeds": "kv-kvstrata-headless.cache.svc:7403,10.0.0.7:7403",
            },
        },
        "networkPolicy": {"enabled": True},
    },
    "caches side by side": {
        "replicas": 2,
        "cluster": {"enabled": False},
        "config": {"cluster": {"name": "blue"}, "server": {"drain_grace": "1s"}},
        "networkPolicy": {"enabled": True},
    },
    "agents that share": AGENT | {"cluster": {"enabled": True}},
    "plain": {
        "podDisruptionBudget": {"enabled": False},
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "serviceAccount": {"create": False},
        "helmTest": {"enabled": False},
        "spread": {"host": "none", "zone": "none"},
        "podAnnotations": {"a/b": "c"},
        "podLabels": {"team": "x"},
        "extraEnv": [{"name": "KV_LOG__LEVEL", "value": "debug"}],
    },
}

BAD: dict[str, tuple[Values, str]] = {
    "unknown value": ({"replica": 3}, "replica"),
    "unknown value, deep": ({"tls": {"certManager": {"issuer": "x"}}}, "issuer"),
    "unknown section": ({"config": {"srever": {"x": 1}}}, "srever"),
    "unknown key": ({"config": {"server": {"grpc_port": 9400}}}, "grpc_port"),
    "unknown mode": ({"mode": "deployment"}, "mode"),
    "wrong type": ({"replicas": "three"}, "replicas"),
    "no memory limit": ({"resources": {"limits": {"memory": None}}}, "memory"),
    "requests below limits": ({"resources": {"requests": {"memory": "1Gi"}}}, "requests.memory"),
    "memory for nothing": ({"resources": memory("100Mi")}, "take 132Mi; raise"),
    "memory below dram": (
        {"resources": memory("4Gi"), "config": {"dram": {"capacity": "4GiB"}}},
        "or lower config.dram.capacity",
    ),
    "a limit above the container's": ({"config": {"memory": {"limit": "5GiB"}}}, "4Gi"),
    "a limit below dram": (
        {"config": {"memory": {"limit": "1GiB"}, "dram": {"capacity": "1GiB"}}},
        "config.memory.limit is 1GiB",
    ),
    "one port twice": ({"config": {"server": {"http_listen": "0.0.0.0:9400"}}}, "9400"),
    "loopback": ({"config": {"server": {"http_listen": "127.0.0.1:9401"}}}, "http_listen"),
    "privileged port": ({"config": {"server": {"grpc_listen": "0.0.0.0:94"}}}, "grpc_listen"),
    "drain without unit": ({"config": {"server": {"drain_grace": "20"}}}, "drain_grace"),
    "drain without end": ({"config": {"server": {"drain_grace": "11m"}}}, "10m at most"),
    "secret elsewhere": ({"config": {"identity": {"secret_file": "/tmp/x"}}}, "secret_file"),
    "latest": ({"image": {"tag": "latest"}}, "tag"),
    "name twice": ({"extraEnv": [{"name": "KV_NODE__NAME", "value": "x"}]}, "KV_NODE__NAME"),
    "port by variable": (
        {"extraEnv": [{"name": "KV_SERVER__HTTP_LISTEN", "value": "x"}]},
        "config.server",
    ),
    "nvme path twice": ({"config": {"nvme": {"path": "/x"}}}, "path"),
    "nvme path by variable": (
        {"extraEnv": [{"name": "KV_NVME__PATH", "value": "x"}]},
        "KV_NVME__PATH",
    ),
    "nvme over the system": ({"nvme": {"path": "/etc/kvstrata"}}, "path"),
    "nvme nowhere": ({"nvme": {"path": "data"}}, "path"),
    "nvme of an odd size": ({"nvme": {"size": "1.5Gi"}}, "size"),
    "nvme of no size": ({"nvme": {"size": "16Mi"}}, "32Mi at least"),
    "nvme elsewhere": ({"nvme": {"volume": "nfs"}}, "volume"),
    "nvme larger than its claim": ({"config": {"nvme": {"capacity": "200GiB"}}}, "nvme.size"),
    "nvme that fills its directory": (
        {"nvme": {"volume": "emptyDir"}, "config": {"nvme": {"capacity": "98GiB"}}},
        "95 %",
    ),
    "nvme beyond scratch": (
        {"nvme": {"volume": "emptyDir"}, "resources": {"limits": {"ephemeral-storage": "50Gi"}}},
        "ephemeral-storage",
    ),
    "nvme settings without nvme": (
        {"nvme": {"enabled": False}, "config": {"nvme": {"engine": "pread"}}},
        "nvme.enabled",
    ),
    "class without claim": (
        {"nvme": {"volume": "emptyDir", "storageClassName": "x"}},
        "storageClassName",
    ),
    "existing of no name": ({"nvme": {"volume": "existing"}}, "existingClaim"),
    "existing for three": (
        {"replicas": 3, "nvme": {"volume": "existing", "existingClaim": "disk"}},
        "replicas",
    ),
    "a name for nothing": ({"nvme": {"existingClaim": "disk"}}, "existingClaim"),
    "a directory by accident": ({"nvme": {"hostPath": "/mnt"}}, "make volume hostPath"),
    "a directory of the system": ({"nvme": {"volume": "hostPath", "hostPath": "/etc"}}, "hostPath"),
    "object without nvme": (
        {"nvme": {"enabled": False}, "config": {"object": {"url": "s3://b"}}},
        "config.object.url",
    ),
    "object where nobody writes": ({"config": {"object": {"url": "file:///x"}}}, "below nvme.path"),
    "credentials for nothing": ({"object": {"credentialsSecret": "x"}}, "credentialsSecret"),
    "tokens by variable": (
        {"extraEnv": [{"name": "KV_AUTH__ALLOW_ANONYMOUS", "value": "true"}]},
        "KV_AUTH__ALLOW_ANONYMOUS",
    ),
    "tokens by config": ({"config": {"auth": {"allow_anonymous": True}}}, "auth"),
    "a token of nobody": (
        {"auth": {"enabled": False, "operatorToken": {"secret": "x"}}},
        "operatorToken",
    ),
    "certificates of clients without TLS": ({"tls": {"clientCertificates": True}}, "tls.secret"),
    "certificates of clients of no CA": (
        {"tls": {"secret": "x", "clientCertificates": True, "ca": ""}},
        "tls.ca",
    ),
    "a client's certificate for nothing": ({"helmTest": {"clientSecret": "x"}}, "clientSecret"),
    "nobody signs": ({"tls": {"certManager": {"enabled": True}}}, "issuerRef.name"),
    "Prometheus without a token": (
        {"auth": {"existingSecret": "x"}, "metrics": {"serviceMonitor": {"enabled": True}}},
        "auth.operatorToken.secret",
    ),
    "alerts about nothing": ({"metrics": {"prometheusRule": {"enabled": True}}}, "serviceMonitor"),
    "clients from nowhere": ({"networkPolicy": {"enabled": True, "clients": []}}, "clients"),
    "RESP in the clear without saying so": (
        {"config": {"server": {"resp_listen": "0.0.0.0:9405"}}},
        "resp_plain",
    ),
    "RESP on the port of bulk": (
        {"tls": {"secret": "x"}, "config": {"server": {"resp_listen": "0.0.0.0:9402"}}},
        "9402",
    ),
    "RESP nowhere": ({"config": {"server": {"resp_plain": True}}}, "resp_listen"),
    "RESP on the port of gossip": (
        {"tls": {"secret": "x"}, "config": {"server": {"resp_listen": "0.0.0.0:9403"}}},
        "cluster.listen both use port 9403",
    ),
    "gossip on loopback": ({"config": {"cluster": {"listen": "127.0.0.1:9403"}}}, "listen"),
    "seeds without a port": ({"config": {"cluster": {"seeds": "kv"}}}, "seeds"),
    "seeds of no cluster": (
        AGENT | {"config": {"cluster": {"seeds": "kv:9403"}}},
        "config.cluster.seeds",
    ),
    "half a cluster": ({"cluster": {"enabled": "some"}}, "enabled"),
    "gossip by variable": (
        {"extraEnv": [{"name": "KV_CLUSTER__LISTEN", "value": "x"}]},
        "config.cluster",
    ),
    "admin elsewhere": ({"config": {"server": {"admin_listen": "none"}}}, "admin_listen"),
    "no time to end": ({"drainMarginSeconds": 11}, "give 12 at least"),
    "no time to hand over": (
        {"replicas": 3, "config": {"server": {"drain_grace": "4s"}}},
        "give 5s at least",
    ),
    "engine": ({"config": {"nvme": {"engine": "steam"}}}, "engine"),
    "router of no kind": ({"config": {"events": {"publish": "tcp://epp:5557"}}}, "publish"),
    "engine without a scheme": ({"config": {"events": {"subscribe": "h:5557"}}}, "subscribe"),
    "bucket of no provider": ({"config": {"object": {"url": "ftp://host/x"}}}, "url"),
    "selector label": ({"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
    "agents with claims": ({"mode": "agent"}, "hostPath, emptyDir or ephemeral"),
    "agents with a bucket": (AGENT | {"config": {"object": {"url": "s3://b"}}}, "mode statefulset"),
    "agents at one address": (
        AGENT | {"config": {"node": {"advertise": "a:1"}}},
        "config.node.advertise",
    ),
    "agents with a socket elsewhere": (
        AGENT | {"config": {"server": {"bulk_unix": "/x"}}},
        "agent.socketDirectory",
    ),
    "a socket for nobody": ({"config": {"server": {"bulk_unix": "/x"}}}, "mode agent"),
    "shared memory for nobody": ({"config": {"server": {"shared_memory": True}}}, "mode agent"),
}
