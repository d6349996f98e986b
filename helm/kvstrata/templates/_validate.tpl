{{- /* What the schema cannot say: each refusal names the value and says what to do. */ -}}
{{- define "kvstrata.validate" -}}
{{- include "kvstrata.validateMemory" . -}}
{{- include "kvstrata.validatePorts" . -}}
{{- include "kvstrata.validateTrust" . -}}
{{- include "kvstrata.validateDisk" . -}}
{{- include "kvstrata.validateMode" . -}}
{{- include "kvstrata.validateEnv" . -}}
{{- include "kvstrata.validateDrain" . -}}
{{- end -}}

{{- define "kvstrata.validateDrain" -}}
{{- $grace := include "kvstrata.seconds" .Values.config.server.drain_grace | int64 -}}
{{- if gt $grace 600 -}}
{{- fail (printf "config.server.drain_grace is %s; give 10m at most" .Values.config.server.drain_grace) -}}
{{- end -}}
{{- if lt (int64 .Values.drainMarginSeconds) 12 -}}
{{- fail (printf "drainMarginSeconds is %v, but a node that has drained takes up to 11 seconds to close its disk and end, and would be killed; give 12 at least" .Values.drainMarginSeconds) -}}
{{- end -}}
{{- if and (include "kvstrata.isCluster" .) (gt (int .Values.replicas) 1) (lt $grace 5) -}}
{{- fail (printf "config.server.drain_grace is %s, in which a node hands next to nothing to the others; give 5s at least, or cluster.enabled false" .Values.config.server.drain_grace) -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validateMemory" -}}
{{- $given := .Values.resources.limits.memory -}}
{{- if ne (toString .Values.resources.requests.memory) (toString $given) -}}
{{- fail (printf "resources: requests.memory is %v and limits.memory is %v; set both to the same amount, for the node fills its limit and the kubelet would evict it with all its blocks" .Values.resources.requests.memory $given) -}}
{{- end -}}
{{- $container := include "kvstrata.bytes" $given | int64 -}}
{{- $limit := $container -}}
{{- $asked := dig "memory" "limit" "auto" .Values.config -}}
{{- if ne $asked "auto" -}}
{{- $limit = include "kvstrata.bytes" $asked | int64 -}}
{{- if gt $limit $container -}}
{{- fail (printf "config.memory.limit is %s, but resources.limits.memory is %v, at which the kernel kills the server; remove config.memory.limit, or raise resources.requests.memory and resources.limits.memory" $asked $given) -}}
{{- end -}}
{{- end -}}
{{- $dram := 33554432 -}}
{{- $capacity := dig "dram" "capacity" "auto" .Values.config -}}
{{- if ne $capacity "auto" -}}
{{- $dram = include "kvstrata.bytes" $capacity | int64 -}}
{{- end -}}
{{- /* The least: found in steps, for the shares grow with the limit by less than a quarter. */ -}}
{{- $least := $dram -}}
{{- range until 24 -}}
{{- $beside := include "kvstrata.memoryBesideDram" (dict "root" $ "limit" $least) | int64 -}}
{{- $least = max 134217728 (add $dram $beside) -}}
{{- end -}}
{{- if lt $limit $least -}}
{{- $what := ternary "resources.limits.memory" "config.memory.limit" (eq $asked "auto") -}}
{{- fail (printf "%s is %v, but a dram of %s and what these tiers need beside it take %s; raise resources.requests.memory and resources.limits.memory to that%s" $what (ternary $given $asked (eq $asked "auto")) (include "kvstrata.mebibytes" $dram) (include "kvstrata.mebibytes" $least) (ternary "" ", or lower config.dram.capacity" (eq $capacity "auto"))) -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validatePorts" -}}
{{- $taken := dict -}}
{{- range list "grpc_listen" "http_listen" "bulk_listen" "resp_listen" -}}
{{- $listen := get $.Values.config.server . -}}
{{- $port := include "kvstrata.port" $listen -}}
{{- if hasKey $taken $port -}}
{{- fail (printf "config.server: %s and %s both use port %s; give them different ports" (get $taken $port) . $port) -}}
{{- end -}}
{{- if ne $listen "none" -}}
{{- $_ := set $taken $port . -}}
{{- end -}}
{{- end -}}
{{- with include "kvstrata.gossip" . -}}
{{- /* UDP, but Kubernetes mixes ports of one number up when it patches a pod. */ -}}
{{- if hasKey $taken . -}}
{{- fail (printf "config: server.%s and cluster.listen both use port %s; give them different ports" (get $taken .) .) -}}
{{- end -}}
{{- end -}}
{{- if and (not (include "kvstrata.isCluster" .)) (hasKey .Values.config.cluster "seeds") -}}
{{- fail "config.cluster.seeds is given, but the nodes are no cluster (cluster.enabled; agents are none unless it is true); remove it, or enable the cluster" -}}
{{- end -}}
{{- if ne .Values.config.server.resp_listen "none" -}}
{{- if not (or (include "kvstrata.tlsSecret" .) .Values.config.server.resp_plain) -}}
{{- fail "config.server.resp_listen is given, but there is no TLS; give tls.secret or tls.certManager, or set config.server.resp_plain to true if tokens and values may cross the network readable" -}}
{{- end -}}
{{- else if .Values.config.server.resp_plain -}}
{{- fail "config.server.resp_plain is true, but resp_listen is none; give an address, or remove it" -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validateTrust" -}}
{{- if .Values.tls.clientCertificates -}}
{{- if not (include "kvstrata.tlsSecret" .) -}}
{{- fail "tls.clientCertificates is true, but there is no TLS; name the Secret in tls.secret, whose CA they must be of, or enable tls.certManager" -}}
{{- end -}}
{{- if not .Values.tls.ca -}}
{{- fail "tls.clientCertificates is true, but tls.ca is empty; give the key in the Secret with the CA that they must be of" -}}
{{- end -}}
{{- else if .Values.helmTest.clientSecret -}}
{{- fail "helmTest.clientSecret is given, but tls.clientCertificates is false; remove it" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager is enabled, but issuerRef.name is empty; name an Issuer of this namespace, or a ClusterIssuer with issuerRef.kind" -}}
{{- end -}}
{{- if and .Values.auth.operatorToken.secret (not .Values.auth.enabled) -}}
{{- fail "auth.operatorToken.secret is given, but auth.enabled is false; remove it, or enable tokens" -}}
{{- end -}}
{{- $metrics := .Values.metrics -}}
{{- if and $metrics.serviceMonitor.enabled .Values.auth.enabled (not (include "kvstrata.operatorSecret" .)) -}}
{{- fail "metrics.serviceMonitor is enabled, but auth.existingSecret holds a file of tokens, which Prometheus cannot read; put an operator's token into a Secret on its own and name it in auth.operatorToken.secret" -}}
{{- end -}}
{{- if and $metrics.prometheusRule.enabled (not $metrics.serviceMonitor.enabled) -}}
{{- fail "metrics.prometheusRule is enabled, but metrics.serviceMonitor is not, by whose job the alerts know this release; enable both" -}}
{{- end -}}
{{- if and .Values.object.credentialsSecret (eq (include "kvstrata.objectUrl" .) "none") -}}
{{- fail "object.credentialsSecret is given, but config.object.url is not; give the URL of the bucket, or remove it" -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validateDisk" -}}
{{- $nvme := .Values.nvme -}}
{{- $url := include "kvstrata.objectUrl" . -}}
{{- if not $nvme.enabled -}}
{{- if dig "nvme" dict .Values.config -}}
{{- fail "config.nvme has keys, but nvme.enabled is false; enable the tier, or remove them" -}}
{{- end -}}
{{- if ne $url "none" -}}
{{- fail "config.object.url is given, but nvme.enabled is false; enable it, for what goes to the bucket is cut from the segments on nvme" -}}
{{- end -}}
{{- end -}}
{{- if and (hasPrefix "file:" $url) (not (hasPrefix (printf "file://%s/" $nvme.path) $url)) -}}
{{- fail (printf "config.object.url is %s, but a pod can write below nvme.path only; give file://%s/NAME, or a bucket" $url $nvme.path) -}}
{{- end -}}
{{- if and $nvme.storageClassName (not (has $nvme.volume (list "claim" "ephemeral"))) -}}
{{- fail (printf "nvme.storageClassName is %q, but nvme.volume is %s, which has no class; empty it, or make volume claim or ephemeral" $nvme.storageClassName $nvme.volume) -}}
{{- end -}}
{{- range $volume, $key := dict "existing" "existingClaim" "hostPath" "hostPath" -}}
{{- $value := get $nvme $key -}}
{{- if and $value (ne $nvme.volume $volume) -}}
{{- fail (printf "nvme.%s is %q, but nvme.volume is %s; empty it, or make volume %s" $key $value $nvme.volume $volume) -}}
{{- end -}}
{{- if and (not $value) (eq $nvme.volume $volume) -}}
{{- fail (printf "nvme.volume is %s, but nvme.%s is empty; say which one" $volume $key) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $nvme.volume "existing") (ne (int .Values.replicas) 1) -}}
{{- fail (printf "nvme.volume is existing, but replicas is %d; one claim is for one node: make replicas 1, or volume claim" (int .Values.replicas)) -}}
{{- end -}}
{{- if and $nvme.enabled (has $nvme.volume (list "claim" "ephemeral" "emptyDir")) -}}
{{- include "kvstrata.validateSize" . -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validateSize" -}}
{{- $size := include "kvstrata.bytes" .Values.nvme.size | int64 -}}
{{- $capacity := dig "nvme" "capacity" "auto" .Values.config -}}
{{- if ne $capacity "auto" -}}
{{- /* An emptyDir that is full is an evicted pod, and other disks are slow when they are full. */ -}}
{{- $most := div (mul $size 19) 20 -}}
{{- if gt (include "kvstrata.bytes" $capacity | int64) $most -}}
{{- fail (printf "config.nvme.capacity is %s, but of nvme.size, %s, it may take 95 %% at most; remove config.nvme.capacity, which then follows the size, or raise nvme.size" $capacity .Values.nvme.size) -}}
{{- end -}}
{{- end -}}
{{- if lt $size 33554432 -}}
{{- fail (printf "nvme.size is %s; give 32Mi at least, or disable the tier by nvme.enabled" .Values.nvme.size) -}}
{{- end -}}
{{- $scratch := get .Values.resources.limits "ephemeral-storage" -}}
{{- if and $scratch (eq .Values.nvme.volume "emptyDir") (lt (include "kvstrata.bytes" $scratch | int64) $size) -}}
{{- fail (printf "resources.limits.ephemeral-storage is %v, but the emptyDir of nvme.size %s counts, too, and the kubelet evicts who exceeds it; raise it, or lower nvme.size" $scratch .Values.nvme.size) -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validateMode" -}}
{{- $server := .Values.config.server -}}
{{- if include "kvstrata.isAgent" . -}}
{{- if hasKey $server "bulk_unix" -}}
{{- fail "config.server.bulk_unix is set by the chart for agents; set agent.socketDirectory" -}}
{{- end -}}
{{- if and .Values.nvme.enabled (has .Values.nvme.volume (list "claim" "existing")) -}}
{{- fail (printf "nvme.volume is %s, but agents (mode agent) have no claims of their own; make it hostPath, emptyDir or ephemeral, or nvme.enabled false" .Values.nvme.volume) -}}
{{- end -}}
{{- if ne (include "kvstrata.objectUrl" .) "none" -}}
{{- fail "config.object.url is given, but agents (mode agent) have no ordinals, by which nodes keep their packs in the bucket apart; use mode statefulset" -}}
{{- end -}}
{{- if dig "node" "advertise" "" .Values.config -}}
{{- fail "config.node.advertise is given, but agents (mode agent) have each an address of its own; remove it" -}}
{{- end -}}
{{- if semverCompare "<1.23-0" .Capabilities.KubeVersion.Version -}}
{{- fail (printf "mode agent needs Kubernetes 1.23 or newer, for Services that stay on one host, and this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- else -}}
{{- range list "bulk_unix" "shared_memory" -}}
{{- if hasKey $server . -}}
{{- fail (printf "config.server.%s is for clients on the same host; set mode agent, or remove it" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.validateEnv" -}}
{{- range .Values.extraEnv -}}
{{- if eq .name "KV_NVME__PATH" -}}
{{- fail "extraEnv: KV_NVME__PATH is set by the chart from nvme.path; remove it" -}}
{{- end -}}
{{- if regexMatch "^KV_(AUTH|TLS)__" .name -}}
{{- fail (printf "extraEnv: %s is set by the chart from auth and tls; remove it" .name) -}}
{{- end -}}
{{- if regexMatch "^KV_SERVER__" .name -}}
{{- fail (printf "extraEnv: %s belongs into config.server, from which the chart takes ports and the grace period; move it there" .name) -}}
{{- end -}}
{{- if regexMatch "^KV_CLUSTER__" .name -}}
{{- fail (printf "extraEnv: %s belongs into config.cluster, from which the chart takes the port; move it there" .name) -}}
{{- end -}}
{{- if has .name (list "KV_NODE__NAME" "KV_NODE__HOST" "KV_NODE__ADVERTISE" "KVSTRATA_ADMIN" "POD_IP") -}}
{{- fail (printf "extraEnv: %s is set by the chart from the pod; remove it" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
