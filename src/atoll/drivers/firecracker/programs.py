"""Firecracker's two programs, pinned: what is run is a copy of ours, made of bytes whose digest was looked at. Blocking."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.drivers.firecracker.config import FirecrackerConfig
from atoll.drivers.versions import version_of

FIRECRACKER: Final = "firecracker"
"""The copy's name. The jailer takes no other for a Firecracker, and a machine's process is known by it."""
JAILER: Final = "jailer"


@dataclass(frozen=True, slots=True)
class Programs:
    """The copies."""

    firecracker: Path
    jailer: Path
    version: str


def have(config: FirecrackerConfig, directory: Path) -> Programs:
    """Have the programs below a directory that is root's alone, named by what they are.

    *Errors*: Refused RUNTIME_MISSING; RUNTIME_UNTRUSTED when one is not the pinned one.
    """
    pinned = ((config.firecracker, FIRECRACKER, config.firecracker_sha256), (config.jailer, JAILER, config.jailer_sha256))
    contents = [_pinned(path, digest) for path, _, digest in pinned]
    name = hashlib.sha256("".join(digest for _, _, digest in pinned).encode()).hexdigest()[:24]
    final = directory / f"programs-{name}"
    if not final.is_dir():
        unfinished = directory / f".{final.name}.{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True, mode=0o700)
        for (_, program, _), content in zip(pinned, contents, strict=True):
            (unfinished / program).write_bytes(content)
            (unfinished / program).chmod(0o755)
        unfinished.rename(final)
    return Programs(final / FIRECRACKER, final / JAILER, version_of(final / FIRECRACKER, directory))


def _pinned(path: Path, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(Code.RUNTIME_MISSING, f"{path} cannot be read: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != digest.lower():
        raise Refused(Code.RUNTIME_UNTRUSTED, f"{path} has SHA-256 {found}, and {digest or 'none'} is the one that was named")
    return content
