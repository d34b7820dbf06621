#!/bin/busybox sh
# The guest's first process: the host's root read-only under a tmpfs (its /tmp too: the checkout may
# lie there), then the start script that the host left in the share.
/bin/busybox --install -s /bin
export PATH=/bin

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev

for module in /modules/*; do
    insmod "$module" 2>/dev/null || echo "guest: $module not loaded"
done

nine=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o ro,cache=loose,$nine root /lower || exec poweroff -f
mount -t tmpfs -o size=75% tmp /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /root ||
    exec poweroff -f

mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/pts /root/dev/shm
mount -t devpts pts /root/dev/pts
mount -t tmpfs shm /root/dev/shm
mount -t tmpfs run /root/run
chmod 1777 /root/dev/shm
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
    ln -sf "/proc/self/${link#*:}" "/root/dev/${link%%:*}"
done
mkdir /root/run/guest
mount -t 9p -o rw,cache=none,$nine share /root/run/guest || exec poweroff -f

# The port carries the command's output alone; what the kernel says stays on the console.
name=$(sed "s/.*guest=//; s/ .*//" /proc/cmdline)
files=/run/guest/$name
chroot /root /bin/bash "$files/start" >/dev/vport0p1 2>&1 </dev/null
echo $? >"/root$files/status"
sync
exec poweroff -f
