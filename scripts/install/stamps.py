"""Stamps: small files that say from which input a result was made, so that a result is made again only when its input changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def digest_of_files(root: Path, files: Iterable[Path], *, extra: str = "") -> str:
    """SHA-256 over names (relative to root) and contents, in name order; `extra` is whatever else decides the result."""
    whole = hashlib.sha256(extra.encode())
    for path in sorted(files):
        whole.update(f"\0{path.relative_to(root)}\0".encode())
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def files_below(root: Path, *, wanted: Callable[[Path], bool]) -> list[Path]:
    """Every regular file below root for which `wanted` holds."""
    return [path for path in root.rglob("*") if path.is_file() and wanted(path)]


def is_current(stamp: Path, digest: str, *results: Path) -> bool:
    """True when the stamp names this digest and every result is there."""
    try:
        return stamp.read_text().strip() == digest and all(result.exists() for result in results)
    except FileNotFoundError:
        return False


def write(stamp: Path, digest: str) -> None:
    """Put the stamp down whole or not at all."""
    stamp.parent.mkdir(parents=True, exist_ok=True)
    unfinished = stamp.with_name(f".{stamp.name}.{os.getpid()}")
    unfinished.write_text(digest + "\n")
    unfinished.replace(stamp)
