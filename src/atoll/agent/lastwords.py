"""Last words: the end of the consoles of guests that failed or ended by themselves, kept a while after everything else of them is gone.

They are the tenant's, so: root's eyes only, few, and small. What was released as asked for leaves nothing here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from atoll.agent.record import EndedBy, Record

KEPT: Final = 64
BYTES: Final = 64 * 1024


def worth_keeping(record: Record) -> bool:
    """Whether somebody will want to know how it ended."""
    return record.ended_by == EndedBy.EXIT or record.failed_revision > 0 or (record.blueprint is not None and record.applied_revision == 0)


class LastWords:
    """A directory with one file a placement, the newest KEPT."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, placement_id: str, console: bytes) -> None:
        """Keep the end of a console. A disk that refuses costs nothing but the words."""
        if not console or "/" in placement_id:
            return
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            path = self._directory / f"{placement_id}.log"
            path.touch(mode=0o600)
            path.write_bytes(console[-BYTES:])
            self._prune()

    def read(self, placement_id: str) -> bytes | None:
        """What was kept of this placement; None when nothing was."""
        if "/" in placement_id:
            return None
        try:
            return (self._directory / f"{placement_id}.log").read_bytes()
        except OSError:
            return None

    def _prune(self) -> None:
        files = sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in files[KEPT:]:
            path.unlink(missing_ok=True)
