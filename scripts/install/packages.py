"""Debian packages: look at what is installed, and call apt only for what is not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from install.progress import Reporter, StepFailed

# What running needs. nftables, iproute2 and kmod prepare the host; mmdebstrap makes the base template; crun and runc are the
# shared-kernel runtimes; e2fsprogs makes their disks.
TO_RUN: Final = (
    "ca-certificates",
    "crun",
    "debian-archive-keyring",
    "e2fsprogs",
    "iproute2",
    "mmdebstrap",
    "nftables",
    "python3-venv",
    "runc",
    "util-linux",
)
# What testing needs besides: images of one static program; Go's race detector links with C; the store's suite runs on PostgreSQL too.
TO_TEST: Final = (*TO_RUN, "busybox-static", "gcc", "git", "libc6-dev", "postgresql", "skopeo")


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that dpkg does not have installed."""
    query = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *packages], capture_output=True, text=True, check=False
    )
    installed = {line.split(" ")[0] for line in query.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in packages if package not in installed]


def ensure(reporter: Reporter, packages: Sequence[str]) -> str:
    """Install what is missing. The package lists are fetched only then."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise StepFailed("this machine has no apt", f"use Debian 12, or install by hand what these packages hold: {' '.join(packages)}")
    absent = missing(packages)
    if not absent:
        return f"have all {len(packages)}"
    reporter.say(f"installing {' '.join(absent)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    # Another apt (unattended upgrades on a fresh machine) may hold the lock for a while: wait for it.
    patient = ["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    reporter.run(["apt-get", *patient, "update"], todo="see that this machine reaches its Debian mirror, then run this again", env=quiet)
    reporter.run(
        ["apt-get", *patient, "install", "--yes", "--no-install-recommends", *absent],
        todo=f"try by hand: apt-get install --no-install-recommends {' '.join(absent)}",
        env=quiet,
    )
    still = missing(absent)
    if still:
        raise StepFailed(
            f"apt ended well, but these are not installed: {' '.join(still)}", f"try by hand: apt-get install {' '.join(still)}"
        )
    return f"installed {len(absent)}"
