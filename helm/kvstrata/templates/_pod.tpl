{{- /* The template of the pods, of both modes. */ -}}
{{- define "kvstrata.pod" -}}
metadata:
  labels:
    {{- include "kvstrata.selectorLabels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "kvstrata.config" . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "kvstrata.serviceAccountName" . }}
  automountServiceAccountToken: false
  # Service links would put variables named after the namespace's Services beside the KV_ ones,
  # and a Service called "kv" would be read as configuration.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "kvstrata.terminationGrace" . }}
  securityContext:
    {{- include "kvstrata.user" . | nindent 4 }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: kvstrata
      image: {{ include "kvstrata.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: ["serve", "--config", "/etc/kvstrata/config.toml"]
      env:
        {{- include "kvstrata.env" . | trim | nindent 8 }}
      {{- with .Values.object.credentialsSecret }}
      envFrom:
        - secretRef:
            name: {{ . }}
      {{- end }}
      ports:
        {{- $ports := include "kvstrata.ports" . | fromYaml }}
        {{- range $name := list "grpc" "http" "bulk" "resp" }}
        {{- with get $ports $name }}
        - name: {{ $name }}
          containerPort: {{ . }}
          protocol: TCP
        {{- end }}
        {{- end }}
        {{- with include "kvstrata.gossip" . }}
        - name: gossip
          containerPort: {{ . }}
          protocol: UDP
        {{- end }}
      # The node leaves before it is told to end: routers and members first, then what is hottest goes to others,
      # while clients finish.
      lifecycle:
        preStop:
          exec:
            command: ["/usr/bin/kvstrata", "drain", "--wait"]
      # The pages answer once memory is mapped: backing it, and finding what is on nvme, go on after that.
      startupProbe:
        httpGet: {{ include "kvstrata.probe" (dict "root" . "page" "/livez") }}
        periodSeconds: 2
        failureThreshold: 150
      livenessProbe:
        httpGet: {{ include "kvstrata.probe" (dict "root" . "page" "/livez") }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {{ include "kvstrata.probe" (dict "root" . "page" "/readyz") }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        {{- include "kvstrata.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: etc
          mountPath: /etc/kvstrata
          readOnly: true
        {{- if .Values.nvme.enabled }}
        - name: nvme
          mountPath: {{ .Values.nvme.path }}
        {{- end }}
        - name: admin
          mountPath: {{ include "kvstrata.adminDirectory" . }}
        {{- if include "kvstrata.isAgent" . }}
        - name: socket
          mountPath: {{ .Values.agent.socketDirectory }}
        {{- end }}
  volumes:
    {{- include "kvstrata.volumes" . | trim | nindent 4 }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* Who the pods run as: the user of the image, or the owner of an agent's socket. */ -}}
{{- define "kvstrata.user" -}}
{{- $user := ternary (int .Values.agent.runAsUser) 65532 (eq .Values.mode "agent") -}}
runAsNonRoot: {{ ne $user 0 }}
runAsUser: {{ $user }}
runAsGroup: {{ $user }}
fsGroup: {{ $user }}
{{- end -}}

{{- define "kvstrata.containerSecurity" -}}
{{- $user := ternary (int .Values.agent.runAsUser) 65532 (eq .Values.mode "agent") -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: {{ ne $user 0 }}
capabilities:
  drop: ["ALL"]
{{- end -}}

{{- define "kvstrata.env" -}}
{{- $grpc := include "kvstrata.port" .Values.config.server.grpc_listen }}
{{- $gossip := include "kvstrata.gossip" . }}
- name: KV_NODE__NAME
  valueFrom:
    fieldRef:
      fieldPath: {{ ternary "spec.nodeName" "metadata.name" (eq .Values.mode "agent") }}
# Where loading is near or far: engines say the same of themselves.
- name: KV_NODE__HOST
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if or $gossip (include "kvstrata.isAgent" .) }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- if include "kvstrata.isAgent" . }}
- name: KV_NODE__ADVERTISE
  value: {{ printf "$(POD_IP):%s" $grpc }}
{{- else if not (dig "node" "advertise" "" .Values.config) }}
- name: KV_NODE__ADVERTISE
  value: {{ printf "$(KV_NODE__NAME).%s.%s.svc:%s" (include "kvstrata.headless" .) .Release.Namespace $grpc }}
{{- end }}
{{- if $gossip }}
- name: KV_CLUSTER__ADVERTISE
  value: {{ printf "$(POD_IP):%s" $gossip }}
{{- if not (hasKey .Values.config.cluster "seeds") }}
- name: KV_CLUSTER__SEEDS
  value: {{ printf "%s.%s.svc:%s" (include "kvstrata.headless" .) .Release.Namespace $gossip }}
{{- end }}
{{- end }}
- name: KVSTRATA_ADMIN
  value: unix:{{ include "kvstrata.adminDirectory" . }}/admin.sock
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvstrata.volumes" -}}
{{- $tls := include "kvstrata.tlsSecret" . }}
- name: etc
  projected:
    defaultMode: 0440
    sources:
      - configMap:
          name: {{ include "kvstrata.fullname" . }}
          items:
            - { key: config.toml, path: config.toml }
            {{- if .Values.auth.tenants }}
            - { key: tenants.toml, path: tenants.toml }
            {{- end }}
      - secret:
          name: {{ include "kvstrata.secretName" . }}
          items:
            - { key: {{ .Values.identity.key | quote }}, path: secret/identity }
      {{- if .Values.auth.enabled }}
      - secret:
          name: {{ include "kvstrata.tokensSecretName" . }}
          items:
            - { key: {{ .Values.auth.key | quote }}, path: secret/tokens }
      {{- end }}
      {{- if $tls }}
      - secret:
          name: {{ $tls }}
          items:
            - { key: tls.crt, path: tls/tls.crt }
            - { key: tls.key, path: tls/tls.key }
            {{- if and .Values.tls.ca (or .Values.tls.clientCertificates (include "kvstrata.isCluster" .)) }}
            - { key: {{ .Values.tls.ca | quote }}, path: tls/ca.crt }
            {{- end }}
      {{- end }}
- name: admin
  emptyDir:
    sizeLimit: 1Mi
{{- if and .Values.nvme.enabled (ne .Values.nvme.volume "claim") }}
- name: nvme
  {{- if eq .Values.nvme.volume "emptyDir" }}
  emptyDir:
    sizeLimit: {{ .Values.nvme.size }}
  {{- else if eq .Values.nvme.volume "existing" }}
  persistentVolumeClaim:
    claimName: {{ .Values.nvme.existingClaim }}
  {{- else if eq .Values.nvme.volume "hostPath" }}
  hostPath:
    path: {{ .Values.nvme.hostPath }}
    type: {{ include "kvstrata.hostPathType" . }}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels:
          {{- include "kvstrata.selectorLabels" . | nindent 10 }}
      spec:
        {{- include "kvstrata.claim" . | nindent 8 }}
  {{- end }}
{{- end }}
{{- if include "kvstrata.isAgent" . }}
- name: socket
  hostPath:
    path: {{ .Values.agent.socketDirectory }}
    type: {{ include "kvstrata.hostPathType" . }}
{{- end }}
{{- end -}}

{{- /* A directory that the kubelet makes belongs to root. */ -}}
{{- define "kvstrata.hostPathType" -}}
{{ ternary "DirectoryOrCreate" "Directory" (and (eq .Values.mode "agent") (eq (int .Values.agent.runAsUser) 0)) }}
{{- end -}}

{{- define "kvstrata.claim" -}}
accessModes: ["ReadWriteOnce"]
{{- with .Values.nvme.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.nvme.size }}
{{- end -}}

{{- /* How the pods of a StatefulSet keep away from one another. */ -}}
{{- define "kvstrata.spread" -}}
{{- $affinity := deepCopy .Values.affinity }}
{{- if and (ne .Values.spread.host "none") (not (hasKey $affinity "podAntiAffinity")) }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "kvstrata.selectorLabels" . | fromYaml)) }}
{{- if eq .Values.spread.host "required" }}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) }}
{{- else }}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) }}
{{- end }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if ne .Values.spread.zone "none" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq .Values.spread.zone "required") }}
    labelSelector:
      matchLabels:
        {{- include "kvstrata.selectorLabels" . | nindent 8 }}
{{- end }}
{{- end -}}
