"""What `atoll template push` remembers of ready-made images that it has packed: which layer each is, and in which repositories that is.

A file of the user's own, `~/.cache/atoll/pushed.json`. Nothing depends on it: what it does not know, or a registry has lost, is packed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

IMAGES_MAX: Final = 64
REPOSITORIES_MAX: Final = 16
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Remembered:
    """A packed layer. *Units*: bytes."""

    digest: str
    size: int
    tar_digest: str
    processor: str
    repositories: tuple[str, ...] = ()
    """`ADDRESS/NAME` of those that have been given it, newest first."""


def _place() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "atoll" / "pushed.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_place().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def recall(image: str) -> Remembered | None:
    """What an image (by its digest and age) was packed as."""
    try:
        said = _read()[image]
        found = Remembered(
            str(said["digest"]), int(said["size"]), str(said["tar_digest"]), str(said["processor"]), tuple(map(str, said["repositories"]))
        )
    except (KeyError, TypeError, ValueError):
        return None
    return found if _DIGEST.fullmatch(found.digest) and _DIGEST.fullmatch(found.tar_digest) else None


def remember(image: str, what: Remembered, repository: str) -> None:
    """It is in this repository, too. What cannot be kept is not: pushing goes on."""
    others = tuple(one for one in what.repositories if one != repository)
    kept = _read()
    kept.pop(image, None)
    kept[image] = {**asdict(what), "repositories": [repository, *others][:REPOSITORIES_MAX]}
    newest = dict(list(kept.items())[-IMAGES_MAX:])
    place = _place()
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as file:
            json.dump(newest, file)
        Path(file.name).replace(place)
