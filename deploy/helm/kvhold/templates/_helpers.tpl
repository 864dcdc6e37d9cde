{{- define "kvhold.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvhold.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvhold.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvhold.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvhold.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvhold.labels" -}}
{{ include "kvhold.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: kv-cache
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvhold.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvhold.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvhold.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* One TOML value. YAML numbers arrive as floats: whole ones are written as integers, as the daemon expects them. */}}
{{- define "kvhold.toml" -}}
{{- if kindIs "string" . -}}{{ . | quote }}
{{- else if kindIs "bool" . -}}{{ . }}
{{- else if eq (float64 .) (floor .) -}}{{ int64 . }}
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity such as 512Mi, 4Gi, 1Ti. */}}
{{- define "kvhold.mebibytes" -}}
{{- $units := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- mul (regexFind "^[0-9]+" .) (get $units (regexFind "[MGT]i$" .)) -}}
{{- end -}}

{{- define "kvhold.memory" -}}
{{- printf "%dMi" (add (include "kvhold.mebibytes" .Values.hostMemory.size) (include "kvhold.mebibytes" .Values.resources.overheadMemory)) -}}
{{- end -}}

{{/* What every container of ours gets: Pod Security "restricted". */}}
{{- define "kvhold.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ .Values.runAs.user }}
runAsGroup: {{ .Values.runAs.group }}
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The kvhold container, the same in both modes but for its GPU access. */}}
{{- define "kvhold.container" -}}
name: kvhold
image: {{ include "kvhold.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [serve, --config, /etc/kvhold/kvhold.toml]
{{- if eq .Values.gpu.mode "runtimeClass" }}
env:
  - name: NVIDIA_VISIBLE_DEVICES
    value: all
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: compute,utility
{{- end }}
ports:
  - name: health
    containerPort: {{ .Values.ports.health }}
  - name: metrics
    containerPort: {{ .Values.ports.metrics }}
# Each probe asks about this daemon alone: a probe that waited for the engine would never let the engine start.
startupProbe:
  grpc:
    port: {{ .Values.ports.health }}
    service: readiness
  periodSeconds: 1
  timeoutSeconds: 1
  failureThreshold: {{ .Values.probes.startupFailureThreshold }}
readinessProbe:
  grpc:
    port: {{ .Values.ports.health }}
    service: readiness
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 3
# Restarting costs running engines their sessions, so this asks only whether the event loop turns, and asks patiently.
livenessProbe:
  grpc:
    port: {{ .Values.ports.health }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ .Values.probes.livenessFailureThreshold }}
resources:
  requests:
    cpu: {{ .Values.resources.cpu | quote }}
    memory: {{ include "kvhold.memory" . }}
  limits:
    memory: {{ include "kvhold.memory" . }}
  {{- if eq .Values.gpu.mode "dra" }}
  claims:
    - name: gpu
  {{- end }}
securityContext:
  {{- include "kvhold.containerSecurityContext" . | nindent 2 }}
volumeMounts:
  - name: config
    mountPath: /etc/kvhold
    readOnly: true
  - name: sockets
    mountPath: /run/kvhold
  - name: admin
    mountPath: /run/kvhold-admin
  - name: state
    mountPath: /var/lib/kvhold
  - name: shared-memory
    mountPath: /dev/shm
{{- end -}}

{{/* Pod-level settings that both modes share. */}}
{{- define "kvhold.podCommon" -}}
serviceAccountName: {{ include "kvhold.serviceAccountName" . }}
automountServiceAccountToken: false
# A Service called "kvhold" would inject KVHOLD_PORT and the like, which the daemon would take for misspelt settings.
enableServiceLinks: false
hostNetwork: false
hostPID: false
hostIPC: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq .Values.gpu.mode "runtimeClass" }}
runtimeClassName: {{ .Values.gpu.runtimeClassName }}
{{- end }}
{{- end -}}

{{- define "kvhold.podAnnotations" -}}
checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
{{- if eq .Values.gpu.mode "cdiAnnotation" }}
{{ .Values.gpu.cdiAnnotationPrefix }}kvhold: {{ .Values.gpu.cdiDevice | quote }}
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvhold.claimTemplateName" -}}
{{- include "kvhold.fullname" . }}-gpu
{{- end -}}
