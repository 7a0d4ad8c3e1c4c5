"""What runs inside a bench, as root, in any POSIX shell: small programs whose words come as arguments, never as part of the text."""

from __future__ import annotations

from typing import Final

ARCHIVE: Final = "/.atoll/copy.tar"
"""Below what no layer takes in."""
ROOT: Final = "/.atoll/scratch"
"""The root of an image that begins with nothing, on a bench that has what is needed to put files into it."""
SSH_KEY: Final = "/.atoll/ssh-key"
SSH_SOCKET: Final = "/.atoll/ssh/{}.sock"

_UNPACK: Final = r"""
set -e
# unpack HOW: the archive comes out here; -o for root's own, -p for whoever's the files are, by number.
unpack() {
    numbers=
    if [ "$1" = -p ]; then numbers=--numeric-owner; fi
    if [ "$(head -c 2 /.atoll/copy.tar | od -An -tx1 | tr -d ' \n')" = 1f8b ]; then
        tar -xz "$1" $numbers -f /.atoll/copy.tar
    else
        tar -x "$1" $numbers -f /.atoll/copy.tar
    fi
}

# give OWNER: what is here becomes a user's; one without a group has the user's own.
give() {
    case $1 in
        *:*) chown -hR "$1" . ;;
        *[!0-9]*) group=$(id -g "$1") || exit 1; chown -hR "$1:$group" . ;;
        *) chown -hR "$1:$1" . ;;
    esac
}
"""

COPY: Final = (
    _UNPACK
    + r"""
source=$1 target=$2 owner=$3 mode=$4
rm -rf /.atoll/copied
mkdir /.atoll/copied
cd /.atoll/copied
if [ -n "$owner" ]; then
    unpack -o
    give "$owner"
else
    unpack -p
fi
if [ -n "$mode" ]; then
    find . -mindepth 1 ! -type l -exec chmod "$mode" {} +
fi

# merge SOURCE TARGET: what is in a directory comes into another; what is there already keeps its own owner and mode.
merge() {
    if [ -d "$2" ]; then
        chown "$(stat -c %u:%g "$2/.")" "$1"
        chmod "$(stat -c %a "$2/.")" "$1"
        cp -a "$1/." "$2/"
    else
        mkdir -p "$(dirname "$2")"
        mv "$1" "$2"
    fi
}

# place SOURCE TARGET INTO: INTO is set when the target is a directory whatever is there.
place() {
    if [ -d "$1" ] && [ ! -L "$1" ]; then
        merge "$1" "$2"
    elif [ -n "$3" ] || [ -d "$2" ]; then
        mkdir -p "$2"
        mv -f "$1" "${2%/}/"
    else
        mkdir -p "$(dirname "$2")"
        mv -f "$1" "$2"
    fi
}

into=
case $target in */) into=yes ;; esac
target=${target%/}
[ -n "$target" ] || target=/
if [ "$source" = . ]; then
    merge /.atoll/copied "$target"
elif [ -e "./$source" ] || [ -L "./$source" ]; then
    place "./$source" "$target" "$into"
else
    found=
    IFS=
    for match in ./$source; do
        if [ -e "$match" ] || [ -L "$match" ]; then
            found=yes
            place "$match" "$target" yes
        fi
    done
    # A pattern that only the client understands: all that it sent was meant.
    if [ -z "$found" ]; then
        if [ -z "$(ls -A)" ]; then
            echo "nothing that matches $source was sent" >&2
            exit 1
        fi
        merge /.atoll/copied "$target"
    fi
fi
cd /
rm -rf /.atoll/copied /.atoll/copy.tar
"""
)
"""SOURCE TARGET OWNER MODE: files of the archive come to their place; a directory is merged into one that is there. No OWNER: whoever's they are."""

UNPACK: Final = (
    _UNPACK
    + r"""
mkdir -p "$1"
cd "$1"
unpack -p
rm -f /.atoll/copy.tar
"""
)
"""TARGET: the archive comes out there, with its own owners and modes."""

EXPORT: Final = r"""
set -e
cd /
pattern=$1
rm -rf /.atoll/copy.tar /.atoll/export
set --
if [ -e "./$pattern" ] || [ -L "./$pattern" ]; then
    set -- "./$pattern"
else
    IFS=
    for match in ./$pattern; do
        if [ -e "$match" ] || [ -L "$match" ]; then set -- "$@" "$match"; fi
    done
fi
if [ $# = 0 ]; then
    echo "there is no /$pattern" >&2
    exit 1
fi
# A link that is itself asked for means what it leads to; those inside a directory stay links.
links=
for match in "$@"; do
    if [ -L "$match" ] && [ -e "$match" ]; then links=yes; fi
done
if [ -n "$links" ]; then
    for match in "$@"; do
        mkdir -p "/.atoll/export/$(dirname "$match")"
        if [ -L "$match" ] && [ -e "$match" ]; then
            cp -a -H "$match" "/.atoll/export/$match"
        else
            cp -a "$match" "/.atoll/export/$match"
        fi
    done
    cd /.atoll/export
fi
tar --exclude=./.atoll --exclude=./proc --exclude=./sys --exclude=./dev --exclude=./run -cf /.atoll/copy.tar "$@"
"""
"""SOURCE: an archive of what is of that name (a pattern, too), relative to the root."""

MOUNT: Final = (
    _UNPACK
    + r"""
place=/.atoll/mounts/$1 target=$2 source=$3 how=$4 owner=$5 mode=$6
rm -rf "$place"
mkdir -p "$place/files"
cd "$place/files"
if [ -n "$how" ]; then
    unpack "$how"
    rm -f /.atoll/copy.tar
fi
if [ -n "$owner" ]; then give "$owner"; fi
if [ -n "$mode" ]; then chmod "$mode" .; fi
cd /
from=$place/files
if [ "$source" != . ]; then from=$place/files/$source; fi
if [ ! -e "$from" ]; then
    echo "there is no $source" >&2
    exit 1
fi
if [ ! -e "$target" ]; then
    if [ -d "$from" ]; then
        mkdir -p "$target"
    else
        mkdir -p "$(dirname "$target")"
        : >"$target"
    fi
    : >"$place/made"
fi
if ! mount --bind "$from" "$target" 2>/dev/null; then
    # Guests that share the host's kernel may not mount: what is there steps aside instead.
    if [ -e "$place/made" ]; then rm -rf "$target"; else mv "$target" "$place/aside"; fi
    mv "$from" "$target"
    : >"$place/swapped"
fi
"""
)
"""NUMBER TARGET SOURCE HOW OWNER MODE: have files of the archive (HOW as for `unpack`), or an empty directory, at a place for a while."""

UNMOUNT: Final = r"""
set -e
place=/.atoll/mounts/$1 target=$2
if [ -e "$place/swapped" ]; then
    rm -rf "$target"
    if [ -e "$place/aside" ]; then mv "$place/aside" "$target"; fi
else
    umount "$target" 2>/dev/null || umount -l "$target"
fi
if [ -e "$place/made" ] && [ ! -e "$place/swapped" ]; then rm -rf "$target"; fi
rm -rf "$place"
"""
"""NUMBER TARGET: what MOUNT has done is undone."""

MAKE_DIRECTORY: Final = r"""
set -e
if [ ! -d "$1" ]; then
    mkdir -p "$1"
    if group=$(id -g "${2%%:*}" 2>/dev/null); then
        chown "${2%%:*}:$group" "$1"
    fi
fi
"""
"""PATH OWNER: have a directory; a new one is the owner's."""

KEEP: Final = r"""
set -e
rm -f /.atoll/copy.tar
size=$(du -sk "$1" | cut -f1)
if [ "$size" -gt "$2" ]; then
    echo "it has $size KiB, and at most $2 are kept" >&2
    exit 1
fi
cd "$1"
tar -cf /.atoll/copy.tar .
"""
"""TARGET KIB: an archive of what a cache has become, where it has no more than so much."""

SSH_BEGIN: Final = r"""
set -e
number=$1 user=$2
if ! command -v ssh-agent >/dev/null 2>&1; then
    rm -f /.atoll/ssh-key
    echo "the image has no ssh-agent: install openssh-client before" >&2
    exit 1
fi
mkdir -p "/.atoll/ssh/$number"
chmod 711 /.atoll /.atoll/ssh
mv /.atoll/ssh-key "/.atoll/ssh/$number/key"
chmod 600 "/.atoll/ssh/$number/key"
owner=${user%%:*}
chown -R "$owner" "/.atoll/ssh/$number"
cat >"/.atoll/ssh/$number/begin" <<'end'
set -e
ssh-agent -a "$1/agent.sock" >"$1/agent"
SSH_AUTH_SOCK=$1/agent.sock ssh-add -q "$1/key" </dev/null
end
if [ "$(id -u "$owner")" = 0 ]; then
    sh "/.atoll/ssh/$number/begin" "/.atoll/ssh/$number"
else
    su -s /bin/sh "$owner" -c "sh /.atoll/ssh/$number/begin /.atoll/ssh/$number"
fi
rm -f "/.atoll/ssh/$number/key" "/.atoll/ssh/$number/begin"
ln -s "/.atoll/ssh/$number/agent.sock" "/.atoll/ssh/$number.sock"
"""
"""NUMBER USER: an agent of the user's has the key that was put beside it, which goes."""

SSH_END: Final = r"""
. "/.atoll/ssh/$1/agent" >/dev/null 2>&1
if [ -n "$SSH_AGENT_PID" ]; then kill "$SSH_AGENT_PID" 2>/dev/null; fi
rm -rf "/.atoll/ssh/$1" "/.atoll/ssh/$1.sock"
"""
"""NUMBER: what SSH_BEGIN has done is undone."""

SEED: Final = (
    _UNPACK
    + r"""
rm -rf /.atoll/scratch
mkdir -p /.atoll/scratch
cd /.atoll/scratch
if [ -e /.atoll/copy.tar ]; then unpack -p; fi
rm -f /.atoll/copy.tar
"""
)
"""The archive, if there is one, is the root of the image that begins with nothing."""

PACK: Final = r"""
set -e
rm -f /.atoll/copy.tar
cd /.atoll/scratch
tar --numeric-owner -cf /.atoll/copy.tar .
"""
"""That root as an archive."""
