{{- define "tidegauge.fullname" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" .Release.Name) -}}
{{- fail (printf "the release is named %s: the name of a Service begins with a letter and has not a dot, so name the release so" .Release.Name) -}}
{{- end -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tidegauge.instance" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tidegauge.selector" -}}
{{ include "tidegauge.instance" . }}
app.kubernetes.io/component: service
{{- end -}}

{{- define "tidegauge.labels" -}}
{{ include "tidegauge.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tidegauge.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tidegauge.hosts" -}}
{{- $name := include "tidegauge.fullname" . -}}
{{- $namespaced := printf "%s.%s" $name .Release.Namespace -}}
{{- $service := printf "%s.svc" $namespaced -}}
{{- $own := list $name $namespaced $service (printf "%s.%s" $service .Values.clusterDomain) -}}
{{- $given := ternary .Values.ingress.hosts list .Values.ingress.enabled -}}
{{- concat $own $given .Values.allowedHosts | uniq | join "," -}}
{{- end -}}

{{- define "tidegauge.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tidegauge.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* The secret's entries as files, of which only those in `entries` are mounted. */ -}}
{{- define "tidegauge.volumes" -}}
- name: secrets
  # 0400. By `fsGroup` the group of the service may read the files too.
  secret:
    secretName: {{ .root.Values.secret.name }}
    defaultMode: 256
    items:
      {{- range .entries }}
      - {key: {{ . | quote }}, path: {{ . | quote }}}
      {{- end }}
- name: tmp
  emptyDir: {}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tidegauge.mounts" -}}
- {name: secrets, mountPath: /etc/tidegauge, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tidegauge.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tidegauge.probe" -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (not (empty .root.Values.tls.secretName)) }}}
{{- end -}}

{{- /* The port of the endpoint of traces, which the URL need not have. */ -}}
{{- define "tidegauge.otlpPort" -}}
{{- $url := urlParse .Values.otlp.endpoint -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{- /* The rules of the policy's egress to these names of `networkPolicy.egress`. */ -}}
{{- define "tidegauge.egress" -}}
{{- range $name := .names }}
{{- $peer := index $.root.Values.networkPolicy.egress $name }}
{{- /* A rule without ports would open all of them. */}}
{{- if not ($peer).ports }}
{{- fail (printf "networkPolicy.egress.%s has not a port: name the ports, or set networkPolicy.enabled to false" $name) }}
{{- end }}
# {{ $name }}
- ports:
    {{- $ports := list }}
    {{- range $peer.ports }}
    {{- $ports = append $ports (int .) }}
    {{- end }}
    {{- if eq $name "otlp" }}
    {{- $ports = append $ports (include "tidegauge.otlpPort" $.root | int) }}
    {{- end }}
    {{- range uniq $ports }}
    - {port: {{ . }}}
    {{- if eq $name "dns" }}
    - {port: {{ . }}, protocol: UDP}
    {{- end }}
    {{- end }}
  {{- with $peer.to }}
  to: {{ toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
