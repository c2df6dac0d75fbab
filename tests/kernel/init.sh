#!/bin/busybox sh
# shellcheck shell=dash
# The test kernel's init. Its root is the machine's, by hostfs and read-only. The first
# time it mounts an overlay on a tmpfs over the root and executes itself there. The
# second time it sets up a small Linux, runs the job that boot.sh left in $share, writes
# its exit code beside it, and powers off.
#
# $checkout, $target, $modules and $share are kernel parameters, which the kernel passes
# in the environment. An early failure ends init, and with it the kernel.
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
# The root alone, without the mounts that follow.
$box mount -o bind / /mnt
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t devpts pts /dev/pts
ln -s /proc/self/fd /dev/fd
# systemd makes it elsewhere. nfs-ganesha 4 looks in it for the file systems of its exports.
[ -e /etc/mtab ] || ln -s ../proc/self/mounts /etc/mtab
$box ip link set lo up
$box hostname test-kernel
# These may be below /tmp, which is now hidden.
for needed in "$checkout" "$target"; do
  if [ ! -d "$needed" ]; then
    mkdir -p "$needed"
    $box mount -o bind "/mnt$needed" "$needed"
  fi
done
$box umount -l /mnt
# The directory shared with boot.sh.
mount -t hostfs -o "$share" share "$share"

mkdir -p /lib/modules
ln -sfn "$modules" "/lib/modules/$(uname -r)"
/lib/systemd/systemd-udevd --daemon
udevadm trigger --action=add --type=all
udevadm settle

# The terminal is a descriptor of boot.sh; in raw mode it passes bytes unchanged.
tty=/dev/ttyS0
stty -F $tty raw -echo
code=0
touch "$share/began"
bash "$share/job" <>$tty >&0 2>&1 || code=$?
echo $code >"$share/status"
# Waits until all output is written.
stty -F $tty sane
# The rest is in memory, or on devices for which a sync could wait for ever.
sync "$share/status"
exec $box halt -n -f
