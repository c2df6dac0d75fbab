#!/usr/bin/env bash
# Called by deb_check.sh, in namespaces of its own, with the package in $deb.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/root.sh
. scripts/containers.sh

inside() { podman exec machine "$@"; }

show_logs() {
  inside systemctl --no-pager --failed || true
  inside journalctl --no-pager --lines=60 || podman logs machine | tail -n 40
}
trap '(($? == 0)) || show_logs; podman rm --force --time=10 --all >/dev/null' EXIT

# The volume is mounted in this machine's namespace of mounts, not in a unit's.
podman run --detach --quiet --name machine --systemd=always --privileged --network=none \
  --hostname=story --volume=/dev:/dev --volume="${deb:?}:/uring-csi.deb:ro" \
  --volume="$story/pool:/srv/uring-csi" --volume="$story/mnt:/mnt:rshared" \
  localhost/debian-systemd /sbin/init --unit=basic.target >/dev/null
booted() { inside systemctl is-system-running --wait | grep -qxE 'running|degraded'; }
until_it_succeeds booted
# As systemd does on a machine, but not in a container.
inside mount --make-rshared /

echo "installing the package"
inside apt-get install -y --no-install-recommends /uring-csi.deb
units=(uring-csi-node uring-csi-controller uring-csi-holder)
inside systemd-analyze verify "${units[@]/%/.service}" uring-csi-volumes.service \
  uring-csi-volume@data.service
for unit in "${units[@]}"; do
  [[ $(inside systemctl is-active "$unit") == inactive ]]
  [[ $(inside systemctl is-enabled "$unit") == disabled ]]
done

echo "starting its services"
inside mkdir -p /var/lib/kubelet
inside sh -c '
  echo '\''allow-path = ["/mnt"]
pool = ["default=/srv/uring-csi,local"]'\'' >>/etc/uring-csi/node.toml
  echo '\''node-id = "story"
pool = ["default=/srv/uring-csi,local"]'\'' >>/etc/uring-csi/controller.toml'
inside systemctl start "${units[@]}"
until_it_succeeds inside uringctl info
volume_is_used inside
# Not in a namespace of the unit: this machine sees the mount.
[[ $(findmnt --noheadings --output FSTYPE "$story/mnt/story") == ext4 ]]

echo "installing it again, which restarts agent and controller, with the volume in use"
main_pid() { inside systemctl show --property=MainPID --value "$1"; }
node=$(main_pid uring-csi-node) holder=$(main_pid uring-csi-holder)
inside apt-get install -y --reinstall --no-install-recommends /uring-csi.deb
until_it_succeeds inside uringctl info
[[ $(main_pid uring-csi-node) != "$node" && $(main_pid uring-csi-holder) == "$holder" ]]
inside grep -qx written /mnt/story/file
volume_is_removed inside

echo "purging it"
for unit in "${units[@]}"; do [[ $(inside systemctl is-active "$unit") == active ]]; done
inside apt-get purge -y uring-csi
for unit in "${units[@]}"; do
  [[ $(inside systemctl is-active "$unit") != active ]]
done
inside sh -c '! ls -d /etc/uring-csi /usr/share/uring-csi /usr/bin/uring* 2>/dev/null'
