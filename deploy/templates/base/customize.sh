#!/bin/sh
# Turn a fresh Debian tree into the `base` template. Run by the bootstrap with the tree's path as $1, as root, before the tree is
# published; everything here is deterministic, so that two builds of one package set differ in nothing that a sandbox can see.
set -eu
root=$1

# The two users of the E2B contract: root, and `user` with uid 1000 who may become root without a password.
chroot "$root" groupadd --gid 1000 user
chroot "$root" useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash user
install -d -m 0755 "$root/etc/sudoers.d"
echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/90-user"
chmod 0440 "$root/etc/sudoers.d/90-user"

# A sandbox is thrown away, not administered: `pip install` works for everybody without a virtual environment.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED

# Plain files, since each sandbox gets its own: a link into the building machine's world would be followed at start.
for file in hosts resolv.conf hostname machine-id; do rm -f "$root/etc/$file"; done
printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
: >"$root/etc/machine-id"
echo sandbox >"$root/etc/hostname"
echo 'LANG=C.UTF-8' >"$root/etc/default/locale"
ln -sf /usr/share/zoneinfo/Etc/UTC "$root/etc/localtime"

# Where the driver mounts the guest agent: without it a runtime would make the mount point itself, in the tree that all sandboxes share.
install -d -m 0755 "$root/.atoll"
: >"$root/.atoll/guest"
chmod 0755 "$root/.atoll/guest"

# Mount points and sticky directories that every runtime expects.
for dir in dev proc sys run; do install -d -m 0755 "$root/$dir"; done
for dir in tmp var/tmp run/lock; do install -d -m 1777 "$root/$dir"; done
for dir in mnt opt srv media home; do install -d -m 0755 "$root/$dir"; done

# What the bootstrap needed and a sandbox must not see: its package cache, its proxy settings, its logs, caches keyed by time.
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"
mv "$root/etc/dpkg/dpkg.cfg.d/99mmdebstrap" "$root/etc/dpkg/dpkg.cfg.d/10-no-documentation"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/cache/ldconfig/* "$root"/var/cache/debconf/*-old
find "$root/var/log" -type f -delete
rm -rf "$root"/tmp/* "$root"/run/* "$root"/root/.cache
install -d -m 1777 "$root/run/lock"

# Every runtime mounts its own /dev: a tree without device nodes can be copied and unpacked without the right to make them.
find "$root/dev" -mindepth 1 -delete
