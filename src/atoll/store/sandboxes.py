"""Looking at sandboxes: lists, counts, deadlines, history, retention. Changes are in `facts.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.ids import Prefix
from atoll.domain.placement import Placement
from atoll.domain.sandbox import LIVING, STARTING, TERMINAL, Sandbox, State
from atoll.planning.pausing import AT_REST
from atoll.store import rows, tallies
from atoll.store.prepared import Prepared
from atoll.store.tables import EVENTS, HOLDS, PLACEMENTS, SANDBOXES

VISIBLE: Final = tuple(sorted(s.value for s in LIVING - STARTING - {State.RELEASING}))
LIVING_STATES: Final = tuple(sorted(s.value for s in LIVING))
_TERMINAL: Final = tuple(sorted(s.value for s in TERMINAL))
_started_at: Final = sa.func.coalesce(SANDBOXES.c.started_at, SANDBOXES.c.created_at)

# Made once: a create runs all of them, and to make one costs twice as much as to run it.
_ONE: Final = Prepared(sa.select(SANDBOXES).where(SANDBOXES.c.id == sa.bindparam("of_id")), unread=["spec"])
_DUE: Final = (
    sa.select(SANDBOXES.c.id)
    .where(SANDBOXES.c.deadline_at <= sa.bindparam("now"))
    .order_by(SANDBOXES.c.deadline_at)
    .limit(sa.bindparam("most"))
)
_ITS: Final = "its_"
"""Before the names of a placement's columns where they stand beside its sandbox's."""
_REACHABLE: Final = (
    sa.select(SANDBOXES, *(column.label(_ITS + column.name) for column in PLACEMENTS.c))
    .outerjoin(PLACEMENTS, PLACEMENTS.c.id == SANDBOXES.c.placement_id)
    .where(
        SANDBOXES.c.state.in_([State.READY.value, *(state.value for state in AT_REST)]),
        sa.or_(HOLDS, sa.and_(SANDBOXES.c.placement_id.is_(None), SANDBOXES.c.moment.is_not(None))),
    )
)
_NEXT_DEADLINE: Final = sa.select(sa.func.min(SANDBOXES.c.deadline_at))


@dataclass(frozen=True, slots=True)
class Filter:
    """Which sandboxes. `before`/`after` are the (time, id) of the last entry of the page before."""

    team_id: str | None
    """None: of every team."""
    states: Sequence[str]
    metadata: Mapping[str, str] | None = None
    template_id: str | None = None
    started_after: float | None = None
    ascending: bool = False
    limit: int = 100
    after: tuple[float, str] | None = None


def find(conn: sa.Connection, wanted: Filter) -> Sequence[Sandbox]:
    """At most `limit` + 1 sandboxes, ordered by start (else creation) time and id: one more than asked says that a page follows."""
    at = _started_at
    query = sa.select(SANDBOXES).where(*_matching(wanted, conn.dialect.name), SANDBOXES.c.state.in_(wanted.states))
    if wanted.after is not None:
        last_at, last_id = wanted.after
        beyond = at > last_at if wanted.ascending else at < last_at
        same = SANDBOXES.c.id > last_id if wanted.ascending else SANDBOXES.c.id < last_id
        query = query.where(sa.or_(beyond, sa.and_(at == last_at, same)))
    order = (at.asc(), SANDBOXES.c.id.asc()) if wanted.ascending else (at.desc(), SANDBOXES.c.id.desc())
    found = conn.execute(query.order_by(*order).limit(wanted.limit + 1))
    return [rows.sandbox(row) for row in found.mappings()]


def _matching(wanted: Filter, dialect: str) -> Iterator[sa.ColumnElement[bool]]:
    """What a sandbox must be like, whatever its state. Those of builds are in no team's list."""
    if wanted.team_id is not None:
        yield SANDBOXES.c.team_id == wanted.team_id
        yield sa.not_(SANDBOXES.c.client_id.startswith(Prefix.BUILD, autoescape=True))
    if wanted.started_after is not None:
        yield _started_at >= wanted.started_after
    if wanted.template_id is not None:
        yield SANDBOXES.c.spec["template_id"].as_string() == wanted.template_id
    for key, value in (wanted.metadata or {}).items():
        yield _has(key, value, dialect)


def _has(key: str, value: str, dialect: str) -> sa.ColumnElement[bool]:
    # Compared as values: in a JSON path, a quote or a backslash of a client's key would be syntax.
    each = sa.func.json_each if dialect == "sqlite" else sa.func.json_each_text
    pairs = each(SANDBOXES.c.metadata).table_valued("key", "value")
    return sa.exists(sa.select(sa.literal(1)).select_from(pairs).where(pairs.c.key == key, pairs.c.value == value))


def is_hidden(sandbox: Sandbox) -> bool:
    """Whether a sandbox serves a build: only that sees it."""
    return sandbox.client_id.startswith(Prefix.BUILD)


def living_of(conn: sa.Connection, client_id: str) -> Sequence[str]:
    """Ids of a client's sandboxes that have not ended."""
    query = sa.select(SANDBOXES.c.id).where(SANDBOXES.c.client_id == client_id, SANDBOXES.c.state.in_(LIVING_STATES))
    return list(conn.execute(query).scalars())


def get(conn: sa.Connection, sandbox_id: str) -> Sandbox | None:
    """One sandbox, whoever's."""
    row = _ONE.first(conn, {"of_id": sandbox_id})
    return rows.sandbox(row) if row else None


def some(conn: sa.Connection, sandbox_ids: Sequence[str]) -> Sequence[Sandbox]:
    """Those that there are, whoever's, in the order of their ids as given."""
    found = conn.execute(sa.select(SANDBOXES).where(SANDBOXES.c.id.in_(sandbox_ids))).mappings() if sandbox_ids else ()
    known = {row["id"]: rows.sandbox(row) for row in found}
    return [known[one] for one in sandbox_ids if one in known]


def by_request(conn: sa.Connection, team_id: str, request_id: str) -> Sandbox | None:
    """The sandbox that this team's request made."""
    row = conn.execute(sa.select(SANDBOXES).where(SANDBOXES.c.team_id == team_id, SANDBOXES.c.request_id == request_id)).mappings().first()
    return rows.sandbox(row) if row else None


def forget_request(conn: sa.Connection, sandbox_id: str) -> None:
    """Let the request id be used again; the sandbox itself goes its way."""
    conn.execute(sa.update(SANDBOXES).where(SANDBOXES.c.id == sandbox_id).values(request_id=None, request_digest=None))


def running(conn: sa.Connection, wanted: Filter) -> int:
    """How many that match are ready; states, page and order of the filter don't matter."""
    return conn.execute(
        sa.select(sa.func.count())
        .select_from(SANDBOXES)
        .where(*_matching(wanted, conn.dialect.name), SANDBOXES.c.state == State.READY.value)
    ).scalar_one()


def due(conn: sa.Connection, *, now: float, limit: int = 100) -> Sequence[str]:
    """Sandboxes whose deadline has come, the longest due first.

    No filter by state: settled and ended ones have no deadline, and with one SQLite would read all living ones by their state.
    """
    return [row[0] for row in conn.execute(_DUE, {"now": now, "most": limit})]


def next_deadline(conn: sa.Connection) -> float | None:
    """When the next deadline comes; None when there is none."""
    first: float | None = conn.execute(_NEXT_DEADLINE).scalar_one()
    return first


def unplaced(conn: sa.Connection) -> Sequence[str]:
    """Sandboxes that wait for a host."""
    found = conn.execute(
        sa.select(SANDBOXES.c.id)
        .where(SANDBOXES.c.state.in_((State.PENDING.value, State.RESERVING.value)))
        .order_by(SANDBOXES.c.created_at)
    )
    return [row[0] for row in found]


def reachable(conn: sa.Connection) -> Sequence[tuple[Sandbox, Placement | None]]:
    """Every sandbox that traffic can reach or wake, with its placement; None: it rests in the artifact store alone."""
    return [(rows.sandbox(row), _its_placement(row)) for row in conn.execute(_REACHABLE).mappings()]


def _its_placement(row: sa.RowMapping) -> Placement | None:
    if row[f"{_ITS}id"] is None:
        return None
    return rows.placement({column.name: row[_ITS + column.name] for column in PLACEMENTS.c})


def events_of(conn: sa.Connection, sandbox: Sandbox, *, after: int, limit: int) -> Sequence[sa.RowMapping]:
    """A sandbox's history after `after`, oldest first. What came before it was its team's is not of it."""
    mine = EVENTS.c.sandbox_id == sandbox.id, EVENTS.c.team_id == sandbox.team_id, EVENTS.c.seq > after
    found = conn.execute(sa.select(EVENTS).where(*mine).order_by(EVENTS.c.seq).limit(limit))
    return list(found.mappings())


def oldest_ended(conn: sa.Connection) -> float | None:
    """When the one ended that ended first of those on record; None when there is none."""
    firsts = [
        conn.execute(sa.select(sa.func.min(SANDBOXES.c.released_at)).where(SANDBOXES.c.state == state)).scalar_one() for state in _TERMINAL
    ]
    return min((at for at in firsts if at is not None), default=None)


def prune(conn: sa.Connection, *, released_before: float, limit: int = 500) -> int:
    """Forget sandboxes that ended long ago, with placements and history; how many. Replicas that do it at once share them."""
    gone = [
        tuple(row)
        for row in conn.execute(
            sa.select(SANDBOXES.c.id, SANDBOXES.c.team_id, SANDBOXES.c.client_id)
            .where(SANDBOXES.c.state.in_(_TERMINAL), SANDBOXES.c.released_at < released_before)
            .order_by(SANDBOXES.c.released_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
    ]
    ids = [sandbox_id for sandbox_id, _, _ in gone]
    if ids:
        conn.execute(sa.delete(EVENTS).where(EVENTS.c.sandbox_id.in_(ids)))
        conn.execute(sa.delete(PLACEMENTS).where(PLACEMENTS.c.sandbox_id.in_(ids)))
        conn.execute(sa.delete(SANDBOXES).where(SANDBOXES.c.id.in_(ids)))
        tallies.forgotten(conn, gone)
    return len(ids)
