"""The store of blobs that `carrier.py` fills, as far as control itself looks into it: to throw away what nothing needs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


def collect(store: Path, wanted: Iterable[str]) -> int:
    """Remove every blob that no wanted image has, and what killed runs left; answers how many bytes went.

    Call it while nothing is being pulled: a pull counts on blobs that it has found. *Idempotency*: a second time finds nothing.
    """
    kept: set[str] = set()
    for digest in wanted:
        kept |= _blobs_of(store, digest)
    freed = 0
    for place, keeps in (("blobs/sha256", kept), ("partial", frozenset[str]())):
        directory = store / place
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.name not in keeps:
                freed += path.lstat().st_size
                path.unlink(missing_ok=True)
    return freed


def trim(store: Path, *, size_bytes_max: int) -> int:
    """Remove the blobs that came first, and what killed runs left, until the rest fits; answers how many bytes went. Blocks.

    Call it while nothing is fetched or unpacked. *Idempotency*: a second time finds nothing.
    """
    known = []
    for place in ("partial", "quarantine", "blobs/sha256"):
        for path in (store / place).iterdir() if (store / place).is_dir() else ():
            info = path.lstat()
            known.append((info.st_mtime, info.st_size, path))
    total, freed = sum(size for _, size, _ in known), 0
    for _, size, path in sorted(known):
        if total - freed <= size_bytes_max:
            break
        path.unlink(missing_ok=True)
        freed += size
    return freed


def _blobs_of(store: Path, digest: str) -> set[str]:
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
