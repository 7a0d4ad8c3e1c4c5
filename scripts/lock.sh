#!/usr/bin/env bash
# Rewrite the lock files under requirements/ from pyproject.toml: exact versions with the hash of every file, and no word of where
# they come from, so that the same lock installs from whatever package index a machine is set up with.
#
#   scripts/lock.sh            keep the versions that are locked, add what is missing
#   scripts/lock.sh --upgrade  take the newest versions that the ranges in pyproject.toml allow
set -euo pipefail
cd "$(dirname "$0")/.."

# A private wheel folder or index of this machine would otherwise decide versions, or leave its path in the lock.
unset PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX_URL UV_DEFAULT_INDEX UV_INDEX

tools=build/venv-lock
if [[ ! -x $tools/bin/uv ]]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet uv
fi

compile() {
  "$tools/bin/uv" pip compile --no-config --quiet --python-version 3.11 --universal --generate-hashes --no-annotate \
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" "$@"
}

compile pyproject.toml --group build -o requirements/runtime.txt "$@"
compile pyproject.toml --group build --group dev -c requirements/runtime.txt -o requirements/dev.txt "$@"
for name in e2b-2.45 go node; do
  compile "requirements/$name.in" -o "requirements/$name.txt" "$@"
done
interpreter=deploy/templates/code-interpreter/requirements
compile "$interpreter.in" -o "$interpreter.txt" "$@"

if grep -nE 'https?://|file:|/opt/|--find-links|--index-url' requirements/*.txt "$interpreter.txt"; then
  echo "lock.sh: a lock file names a place of this machine or a registry (above)" >&2
  exit 1
fi
wc -l requirements/*.txt
