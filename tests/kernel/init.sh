#!/bin/busybox sh
# shellcheck shell=dash
# The first process of the test kernel, twice. Its root is the machine's, by
# hostfs and read-only; the first time it lays a tmpfs over it and starts over
# there, the second time it makes a small Linux, runs the job that boot.sh left
# in $share, leaves its exit code beside it, and powers off.
#
# $checkout, $target, $modules and $share are kernel parameters, which the kernel
# passes on as the environment. An early failure ends this, and with it the kernel.
set -eu
: "${checkout:?}" "${target:?}" "${modules:?}" "${share:?}"
box=/bin/busybox

if [ "${1:-}" != again ]; then
  $box mount -t proc proc /proc
  $box mount -t sysfs sys /sys
  $box insmod "$modules/kernel/fs/overlayfs/overlay.ko"
  $box mount -t tmpfs -o size=75% upper /mnt
  $box mkdir /mnt/upper /mnt/work /mnt/root
  $box mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work,xino=off root /mnt/root
  cd /mnt/root
  $box mkdir -p .old
  $box pivot_root . .old
  for kept in proc sys dev; do $box mount -o move /.old/$kept /$kept; done
  $box umount -l /.old
  exec $box chroot / "$0" again
fi

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
# The root alone, without what is mounted on it next.
$box mount -o bind / /mnt
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t devpts pts /dev/pts
ln -s /proc/self/fd /dev/fd
$box ip link set lo up
$box hostname test-kernel
# These may lie below /tmp, and be hidden now.
for needed in "$checkout" "$target"; do
  if [ ! -d "$needed" ]; then
    mkdir -p "$needed"
    $box mount -o bind "/mnt$needed" "$needed"
  fi
done
$box umount -l /mnt
# The way back to the machine.
mount -t hostfs -o "$share" share "$share"

mkdir -p /lib/modules
ln -sfn "$modules" "/lib/modules/$(uname -r)"
/lib/systemd/systemd-udevd --daemon
udevadm trigger --action=add --type=all
udevadm settle

# The terminal is a descriptor of boot.sh; raw, it passes bytes on as they are.
tty=/dev/ttyS0
stty -F $tty raw -echo
code=0
touch "$share/began"
bash "$share/job" <>$tty >&0 2>&1 || code=$?
echo $code >"$share/status"
# Waits until all of the output has gone out.
stty -F $tty sane
$box sync
exec $box halt -f
