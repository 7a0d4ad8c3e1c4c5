#!/usr/bin/env bash
# Run every Go fuzz target for FUZZTIME (10 s unless told), one after the other; a crash leaves its input under testdata/fuzz.
set -euo pipefail
cd "$(dirname "$0")/../native"
export GOTOOLCHAIN=local GOFLAGS='-mod=readonly -buildvcs=false' GOWORK=off
go=../build/tools/go
failed=0 ran=0

for package in $("$go" list ./...); do
  for target in $("$go" test -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
    echo "=== $package $target"
    ran=$((ran + 1))
    "$go" test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-10s}" -parallel 2 "$package" || failed=$((failed + 1))
  done
done

echo "$((ran - failed)) passed, $failed failed, 0 skipped"
[[ $failed -eq 0 && $ran -gt 0 ]]
