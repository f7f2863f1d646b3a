{{/* Name of the chart, or its override. */}}
{{- define "queuebox.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Name of the objects: at most 63 characters, as some of them become labels. */}}
{{- define "queuebox.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := include "queuebox.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "queuebox.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{/* What selects the operator's pods. Not the chart's version, which may change, nor what others rewrite. */}}
{{- define "queuebox.selectorLabels" -}}
app.kubernetes.io/name: {{ include "queuebox.name" . }}
app.kubernetes.io/component: operator
queuebox.io/release: {{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "queuebox.labels" -}}
app.kubernetes.io/name: {{ include "queuebox.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* metadata.annotations of a CRD, or nothing. */}}
{{- define "queuebox.crdAnnotations" -}}
{{- $annotations := deepCopy .Values.crds.annotations }}
{{- if .Values.crds.keep }}
{{- $annotations = set $annotations "helm.sh/resource-policy" "keep" }}
{{- end }}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* An image's reference, of a dict with registry, repository, tag and digest. */}}
{{- define "queuebox.reference" -}}
{{- $name := .repository }}
{{- with .registry }}
{{- $name = printf "%s/%s" (trimSuffix "/" .) $name }}
{{- end }}
{{- if .digest }}
{{- printf "%s@%s" $name .digest }}
{{- else }}
{{- printf "%s:%s" $name .tag }}
{{- end }}
{{- end }}

{{- define "queuebox.image" -}}
{{- $image := .Values.image }}
{{- include "queuebox.reference" (dict
  "registry" (default $image.registry .Values.global.imageRegistry)
  "repository" $image.repository
  "tag" (default .Chart.AppVersion $image.tag)
  "digest" $image.digest) }}
{{- end }}

{{/* A tag or repository of its own makes the operator's digest meaningless for the workers. */}}
{{- define "queuebox.workerImage" -}}
{{- $image := .Values.image }}
{{- $worker := .Values.worker.image }}
{{- $own := or $worker.repository $worker.tag }}
{{- include "queuebox.reference" (dict
  "registry" (coalesce $worker.registry .Values.global.imageRegistry $image.registry)
  "repository" (default $image.repository $worker.repository)
  "tag" (coalesce $worker.tag $image.tag .Chart.AppVersion)
  "digest" (default (ternary "" $image.digest (not (empty $own))) $worker.digest)) }}
{{- end }}

{{/* imagePullSecrets of our own pods, or nothing. */}}
{{- define "queuebox.imagePullSecrets" -}}
{{- with concat .Values.global.imagePullSecrets .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "queuebox.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "queuebox.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "queuebox.leaseName" -}}
{{- default (include "queuebox.fullname" .) .Values.leaderElection.leaseName }}
{{- end }}

{{/* The operator as the subject of a binding. */}}
{{- define "queuebox.subjects" -}}
subjects:
  - kind: ServiceAccount
    name: {{ include "queuebox.serviceAccountName" . }}
    namespace: {{ include "queuebox.namespace" . }}
{{- end }}
