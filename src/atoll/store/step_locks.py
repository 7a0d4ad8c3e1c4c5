"""Who takes which step of a build: one build at a time, whichever control process runs it.

Theory of operation. A row names a build, and the process that ran it when it began the step. It counts for as long as that process is heard
of as the owner of that build, by the build's own beat: a build that has ended, was taken over, or whose owner is silent holds nothing.
Whoever takes a step over raises its fence, and what a step has made is kept only by the holder of the fence that it was given: a holder that
was silent and comes back keeps nothing. Rows of holders that are gone are harmless, and swept.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from atoll.domain.building import State
from atoll.store import builds
from atoll.store.engine import Stale
from atoll.store.tables import TEMPLATE_BUILDS as BUILDS
from atoll.store.tables import TEMPLATE_STEP_LOCKS as LOCKS


@dataclass(frozen=True, slots=True)
class Held:
    """A step that is being taken."""

    team_id: str
    key: str
    fence: int
    build_id: str
    owner: str


def take(conn: sa.Connection, team_id: str, key: str, *, build_id: str, owner: str, silent_before: float) -> Held | None:
    """Have a step, unless a build that is heard of since `silent_before` (wall seconds) takes it.

    *Errors*: Stale when another process takes it in the same moment: look again.
    """
    row = conn.execute(sa.select(LOCKS).where(LOCKS.c.team_id == team_id, LOCKS.c.key == key)).mappings().first()
    if row is None:
        held = Held(team_id, key, 1, build_id, owner)
        try:
            conn.execute(sa.insert(LOCKS), {name: getattr(held, name) for name in Held.__slots__})
        except sa.exc.IntegrityError as error:
            raise Stale(f"step {key} of {team_id}") from error
        return held
    its = sa.select(BUILDS.c.id).where(
        BUILDS.c.id == row["build_id"],
        BUILDS.c.owner == row["owner"],
        BUILDS.c.state == State.BUILDING.value,
        BUILDS.c.beat_at > silent_before,
    )
    if (row["build_id"], row["owner"]) != (build_id, owner) and conn.execute(its).first() is not None:
        return None
    held = Held(team_id, key, row["fence"] + 1, build_id, owner)
    changed = {"fence": held.fence, "build_id": build_id, "owner": owner}
    if conn.execute(sa.update(LOCKS).where(*_its(Held(**row))).values(changed)).rowcount != 1:
        raise Stale(f"step {key} of {team_id}")
    return held


def keep(conn: sa.Connection, held: Held, image: str, *, now: float) -> bool:
    """Remember what a step has made, and let go of it; False, and nothing is kept, when it is another's meanwhile."""
    if not release(conn, held):
        return False
    builds.keep_step(conn, held.team_id, held.key, image, now=now)
    return True


def release(conn: sa.Connection, held: Held) -> bool:
    """Let go of a step. *Idempotency*: a second time, or when it is another's, nothing changes, and it says so."""
    return conn.execute(sa.delete(LOCKS).where(*_its(held))).rowcount == 1


def sweep(conn: sa.Connection) -> int:
    """Remove what builds have left that are not being built any more; how many."""
    going = sa.select(BUILDS.c.id).where(BUILDS.c.state == State.BUILDING.value)
    return conn.execute(sa.delete(LOCKS).where(LOCKS.c.build_id.not_in(going))).rowcount


def _its(held: Held) -> tuple[sa.ColumnElement[bool], ...]:
    return tuple(LOCKS.c[name] == getattr(held, name) for name in Held.__slots__)
