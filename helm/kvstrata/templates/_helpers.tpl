{{- define "kvstrata.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.headless" -}}
{{ include "kvstrata.fullname" . }}-headless
{{- end -}}

{{- define "kvstrata.secretName" -}}
{{ .Values.identity.existingSecret | default (printf "%s-identity" (include "kvstrata.fullname" .)) }}
{{- end -}}

{{- define "kvstrata.tokensSecretName" -}}
{{ .Values.auth.existingSecret | default (printf "%s-tokens" (include "kvstrata.fullname" .)) }}
{{- end -}}

{{- /* Selectors cannot be changed later: no version, nothing that a user sets. */ -}}
{{- define "kvstrata.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvstrata.labels" -}}
{{ include "kvstrata.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvstrata
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvstrata.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /*
The configuration file. Not toToml: values arrive as floating-point numbers, and 3 would become 3.0.
JSON writes whole numbers whole, and a JSON scalar or list of scalars is TOML as it stands.
*/ -}}
{{- define "kvstrata.config" -}}
{{- $config := deepCopy .Values.config }}
{{- if .Values.nvme.enabled }}
{{- $nvme := dict "path" .Values.nvme.path }}
{{- if eq .Values.nvme.volume "emptyDir" }}
{{- $_ := set $nvme "capacity" (include "kvstrata.emptyDirCapacity" .) }}
{{- end }}
{{- $_ := set $config "nvme" (merge (dig "nvme" dict $config) $nvme) }}
{{- end }}
{{- if .Values.auth.enabled }}
{{- $_ := set $config "auth" (dict "tokens_file" "/etc/kvstrata/secret/tokens") }}
{{- else }}
{{- $_ := set $config "auth" (dict "allow_anonymous" true) }}
{{- end }}
{{- if .Values.tls.secret }}
{{- $tls := dict "cert_file" "/etc/kvstrata/tls/tls.crt" "key_file" "/etc/kvstrata/tls/tls.key" }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $tls "client_ca_file" "/etc/kvstrata/tls/ca.crt" }}
{{- end }}
{{- $_ := set $config "tls" $tls }}
{{- end }}
{{- range $section, $keys := $config }}
{{- if $keys }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end }}
{{- end -}}

{{- /*
The file system under an emptyDir is the whole disk of the node, so the server cannot see the limit,
and the kubelet evicts the pod that exceeds it: 90 % of the limit, as the server takes of a volume.
*/ -}}
{{- define "kvstrata.emptyDirCapacity" -}}
{{- $mebibytes := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- $unit := regexFind "[MGT]i$" .Values.nvme.size -}}
{{- $count := trimSuffix $unit .Values.nvme.size | int64 -}}
{{- div (mul $count (get $mebibytes $unit) 9) 10 -}}MiB
{{- end -}}

{{- define "kvstrata.port" -}}
{{- splitList ":" . | last -}}
{{- end -}}

{{- /* Drain grace plus margin in seconds; Go's duration reader is reached through date arithmetic. */ -}}
{{- define "kvstrata.terminationGrace" -}}
{{- $start := toDate "2006-01-02" "2000-01-01" -}}
{{- $end := mustDateModify .Values.config.server.drain_grace $start -}}
{{- add (sub (unixEpoch $end) (unixEpoch $start)) .Values.drainMarginSeconds -}}
{{- end -}}

{{- /* What the schema cannot say. */ -}}
{{- define "kvstrata.validate" -}}
{{- if ne (toString .Values.resources.requests.memory) (toString .Values.resources.limits.memory) -}}
{{- fail (printf "resources: requests.memory is %v and limits.memory is %v; set both to the same amount, for the node fills its limit and the kubelet would evict it with all its blocks" .Values.resources.requests.memory .Values.resources.limits.memory) -}}
{{- end -}}
{{- if eq (include "kvstrata.port" .Values.config.server.grpc_listen) (include "kvstrata.port" .Values.config.server.http_listen) -}}
{{- fail (printf "config.server: grpc_listen and http_listen both use port %s; give them different ports" (include "kvstrata.port" .Values.config.server.grpc_listen)) -}}
{{- end -}}
{{- range list "grpc_listen" "http_listen" -}}
{{- if eq (include "kvstrata.port" (get $.Values.config.server .)) (include "kvstrata.port" $.Values.config.server.bulk_listen) -}}
{{- fail (printf "config.server: %s and bulk_listen both use port %s; give them different ports" . (include "kvstrata.port" $.Values.config.server.bulk_listen)) -}}
{{- end -}}
{{- end -}}
{{- $resp := .Values.config.server.resp_listen -}}
{{- if ne $resp "none" -}}
{{- range list "grpc_listen" "http_listen" "bulk_listen" -}}
{{- if eq (include "kvstrata.port" (get $.Values.config.server .)) (include "kvstrata.port" $resp) -}}
{{- fail (printf "config.server: %s and resp_listen both use port %s; give them different ports" . (include "kvstrata.port" $resp)) -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.tls.secret .Values.config.server.resp_plain) -}}
{{- fail "config.server.resp_listen is given, but tls.secret is empty; name the Secret, or set config.server.resp_plain to true if tokens and values may cross the network readable" -}}
{{- end -}}
{{- else if .Values.config.server.resp_plain -}}
{{- fail "config.server.resp_plain is true, but resp_listen is none; give an address, or remove it" -}}
{{- end -}}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) -}}
{{- fail "tls.clientCertificates is true, but tls.secret is empty; name the Secret, whose ca.crt they must be of" -}}
{{- end -}}
{{- if and (ne .Values.nvme.volume "claim") .Values.nvme.storageClassName -}}
{{- fail (printf "nvme.storageClassName is %q, but nvme.volume is %s, which has no class; empty it, or make volume claim" .Values.nvme.storageClassName .Values.nvme.volume) -}}
{{- end -}}
{{- if and (not .Values.nvme.enabled) (dig "nvme" dict .Values.config) -}}
{{- fail "config.nvme has keys, but nvme.enabled is false; enable the tier, or remove them" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if eq .name "KV_NVME__PATH" -}}
{{- fail "extraEnv: KV_NVME__PATH is set by the chart from nvme.path; remove it" -}}
{{- end -}}
{{- if regexMatch "^KV_(AUTH|TLS)__" .name -}}
{{- fail (printf "extraEnv: %s is set by the chart from auth and tls; remove it" .name) -}}
{{- end -}}
{{- if has .name (list "KV_NODE__NAME" "KV_NODE__ADVERTISE") -}}
{{- fail (printf "extraEnv: %s is set by the chart from the pod's name; remove it" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A page that probes ask for. */ -}}
{{- define "kvstrata.probe" -}}
{ path: {{ .page }}, port: http{{ if .root.Values.tls.secret }}, scheme: HTTPS{{ end }} }
{{- end -}}
