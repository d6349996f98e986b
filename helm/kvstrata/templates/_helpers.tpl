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

{{- /* The Secret with an operator's token alone; empty if there is none. */ -}}
{{- define "kvstrata.operatorSecret" -}}
{{- if and .Values.auth.enabled (not .Values.auth.operatorToken.secret) (not .Values.auth.existingSecret) -}}
{{ include "kvstrata.tokensSecretName" . }}
{{- else if .Values.auth.enabled -}}
{{ .Values.auth.operatorToken.secret }}
{{- end -}}
{{- end -}}

{{- /* The Secret with the certificate; empty without TLS. */ -}}
{{- define "kvstrata.tlsSecret" -}}
{{- if .Values.tls.secret -}}
{{ .Values.tls.secret }}
{{- else if .Values.tls.certManager.enabled -}}
{{ include "kvstrata.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{- define "kvstrata.serviceAccountName" -}}
{{ .Values.serviceAccount.name | default (ternary (include "kvstrata.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{- /* Selectors cannot be changed later: no version, nothing that a user sets. */ -}}
{{- define "kvstrata.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvstrata.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvstrata
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvstrata.labels" -}}
{{ include "kvstrata.selectorLabels" . }}
{{ include "kvstrata.commonLabels" . }}
{{- end -}}

{{- /* The pod of `helm test` must not be selected by the Services. */ -}}
{{- define "kvstrata.testLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvstrata.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "kvstrata.port" -}}
{{- splitList ":" . | last -}}
{{- end -}}

{{- /* The ports by name, as YAML; resp only where there is such a listener. */ -}}
{{- define "kvstrata.ports" -}}
{{- range list "grpc" "http" "bulk" "resp" }}
{{- $listen := get $.Values.config.server (printf "%s_listen" .) }}
{{- if ne $listen "none" }}
{{ . }}: {{ include "kvstrata.port" $listen }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Whether the nodes are a cluster. */ -}}
{{- define "kvstrata.isCluster" -}}
{{- $enabled := toString .Values.cluster.enabled -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (ne .Values.mode "agent")) }}true{{ end -}}
{{- end -}}

{{- /* The port of gossip; empty without a cluster. */ -}}
{{- define "kvstrata.gossip" -}}
{{- if include "kvstrata.isCluster" . -}}
{{ include "kvstrata.port" .Values.config.cluster.listen }}
{{- end -}}
{{- end -}}

{{- define "kvstrata.isAgent" -}}
{{- if eq .Values.mode "agent" }}true{{ end -}}
{{- end -}}

{{- /* `kubectl` names the workload so. */ -}}
{{- define "kvstrata.workload" -}}
{{ ternary "daemonset" "statefulset" (eq .Values.mode "agent") }}/{{ include "kvstrata.fullname" . }}
{{- end -}}

{{- /* What clients write before the address. */ -}}
{{- define "kvstrata.scheme" -}}
{{- if include "kvstrata.tlsSecret" . }}https://{{ end -}}
{{- end -}}

{{- /* A page that probes ask for. */ -}}
{{- define "kvstrata.probe" -}}
{ path: {{ .page }}, port: http{{ if include "kvstrata.tlsSecret" .root }}, scheme: HTTPS{{ end }} }
{{- end -}}

{{- /* The bytes of a quantity of Kubernetes (4Gi) or of a size of the server (1.5 GiB). */ -}}
{{- define "kvstrata.bytes" -}}
{{- $text := toString . | replace " " "" | trimSuffix "B" -}}
{{- $units := dict "" 1 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[KMGT]?i?$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) | int64 -}}
{{- end -}}

{{- /* Mebibytes, for people; a rest counts as one more. */ -}}
{{- define "kvstrata.mebibytes" -}}
{{- div (add (int64 .) 1048575) 1048576 -}}Mi
{{- end -}}

{{- /* A time like 1m30s in seconds; Go's duration reader is reached through date arithmetic. */ -}}
{{- define "kvstrata.seconds" -}}
{{- $start := toDate "2006-01-02" "2000-01-01" -}}
{{- sub (unixEpoch (mustDateModify . $start)) (unixEpoch $start) -}}
{{- end -}}

{{- /* Where the hook, and people with a shell in the container, have the node leave. */ -}}
{{- define "kvstrata.adminDirectory" -}}
/run/kvstrata-admin
{{- end -}}

{{- /* The hook drains within drain_grace; after it, SIGTERM finds nothing left to do but to close and end. */ -}}
{{- define "kvstrata.terminationGrace" -}}
{{- add (include "kvstrata.seconds" .Values.config.server.drain_grace) .Values.drainMarginSeconds -}}
{{- end -}}
