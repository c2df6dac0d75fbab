{{- /* Refuses classes that no backend of this release serves, as the controller would refuse
each volume of theirs (src/provision/stores.rs has the rules). */ -}}
{{- define "uring-csi.validateClasses" -}}
{{- $names := list }}
{{- range .Values.storageClasses }}
{{- if has .name $names }}
{{- fail (printf "storageClasses: two have the name %s" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- $where := printf "storageClasses: class %s" .name }}
{{- $parameters := .parameters | default dict }}
{{- /* Those of NFS may be in any case. */ -}}
{{- $lower := dict }}
{{- range $key, $value := $parameters }}
{{- $_ := set $lower (lower $key) $value }}
{{- end }}
{{- $backend := get $parameters "backend" }}
{{- if and .allowVolumeExpansion (not $.Values.sidecars.resizer.enabled) }}
{{- fail (printf "%s: allowVolumeExpansion without sidecars.resizer.enabled" $where) }}
{{- end }}
{{- $arguments := dict "root" $ "where" $where "parameters" $parameters "lower" $lower }}
{{- if or (hasKey $parameters "clusterID") (eq $backend "rbd") }}
{{- include "uring-csi.validateCephClass" $arguments }}
{{- else if or (eq $backend "nfs") (and (not $backend) (hasKey $lower "server") (hasKey $lower "share")) }}
{{- include "uring-csi.validateNfsClass" $arguments }}
{{- else }}
{{- include "uring-csi.validateImageClass" $arguments }}
{{- end }}
{{- end }}
{{- range concat .Values.snapshots.classes .Values.snapshots.groupClasses }}
{{- if and $.Values.snapshots.enabled (hasKey (.parameters | default dict) "clusterID") (not $.Values.ceph.enabled) }}
{{- fail (printf "snapshots: class %s has a clusterID, without ceph.enabled" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "uring-csi.validateCephClass" -}}
{{- $ceph := .root.Values.ceph }}
{{- if not $ceph.enabled }}
{{- fail (printf "%s is for Ceph, as it has a clusterID or backend rbd, without ceph.enabled" .where) }}
{{- end }}
{{- $id := get .parameters "clusterID" }}
{{- if not $id }}
{{- fail (printf "%s has backend rbd without a clusterID" .where) }}
{{- end }}
{{- $known := list }}
{{- range $ceph.clusters }}{{ $known = append $known .clusterID }}{{ end }}
{{- if and $known (not (has $id $known)) }}
{{- fail (printf "%s: clusterID %s is none of ceph.clusters: %s" .where $id (join ", " $known)) }}
{{- end }}
{{- if not (or (get .parameters "pool") (get .parameters "topologyConstrainedPools")) }}
{{- fail (printf "%s has neither pool nor topologyConstrainedPools, of which Ceph needs one" .where) }}
{{- end }}
{{- if and (eq (get .parameters "mounter") "rbd-nbd") (not $ceph.rbdNbd.enabled) }}
{{- fail (printf "%s has mounter rbd-nbd, without ceph.rbdNbd.enabled" .where) }}
{{- end }}
{{- end }}

{{- define "uring-csi.validateNfsClass" -}}
{{- $wanted := printf "%s:/%s" (get .lower "server" | lower | trimAll "[]") (get .lower "share" | trimAll "/") }}
{{- $known := list }}
{{- range .root.Values.nfs.exports }}
{{- $known = append $known (printf "%s:/%s" (lower .server | trimAll "[]") (trimAll "/" .share)) }}
{{- end }}
{{- if not $known }}
{{- fail (printf "%s is for directories of NFS, as it has a server and a share or backend nfs, without nfs.exports" .where) }}
{{- end }}
{{- if not (has $wanted $known) }}
{{- fail (printf "%s: %s is none of nfs.exports: %s" .where $wanted (join ", " $known)) }}
{{- end }}
{{- $fsType := get .lower "csi.storage.k8s.io/fstype" }}
{{- if not (has $fsType (list "" "nfs" "nfs4")) }}
{{- fail (printf "%s: csi.storage.k8s.io/fstype %s is not that of an NFS server" .where $fsType) }}
{{- end }}
{{- end }}

{{- define "uring-csi.validateImageClass" -}}
{{- $values := .root.Values }}
{{- $known := list }}
{{- range $values.pools }}{{ $known = append $known .name }}{{ end }}
{{- if not $known }}
{{- $lacks := ternary "clusterID" "server and share" $values.ceph.enabled }}
{{- fail (printf "%s is for image files, as it has no %s, and there are no pools of them; set storageClasses" .where $lacks) }}
{{- end }}
{{- $pool := get .parameters "pool" }}
{{- if and $pool (not (has $pool $known)) }}
{{- fail (printf "%s: pool %s is none of pools: %s" .where $pool (join ", " $known)) }}
{{- end }}
{{- if and (not $pool) (gt (len $known) 1) }}
{{- fail (printf "%s names no pool, and there are several: %s" .where (join ", " $known)) }}
{{- end }}
{{- $backend := get .parameters "backend" }}
{{- if not (has $backend (list "" "loop" "nbd")) }}
{{- fail (printf "%s: there is no backend %s" .where $backend) }}
{{- end }}
{{- if and $values.nbd.enabled (ne $backend "nbd") }}
{{- fail (printf "%s: with nbd.enabled nodes mount no pool, so the class needs backend nbd and nbdServer" .where) }}
{{- end }}
{{- if and (eq $backend "nbd") (include "uring-csi.local" .root) }}
{{- fail (printf "%s: backend nbd needs a shared pool" .where) }}
{{- end }}
{{- if and (eq $backend "nbd") (not (get .parameters "nbdServer")) }}
{{- fail (printf "%s: backend nbd needs nbdServer, the address by which nodes reach the server" .where) }}
{{- end }}
{{- end }}
