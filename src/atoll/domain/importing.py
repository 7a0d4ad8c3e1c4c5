"""Import: an image that becomes a template, as an operation that goes on without its client.

Theory of operation. Control writes every field. An import begins RUNNING in the same commit that lets it begin, and ends once: READY
together with the template's new build, or FAILED with a stable code. A control process that starts finds no running imports of its own:
what an earlier process left RUNNING it ends as IMPORT_INTERRUPTED (what was fetched stays in the store, so a new import goes on there).
Credentials are never part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from atoll.base.ids import TeamId, TemplateId


class State(StrEnum):
    """Where an import is."""

    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


class Event(StrEnum):
    """What moves it."""

    DONE = "done"
    BROKE = "broke"


MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.RUNNING, Event.DONE): State.READY,
    (State.RUNNING, Event.BROKE): State.FAILED,
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import. *Units*: wall seconds."""

    id: str
    team_id: TeamId
    name: str
    """Of the template."""
    source: str
    state: State
    created_at: float
    log: tuple[str, ...] = ()
    code: str | None = None
    message: str | None = None
    template_id: TemplateId | None = None
    image: str | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What a client asks for. *Units*: millicores, MiB. None: as ready-made templates have it."""

    name: str
    source: str
    """`registry:REF` or `archive:sha256:HEX[:TAG]` (an archive that the team has uploaded)."""
    cpu_millis: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    start_command: str | None = None
    public: bool = False
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    """`username` and `password`, or `token`; kept in memory only."""
