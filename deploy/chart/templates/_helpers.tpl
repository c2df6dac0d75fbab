{{- define "uring-csi.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{- define "uring-csi.labels" -}}
app.kubernetes.io/part-of: {{ .Values.name }}
{{- end }}

{{- /* "true" if each node's pod has a controller. */ -}}
{{- define "uring-csi.local" -}}
{{- if and .Values.pools (eq (first .Values.pools).scope "local") }}true{{ end }}
{{- end }}

{{- /* "true" if nodes attach image files, and so need the pools. */ -}}
{{- define "uring-csi.nodePools" -}}
{{- if and .Values.pools (not .Values.nbd.enabled) }}true{{ end }}
{{- end }}

{{- /* An image of this project: root, image. */ -}}
{{- define "uring-csi.image" -}}
{{- with .root.Values.images.registry }}{{ . }}/{{ end }}{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}
{{- else }}:{{ .image.tag | default .root.Values.images.tag | default .root.Chart.AppVersion }}{{ end }}
{{- with .root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "uring-csi.podBasics" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* A program that works on files and sockets only. */ -}}
{{- define "uring-csi.filesOnly" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- /* With SELinux, the type that may enter the host's directories. */ -}}
{{- define "uring-csi.selinux" -}}
seLinuxOptions:
  type: spc_t
{{- end }}

{{- /* The owner of pools, sockets and devices. */ -}}
{{- define "uring-csi.root" -}}
runAsUser: 0
runAsGroup: 0
{{- end }}

{{- /* The backends' kernel modules, with their parameters, separated by commas. */ -}}
{{- define "uring-csi.modules" -}}
{{- $modules := list }}
{{- if .Values.ceph.enabled }}
{{- $modules = concat $modules (list "rbd" "dm_crypt") }}
{{- end }}
{{- if .Values.nbd.enabled }}
{{- $modules = append $modules "nbd max_part=0" }}
{{- end }}
{{- if .Values.nfs.exports }}
{{- $modules = concat $modules (list "nfsv4" "nfsv3") }}
{{- end }}
{{- join "," $modules }}
{{- end }}

{{- /* Loads kernel modules if the node has them, and names the others in its log: root, image,
modules. */ -}}
{{- define "uring-csi.modprobe" -}}
- name: modprobe
  image: {{ include "uring-csi.image" (dict "root" .root "image" .image) | nindent 2 | trim }}
  command:
    - sh
    - -c
    - |
      for module; do
        name=${module%% *}
        test -d "/sys/module/$name" || modprobe $module ||
          echo "The kernel module $name was not loaded: volumes that need it fail on this node," \
            "unless its kernel has it built in. Load it on the node itself: modprobe $name," \
            "and a line in /etc/modules-load.d."
      done
    - modprobe
    {{- range splitList "," .modules }}
    - {{ . }}
    {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [SYS_MODULE]
    seccompProfile:
      type: RuntimeDefault
  resources:
    {{- toYaml .root.Values.sidecars.smallResources | nindent 4 }}
  volumeMounts:
    - name: modules
      mountPath: /lib/modules
      readOnly: true
{{- end }}

{{- /* Not empty if the agents read labels of their nodes. */ -}}
{{- define "uring-csi.nodeLabels" -}}
{{- join "," (concat .Values.node.domainLabels .Values.node.crushLocationLabels) }}
{{- end }}

{{- /* Leaves the Node object, as the API answers it, for the agent. The token goes through a
pipe, not into the arguments. */ -}}
{{- define "uring-csi.readLabels" -}}
- name: node-labels
  image: {{ .Values.node.labelsFromApi.image }}
  {{- with .Values.images.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  command:
    - sh
    - -ec
    - |
      case $KUBERNETES_SERVICE_HOST in
        *:*) host="[$KUBERNETES_SERVICE_HOST]" ;;
        *) host=$KUBERNETES_SERVICE_HOST ;;
      esac
      url=https://$host:$KUBERNETES_SERVICE_PORT/api/v1/nodes/$NODE_NAME
      cd /var/run/secrets/kubernetes.io/serviceaccount
      if ! printf 'Authorization: Bearer %s' "$(cat token)" |
        curl --fail --silent --show-error --connect-timeout 10 --max-time 30 \
          --retry 10 --retry-all-errors --retry-max-time 120 \
          --cacert ca.crt --header @- --output /etc/node-labels/labels "$url"
      then
        echo "The labels of the node $NODE_NAME were not read from $url. The agent does not" \
          "start without them; kubelet tries again. See that the API server is reached from" \
          "this node, and that the service account may get nodes."
        exit 1
      fi
  terminationMessagePolicy: FallbackToLogsOnError
  env:
    - name: NODE_NAME
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
    seccompProfile:
      type: RuntimeDefault
  resources:
    {{- toYaml .Values.sidecars.smallResources | nindent 4 }}
  volumeMounts:
    - name: node-labels
      mountPath: /etc/node-labels
    - name: node-labels-api
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
{{- end }}

{{- define "uring-csi.modulesVolume" -}}
- name: modules
  hostPath:
    path: /lib/modules
{{- end }}

{{- /* The directory of a pool that a container mounts. A hostPath is itself a mount, so a
pool that must be mounted is below what the container mounts. */ -}}
{{- define "uring-csi.poolMount" -}}
{{- if .mounted }}{{ dir .path }}{{ else }}{{ .path }}{{ end }}
{{- end }}

{{- define "uring-csi.poolArgs" -}}
{{- range .Values.pools }}
- --pool={{ .name }}={{ .path }},{{ .scope }}{{ if .mounted }},mounted{{ end }}
{{- end }}
{{- end }}

{{- define "uring-csi.poolMounts" -}}
{{- range .Values.pools }}
- name: pool-{{ .name }}
  mountPath: {{ include "uring-csi.poolMount" . }}
  mountPropagation: HostToContainer
{{- end }}
{{- end }}

{{- define "uring-csi.poolVolumes" -}}
{{- range .Values.pools }}
- name: pool-{{ .name }}
  hostPath:
    path: {{ include "uring-csi.poolMount" . }}
    type: Directory
{{- end }}
{{- end }}

{{- /* Not empty if volumes are attached to nodes, which takes the attacher: not those on a
node's own disk, nor directories of NFS servers. */ -}}
{{- define "uring-csi.attaches" -}}
{{- if not (or (include "uring-csi.local" .) .Values.nfs.exports) }}true{{ end }}
{{- end }}

{{- /* The volume, and the directory below /, at which the controller has an export. */ -}}
{{- define "uring-csi.share" -}}
share{{ if . }}-{{ . }}{{ end }}
{{- end }}

{{- define "uring-csi.nfsArgs" -}}
{{- range $index, $export := .Values.nfs.exports }}
- --nfs-export={{ $export.server }}:{{ $export.share }}=/{{ include "uring-csi.share" $index }},mounted
{{- end }}
{{- end }}

{{- define "uring-csi.nfsInline" -}}
{{- $shares := list }}
{{- range .Values.nfs.inline }}
{{- $port := ternary (printf ":%v" .port) "" (hasKey . "port") }}
{{- $shares = append $shares (printf "%s%s:%s" .server $port .share) }}
{{- end }}
{{- join "," $shares }}
{{- end }}

{{- define "uring-csi.nfsMounts" -}}
{{- range $index, $export := .Values.nfs.exports }}
- name: {{ include "uring-csi.share" $index }}
  mountPath: /{{ include "uring-csi.share" $index }}
{{- end }}
{{- end }}

{{- define "uring-csi.nfsVolumes" -}}
{{- range $index, $export := .Values.nfs.exports }}
- name: {{ include "uring-csi.share" $index }}
  nfs:
    server: {{ $export.address | default $export.server | quote }}
    path: {{ $export.share | quote }}
{{- end }}
{{- end }}

{{- /* Without a key the whole ConfigMap is the configuration, a section each. */ -}}
{{- define "uring-csi.kmsArgs" -}}
{{- with .Values.ceph }}
{{- if ne .kmsConfigMapKey "config.json" }}
- --kms-config=/etc/ceph-csi-encryption-kms-config{{ with .kmsConfigMapKey }}/{{ . }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "uring-csi.cephMounts" -}}
- name: clusters
  mountPath: /etc/ceph-csi-config
  readOnly: true
- name: kms
  mountPath: /etc/ceph-csi-encryption-kms-config
  readOnly: true
{{- if .Values.ceph.vault.enabled }}
- name: kms-token
  mountPath: /var/run/secrets/uring-csi/kms
  readOnly: true
{{- end }}
{{- range $index, $mounted := .Values.ceph.kmsSecrets }}
- name: kms-secret-{{ $index }}
  mountPath: /etc/uring-csi/kms-secrets/{{ with $mounted.namespace }}{{ . }}/{{ end }}{{ $mounted.name }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "uring-csi.cephVolumes" -}}
- name: clusters
  {{- if .Values.ceph.mappingConfigMap }}
  projected:
    sources:
      - configMap:
          name: {{ .Values.ceph.configMap }}
          items:
            - key: {{ .Values.ceph.configMapKey }}
              path: config.json
      - configMap:
          name: {{ .Values.ceph.mappingConfigMap }}
          optional: true
          items:
            - key: {{ .Values.ceph.mappingConfigMapKey }}
              path: cluster-mapping.json
  {{- else }}
  configMap:
    name: {{ .Values.ceph.configMap }}
    {{- if ne .Values.ceph.configMapKey "config.json" }}
    items:
      - key: {{ .Values.ceph.configMapKey }}
        path: config.json
    {{- end }}
  {{- end }}
- name: kms
  configMap:
    name: {{ .Values.ceph.kmsConfigMap }}
    optional: true
{{- if .Values.ceph.vault.enabled }}
- name: kms-token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          audience: {{ .Values.ceph.vault.audience }}
{{- end }}
{{- range $index, $mounted := .Values.ceph.kmsSecrets }}
- name: kms-secret-{{ $index }}
  secret:
    secretName: {{ $mounted.secret }}
    optional: true
{{- end }}
{{- end }}

{{- define "uring-csi.logArgs" -}}
- --log-format={{ .Values.log.format }}
{{- with .Values.log.level }}
- --log-level={{ . }}
{{- end }}
{{- end }}

{{- /* The flags of `config`, and further ones. */ -}}
{{- define "uring-csi.flags" -}}
{{- range $flag, $value := .config }}
{{- if not (kindIs "bool" $value) }}
- {{ printf "--%s=%v" $flag (kindIs "float64" $value | ternary (int64 $value) $value) | quote }}
{{- else if $value }}
- --{{ $flag }}
{{- end }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "uring-csi.nodeName" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end }}

{{- define "uring-csi.hostIp" -}}
- name: HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
{{- end }}

{{- define "uring-csi.driverName" -}}
{{- if ne .Values.driverName "block.uring-csi.dev" }}
- name: URING_CSI_DRIVER_NAME
  value: {{ .Values.driverName }}
{{- end }}
{{- end }}

{{- /* For uringctl in a node's pod, if the sockets are not at its defaults. */ -}}
{{- define "uring-csi.sockets" -}}
{{- if ne .Values.node.runDir "/run/uring-csi" }}
- name: URING_CSI_NODE_ENDPOINT
  value: unix://{{ .Values.node.runDir }}/node.sock
- name: URING_CSI_CONTROLLER_ENDPOINT
  value: unix://{{ .Values.node.runDir }}/controller.sock
- name: URING_CSI_HOLDER_ENDPOINT
  value: unix://{{ .Values.node.runDir }}-holder/holder.sock
{{- end }}
{{- end }}

{{- /* A class's parameters, and the secrets that it does not name itself. */ -}}
{{- define "uring-csi.parameters" -}}
{{- $parameters := deepCopy .parameters }}
{{- $values := .root.Values }}
{{- $namespace := include "uring-csi.namespace" .root }}
{{- range .secrets }}
{{- $key := printf "csi.storage.k8s.io/%s-secret-name" . }}
{{- if not (hasKey $parameters $key) }}
{{- $_ := set $parameters $key $values.ceph.secret }}
{{- $_ := set $parameters (printf "csi.storage.k8s.io/%s-secret-namespace" .) $namespace }}
{{- end }}
{{- end }}
{{- if $parameters }}
{{- toYaml $parameters }}
{{- end }}
{{- end }}
