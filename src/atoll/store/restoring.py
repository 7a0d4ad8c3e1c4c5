"""Restoring: the rows of a store that was taken back to a backup, as its next life begins, and as hosts account for what they have.

Theory of operation. Rows of a backup are true as of its moment, and hosts have gone on since. `begin_anew` makes what is on record safe to
act upon before anybody has heard from a host: nothing that was under way is begun a second time, no host has a session. Then each host,
before it takes anything new, gives an account of each placement that it has (`take`): what is on record is caught up with, what is
not gets a record again where it fits. What a host does not have, although it is on record, comes to light by the ordinary way: it is asked for
by a command that may not begin it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Unavailable
from atoll.base.ids import Prefix, new_id
from atoll.base.records import replace
from atoll.domain import history
from atoll.domain.account import Account
from atoll.domain.placement import Holding
from atoll.domain.sandbox import TERMINAL, Condition, State
from atoll.domain.warmth import OWN_TEAM
from atoll.planning import restoring as planning
from atoll.planning.stimuli import Facts
from atoll.store import facts, hints, payloads, rows, tallies, warmth
from atoll.store.tables import DEPLOYMENT, ENROLLMENTS, EVENTS, HOSTS, PLACEMENTS, SANDBOXES, TEAMS

_INCARNATION: Final = sa.select(DEPLOYMENT.c.incarnation)
HEARD_WITHIN_S: Final = 600.0
"""How long after a restore a start that was under way may stay so: its host may have to be found first."""

NewId = Callable[[], str]


def first(*, chance: Callable[[int], bytes]) -> str:
    """The incarnation of a new store: a number that each restore raises, and some chance, so that two of one number differ."""
    return f"1.{chance(8).hex()}"


def after(*lives: str | None, chance: Callable[[int], bytes]) -> str:
    """The incarnation that follows these. One that was written without a number is the first."""
    return f"{max(map(_number, lives)) + 1}.{chance(8).hex()}"


def _number(incarnation: str | None) -> int:
    number, dot, _ = (incarnation or "").partition(".")
    return int(number) if dot and number.isdecimal() else 1


def begin_anew(conn: sa.Connection, *, incarnation: str, now: float, chance: Callable[[int], bytes]) -> None:
    """Make a store of this backup's rows that may be acted upon. *Units*: wall seconds. Once, before anybody uses it."""
    conn.execute(sa.update(DEPLOYMENT).values(incarnation=incarnation, restored_at=now))
    # No session: whichever agent run there is now has begun after the backup, or may have.
    conn.execute(sa.update(HOSTS).values(epoch=None, poll_seq=0, seen_at=None, revision=HOSTS.c.revision + 1))
    # A token that was unused then may have been used since.
    conn.execute(sa.update(ENROLLMENTS).where(ENROLLMENTS.c.used_at.is_(None)).values(expires_at=now))
    _end_unplaced(conn, now=now, chance=chance)
    # A start that was under way has come to its end meanwhile, one way or the other. Its host says which; nobody begins it again.
    starting = sa.update(SANDBOXES).where(SANDBOXES.c.state == State.PROVISIONING.value)
    conn.execute(starting.values(bootstrap_exposed=True, deadline_at=now + HEARD_WITHIN_S, revision=SANDBOXES.c.revision + 1))
    conn.execute(
        sa.update(PLACEMENTS).where(PLACEMENTS.c.holding == Holding.RESERVED.value).values(applied_revision=PLACEMENTS.c.desired_revision)
    )
    _keep_at_rest(conn)
    tallies.recount(conn)


def _keep_at_rest(conn: sa.Connection) -> None:
    """Suspended sandboxes, and those on their way back: since the backup one may have come to another host, which has to say so first."""
    at_rest = SANDBOXES.c.state.in_([State.SUSPENDED.value, State.RESUMING.value])
    suspended = sa.select(SANDBOXES.c.id, SANDBOXES.c.conditions).where(at_rest)
    for row in list(conn.execute(suspended)):
        conditions = sorted({*row.conditions, Condition.HOSTS_UNSETTLED.value})
        conn.execute(sa.update(SANDBOXES).where(SANDBOXES.c.id == row.id).values(conditions=conditions, revision=SANDBOXES.c.revision + 1))


def next_life(conn: sa.Connection, *, now: float, chance: Callable[[int], bytes]) -> str:
    """`begin_anew` for a database that was restored by other means; the new incarnation."""
    before: str | None = conn.execute(sa.select(DEPLOYMENT.c.incarnation)).scalar_one_or_none()
    incarnation = after(before, chance=chance)
    begin_anew(conn, incarnation=incarnation, now=now, chance=chance)
    return incarnation


def _end_unplaced(conn: sa.Connection, *, now: float, chance: Callable[[int], bytes]) -> None:
    """Sandboxes without a host: if they have got one since, its account brings them back; to place them again might make them twice."""
    waiting = sa.select(SANDBOXES).where(SANDBOXES.c.state.in_([State.PENDING.value, State.RESERVING.value]))
    for row in list(conn.execute(waiting).mappings()):
        sandbox = rows.sandbox(row)
        payloads.drop(conn, sandbox.id)
        conn.execute(
            sa.update(SANDBOXES)
            .where(SANDBOXES.c.id == sandbox.id)
            .values(
                state=State.FAILED.value,
                reason=str(Code.STORE_RESTORED),
                released_at=now,
                deadline_at=None,
                conditions=[],
                request_id=None,
                request_digest=None,
                revision=sandbox.revision + 1,
            )
        )
        conn.execute(
            sa.insert(EVENTS),
            {
                "id": new_id(Prefix.EVENT, chance),
                "at": now,
                "type": history.SANDBOX_FAILED,
                "sandbox_id": sandbox.id,
                "team_id": sandbox.team_id,
                "generation": sandbox.generation,
                "state": State.FAILED.value,
                "reason": str(Code.STORE_RESTORED),
                "data": {"reason": str(Code.STORE_RESTORED)},
            },
        )


def require_life(conn: sa.Connection, incarnation: str) -> None:
    """Before anything is written that rests on what a process remembers of this life of the store. *Errors*: as `outlived`."""
    now: str | None = conn.execute(_INCARNATION).scalar_one_or_none()
    if now != incarnation:
        raise outlived()


def outlived() -> Unavailable:
    """What a process says that has begun in an earlier life of the store, and goes on by mistake: what it remembers is of another world."""
    return Unavailable(Code.CONTROL_UNAVAILABLE, "the store was restored from a backup, and this control process is of the time before")


def restored_at(conn: sa.Connection) -> float | None:
    """When this store was last taken back to a backup. *Units*: wall seconds."""
    at: float | None = conn.execute(sa.select(DEPLOYMENT.c.restored_at)).scalar_one_or_none()
    return at


class Taken(Enum):
    """What became of an account."""

    KNOWN = auto()
    """It was on record, which has caught up with it."""
    RESTORED = auto()
    """It is on record again."""
    UNKNOWN = auto()
    """It fits nothing: the agent keeps and reports it."""


def take(conn: sa.Connection, account: Account, *, host_id: str, now: float, ids: NewId) -> tuple[Taken, facts.Committed | None]:
    """Take one account of a host into the records. *Idempotency*: given again, it is KNOWN.

    Lock order host, placement, sandbox. Capacity is not asked for: what is accounted for is there, and holds what it holds.
    """
    conn.execute(sa.select(HOSTS.c.id).where(HOSTS.c.id == host_id).with_for_update())
    at = restored_at(conn)
    on_record = conn.execute(sa.select(PLACEMENTS.c.host_id).where(PLACEMENTS.c.id == account.placement_id)).scalar_one_or_none()
    known = facts.load(conn, account.sandbox_id)
    if on_record is not None:
        return _caught_up(conn, account, known, now=now, ids=ids) if on_record == host_id else (Taken.UNKNOWN, None)
    if at is not None and account.team_id == OWN_TEAM:
        # Made ahead since the backup, maybe where nothing had ever been kept warm then.
        warmth.own_team(conn, now=now)
    if at is None or not _team_is_known(conn, account.team_id):
        return Taken.UNKNOWN, None
    found = planning.found(account, known, host_id=host_id, restored_at=at, now=now)
    if found is None:
        return Taken.UNKNOWN, None
    return Taken.RESTORED, _write(conn, found, known, now=now, ids=ids)


def unsettled(conn: sa.Connection) -> bool:
    """Whether this store was taken back to a backup, and a host may have what is on no record."""
    return restored_at(conn) is not None and bool(facts.unheard(conn))


def mark(conn: sa.Connection, left: planning.Left, *, now: float, ids: NewId) -> facts.Committed | None:
    """What the artifact store says of a sandbox, for the case that its host has it no more (`planning.restoring.marked`).

    Before any host was heard: of one that was, the account counts. *Idempotency*: a second time changes nothing.
    """
    known = facts.load(conn, left.sandbox_id)
    if known is None or (known.placement is not None and known.placement.host_id not in facts.unheard(conn)):
        return None
    outcome = planning.marked(known, left)
    return None if outcome is None else facts.commit(conn, known, outcome, now=now, ids=ids)


def _caught_up(
    conn: sa.Connection, account: Account, known: Facts | None, *, now: float, ids: NewId
) -> tuple[Taken, facts.Committed | None]:
    if known is None:
        return Taken.KNOWN, None
    if known.sandbox.claimable is not None and not _team_is_known(conn, account.team_id):
        # It has been somebody's whom nobody here knows: kept and reported, and given to nobody.
        facts.rewrite(conn, known.sandbox, replace(known.sandbox, claimable=None))
        return Taken.UNKNOWN, None
    outcome = planning.caught_up(known, account, now=now)
    if outcome is None:
        return Taken.KNOWN, None
    done = facts.commit(conn, known, outcome, now=now, ids=ids)
    if done.sandbox.team_id != known.sandbox.team_id:
        tallies.made(conn, done.sandbox)
    return Taken.KNOWN, done


def _team_is_known(conn: sa.Connection, team_id: str) -> bool:
    return conn.execute(sa.select(TEAMS.c.id).where(TEAMS.c.id == team_id)).first() is not None


def _write(conn: sa.Connection, found: planning.Found, known: Facts | None, *, now: float, ids: NewId) -> facts.Committed:
    sandbox = found.sandbox
    if known is None:
        whole = {"id": sandbox.id, "revision": sandbox.revision, "spec": rows.SPEC.dump_python(sandbox.spec, mode="json")}
        conn.execute(sa.insert(SANDBOXES), {**whole, **rows.sandbox_values(sandbox)})
        tallies.made(conn, sandbox)
    else:
        if known.sandbox.state in TERMINAL:
            tallies.revived(conn, known.sandbox)
        if found.instead is not None and found.instead.holding is not Holding.NONE:
            gone = sa.update(PLACEMENTS).where(PLACEMENTS.c.id == found.instead.id)
            nothing = {f"held_{part}": 0 for part in ("cpu_millis", "memory_mib", "disk_mib", "slots")}
            conn.execute(gone.values(holding=Holding.NONE.value, ready=False, gone_at=now, **nothing))
        sandbox = facts.rewrite(conn, known.sandbox, sandbox)
    conn.execute(sa.insert(PLACEMENTS), rows.new_placement_values(found.placement))
    facts.record(conn, sandbox, found.placement, (found.note,), at=now, ids=ids)
    hints.sandbox(conn, sandbox.id)
    return facts.Committed(sandbox, found.placement, changed=True, capacity_changed=True)
