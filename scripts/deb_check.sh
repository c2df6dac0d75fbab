#!/usr/bin/env bash
# deb_check.sh [FILE.deb]: in a container of Debian 12 that systemd boots, installs the
# package, runs a volume's life by its services, upgrades and purges it. Run as root, with
# podman, crun, mmdebstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/root.sh
. scripts/containers.sh
deb=$(realpath "${1:-${CARGO_TARGET_DIR:-target}/debian/uring-csi_$version-1_$native.deb}")
export deb

# The oldest Debian that the package is for.
debian=docker.io/library/debian:bookworm-slim
use_debian "$native"
# No udevd and no sysctl: devices and /proc/sys are the machine's.
podman image exists localhost/debian-systemd || buildah build --quiet --pull-never \
  --tag localhost/debian-systemd --file - "$dir/tmp" <<END
FROM $debian
RUN apt-get update \
 && apt-get install -y --no-install-recommends dbus e2fsprogs kmod libudev1 systemd systemd-sysv \
 && systemctl mask systemd-sysctl.service systemd-modules-load.service \
      systemd-tmpfiles-setup-dev.service systemd-udevd.service
CMD ["/sbin/init"]
END
story deb scripts/deb_story.sh
