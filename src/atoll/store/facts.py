"""The commits of a sandbox: accept, advance, reserve. Each writes state and event together, `WHERE revision = read`.

Read `advance` first. Callers run these through `Store.write`; each is one savepoint, so an outcome is whole or not there.
Statements of the hot paths are prepared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code, Unavailable
from atoll.base.records import replace
from atoll.base.units import ZERO, Vector
from atoll.domain import history
from atoll.domain.command import command_id
from atoll.domain.host import UNSETTLED, Admin
from atoll.domain.placement import Holding, Placement, held
from atoll.domain.sandbox import TERMINAL, Condition, Sandbox
from atoll.domain.snapshot import HELD
from atoll.domain.spec import Spec
from atoll.planning import placing
from atoll.planning.placing import Advert
from atoll.planning.reconcile import advance
from atoll.planning.stimuli import Facts, HostRefused, Note, Outcome, Placed, ResumeRequested, Stimulus
from atoll.store import copies, hints, payloads, rows, tallies
from atoll.store.engine import Stale
from atoll.store.payloads import Sealed
from atoll.store.prepared import Prepared, Row
from atoll.store.tables import COPIES, EVENTS, HOLDS, HOSTS, PLACEMENTS, SANDBOXES, SNAPSHOTS

READMIT_AGAIN_S: Final = 5.0
_IS_KEPT: Final = sa.or_(*(SNAPSHOTS.c.state == state.value for state in sorted(HELD)))
NewId = Callable[[], str]

_ITS: Final = "its_"
"""Before the names of a placement's columns where they stand beside its sandbox's."""
_ITS_COLUMNS: Final = tuple((column.name, _ITS + column.name) for column in PLACEMENTS.c)
_FACTS: Final = Prepared(
    sa.select(SANDBOXES, *(column.label(_ITS + column.name) for column in PLACEMENTS.c))
    .outerjoin(PLACEMENTS, PLACEMENTS.c.id == SANDBOXES.c.placement_id)
    .where(SANDBOXES.c.id == sa.bindparam("of_id")),
    unread=["spec"],
)
_OLDER: Final = (
    sa.select(PLACEMENTS)
    .where(
        PLACEMENTS.c.sandbox_id == sa.bindparam("of_sandbox"),
        HOLDS,
        PLACEMENTS.c.id != sa.bindparam("present"),
    )
    .order_by(PLACEMENTS.c.generation)
)
_FACTS_OF_MANY: Final = (
    sa.select(SANDBOXES, *(column.label(_ITS + column.name) for column in PLACEMENTS.c))
    .outerjoin(PLACEMENTS, PLACEMENTS.c.id == SANDBOXES.c.placement_id)
    .where(SANDBOXES.c.id.in_(sa.bindparam("ids", expanding=True)))
)
_UNHEARD: Final = (
    sa.select(HOSTS.c.id, HOSTS.c.name, HOSTS.c.seen_at, HOSTS.c.problems)
    .where(HOSTS.c.admin != Admin.DISABLED.value)
    .order_by(HOSTS.c.name)
)
_HOST_LOCKED: Final = Prepared(sa.select(HOSTS).where(HOSTS.c.id == sa.bindparam("of_id")).with_for_update())
_SANDBOX_LOCKED: Final = Prepared(sa.select(SANDBOXES.c.id).where(SANDBOXES.c.id == sa.bindparam("of_id")).with_for_update())
_NEW_SANDBOX: Final = Prepared(sa.insert(SANDBOXES))
_NEW_PLACEMENT: Final = Prepared(sa.insert(PLACEMENTS))
_NEW_EVENT: Final = Prepared(sa.insert(EVENTS))
_CHANGED_SANDBOX: Final = Prepared(
    sa.update(SANDBOXES).where(SANDBOXES.c.id == sa.bindparam("of_id"), SANDBOXES.c.revision == sa.bindparam("read"))
)
_CHANGED_PLACEMENT: Final = Prepared(
    sa.update(PLACEMENTS).where(
        PLACEMENTS.c.id == sa.bindparam("of_id"),
        PLACEMENTS.c.seq == sa.bindparam("of_seq"),
        PLACEMENTS.c.desired_revision == sa.bindparam("of_desired"),
        PLACEMENTS.c.holding == sa.bindparam("of_holding"),
    )
)


@dataclass(frozen=True, slots=True)
class Committed:
    """What stands in the database after a commit."""

    sandbox: Sandbox
    placement: Placement | None
    changed: bool
    capacity_changed: bool = False
    """The host's used capacity is another."""
    used: Vector | None = None
    """What the host's placements hold now, where the commit had to know it anyway."""
    older: tuple[Placement, ...] = ()
    """Earlier placements that have changed."""
    refused_by: Advert | None = None
    """The host that was asked and said no, as its record was."""
    notes: tuple[Note, ...] = ()
    """The events that were recorded with it."""


def load(conn: sa.Connection, sandbox_id: str) -> Facts | None:
    """The sandbox and its current placement as of one moment; None when there is no such sandbox."""
    row = _FACTS.first(conn, {"of_id": sandbox_id})
    return None if row is None else _facts(conn, row)


def load_after_others(conn: sa.Connection, sandbox_id: str) -> Facts | None:
    """As `load`, once every transaction that has begun to change this sandbox has come to its end."""
    _SANDBOX_LOCKED.first(conn, {"of_id": sandbox_id})
    return load(conn, sandbox_id)


def load_many(conn: sa.Connection, sandbox_ids: Sequence[str]) -> Sequence[Facts]:
    """As `load`, of those that there are."""
    return [_facts(conn, row) for row in conn.execute(_FACTS_OF_MANY, {"ids": list(sandbox_ids)}).mappings().all()]


def _facts(conn: sa.Connection, row: Row) -> Facts:
    placement = rows.placement({name: row[its] for name, its in _ITS_COLUMNS}) if row[f"{_ITS}id"] is not None else None
    sandbox = rows.sandbox(row)
    if sandbox.unseen == 0:
        return Facts(sandbox, placement)
    older = conn.execute(_OLDER, {"of_sandbox": sandbox.id, "present": sandbox.placement_id or ""}).mappings()
    return Facts(sandbox, placement, tuple(rows.placement(one) for one in older))


def accept(
    conn: sa.Connection,
    sandbox: Sandbox,
    *,
    payload: Sealed | None,
    event_id: str,
    request_id: str | None = None,
    said: Mapping[str, str] | None = None,
) -> None:
    """A new sandbox with its sealed payload and first event, in which `said` stands, too.

    *Errors*: IntegrityError when its request id is taken.
    """
    _NEW_SANDBOX.run(
        conn,
        {
            "id": sandbox.id,
            "revision": sandbox.revision,
            "spec": rows.spec_values(sandbox.spec),
            **rows.sandbox_values(sandbox),
        },
    )
    tallies.made(conn, sandbox)
    if payload is not None:
        payloads.add(conn, sandbox.id, payload)
    accepted = Note(history.SANDBOX_ACCEPTED, {"template": sandbox.spec.image_name, "class": sandbox.spec.class_name, **(said or {})})
    record(conn, sandbox, None, (accepted,), at=sandbox.created_at, ids=lambda: event_id, request_id=request_id)


def advance_sandbox(
    conn: sa.Connection,
    sandbox_id: str,
    stimulus: Stimulus,
    *,
    now: float,
    ids: NewId,
    about: Callable[[Facts], bool] = lambda _: True,
    request_id: str | None = None,
) -> Committed | None:
    """Apply one stimulus to what is in the database. None when there is no such sandbox, or it is none that `about` means.

    `request_id`: the client's request that it comes from, for the events.
    """
    facts = load(conn, sandbox_id)
    if facts is None or not about(facts):
        return None
    outcome = advance(_settled_if(conn, facts), stimulus, now=now)
    if outcome is None:
        return Committed(facts.sandbox, facts.placement, changed=False)
    return commit(conn, facts, outcome, now=now, ids=ids, request_id=request_id)


def reserve(
    conn: sa.Connection,
    sandbox_id: str,
    placement: Placement,
    *,
    now: float,
    ids: NewId,
    request_id: str | None = None,
    sought: Spec | None = None,
) -> Committed | None:
    """Ask the host's own record, and record its answer: granted (placed) or refused. `sought`: what the host was looked for with.

    Lock order host, placement, sandbox; the host's row is locked before its holdings are summed, so that two reservations cannot both
    see the last room. *Idempotency*: key (sandbox, generation, host): a repeated call after acceptance changes nothing.
    """
    locked = _HOST_LOCKED.first(conn, {"of_id": placement.host_id})
    facts = load(conn, sandbox_id)
    if facts is None:
        return None
    if facts.placement is not None and facts.placement.generation == placement.generation:
        return Committed(facts.sandbox, facts.placement, changed=False)
    answer = functools.partial(_advance, conn, facts, now=now, ids=ids, request_id=request_id)
    if locked is None:
        return answer(HostRefused(placement.host_id, Code.HOST_NOT_FOUND))
    known, spec = Advert(rows.host(locked), used(conn, placement.host_id)), sought or facts.sandbox.spec
    placement, to_fetch_mib = _fetching(conn, known, spec, placement)
    code = placing.refusal(known.host, spec, used=known.used + Vector(disk_mib=to_fetch_mib))
    if code is not None:
        return replace(answer(HostRefused(placement.host_id, code)), refused_by=known)
    done = answer(Placed(replace(placement, generation=facts.sandbox.generation)))
    if not done.changed or done.placement is None:
        return done
    if placement.origin_moment is not None and spec.origin is not None:
        if to_fetch_mib:
            copies.take(conn, placement.host_id, spec.origin.snapshot_id, disk_mib=to_fetch_mib, now=now)
        else:
            copies.use(conn, placement.host_id, spec.origin.snapshot_id, now=now)
    # The host's row is locked: nobody else has changed what it holds since it was summed.
    return replace(done, used=known.used + held(done.placement) + Vector(disk_mib=to_fetch_mib))


def _fetching(conn: sa.Connection, known: Advert, spec: Spec, placement: Placement) -> tuple[Placement, int]:
    """The placement, and what its host has to fetch for it that is not counted there yet. *Units*: MiB. A head start for which there is no room is done
    without: the guest boots.
    """
    if placement.origin_moment is None or spec.origin is None:
        return placement, 0
    coming = copies.to_come(conn, known.host.id, spec.origin.snapshot_id)
    if coming is None:
        return placement, 0
    to_fetch_mib = copies.size_mib(coming)
    if spec.origin.or_boot and placing.no_room(known.host, used=known.used + Vector(disk_mib=to_fetch_mib), need=spec.vector()) is not None:
        return replace(placement, origin_moment=None), 0
    return placement, to_fetch_mib


def readmit(
    conn: sa.Connection,
    sandbox_id: str,
    stimulus: Stimulus,
    *,
    now: float,
    ids: NewId,
    about: Callable[[Facts], bool] = lambda _: True,
    request_id: str | None = None,
) -> Committed | None:
    """As `advance_sandbox`, for what makes a placement hold more: its host's own record must have room for what it has given back.

    Lock order as in `reserve`. *Errors*: Unavailable with what is lacking, and then nothing has changed.
    """
    found = load(conn, sandbox_id)
    if found is None or found.placement is None or found.placement.holding is Holding.NONE:
        return advance_sandbox(conn, sandbox_id, stimulus, now=now, ids=ids, about=about, request_id=request_id)
    locked = _HOST_LOCKED.first(conn, {"of_id": found.placement.host_id})
    facts = load(conn, sandbox_id)
    if facts is None or not about(facts):
        return None
    outcome = advance(_settled(conn, facts) if isinstance(stimulus, ResumeRequested) else facts, stimulus, now=now)
    if outcome is None:
        return Committed(facts.sandbox, facts.placement, changed=False)
    assert facts.placement is not None
    assert outcome.placement is not None
    assert locked is not None
    host, before = rows.host(locked), used(conn, facts.placement.host_id)
    code = placing.no_room(host, used=before - held(facts.placement), need=held(outcome.placement))
    if code is not None and held(outcome.placement) != held(facts.placement):
        message = f"{host.name} has no room for what {sandbox_id} has given back; it stays {facts.sandbox.state}"
        raise Unavailable(code, message, retry_after_s=READMIT_AGAIN_S)
    return commit(conn, facts, outcome, now=now, ids=ids, request_id=request_id)


def take_up(
    conn: sa.Connection,
    sandbox_id: str,
    wish: ResumeRequested,
    *,
    sought: Spec,
    now: float,
    ids: NewId,
    about: Callable[[Facts], bool] = lambda _: True,
    request_id: str | None = None,
) -> Committed | None:
    """Ask the record of the wish's placement's host for what a sandbox needs that rests in the store alone; granted, it is on its way there.

    Lock order as in `reserve`. A refusal changes nothing but what is told with it (`refused_by`). *Errors*: Unavailable STORE_RESTORED.
    """
    assert wish.placement is not None
    locked = _HOST_LOCKED.first(conn, {"of_id": wish.placement.host_id})
    facts = load(conn, sandbox_id)
    if facts is None or not about(facts):
        return None
    if locked is None or not facts.sandbox.rests_in_store:
        return Committed(facts.sandbox, facts.placement, changed=False)
    known = Advert(rows.host(locked), used(conn, wish.placement.host_id))
    if placing.refusal(known.host, sought, used=known.used) is not None:
        return Committed(facts.sandbox, facts.placement, changed=False, refused_by=known)
    outcome = advance(_settled(conn, facts), wish, now=now)
    if outcome is None:
        return Committed(facts.sandbox, facts.placement, changed=False)
    done = commit(conn, facts, outcome, now=now, ids=ids, request_id=request_id)
    assert done.placement is not None
    return replace(done, used=known.used + held(done.placement))


def unheard(conn: sa.Connection) -> dict[str, str]:
    """Hosts that have not said what they have since the store was taken back to a backup: id → name."""
    return {row.id: row.name for row in conn.execute(_UNHEARD) if row.seen_at is None or UNSETTLED in row.problems}


def require_settled(conn: sa.Connection, sandbox: Sandbox) -> None:
    """*Errors*: Unavailable STORE_RESTORED while a host may have this suspended sandbox that has not said so since the store was taken back."""
    if Condition.HOSTS_UNSETTLED not in sandbox.conditions:
        return
    if missing := unheard(conn):
        names = ", ".join(list(missing.values())[:5])
        message = f"{names} may have {sandbox.id} since before the store was restored; it stays {sandbox.state} until that is known"
        raise Unavailable(Code.STORE_RESTORED, message, retry_after_s=READMIT_AGAIN_S)


def _settled_if(conn: sa.Connection, facts: Facts) -> Facts:
    """The facts without the condition that every host has to settle first, where all have."""
    if Condition.HOSTS_UNSETTLED not in facts.sandbox.conditions:
        return facts
    try:
        return _settled(conn, facts)
    except Unavailable:
        return facts


def _settled(conn: sa.Connection, facts: Facts) -> Facts:
    """The facts of a suspended sandbox that may be resumed. *Errors*: as `require_settled`."""
    require_settled(conn, facts.sandbox)
    if Condition.HOSTS_UNSETTLED not in facts.sandbox.conditions:
        return facts
    conditions = facts.sandbox.conditions - {Condition.HOSTS_UNSETTLED}
    return replace(facts, sandbox=replace(facts.sandbox, conditions=conditions))


def _advance(conn: sa.Connection, facts: Facts, stimulus: Stimulus, *, now: float, ids: NewId, request_id: str | None) -> Committed:
    outcome = advance(facts, stimulus, now=now)
    if outcome is None:
        return Committed(facts.sandbox, facts.placement, changed=False)
    return commit(conn, facts, outcome, now=now, ids=ids, request_id=request_id)


def commit(conn: sa.Connection, facts: Facts, outcome: Outcome, *, now: float, ids: NewId, request_id: str | None = None) -> Committed:
    """Write an outcome. *Errors*: Stale when a row is no longer as it was read."""
    before, after = facts.sandbox, outcome.sandbox
    placement = outcome.placement
    if placement is not None and placement is not facts.placement:
        if facts.placement is None or facts.placement.id != placement.id:
            _NEW_PLACEMENT.run(conn, rows.new_placement_values(placement))
        else:
            _update_placement(conn, facts.placement, placement)
    was = {one.id: one for one in (facts.placement, *facts.older) if one is not None}
    for one in outcome.older:
        _update_placement(conn, was[one.id], one)
    if after is not before:
        after = _update(conn, before, after)
        hints.sandbox(conn, after.id)
        if after.state in TERMINAL:
            payloads.drop(conn, after.id)
            tallies.ended(conn, after)
    if after.bootstrap_exposed and placement is not None and placement.ready and placement.id in was and not was[placement.id].ready:
        payloads.received(conn, after, placement)
    record(conn, after, placement, outcome.notes, at=now, ids=ids, request_id=request_id)
    held_before = held(facts.placement) if facts.placement else ZERO
    return Committed(
        after,
        placement,
        changed=True,
        capacity_changed=placement is not None and held(placement) != held_before,
        older=outcome.older,
        notes=outcome.notes,
    )


def _update_placement(conn: sa.Connection, before: Placement, after: Placement) -> None:
    """With a fence of its own: an observation often changes nothing of the sandbox."""
    read = {"of_id": before.id, "of_seq": before.seq, "of_desired": before.desired_revision, "of_holding": before.holding.value}
    old, new = rows.placement_values(before), rows.placement_values(after)
    changed = {name: value for name, value in new.items() if old[name] != value}
    # An index of a column that is named is written anew, whatever the value. The number stays named: there may be nothing else.
    if _CHANGED_PLACEMENT.run(conn, {**read, **changed, "seq": after.seq}) != 1:
        raise Stale(f"placement {before.id}")


def rewrite(conn: sa.Connection, before: Sandbox, after: Sandbox) -> Sandbox:
    """A sandbox as it is from now on, by no move of its table: for what brings lost records back. *Errors*: as `commit`."""
    return _update(conn, before, after)


def _update(conn: sa.Connection, before: Sandbox, after: Sandbox) -> Sandbox:
    changed = rows.sandbox_changes(before, after)
    changed["revision"] = before.revision + 1
    if after.spec is not before.spec:
        changed["spec"] = rows.spec_values(after.spec)
    if _CHANGED_SANDBOX.run(conn, {"of_id": before.id, "read": before.revision, **changed}) != 1:
        raise Stale(f"sandbox {before.id}")
    return replace(after, revision=before.revision + 1)


def record(
    conn: sa.Connection,
    sandbox: Sandbox,
    placement: Placement | None,
    notes: Sequence[Note],
    *,
    at: float,
    ids: NewId,
    request_id: str | None = None,
) -> None:
    """Write events of a sandbox, each with what it belongs to: the client's request, the placement, and the command that is in force."""
    if not notes:
        return
    where = {
        "host_id": placement.host_id if placement else None,
        "placement_id": placement.id if placement else None,
        "command_id": command_id(placement.id, placement.generation, placement.desired_revision) if placement else None,
        "request_id": request_id,
    }
    _NEW_EVENT.run_many(
        conn,
        [
            {
                "id": ids(),
                "at": at,
                "type": note.type,
                "sandbox_id": sandbox.id,
                "team_id": sandbox.team_id,
                "generation": sandbox.generation,
                "state": sandbox.state.value,
                "reason": sandbox.reason,
                "data": dict(note.data),
                **where,
            }
            for note in notes
        ],
    )


_SUMS: Final = (
    sa.func.coalesce(sa.func.sum(PLACEMENTS.c.held_cpu_millis), 0).label("cpu_millis"),
    sa.func.coalesce(sa.func.sum(PLACEMENTS.c.held_memory_mib), 0).label("memory_mib"),
    sa.func.coalesce(sa.func.sum(PLACEMENTS.c.held_disk_mib), 0).label("disk_mib"),
    sa.func.coalesce(sa.func.sum(PLACEMENTS.c.held_slots), 0).label("slots"),
)
_KEPT: Final = sa.func.coalesce(sa.func.sum(SNAPSHOTS.c.held_disk_mib), 0)
"""What snapshots hold of a host's disk; those that have ended hold nothing."""
_KEPT_HERE: Final = sa.select(_KEPT).where(SNAPSHOTS.c.host_id == sa.bindparam("host_id"), _IS_KEPT)
_FETCHED: Final = sa.func.coalesce(sa.func.sum(COPIES.c.disk_mib), 0)
"""What copies take that a host has fetched, or is about to."""
_FETCHED_HERE: Final = sa.select(_FETCHED).where(COPIES.c.host_id == sa.bindparam("host_id"))
_USED: Final = Prepared(
    sa.select(*_SUMS, _KEPT_HERE.scalar_subquery().label("kept_mib"), _FETCHED_HERE.scalar_subquery().label("fetched_mib")).where(
        PLACEMENTS.c.host_id == sa.bindparam("host_id"), HOLDS
    )
)
_KEPT_BY_HOST: Final = sa.select(SNAPSHOTS.c.host_id, _KEPT).where(_IS_KEPT).group_by(SNAPSHOTS.c.host_id)
_FETCHED_BY_HOST: Final = sa.select(COPIES.c.host_id, _FETCHED).group_by(COPIES.c.host_id)
_USED_BY_HOST: Final = sa.select(PLACEMENTS.c.host_id, *_SUMS).where(HOLDS).group_by(PLACEMENTS.c.host_id)


def used(conn: sa.Connection, host_id: str) -> Vector:
    """What the host's placements hold, and what is kept or fetched there, summed."""
    sums = _USED.first(conn, {"host_id": host_id})
    assert sums is not None
    amounts = {name: int(amount) for name, amount in sums.items()}
    more_mib = amounts.pop("kept_mib") + amounts.pop("fetched_mib")
    return replace(Vector(**amounts), disk_mib=amounts["disk_mib"] + more_mib)


def used_by_host(conn: sa.Connection) -> Mapping[str, Vector]:
    """`used` of every host that holds something."""
    found = {row[0]: Vector(*map(int, row[1:])) for row in conn.execute(_USED_BY_HOST)}
    for query in (_KEPT_BY_HOST, _FETCHED_BY_HOST):
        for host_id, disk_mib in conn.execute(query):
            found[host_id] = found.get(host_id, ZERO) + Vector(disk_mib=int(disk_mib))
    return found
