"""What operators may ask of control: alerts, the audit, events of the whole deployment, metrics. `records.py` answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from atoll.control.service import Caller, EventRecord, Page
from atoll.domain.operations import Act, Alert


@dataclass(frozen=True, slots=True)
class AuditQuery:
    """Which entries, None: all. `team` by name or id. `newest`: the last `limit` ones that match, instead of the first after `after`."""

    action: str | None = None
    subject: str | None = None
    team: str | None = None
    client_id: str | None = None
    result: str | None = None
    after: int = 0
    limit: int = 100
    newest: bool = False


@dataclass(frozen=True, slots=True)
class EventQuery:
    """Which events, None: all; as AuditQuery."""

    type: str | None = None
    sandbox_id: str | None = None
    host_id: str | None = None
    team: str | None = None
    request_id: str | None = None
    after: int = 0
    limit: int = 100
    newest: bool = False


@dataclass(frozen=True, slots=True)
class AlertQuery:
    """Which alerts, newest first."""

    state: Literal["open", "cleared", "all"] = "open"
    severity: str | None = None
    kind: str | None = None
    limit: int = 100
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One entry of the audit; `result` is `done` or the code with which it was refused. *Units*: wall seconds."""

    seq: int
    at: float
    action: str
    subject: str
    result: str
    team_id: str | None
    client_id: str | None
    address: str | None
    request_id: str | None
    data: Mapping[str, str | int | float | None]


@dataclass(frozen=True, slots=True)
class AlertRecord:
    """One alert. `id` is None for one that could not be kept, because the database itself is what is wrong. *Units*: wall seconds."""

    id: str | None
    kind: Alert
    subject: str
    severity: str
    detail: str
    raised_at: float
    seen_at: float
    cleared_at: float | None


@dataclass(frozen=True, slots=True)
class CollectedArtifacts:
    """What went, or would go. *Units*: bytes."""

    keys: tuple[str, ...]
    size: int
    busy: bool = False
    """Images are being made at this moment, so nothing was looked at."""


class Operations(Protocol):
    """All for operators only. *Errors*: FORBIDDEN; Unavailable of the store."""

    async def alerts(self, caller: Caller, query: AlertQuery) -> Page[AlertRecord]: ...

    async def audit(self, caller: Caller, query: AuditQuery) -> Sequence[AuditRecord]: ...

    async def events(self, caller: Caller, query: EventQuery) -> Sequence[EventRecord]: ...

    def follow(self, caller: Caller, query: EventQuery) -> AsyncIterator[Sequence[EventRecord]]:
        """Events after `query.after` as they come, in batches; an empty one says that the stream lives.

        *Errors*: FORBIDDEN and RATE_LIMITED (too many streams), at the call.
        """
        ...

    async def metrics(self, caller: Caller) -> bytes:
        """Everything that this process counts, in Prometheus' text format."""
        ...

    async def collect(self, caller: Caller, *, dry_run: bool) -> CollectedArtifacts:
        """Remove from the artifact store what nothing on record needs. *Errors*: those of the store; NOT_SUPPORTED where there is none."""
        ...

    async def did(self, act: Act) -> None:
        """Keep what has no commit of its own, in the place of which it is written."""
        ...

    async def refused(self, act: Act) -> None:
        """Keep that somebody was refused. Beyond some a second they are not kept, so that nobody can fill the database by asking."""
        ...
