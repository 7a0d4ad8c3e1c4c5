#!/usr/bin/env bash
# Try this checkout's last commit on a fresh machine: a minimal Debian 12 with python3, make and git, in mount, process, IPC and host name
# namespaces of its own. The network is this machine's, since the package registries are reached through it; ports are chosen free.
#
#   scripts/fresh-machine.sh                          make up, make up again (must be quick), make down
#   scripts/fresh-machine.sh make test                some other command, in the clone
#   KEEP=1 scripts/fresh-machine.sh ...               keep the tree, and say where it is
#   MACHINE=DIR scripts/fresh-machine.sh ...          go on with a tree that was kept: it is as fresh as it was left
#
# Needs root and mmdebstrap. Everything that runs inside ends with this script.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $(id -u) -ne 0 ]]; then echo "fresh-machine.sh: not root" >&2; exit 1; fi
command -v mmdebstrap >/dev/null || { echo "fresh-machine.sh: apt-get install mmdebstrap" >&2; exit 1; }

machine=${MACHINE:-$(mktemp -d /var/tmp/fresh-machine.XXXXXX)}
finish() {
  if [[ -n ${KEEP:-}${MACHINE:-} ]]; then
    echo "the machine stays at $machine"
  else
    # All mounts were in a namespace that has ended; --one-file-system guards against one that was not.
    rm -rf --one-file-system "$machine"
  fi
}
trap finish EXIT

if [[ ! -e $machine/root/atoll ]]; then
  echo "--- bootstrapping a minimal Debian 12 at $machine"
  chmod 0755 "$machine"
  # The same mirror and signatures as this machine's own.
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' 'Component: main' | awk '$2 == "bookworm" {print $1; exit}')
  unshare --mount --pid --fork --kill-child --mount-proc \
    mmdebstrap --quiet --mode=root --variant=minbase --include=python3,make,git --aptopt='Apt::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' bookworm "$machine" ${mirror:+"$mirror"}

  # A machine behind an inspecting proxy has its operator's certificates before anything else is done with it.
  mkdir -p "$machine/usr/local/share/ca-certificates"
  find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$machine/usr/local/share/ca-certificates" {} +
  cp -L /etc/resolv.conf "$machine/etc/resolv.conf"
  echo fresh >"$machine/etc/hostname"
  printf '127.0.0.1\tlocalhost fresh\n' >"$machine/etc/hosts"
  git clone --quiet --no-hardlinks . "$machine/root/atoll"
fi

# What says how registries are reached, and nothing else of this shell's environment.
settings=()
while IFS= read -r -d '' setting; do
  case ${setting%%=*} in
    PIP_CERT | PIP_INDEX_URL | PIP_DEFAULT_TIMEOUT | GOPROXY | GOSUMDB | SSL_CERT_FILE | NODE_EXTRA_CA_CERTS | npm_config_* | [Hh][Tt][Tt][Pp]*_[Pp][Rr][Oo][Xx][Yy] | [Nn][Oo]_[Pp][Rr][Oo][Xx][Yy])
      settings+=("$setting") ;;
  esac
done < <(env -0)

port=$(python3 scripts/free_ports.py 3)
cat >"$machine/root/inside.sh" <<'INSIDE'
#!/bin/bash
set -euo pipefail
cd /root/atoll
hostname fresh
if [[ $# -gt 0 ]]; then exec "$@"; fi
began=$SECONDS
make up
echo "--- the first make up took $((SECONDS - began)) s"
began=$SECONDS
make up
echo "--- the second make up took $((SECONDS - began)) s"
make down
INSIDE

# pivot_root, not chroot: the kernel refuses user namespaces, and with them every sandbox runtime, to a process in a chroot.
cat >"$machine/root/enter.sh" <<'ENTER'
#!/bin/bash
set -euo pipefail
machine=$1
shift
mount --bind "$machine" "$machine"
cd "$machine"
mkdir -p old dev proc sys run tmp
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o mode=0755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
pivot_root . old
cd /
umount --lazy /old
exec /bin/bash /root/inside.sh "$@"
ENTER

echo "--- entering it"
env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" ATOLL_PORT="$port" "${settings[@]}" \
  unshare --mount --propagation private --pid --ipc --uts --fork --kill-child bash "$machine/root/enter.sh" "$machine" "$@"
