"""The audit, alerts, and events of the whole deployment: written beside what they tell of, read in pages, forgotten by age."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code
from atoll.domain.operations import Act, Raised
from atoll.domain.sandbox import TERMINAL, Condition, State
from atoll.planning.alerting import RefusedImage, Troubled
from atoll.store.engine import Stale
from atoll.store.prepared import Prepared
from atoll.store.tables import ALERTS, AUDIT, ENROLLMENTS, EVENTS, HOST_EPOCHS, SANDBOXES

_ACT: Final = Prepared(sa.insert(AUDIT))
_EVENT: Final = sa.insert(EVENTS)
_REFUSALS: Final = (Code.IMAGE_UNTRUSTED.value, Code.IMAGE_CORRUPT.value)
_UNREST: Final = (State.PENDING.value, State.RESERVING.value, State.RELEASING.value)
_TERMINAL: Final = tuple(sorted(state.value for state in TERMINAL))
NO_SANDBOX: Final = ""
"""In place of a sandbox and its team, in events that are no sandbox's."""
TROUBLED_MAX: Final = 2000
"""Sandboxes that one look counts; what is beyond them is the same trouble."""


# The audit.


def audit(conn: sa.Connection, act: Act, *, at: float) -> None:
    """Keep who did what, in the commit that does it."""
    actor = act.actor
    _ACT.run(
        conn,
        {
            "at": at,
            "action": act.action.value,
            "subject": act.subject[:256],
            "result": act.result,
            "team_id": actor.team_id,
            "client_id": actor.client_id,
            "address": actor.address,
            "request_id": actor.request_id,
            "data": dict(act.data),
        },
    )


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries; None: all."""

    action: str | None = None
    subject: str | None = None
    team_id: str | None = None
    client_id: str | None = None
    result: str | None = None


def audited(conn: sa.Connection, wanted: AuditFilter, *, after: int, limit: int, newest: bool = False) -> Sequence[sa.RowMapping]:
    """Entries after `after`, oldest first; with `newest`, the last ones instead of the first."""
    return _page(conn, AUDIT, asdict(wanted), after=after, limit=limit, newest=newest)


def _page(
    conn: sa.Connection, table: sa.Table, wanted: Mapping[str, str | None], *, after: int, limit: int, newest: bool
) -> Sequence[sa.RowMapping]:
    """Rows after `after` by their `seq` whose columns have what is `wanted` of them; None: anything."""
    seq = table.c.seq
    same = (table.c[name] == value for name, value in wanted.items() if value is not None)
    query = sa.select(table).where(seq > after, *same).order_by(seq.desc() if newest else seq.asc()).limit(limit)
    found = list(conn.execute(query).mappings())
    return found[::-1] if newest else found


# Events.


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events; None: all."""

    type: str | None = None
    sandbox_id: str | None = None
    host_id: str | None = None
    team_id: str | None = None
    request_id: str | None = None


def events(conn: sa.Connection, wanted: EventFilter, *, after: int, limit: int, newest: bool = False) -> Sequence[sa.RowMapping]:
    """Events of the deployment after `after`, oldest first; with `newest`, the last ones instead of the first."""
    return _page(conn, EVENTS, asdict(wanted), after=after, limit=limit, newest=newest)


def last_seq(conn: sa.Connection) -> int:
    """Of the newest event; 0 when there is none."""
    found: int = conn.execute(sa.select(sa.func.coalesce(sa.func.max(EVENTS.c.seq), 0))).scalar_one()
    return found


@dataclass(frozen=True, slots=True)
class Told:
    """An event that is no sandbox's: of a host, or of the deployment."""

    type: str
    state: str
    host_id: str | None = None
    reason: str | None = None
    request_id: str | None = None
    data: Mapping[str, str | int | float | None] = field(default_factory=dict)


def record(conn: sa.Connection, told: Told, *, event_id: str, at: float) -> None:
    """Write it, in the commit of what it tells of."""
    conn.execute(
        _EVENT,
        {
            "id": event_id,
            "at": at,
            "type": told.type,
            "sandbox_id": NO_SANDBOX,
            "team_id": NO_SANDBOX,
            "generation": 0,
            "state": told.state,
            "reason": told.reason,
            "data": dict(told.data),
            "host_id": told.host_id,
            "placement_id": None,
            "command_id": None,
            "request_id": told.request_id,
        },
    )


# Alerts.


@dataclass(frozen=True, slots=True)
class AlertRow:
    """An alert on record. *Units*: wall seconds."""

    id: str
    kind: str
    subject: str
    severity: str
    detail: str
    raised_at: float
    seen_at: float
    cleared_at: float | None = None


def open_alerts(conn: sa.Connection) -> Sequence[AlertRow]:
    """Every alert that is not cleared, the worst kinds as they come."""
    found = conn.execute(sa.select(ALERTS).where(ALERTS.c.cleared_at.is_(None)).order_by(ALERTS.c.raised_at, ALERTS.c.id))
    return [AlertRow(**row) for row in found.mappings()]


def alerts(
    conn: sa.Connection, *, state: str, severity: str | None, kind: str | None, limit: int, before: tuple[float, str] | None
) -> Sequence[AlertRow]:
    """At most `limit` + 1 alerts, newest first; `before` is (raised_at, id) of the last one of the page before."""
    query = sa.select(ALERTS)
    if state != "all":
        query = query.where(ALERTS.c.cleared_at.is_(None) if state == "open" else ALERTS.c.cleared_at.is_not(None))
    if severity is not None:
        query = query.where(ALERTS.c.severity == severity)
    if kind is not None:
        query = query.where(ALERTS.c.kind == kind)
    if before is not None:
        at, alert_id = before
        query = query.where(sa.or_(ALERTS.c.raised_at < at, sa.and_(ALERTS.c.raised_at == at, ALERTS.c.id < alert_id)))
    found = conn.execute(query.order_by(ALERTS.c.raised_at.desc(), ALERTS.c.id.desc()).limit(limit + 1))
    return [AlertRow(**row) for row in found.mappings()]


def keep_alerts(
    conn: sa.Connection,
    wanted: Sequence[Raised],
    *,
    now: float,
    ids: Callable[[], str],
    spare: Callable[[AlertRow], bool] = lambda _: False,
) -> tuple[list[AlertRow], list[AlertRow]]:
    """Have exactly the alerts of `wanted` open, and say which were raised and which were cleared by that.

    `spare`: open ones that are somebody else's to clear. *Idempotency*: the same `wanted` again only says that they were seen.
    *Errors*: Stale when another replica has raised or cleared one of them meanwhile: each is told once.
    """
    known = {(row.kind, row.subject): row for row in open_alerts(conn)}
    raised: list[AlertRow] = []
    for one in wanted:
        row = known.pop((one.kind.value, one.subject), None)
        if row is None:
            made = AlertRow(ids(), one.kind.value, one.subject, one.severity.value, one.detail, now, now)
            try:
                conn.execute(sa.insert(ALERTS), {name: getattr(made, name) for name in AlertRow.__slots__})
            except sa.exc.IntegrityError as error:
                raise Stale(f"alert {one.kind} of {one.subject}") from error
            raised.append(made)
        else:
            changed = {"severity": one.severity.value, "detail": one.detail, "seen_at": now}
            conn.execute(sa.update(ALERTS).where(ALERTS.c.id == row.id).values(changed))
    cleared = [row for row in known.values() if not spare(row)]
    if cleared:
        ids_cleared = [row.id for row in cleared]
        done = conn.execute(sa.update(ALERTS).where(ALERTS.c.id.in_(ids_cleared), ALERTS.c.cleared_at.is_(None)).values(cleared_at=now))
        if done.rowcount != len(cleared):
            raise Stale("alerts")
    return raised, cleared


def troubled(conn: sa.Connection) -> Sequence[Troubled]:
    """Sandboxes that are on their way in or out: few, and found by their state's index."""
    found = conn.execute(
        sa.select(
            SANDBOXES.c.id,
            SANDBOXES.c.state,
            SANDBOXES.c.spec["class_name"].as_string().label("class_name"),
            SANDBOXES.c.host_id,
            SANDBOXES.c.conditions,
            SANDBOXES.c.release_requested_at,
            SANDBOXES.c.detail,
        )
        .where(SANDBOXES.c.state.in_(_UNREST))
        .limit(TROUBLED_MAX)
    )
    return [_troubled(row) for row in found.mappings()]


def blocked(conn: sa.Connection, host_ids: Sequence[str]) -> Sequence[Troubled]:
    """Sandboxes of these hosts that may not be replaced. Only asked about hosts that are lost or fenced."""
    if not host_ids:
        return []
    found = conn.execute(
        sa.select(
            SANDBOXES.c.id,
            SANDBOXES.c.state,
            SANDBOXES.c.spec["class_name"].as_string().label("class_name"),
            SANDBOXES.c.host_id,
            SANDBOXES.c.conditions,
            SANDBOXES.c.release_requested_at,
            SANDBOXES.c.detail,
        )
        .where(
            SANDBOXES.c.state.not_in((*_TERMINAL, *_UNREST)),
            SANDBOXES.c.host_id.in_(host_ids),
            sa.cast(SANDBOXES.c.conditions, sa.Text).contains(Condition.REPLACEMENT_BLOCKED.value),
        )
        .limit(TROUBLED_MAX)
    )
    return [_troubled(row) for row in found.mappings()]


def refused_images(conn: sa.Connection, *, since: float) -> Sequence[RefusedImage]:
    """Versions of templates that hosts refused since then, by sandboxes that failed by it; found by state and time of the end."""
    template_id, name = SANDBOXES.c.spec["template_id"].as_string(), SANDBOXES.c.spec["image_name"].as_string()
    found = conn.execute(
        sa.select(
            template_id.label("template_id"),
            name.label("name"),
            SANDBOXES.c.reason,
            sa.func.count().label("count"),
            sa.func.max(SANDBOXES.c.id).label("example"),
            sa.func.max(SANDBOXES.c.detail).label("detail"),
        )
        .where(SANDBOXES.c.state == State.FAILED.value, SANDBOXES.c.released_at >= since, SANDBOXES.c.reason.in_(_REFUSALS))
        .group_by(template_id, name, SANDBOXES.c.reason)
        .limit(TROUBLED_MAX)
    )
    return [RefusedImage(**row) for row in found.mappings()]


def _troubled(row: sa.RowMapping) -> Troubled:
    return Troubled(
        id=row["id"],
        state=State(row["state"]),
        class_name=row["class_name"],
        host_id=row["host_id"],
        conditions=frozenset(Condition(name) for name in row["conditions"]),
        release_requested_at=row["release_requested_at"],
        detail=row["detail"],
    )


# Counts, for metrics.


def census(conn: sa.Connection) -> Sequence[tuple[str, str, int]]:
    """How many living sandboxes there are of each (state, class)."""
    class_name = SANDBOXES.c.spec["class_name"].as_string()
    found = conn.execute(
        sa.select(SANDBOXES.c.state, class_name, sa.func.count())
        .where(SANDBOXES.c.state.not_in(_TERMINAL))
        .group_by(SANDBOXES.c.state, class_name)
    )
    return [(str(state), str(name), int(count)) for state, name, count in found]


# Retention.


def prune(
    conn: sa.Connection, *, audit_before: float, alerts_before: float, events_before: float, tokens_before: float, limit: int = 500
) -> int:
    """Forget what is older; how many.

    Entries of the audit; alerts that were cleared; events that are no sandbox's, agents' runs that have ended (their messages are refused
    for their lease, too, by then) and tokens that have expired.
    """
    entries = sa.select(AUDIT.c.seq).order_by(AUDIT.c.seq).limit(limit).subquery()
    cleared = sa.select(ALERTS.c.id).where(ALERTS.c.cleared_at < alerts_before).limit(limit).subquery()
    told = sa.select(EVENTS.c.seq).where(EVENTS.c.sandbox_id == NO_SANDBOX, EVENTS.c.at < events_before).limit(limit).subquery()
    expired = sa.select(ENROLLMENTS.c.id).where(ENROLLMENTS.c.expires_at < tokens_before).limit(limit).subquery()
    return sum(
        conn.execute(statement).rowcount
        for statement in (
            sa.delete(AUDIT).where(AUDIT.c.seq.in_(sa.select(entries.c.seq)), AUDIT.c.at < audit_before),
            sa.delete(ALERTS).where(ALERTS.c.id.in_(sa.select(cleared.c.id))),
            sa.delete(EVENTS).where(EVENTS.c.seq.in_(sa.select(told.c.seq))),
            sa.delete(HOST_EPOCHS).where(HOST_EPOCHS.c.ended_at < events_before),
            sa.delete(ENROLLMENTS).where(ENROLLMENTS.c.id.in_(sa.select(expired.c.id))),
        )
    )


@dataclass(frozen=True, slots=True)
class Oldest:
    """When the oldest came of each that `prune` forgets. *Units*: wall seconds."""

    entry: float | None
    cleared: float | None
    event: float | None
    epoch: float | None
    token: float | None


def oldest(conn: sa.Connection) -> Oldest:
    """What there is."""
    events_alone = sa.select(EVENTS.c.at).where(EVENTS.c.sandbox_id == NO_SANDBOX).order_by(EVENTS.c.seq).limit(1)
    return Oldest(
        entry=conn.execute(sa.select(AUDIT.c.at).order_by(AUDIT.c.seq).limit(1)).scalar_one_or_none(),
        cleared=conn.execute(sa.select(sa.func.min(ALERTS.c.cleared_at))).scalar_one(),
        event=conn.execute(events_alone).scalar_one_or_none(),
        epoch=conn.execute(sa.select(sa.func.min(HOST_EPOCHS.c.ended_at))).scalar_one(),
        token=conn.execute(sa.select(sa.func.min(ENROLLMENTS.c.expires_at))).scalar_one(),
    )
