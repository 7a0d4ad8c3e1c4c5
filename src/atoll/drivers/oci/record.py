"""The record of a placement: the file that says what a directory below `sandboxes/` is for.

Written before anything else of a placement is made, renamed into place, and replaced when the placement gets another slot. It is a hint for cleaning
up and for finding the guest's address; whether something runs is read from the machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = "placement.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One placement's record."""

    install_id: str
    host_id: str
    placement_id: str
    sandbox_id: str
    generation: int
    runtime: str
    slot: int
    address: str
    image: str = ""
    """Digest of what it stands on; unknown in records of before."""


def write(directory: Path, record: Record) -> None:
    """Have this record in the directory, whole or not at all."""
    temporary = directory / f".{FILE}"
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(directory / FILE)


def read(directory: Path) -> Record | None:
    """The record, or None when there is none that can be read: then the directory's name is all that is known."""
    try:
        content: dict[str, Any] = json.loads((directory / FILE).read_text())
        return Record(**{name: content[name] for name in Record.__slots__ if name in content})
    except (OSError, ValueError, TypeError):
        return None
