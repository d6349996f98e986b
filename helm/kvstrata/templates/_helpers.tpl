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
{{- range $section, $keys := .Values.config }}
{{- if $keys }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end }}
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
{{- range .Values.extraEnv -}}
{{- if has .name (list "KV_NODE__NAME" "KV_NODE__ADVERTISE") -}}
{{- fail (printf "extraEnv: %s is set by the chart from the pod's name; remove it" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
