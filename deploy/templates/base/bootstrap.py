#!/usr/bin/env python3
"""Make the tree of the `base` template: `bootstrap.py ROOTFS`, as root, where mmdebstrap is installed.

Run by the set-up on the machine itself, with its mirrors and proxies, and by the Dockerfile beside this in a sandbox. The options
follow from recipe.toml; `customize.sh` does the rest. A change here that makes another tree of the same recipe raises BUILDER_VERSION in
scripts/install/base_template.py.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parent


def recipe(place: Path = PLACE) -> dict[str, Any]:
    """What recipe.toml says."""
    return tomllib.loads((place / "recipe.toml").read_text())


def options(said: dict[str, Any], architecture: str, settings: Sequence[str] = ()) -> list[str]:
    """The options of mmdebstrap for a recipe. `settings`: of apt, besides, which customize.sh takes out again."""
    return [
        f"--variant={said['variant']}",
        f"--architectures={architecture}",
        f"--include={','.join(said['packages'])}",
        '--aptopt=Apt::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        *[f"--aptopt={line}" for line in settings],
        *[f"--dpkgopt=path-exclude={pattern}" for pattern in said["exclude"]],
        *[f"--dpkgopt=path-include={pattern}" for pattern in said["include"]],
    ]


def lines_of(sources: str, suite: str) -> list[str]:
    """Sources of a machine's own that are of a suite, or of its updates, as apt's one-line form has them."""
    found = []
    for stanza in sources.split("\n\n"):
        said = dict(line.split(":", 1) for line in stanza.splitlines() if ":" in line and not line.startswith((" ", "#")))
        suites = [one for one in said.get("Suites", "").split() if one.partition("-")[0] == suite]
        found += [f"deb {uri} {one} main" for uri in said.get("URIs", "").split() for one in suites]
    return found


def main(rootfs: str) -> None:
    """In a sandbox: from the mirrors that its image is set up with, else Debian's own."""
    said = recipe()
    suite, components = said["suite"], " ".join(said["components"])
    listed = [line for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")) for line in lines_of(path.read_text(), suite)]
    plain = Path("/etc/apt/sources.list")
    lines = [line for line in plain.read_text().splitlines() if line.startswith("deb ") and suite in line] if plain.exists() else []
    sources = lines or listed or [f"deb http://deb.debian.org/debian {suite} {components}"]
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    # What a sandbox mounts is there already, and none of it is the tree's.
    command = ["mmdebstrap", "--mode=root", "--format=directory", *options(said, architecture), suite, rootfs, *sources]
    subprocess.run(command, check=True)
    subprocess.run([PLACE / "customize.sh", rootfs], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
