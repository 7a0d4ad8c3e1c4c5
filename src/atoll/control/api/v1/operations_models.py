"""The objects of `/v1/operations`: alerts, the audit, events of the deployment. As `models.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from atoll.control.api.v1.models import Event, Incoming, Outgoing
from atoll.domain.operations import Action, Alert, Severity

SEQ_MAX = 2**63 - 1
Word = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]*$")]


class Asked(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class Paged(Asked):
    """What lists by `seq` share."""

    after: Annotated[int, Field(ge=0, le=SEQ_MAX, description="Only those with a larger `seq`.")] = 0
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    newest: Annotated[bool, Field(description="The last ones that match, instead of the first; oldest first in either case.")] = False


class EventsAsked(Paged):
    """Which events; left out: all."""

    type: Word | None = None
    sandbox: Annotated[Word | None, Field(description="Id of a sandbox.")] = None
    host: Annotated[Word | None, Field(description="Id of a host.")] = None
    team: Annotated[Word | None, Field(description="Name or id of a team.")] = None
    request: Annotated[Word | None, Field(description="Id of a client's request, as `X-Request-Id` told it.")] = None


class StreamAsked(Asked):
    """Which events; left out: all that come from now on."""

    after: Annotated[int | None, Field(ge=0, le=SEQ_MAX, description="Begin behind this `seq`; left out: with what comes next.")] = None
    type: Word | None = None
    sandbox: Word | None = None
    host: Word | None = None
    team: Word | None = None
    request: Word | None = None


class AuditAsked(Paged):
    """Which entries; left out: all."""

    action: Annotated[Action | None, Field(description="What was done.")] = None
    subject: Annotated[Word | None, Field(description="Id of what it was done to.")] = None
    team: Annotated[Word | None, Field(description="Name or id of the team whose key did it.")] = None
    client: Annotated[Word | None, Field(description="Id of the key that did it.")] = None
    result: Annotated[Word | None, Field(description="`done`, or the code of a refusal.")] = None


class AlertsAsked(Asked):
    """Which alerts."""

    state: Literal["open", "cleared", "all"] = "open"
    severity: Severity | None = None
    kind: Alert | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    cursor: Annotated[str | None, Field(max_length=512, description="`nextCursor` of the page before")] = None


class AlertView(Outgoing):
    """One alert. `runbook` says where to read what to do. `id` is null while the database does not take it."""

    id: str | None
    kind: Alert
    severity: Severity
    subject: str
    detail: str
    runbook: str
    raised_at: str
    seen_at: str
    cleared_at: str | None


class AlertPage(Outgoing):
    items: list[AlertView]
    next_cursor: str | None


class CollectAsked(Incoming):
    """How to collect."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"dryRun": True}]})

    dry_run: Annotated[bool, Field(description="Only say what would go")] = False


class CollectedView(Outgoing):
    """What went from the artifact store, or would go; `keys` are the first thousand. `busy`: images are being made now, and nothing was looked at."""

    count: int
    bytes: int
    keys: list[str]
    busy: bool


class AuditEntry(Outgoing):
    """Who did what, when, and with which result: `done`, or the code with which it was refused."""

    seq: int
    at: str
    action: Action
    subject: str
    result: str
    team_id: str | None
    client_id: str | None
    address: str | None
    request_id: str | None
    data: dict[str, str | int | float | None]


class AuditPage(Outgoing):
    """`nextAfter` is what to send as `after` for what comes later."""

    items: list[AuditEntry]
    next_after: int


class DeploymentEventPage(Outgoing):
    """`nextAfter` is what to send as `after` for what comes later."""

    items: list[Event]
    next_after: int
