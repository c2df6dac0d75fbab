{{- /* The container of the controller, in its own pod or, with local pools, in a node's. */ -}}
{{- define "uring-csi.controller" -}}
{{- $local := include "uring-csi.local" . }}
- name: controller
  image: {{ include "uring-csi.image" (dict "root" . "image" .Values.controller.image) | nindent 2 | trim }}
  args:
    {{- if $local }}
    - --endpoint=unix://{{ .Values.node.runDir }}/controller.sock
    - --node-id=$(NODE_NAME)
    {{- else }}
    - --endpoint=unix:///csi/controller.sock
    {{- end }}
    {{- include "uring-csi.poolArgs" . | nindent 4 }}
    {{- include "uring-csi.nfsArgs" . | nindent 4 }}
    {{- if .Values.ceph.enabled }}
    - --ceph-config=/etc/ceph-csi-config/config.json
    {{- include "uring-csi.kmsArgs" . | nindent 4 }}
    - --ceph-secret=/etc/ceph-user
    {{- with .Values.ceph.instanceId }}
    - --instance-id={{ . }}
    {{- end }}
    {{- with .Values.ceph.fenceAfter }}
    - --fence-after={{ . }}
    {{- end }}
    {{- end }}
    {{- if $local }}
    - --metrics-listen={{ .Values.metrics.nodeAddress }}:{{ .Values.ports.controllerMetrics }}
    {{- else }}
    - --metrics-listen={{ .Values.metrics.controllerAddress }}:{{ .Values.ports.metrics }}
    {{- end }}
    {{- include "uring-csi.logArgs" . | nindent 4 }}
    {{- include "uring-csi.flags" .Values.controller | nindent 4 }}
  {{- if $local }}
  env:
    {{- include "uring-csi.nodeName" . | nindent 4 }}
    {{- include "uring-csi.hostIp" . | nindent 4 }}
    {{- include "uring-csi.driverName" . | nindent 4 }}
    {{- include "uring-csi.sockets" . | nindent 4 }}
  {{- else }}
  env:
    - name: URING_CSI_CONTROLLER_ENDPOINT
      value: unix:///csi/controller.sock
    {{- include "uring-csi.driverName" . | nindent 4 }}
    {{- if .Values.csiAddons.enabled }}
    {{- include "uring-csi.csiAddonsEnv" "/csi/csi-addons.sock" | nindent 4 }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "uring-csi.filesOnly" . | nindent 4 }}
  ports:
    - name: {{ ternary "controller" "metrics" (ne $local "") }}
      containerPort: {{ ternary .Values.ports.controllerMetrics .Values.ports.metrics (ne $local "") }}
  readinessProbe:
    httpGet:
      path: /readyz
      port: {{ ternary "controller" "metrics" (ne $local "") }}
    periodSeconds: 10
  livenessProbe:
    httpGet:
      {{- if $local }}
      host: 127.0.0.1
      {{- end }}
      path: /healthz
      port: {{ ternary .Values.ports.controllerHealth .Values.ports.health (ne $local "") }}
    initialDelaySeconds: 10
    periodSeconds: 20
    timeoutSeconds: 5
    failureThreshold: 5
  resources:
    {{- toYaml .Values.controller.resources | nindent 4 }}
  volumeMounts:
    {{- if $local }}
    {{- include "uring-csi.runMount" . | nindent 4 }}
    {{- else }}
    - name: socket
      mountPath: /csi
    {{- end }}
    {{- include "uring-csi.poolMounts" . | nindent 4 }}
    {{- include "uring-csi.nfsMounts" . | nindent 4 }}
    {{- if .Values.ceph.enabled }}
    {{- include "uring-csi.cephMounts" . | nindent 4 }}
    - name: user
      mountPath: /etc/ceph-user
      readOnly: true
    {{- end }}
    {{- with .Values.controller.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
