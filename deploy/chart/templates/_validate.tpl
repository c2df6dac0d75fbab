{{- /* Refuses values that contradict each other. */ -}}
{{- define "uring-csi.validate" -}}
{{- $scopes := list }}
{{- $names := list }}
{{- $paths := list }}
{{- range .Values.pools }}
{{- if has .name $names }}
{{- fail (printf "pools: two have the name %s" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- if has (clean .path) $paths }}
{{- fail (printf "pools: two have the path %s" .path) }}
{{- end }}
{{- $paths = append $paths (clean .path) }}
{{- $scopes = append $scopes .scope }}
{{- if and .mounted (eq (dir .path) "/") }}
{{- fail (printf "pool %s: with `mounted` the pods mount the directory above the pool's, which must not be /" .name) }}
{{- end }}
{{- end }}
{{- $local := include "uring-csi.local" . }}
{{- if gt (len (uniq $scopes)) 1 }}
{{- fail "pools: either all are local or all are shared: local ones have their controller in each node's pod" }}
{{- end }}
{{- if not (or .Values.pools .Values.ceph.enabled .Values.nfs.exports) }}
{{- fail "pools and nfs.exports are empty and ceph.enabled is false: there is no place for volumes" }}
{{- end }}
{{- if and .Values.nfs.exports (or .Values.pools .Values.ceph.enabled) }}
{{- fail "nfs.exports: directories are not attached to nodes, so they take a release of their own, without pools and Ceph" }}
{{- end }}
{{- if and $local .Values.ceph.enabled }}
{{- fail "ceph.enabled: volumes in Ceph and in local pools take two releases, with different names and drivers" }}
{{- end }}
{{- if and .Values.nbd.enabled (or $local (ne (len .Values.pools) 1)) }}
{{- fail "nbd.enabled: one shared pool is served by NBD" }}
{{- end }}
{{- if and .Values.nfs.inline (not .Values.nfs.exports) }}
{{- fail "nfs.inline: shares as inline volumes are of a release with nfs.exports" }}
{{- end }}
{{- range $pods := .Values.nfs.inline }}
{{- range $.Values.nfs.exports }}
{{- if and (has $pods.server (list .server .address)) (hasPrefix (printf "%s/" (trimSuffix "/" $pods.share)) (printf "%s/" .share)) }}
{{- fail "nfs.inline: pods could replace the directories of claims in a share of nfs.exports, or below" }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.inline.enabled (not $local) }}
{{- fail "inline.enabled: inline volumes need local pools" }}
{{- end }}
{{- if and .Values.node.labelsFromApi.enabled (or $local (not (include "uring-csi.nodeLabels" .))) }}
{{- fail "node.labelsFromApi.enabled: needs node.domainLabels or node.crushLocationLabels, and no local pools" }}
{{- end }}
{{- if and $local .Values.csiAddons.enabled }}
{{- fail "csiAddons.enabled: the nodes' pods of local pools have two agents, and csi-addons knows one sidecar of a pod" }}
{{- end }}
{{- if and .Values.ceph.rbdNbd.enabled (not .Values.ceph.enabled) }}
{{- fail "ceph.rbdNbd.enabled without ceph.enabled" }}
{{- end }}
{{- if and (or .Values.ceph.vault.enabled .Values.ceph.kmsSecrets) (not .Values.ceph.enabled) }}
{{- fail "ceph.vault and ceph.kmsSecrets without ceph.enabled" }}
{{- end }}
{{- if and .Values.node.crushLocation .Values.node.crushLocationLabels }}
{{- fail "node.crushLocation and node.crushLocationLabels exclude each other" }}
{{- end }}
{{- if and .Values.attributesClasses (not .Values.ceph.enabled) }}
{{- fail "attributesClasses: only volumes in Ceph have attributes to modify" }}
{{- end }}
{{- if and .Values.attributesClasses (not .Values.sidecars.resizer.enabled) }}
{{- fail "attributesClasses without sidecars.resizer.enabled: the resizer modifies volumes" }}
{{- end }}
{{- if and .Values.snapshots.groupClasses (not .Values.snapshots.enabled) }}
{{- fail "snapshots.groupClasses without snapshots.enabled" }}
{{- end }}
{{- if and .Values.controller.networkPolicy.enabled $local }}
{{- fail "controller.networkPolicy.enabled: the controllers of local pools are in the nodes' pods, whose host network no policy restricts" }}
{{- end }}
{{- $ports := dict }}
{{- range $name, $port := .Values.ports }}
{{- if hasKey $ports (toString $port) }}
{{- fail (printf "ports: %s and %s are both %v" (get $ports (toString $port)) $name $port) }}
{{- end }}
{{- $_ := set $ports (toString $port) $name }}
{{- end }}
{{- include "uring-csi.validateClasses" . }}
{{- end }}
