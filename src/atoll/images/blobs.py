"""The store of blobs that `carrier.py` fills, as far as control itself looks into it: to throw away what nothing needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

PULLED: Final = "fetch-"
"""How the image program begins the names of what it pulls."""
IDLE_S: Final = 600.0
"""Nobody writes any more to what has not been written to for so long: each part of a layer that comes from a host is one."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


def trim(store: Path, *, size_bytes_max: int, kept: Collection[str] = ()) -> int:
    """Remove what was used longest ago, blobs and what killed runs left, until the rest fits; how many bytes went. Blocks. `kept`: names of blobs.

    Call it while nothing is fetched or unpacked. *Idempotency*: a second time finds nothing.
    """
    known = []
    for place in ("partial", "quarantine", "blobs/sha256"):
        for path in (store / place).iterdir() if (store / place).is_dir() else ():
            if path.name in kept and place == "blobs/sha256":
                continue
            info = path.lstat()
            known.append((info.st_mtime, info.st_size, path))
    total, freed = sum(size for _, size, _ in known), 0
    for _, size, path in sorted(known):
        if total - freed <= size_bytes_max:
            break
        path.unlink(missing_ok=True)
        freed += size
    return freed


def used(store: Path, digest: str) -> None:
    """Note that an image's blobs are used now; blocks."""
    for name in blobs_of(store, digest):
        with contextlib.suppress(OSError):
            os.utime(store / "blobs" / "sha256" / name)


def clear_unfinished(store: Path, *, before: float) -> None:
    """Remove what was being written when its writer was killed. Blocks. *Units*: `before` in wall seconds.

    Call it while nothing is pulled. Layers from hosts (for other replicas too), clients' files and manifests come at any time: theirs go
    when nobody has written to them since `before`.
    """
    # What cannot be looked at or removed now is left for the next time: whoever calls has done its own work already.
    with contextlib.suppress(OSError):
        for path in (store / "partial").iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(PULLED) or path.lstat().st_mtime <= before:
                    path.unlink()


def blobs_of(store: Path, digest: str) -> set[str]:
    """The names of an image's blobs, its manifest's too; empty for an image that is not of this store."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        return set()
    try:
        manifest = json.loads((store / "blobs" / "sha256" / match[1]).read_bytes())
        parts = [manifest["config"], *manifest["layers"]]
        return {match[1], *(str(part["digest"]).removeprefix("sha256:") for part in parts)}
    except (OSError, ValueError, KeyError, TypeError):
        return {match[1]}
