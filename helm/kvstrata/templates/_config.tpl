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
{{- if not (include "kvstrata.isCluster" .) }}
{{- $_ := set $config "cluster" (pick $config.cluster "name") }}
{{- end }}
{{- $_ := set $config.server "admin_listen" (printf "unix:%s/admin.sock" (include "kvstrata.adminDirectory" .)) }}
{{- if include "kvstrata.isAgent" . }}
{{- $_ := set $config.server "bulk_unix" (include "kvstrata.socket" .) }}
{{- if not (hasKey $config.server "shared_memory") }}
{{- $_ := set $config.server "shared_memory" true }}
{{- end }}
{{- end }}
{{- if .Values.auth.enabled }}
{{- $_ := set $config "auth" (dict "tokens_file" "/etc/kvstrata/secret/tokens") }}
{{- else }}
{{- $_ := set $config "auth" (dict "allow_anonymous" true) }}
{{- end }}
{{- if .Values.auth.tenants }}
{{- $_ := set $config.auth "tenants_file" "/etc/kvstrata/tenants.toml" }}
{{- end }}
{{- if include "kvstrata.tlsSecret" . }}
{{- $tls := dict "cert_file" "/etc/kvstrata/tls/tls.crt" "key_file" "/etc/kvstrata/tls/tls.key" }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $tls "client_ca_file" "/etc/kvstrata/tls/ca.crt" }}
{{- end }}
{{- if and .Values.tls.ca (include "kvstrata.isCluster" .) }}
{{- $_ := set $tls "peer_ca_file" "/etc/kvstrata/tls/ca.crt" }}
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
{{- div (mul (include "kvstrata.bytes" .Values.nvme.size | int64) 9) 10485760 -}}MiB
{{- end -}}

{{- /* The Unix socket of an agent. */ -}}
{{- define "kvstrata.socket" -}}
{{ .Values.agent.socketDirectory }}/bulk.sock
{{- end -}}

{{- /*
What a memory limit must have beside dram, in bytes, divided as src/budget.rs divides it: index,
staging, reserve, schemes, filters of a cluster, and what the colder tiers keep in memory.
*/ -}}
{{- define "kvstrata.memoryBesideDram" -}}
{{- $limit := int64 .limit -}}
{{- $mib := 1048576 -}}
{{- $sum := add (max (div $limit 32) (mul 8 $mib)) (max (mul 16 $mib) (min (div $limit 16) (mul 1024 $mib))) -}}
{{- $sum = add $sum (mul 40 $mib) (div $limit 50) (div $limit 128) -}}
{{- if include "kvstrata.isCluster" .root -}}
{{- $sum = add $sum (max (div $limit 64) (mul 8 $mib)) -}}
{{- end -}}
{{- if .root.Values.nvme.enabled -}}
{{- $sum = add $sum (max (mul 16 $mib) (min (div $limit 16) (mul 256 $mib))) -}}
{{- $sum = add $sum (max (mul 8 $mib) (min (div $limit 32) (mul 32 $mib))) -}}
{{- end -}}
{{- if ne (include "kvstrata.objectUrl" .root) "none" -}}
{{- $pack := dig "object" "pack_bytes" "32MiB" .root.Values.config -}}
{{- $sum = add $sum (mul 48 $mib) (include "kvstrata.bytes" $pack | int64) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{- define "kvstrata.objectUrl" -}}
{{ dig "object" "url" "none" .Values.config }}
{{- end -}}

{{- /*
What tenants may have and do. Numbers are whole ones, see above.
*/ -}}
{{- define "kvstrata.tenants" -}}
{{- range $tenant, $bounds := .Values.auth.tenants }}
[{{ toJson $tenant }}]
{{- range $key, $value := $bounds }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end -}}
