"""How many sandboxes live and are on record, of each client, of each team and of the deployment: what admission counts.

Theory of operation. A tally is raised in the commit that makes a sandbox, lowered in the one that ends it and in the one that forgets it;
so it is what a count of the rows would give, at a price that does not grow with them. Each scope's tally lies in a few slots, by the id of
the sandbox, so that on a shared database creates do not wait for each other's commits. Far from every limit nobody waits: more transactions
than MARGIN are never open at once, so what they do not see of each other cannot matter. Near one, a create locks every slot of the scopes
and counts again; those after it wait. The order is always deployment, team, client, then the slot's number.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import sqlalchemy as sa

from atoll.domain.sandbox import TERMINAL, Sandbox
from atoll.domain.warmth import OWN_TEAM
from atoll.planning import admission
from atoll.planning.admission import Limits, Usage
from atoll.store.prepared import Prepared
from atoll.store.tables import SANDBOXES, TALLIES

DEPLOYMENT: Final = "deployment"
SLOTS: Final = 8
MARGIN: Final = 512

_COLUMNS: Final = ["scope", "slot", "place", "living", "records"]
_TERMINAL: Final = tuple(sorted(state.value for state in TERMINAL))
_SUMS: Final = Prepared(
    sa.select(TALLIES.c.scope, sa.func.sum(TALLIES.c.living).label("living"), sa.func.sum(TALLIES.c.records).label("records"))
    .where(sa.or_(TALLIES.c.scope == sa.bindparam("one"), TALLIES.c.scope == sa.bindparam("two"), TALLIES.c.scope == sa.bindparam("three")))
    .group_by(TALLIES.c.scope)
)
_LOCKED: Final = (
    sa.select(TALLIES.c.scope)
    .where(TALLIES.c.scope.in_(sa.bindparam("scopes", expanding=True)))
    .order_by(TALLIES.c.place, TALLIES.c.scope, TALLIES.c.slot)
    .with_for_update()
)
# Both databases read the same words here, and no dialect's construct is one for both.
_ADDING: Final = (
    "INSERT INTO tallies (scope, slot, place, living, records) VALUES {} "
    "ON CONFLICT (scope, slot) DO UPDATE SET living = tallies.living + excluded.living, records = tallies.records + excluded.records"
)
_ADDED: Final = Prepared(sa.text(_ADDING.format("(:scope, :slot, :place, :living, :records)")))
"""Also what is lowered: a sandbox that was counted by `recount` is in a slot that its end does not know, and only the sum has a meaning."""

_ADDED_FOR_ONE: Final = Prepared(
    sa.text(
        _ADDING.format("(:one, :slot, 0, :living, :records), (:two, :slot, 1, :living, :records), (:three, :slot, 2, :living, :records)")
    )
)
"""The same for one sandbox, in all of its scopes: every create and every end runs it."""


def _counts(team_id: str) -> bool:
    """Whether a team's sandboxes are counted. What is made ahead is the operator's own choice, and counts from when somebody has claimed it."""
    return team_id != OWN_TEAM


def admit(conn: sa.Connection, *, team_id: str, client_id: str, limits: Limits) -> None:
    """Whether one more sandbox may be made; call it in the transaction that makes it, and before. *Errors*: as planning.admission.admit."""
    scopes = _scopes(team_id, client_id)
    usage = _usage(conn, scopes)
    if conn.dialect.name != "sqlite" and admission.near(usage, limits, margin=MARGIN):
        _complete(conn, scopes)
        conn.execute(_LOCKED, {"scopes": scopes}).all()
        usage = _usage(conn, scopes)
    admission.admit(usage, limits)


def usage(conn: sa.Connection, *, team_id: str, client_id: str) -> Usage:
    """What is counted for a client."""
    return _usage(conn, _scopes(team_id, client_id))


def made(conn: sa.Connection, sandbox: Sandbox) -> None:
    """A sandbox has come."""
    _add(conn, sandbox, living=int(sandbox.state not in TERMINAL), records=1)


def revived(conn: sa.Connection, sandbox: Sandbox) -> None:
    """One that had ended lives again: its record was brought back."""
    _add(conn, sandbox, living=1, records=0)


def ended(conn: sa.Connection, sandbox: Sandbox) -> None:
    """A sandbox lives no more; its record stays."""
    _add(conn, sandbox, living=-1, records=0)


def forgotten(conn: sa.Connection, gone: Iterable[tuple[str, str, str]]) -> None:
    """Records of ended sandboxes are gone: (sandbox, team, client) of each."""
    fewer: Counter[tuple[int, str, int]] = Counter()
    for sandbox_id, team_id, client_id in gone:
        if not _counts(team_id):
            continue
        for place, scope in enumerate(_scopes(team_id, client_id)):
            fewer[place, scope, _slot(sandbox_id)] += 1
    _lower(conn, fewer)


def recount(conn: sa.Connection) -> None:
    """Count the rows themselves, and let the tallies say that. Only while nobody else writes."""
    conn.execute(sa.delete(TALLIES))
    living = sa.func.coalesce(sa.func.sum(sa.case((SANDBOXES.c.state.in_(_TERMINAL), 0), else_=1)), 0)
    counted_ones = SANDBOXES.c.team_id != OWN_TEAM
    of_all = sa.select(sa.literal(DEPLOYMENT), sa.literal(0), sa.literal(0), living, sa.func.count(SANDBOXES.c.id)).where(counted_ones)
    conn.execute(sa.insert(TALLIES).from_select(_COLUMNS, of_all))
    for place, scope in ((1, SANDBOXES.c.team_id), (2, SANDBOXES.c.client_id)):
        counted = sa.select(scope, sa.literal(0), sa.literal(place), living, sa.func.count(SANDBOXES.c.id))
        counted = counted.where(counted_ones).group_by(scope)
        conn.execute(sa.insert(TALLIES).from_select(_COLUMNS, counted))


def _scopes(team_id: str, client_id: str) -> list[str]:
    return [DEPLOYMENT, team_id, client_id]


def _named(scopes: list[str]) -> dict[str, str]:
    return dict(zip(("one", "two", "three"), scopes, strict=True))


def _slot(sandbox_id: str) -> int:
    return zlib.crc32(sandbox_id.encode()) % SLOTS


def _usage(conn: sa.Connection, scopes: list[str]) -> Usage:
    sums = {row["scope"]: (int(row["living"]), int(row["records"])) for row in _SUMS.all(conn, _named(scopes))}
    deployment, team, client = (sums.get(scope, (0, 0)) for scope in scopes)
    return Usage(client[0], team[0], team[1], deployment[0], deployment[1])


def _complete(conn: sa.Connection, scopes: list[str]) -> None:
    """Every slot has a row: one that is not there cannot be locked, and two creates would both bring it."""
    rows = [{"scope": scope, "slot": slot, "place": place} for place, scope in enumerate(scopes) for slot in range(SLOTS)]
    conn.execute(
        sa.text("INSERT INTO tallies (scope, slot, place, living, records) VALUES (:scope, :slot, :place, 0, 0) ON CONFLICT DO NOTHING"),
        rows,
    )


def _add(conn: sa.Connection, sandbox: Sandbox, *, living: int, records: int) -> None:
    if not _counts(sandbox.team_id):
        return
    of_these = _named(_scopes(sandbox.team_id, sandbox.client_id))
    _ADDED_FOR_ONE.run(conn, {**of_these, "slot": _slot(sandbox.id), "living": living, "records": records})


def _lower(conn: sa.Connection, records: Mapping[tuple[int, str, int], int]) -> None:
    parameters = [
        {"scope": scope, "slot": slot, "place": place, "living": 0, "records": -fewer}
        for (place, scope, slot), fewer in sorted(records.items())
    ]
    if parameters:
        _ADDED.run_many(conn, parameters)
