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
  localhost/debian-systemd /sbin/init --unit=multi-user.target >/dev/null
# As systemd does on a machine, but not in a container.
podman exec --interactive machine sh -c 'cat >/etc/systemd/system/shared.service' <<'END'
[Unit]
DefaultDependencies=no
Before=sysinit.target

[Service]
Type=oneshot
ExecStart=/bin/mount --make-rshared /

[Install]
WantedBy=sysinit.target
END
booted() { inside systemctl is-system-running --wait | grep -qxE 'running|degraded'; }
until_it_succeeds booted
inside systemctl enable --now shared.service

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
inside install -D /dev/null /etc/uring-csi/volumes/.uring-csi-volumes
inside sh -c '
  echo '\''allow-path = ["/mnt"]
volumes = "/etc/uring-csi/volumes"
pool = ["default=/srv/uring-csi,local"]'\'' >>/etc/uring-csi/node.toml
  echo '\''node-id = "story"
pool = ["default=/srv/uring-csi,local"]'\'' >>/etc/uring-csi/controller.toml'
inside systemctl start "${units[@]}"
until_it_succeeds inside uringctl info

echo "mounting a volume that a file asks for, and starting a unit behind it"
# The unit writes when it starts and stops, and fails where the volume is not mounted.
inside sh -c '
  truncate --size=64M /srv/uring-csi/wanted.img
  cat >/root/wanted.toml <<END
[source]
backend = "loop"
pool = "default"
image = "wanted.img"

[mount]
path = "/mnt/wanted"
fs = "ext4"
END
  cat >/etc/systemd/system/user.service <<END
[Unit]
Requires=uring-csi-volume@wanted.service
After=uring-csi-volume@wanted.service

[Service]
ExecStartPre=/bin/mountpoint --quiet /mnt/wanted
ExecStartPre=/bin/sh -c "echo started >>/mnt/wanted/log"
ExecStart=/bin/sleep infinity
ExecStop=/bin/mountpoint --quiet /mnt/wanted
ExecStop=/bin/sh -c "echo stopped >>/mnt/wanted/log"

[Install]
WantedBy=multi-user.target
END'
inside uringctl apply /root/wanted.toml
inside systemctl enable --now uring-csi-node uring-csi-volumes user
log_is() { [[ $(inside cat /mnt/wanted/log | xargs) == "$1" ]]; }
log_is started

# Neither a mount nor a device of the volume is left on this machine.
is_parked() {
  ! mountpoint --quiet "$story/mnt/wanted" &&
    [[ -z $(losetup --noheadings --associated "$story/pool/wanted.img") ]]
}

echo "parking it by a stop of the unit, which first stops what uses the volume"
inside systemctl stop uring-csi-volumes
is_parked
inside systemctl start uring-csi-volumes user
log_is "started stopped started"

echo "shutting down and booting, with the volume in use"
podman stop --time=90 machine >/dev/null
is_parked
podman start machine >/dev/null
until_it_succeeds booted
until_it_succeeds inside systemctl is-active --quiet user
log_is "started stopped started stopped started"

echo "using another volume"
inside systemctl start "${units[@]}"
until_it_succeeds inside uringctl list
volume_is_used inside
# Not in a namespace of the unit: this machine sees the mount.
[[ $(findmnt --noheadings --output FSTYPE "$story/mnt/story") == ext4 ]]

echo "copying a directory of another user on an NFS server"
drop_in=/etc/systemd/system/uring-csi-controller.service.d
inside mkdir -p "$drop_in" /srv/share
podman cp deploy/systemd/controller-nfs-server.conf "machine:$drop_in/"
inside sh -c 'echo '\''nfs-export = ["story:/share=/srv/share"]'\'' >>/etc/uring-csi/controller.toml'
inside systemctl daemon-reload
inside systemctl restart uring-csi-controller
until_it_succeeds inside uringctl list
share=(-p server=story -p share=/share)
inside uringctl create made 1Mi "${share[@]}"
inside sh -c 'cd /srv/share/made && touch file && chown 1234:5678 file && chmod 6751 file'
inside uringctl create copy 1Mi "${share[@]}" --from-volume 'story#share#made##'
[[ $(inside stat --format="%u:%g %a" /srv/share/copy/file) == "1234:5678 6751" ]]
inside uringctl delete 'story#share#made##' 'story#share#copy##'

echo "installing it again, which restarts agent and controller, with the volume in use"
main_pid() { inside systemctl show --property=MainPID --value "$1"; }
node=$(main_pid uring-csi-node) holder=$(main_pid uring-csi-holder)
inside apt-get install -y --reinstall --no-install-recommends /uring-csi.deb
until_it_succeeds inside uringctl info
[[ $(main_pid uring-csi-node) != "$node" && $(main_pid uring-csi-holder) == "$holder" ]]
inside grep -qx written /mnt/story/file
inside systemctl is-active --quiet uring-csi-volumes user
volume_is_removed inside

echo "purging it, with a volume that a file asks for in use"
for unit in "${units[@]}"; do [[ $(inside systemctl is-active "$unit") == active ]]; done
inside apt-get purge -y uring-csi
is_parked
for unit in "${units[@]}"; do
  [[ $(inside systemctl is-active "$unit") != active ]]
done
inside sh -c '! ls -d /etc/uring-csi/*.toml /usr/share/uring-csi /usr/bin/uring* 2>/dev/null'
