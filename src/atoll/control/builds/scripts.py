"""What runs inside a bench, as root, in any POSIX shell: small programs whose words come as arguments, never as part of the text."""

from __future__ import annotations

from typing import Final

ARCHIVE: Final = "/.atoll/copy.tar"
"""Below what no layer takes in."""

COPY: Final = r"""
set -e
source=$1 target=$2 owner=$3 mode=$4
rm -rf /.atoll/copied
mkdir /.atoll/copied
cd /.atoll/copied
if [ "$(head -c 2 /.atoll/copy.tar | od -An -tx1 | tr -d ' \n')" = 1f8b ]; then
    tar -xzof /.atoll/copy.tar
else
    tar -xof /.atoll/copy.tar
fi
case $owner in
    *:*) ;;
    *) group=$(id -g "$owner") || exit 1; owner=$owner:$group ;;
esac
chown -hR "$owner" .
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
"""SOURCE TARGET OWNER MODE: files of the archive come to their place; a directory is merged into one that is there."""

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
