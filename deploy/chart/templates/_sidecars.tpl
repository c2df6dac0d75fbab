{{- /* A sidecar of the controller: root, name (of its values), container, args, env. With
local pools it is in a node's pod: beside the agent, in the host's network, and with a token
of its own, as the agent must have none. */ -}}
{{- define "uring-csi.sidecar" -}}
{{- $values := .root.Values }}
{{- $local := include "uring-csi.local" .root }}
{{- $sidecar := index $values.sidecars .name }}
- name: {{ .container }}
  image: {{ include "uring-csi.sidecarImage" (dict "root" .root "image" .container "tag" $sidecar.tag) | nindent 2 | trim }}
  args:
    - --csi-address={{ ternary (printf "%s/controller.sock" $values.node.runDir) "/csi/controller.sock" (ne $local "") }}
    - --timeout={{ $values.sidecars.timeout }}
    {{- range .args }}
    - {{ . }}
    {{- end }}
    {{- if not $local }}
    - --kube-api-qps={{ $values.sidecars.kubeApiQps }}
    - --kube-api-burst={{ $values.sidecars.kubeApiBurst }}
    {{- end }}
    - --http-endpoint={{ if $local }}{{ $values.metrics.nodeAddress }}{{ end }}:{{ index $values.ports .name }}
    {{- range $sidecar.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  {{- if $local }}
  env:
    {{- include "uring-csi.hostIp" .root | nindent 4 }}
    {{- with .env }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    - name: {{ .name }}
      containerPort: {{ index $values.ports .name }}
  securityContext:
    {{- include "uring-csi.filesOnly" .root | nindent 4 }}
  resources:
    {{- toYaml $values.sidecars.resources | nindent 4 }}
  volumeMounts:
    {{- if $local }}
    {{- include "uring-csi.runMount" .root | nindent 4 }}
    - name: api
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
    {{- else }}
    - name: socket
      mountPath: /csi
    {{- end }}
{{- end }}

{{- define "uring-csi.sidecarImage" -}}
{{ .root.Values.sidecars.registry }}/{{ .image }}:{{ .tag }}
{{- with .root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- /* Without propagation a container would keep the mounts that exist at its start, and
their devices busy. */ -}}
{{- define "uring-csi.runMount" -}}
- name: run
  mountPath: {{ .Values.node.runDir }}
  mountPropagation: HostToContainer
{{- end }}

{{- define "uring-csi.livenessProbe" -}}
- name: {{ .container }}
  image: {{ include "uring-csi.sidecarImage" (dict "root" .root "image" "livenessprobe" "tag" .root.Values.sidecars.livenessProbe.tag) | nindent 2 | trim }}
  args:
    - --csi-address={{ .socket }}
    - --http-endpoint={{ .address }}
    {{- range .root.Values.sidecars.livenessProbe.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  securityContext:
    {{- include "uring-csi.filesOnly" .root | nindent 4 }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  volumeMounts:
    {{- .mount | nindent 4 }}
{{- end }}

{{- define "uring-csi.provisioner" -}}
{{- $env := "" }}
{{- $args := list "--leader-election" "--extra-create-metadata" }}
{{- if not .Values.nfs.exports }}{{ $args = append $args "--default-fstype=ext4" }}{{ end }}
{{- if include "uring-csi.local" . }}
{{- $args = list "--node-deployment" "--strict-topology" "--immediate-topology=false" "--extra-create-metadata" "--default-fstype=ext4" "--enable-capacity" "--capacity-ownerref-level=1" }}
{{- $env = include "uring-csi.provisionerEnv" . }}
{{- end }}
{{- include "uring-csi.sidecar" (dict "root" . "name" "provisioner" "container" "csi-provisioner" "args" $args "env" $env) }}
{{- end }}

{{- define "uring-csi.provisionerEnv" -}}
{{ include "uring-csi.nodeName" . }}
- name: NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- end }}

{{- define "uring-csi.attacher" -}}
{{- include "uring-csi.sidecar" (dict "root" . "name" "attacher" "container" "csi-attacher" "args" (list "--leader-election" "--default-fstype=ext4" "--worker-threads=100")) }}
{{- end }}

{{- define "uring-csi.resizer" -}}
{{- include "uring-csi.sidecar" (dict "root" . "name" "resizer" "container" "csi-resizer" "args" (list "--leader-election" "--handle-volume-inuse-error=false")) }}
{{- end }}

{{- define "uring-csi.snapshotter" -}}
{{- $args := list "--leader-election" }}
{{- $env := "" }}
{{- if include "uring-csi.local" . }}
{{- $args = list "--node-deployment" }}
{{- $env = include "uring-csi.nodeName" . }}
{{- end }}
{{- include "uring-csi.sidecar" (dict "root" . "name" "snapshotter" "container" "csi-snapshotter" "args" $args "env" $env) }}
{{- end }}

{{- /* csi-addons' sidecar: root, socket, mounts. */ -}}
{{- define "uring-csi.csiAddons" -}}
{{- $values := .root.Values }}
- name: csi-addons
  image: {{ $values.csiAddons.image }}
  {{- with $values.images.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  args:
    - --csi-addons-address=unix://{{ .socket }}
    - --node-id=$(NODE_NAME)
    - --controller-port={{ $values.ports.csiAddons }}
    - --pod=$(POD_NAME)
    - --namespace=$(POD_NAMESPACE)
    - --pod-uid=$(POD_UID)
    {{- if ne $values.node.kubeletDir "/var/lib/kubelet" }}
    - --stagingpath={{ $values.node.kubeletDir }}/plugins/kubernetes.io/csi/
    {{- end }}
  env:
    {{- include "uring-csi.nodeName" .root | nindent 4 }}
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    - name: POD_NAMESPACE
      valueFrom:
        fieldRef:
          fieldPath: metadata.namespace
    - name: POD_UID
      valueFrom:
        fieldRef:
          fieldPath: metadata.uid
  ports:
    - name: csi-addons
      containerPort: {{ $values.ports.csiAddons }}
  securityContext:
    {{- include "uring-csi.filesOnly" .root | nindent 4 }}
  resources:
    {{- toYaml $values.sidecars.resources | nindent 4 }}
  volumeMounts:
    {{- .mounts | nindent 4 }}
{{- end }}

{{- /* The agent's or the controller's socket for it. */ -}}
{{- define "uring-csi.csiAddonsEnv" -}}
- name: URING_CSI_ADDONS_ENDPOINT
  value: unix://{{ . }}
{{- end }}
