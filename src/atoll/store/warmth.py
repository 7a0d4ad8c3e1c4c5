"""Warm guests on record: policies, the guests that there are, and the one commit by which a create takes one over.

Theory of operation. How many there may be is counted with the policy's row locked, so that replicas that make what is missing beside each
other do not make too many. A claim locks the placement first, as everybody does, and passes over what somebody else has locked: that one is
claimed, ended or heard of just now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import sqlalchemy as sa

from atoll.base.ids import TemplateId
from atoll.base.records import replace
from atoll.domain.sandbox import Sandbox, State
from atoll.domain.warmth import OWN_TEAM, OWN_TEAM_NAME, WarmPolicy
from atoll.planning.alerting import WarmShort
from atoll.planning.reconcile import advance
from atoll.planning.stimuli import Claimed
from atoll.planning.warming import KEPT, Guest
from atoll.store import facts, payloads, rows, tallies
from atoll.store.facts import Committed, NewId
from atoll.store.payloads import Sealed
from atoll.store.prepared import Prepared
from atoll.store.tables import HOLDS, PLACEMENTS, SANDBOXES, TEAMS, TEMPLATES, WARM_POLICIES

CANDIDATES_MAX: Final = 64
FAILED_S: Final = 600.0
"""For so long a failure counts for when the next one of its pool is tried."""
_KIND: Final = ("template_id", "class_name", "cpu_millis", "memory_mib", "disk_mib")
_LIVING: Final = tuple(sorted(state.value for state in State if state not in (State.RELEASED, State.FAILED)))
_KEPT: Final = tuple(sorted(state.value for state in KEPT))

_POLICIES: Final = sa.select(WARM_POLICIES).order_by(*(WARM_POLICIES.c[name] for name in _KIND))
_CANDIDATES: Final = Prepared(
    sa.select(SANDBOXES.c.id, SANDBOXES.c.host_id)
    .where(
        SANDBOXES.c.team_id == OWN_TEAM,
        SANDBOXES.c.state == State.READY.value,
        SANDBOXES.c.claimable == sa.bindparam("pool"),
    )
    .order_by(SANDBOXES.c.started_at)
    .limit(CANDIDATES_MAX)
)
_LOCKED: Final = Prepared(
    sa.select(PLACEMENTS.c.id)
    .join(SANDBOXES, SANDBOXES.c.placement_id == PLACEMENTS.c.id)
    .where(SANDBOXES.c.id == sa.bindparam("of_id"), SANDBOXES.c.claimable.is_not(None), SANDBOXES.c.state == State.READY.value)
    .with_for_update(of=PLACEMENTS, skip_locked=True)
)


# Policies.


def policies(conn: sa.Connection) -> list[WarmPolicy]:
    """All of them, by what they are for."""
    return [_policy(row) for row in conn.execute(_POLICIES).mappings()]


def put_policy(conn: sa.Connection, policy: WarmPolicy) -> WarmPolicy:
    """This policy in place of the one for the same kind, with the next revision; a count of 0 takes it away."""
    known = conn.execute(sa.select(WARM_POLICIES).where(*_is(policy)).with_for_update()).mappings().first()
    after = replace(policy, revision=1 if known is None else known["revision"] + 1)
    if policy.count == 0:
        conn.execute(sa.delete(WARM_POLICIES).where(*_is(policy)))
        return after
    values = {"count": after.count, "revision": after.revision, "updated_at": after.updated_at, "short_since": None, "problem": None}
    if known is None:
        own_team(conn, now=after.updated_at)
        conn.execute(sa.insert(WARM_POLICIES), {**dict(zip(_KIND, after.kind, strict=True)), **values})
    else:
        conn.execute(sa.update(WARM_POLICIES).where(*_is(policy)).values(values))
    return after


def tell(conn: sa.Connection, policy: WarmPolicy, *, short_since: float | None, problem: str | None) -> None:
    """How well it is kept. One that was changed meanwhile is left alone."""
    conn.execute(
        sa.update(WARM_POLICIES)
        .where(*_is(policy), WARM_POLICIES.c.revision == policy.revision)
        .values(short_since=short_since, problem=problem[:500] if problem else None)
    )


def short(conn: sa.Connection) -> list[WarmShort]:
    """Policies that are not kept."""
    found = conn.execute(
        sa.select(WARM_POLICIES, TEMPLATES.c.name)
        .outerjoin(TEMPLATES, TEMPLATES.c.id == WARM_POLICIES.c.template_id)
        .where(WARM_POLICIES.c.short_since.is_not(None))
    ).mappings()
    return [
        WarmShort(row["template_id"], row["name"] or row["template_id"], row["count"], row["short_since"], row["problem"]) for row in found
    ]


def _is(policy: WarmPolicy) -> list[sa.ColumnElement[bool]]:
    return [WARM_POLICIES.c[name] == value for name, value in zip(_KIND, policy.kind, strict=True)]


def _policy(row: sa.RowMapping) -> WarmPolicy:
    return WarmPolicy(
        template_id=TemplateId(row["template_id"]),
        class_name=row["class_name"],
        cpu_millis=row["cpu_millis"],
        memory_mib=row["memory_mib"],
        disk_mib=row["disk_mib"],
        count=row["count"],
        revision=row["revision"],
        updated_at=row["updated_at"],
        short_since=row["short_since"],
        problem=row["problem"],
    )


def own_team(conn: sa.Connection, *, now: float) -> None:
    """The deployment's own team is on record: sandboxes have a team. Somebody else's may have its name already."""
    if conn.execute(sa.select(TEAMS.c.id).where(TEAMS.c.id == OWN_TEAM)).first() is not None:
        return
    taken = conn.execute(sa.select(TEAMS.c.id).where(TEAMS.c.name == OWN_TEAM_NAME)).first() is not None
    name = f"{OWN_TEAM_NAME} ({OWN_TEAM})" if taken else OWN_TEAM_NAME
    conn.execute(
        sa.text("INSERT INTO teams (id, name, created_at) VALUES (:id, :name, :at) ON CONFLICT DO NOTHING"),
        {"id": OWN_TEAM, "name": name, "at": now},
    )


# Guests.


def guests(conn: sa.Connection) -> list[Guest]:
    """Every guest that was made ahead, is nobody's, and has not ended."""
    nobodys = SANDBOXES.c.team_id == OWN_TEAM, SANDBOXES.c.claimable.is_not(None)
    found = conn.execute(sa.select(SANDBOXES).where(*nobodys, SANDBOXES.c.state.in_(_LIVING))).mappings()
    return [_guest(rows.sandbox(row)) for row in found]


def _guest(sandbox: Sandbox) -> Guest:
    return Guest(
        id=sandbox.id,
        pool=sandbox.claimable or "",
        state=sandbox.state,
        host_id=sandbox.host_id,
        vector=sandbox.spec.vector(),
        created_at=sandbox.created_at,
        end_at=sandbox.end_at,
    )


def failures(conn: sa.Connection, *, now: float) -> Mapping[str, tuple[int, float, str | None]]:
    """For each pool of which guests have failed of late: how many, when the last one did, and why. *Units*: wall seconds."""
    found = conn.execute(
        sa.select(SANDBOXES.c.claimable, SANDBOXES.c.released_at, SANDBOXES.c.reason, SANDBOXES.c.detail)
        .where(SANDBOXES.c.team_id == OWN_TEAM, SANDBOXES.c.state == State.FAILED.value, SANDBOXES.c.released_at >= now - FAILED_S)
        .order_by(SANDBOXES.c.released_at)
    )
    counted: dict[str, tuple[int, float, str | None]] = {}
    for pool, at, reason, detail in found:
        counted[pool or ""] = (counted.get(pool or "", (0, 0.0, None))[0] + 1, at, f"{reason}: {detail}" if detail else reason)
    return counted


def warm_by_host(conn: sa.Connection) -> Mapping[str, int]:
    """How many of the placements that each host holds are of warm guests."""
    query = (
        sa.select(PLACEMENTS.c.host_id, sa.func.count())
        .join(SANDBOXES, SANDBOXES.c.id == PLACEMENTS.c.sandbox_id)
        .where(HOLDS, SANDBOXES.c.team_id == OWN_TEAM)
        .group_by(PLACEMENTS.c.host_id)
    )
    return {row[0]: row[1] for row in conn.execute(query)}


def accept(
    conn: sa.Connection, sandbox: Sandbox, policy: WarmPolicy, *, payload: Sealed, most: int, beside: Collection[str], event_id: str
) -> bool:
    """A new guest of this policy, unless it is another one by now, or there are `most` of its pool already. Whether it was made.

    `beside`: hosts that are not heard of; what is on them does not count.
    """
    kept = conn.execute(sa.select(WARM_POLICIES.c.revision).where(*_is(policy)).with_for_update()).first()
    if kept is None or kept[0] != policy.revision:
        return False
    there = conn.execute(
        sa.select(SANDBOXES.c.host_id).where(
            SANDBOXES.c.team_id == OWN_TEAM, SANDBOXES.c.claimable == sandbox.claimable, SANDBOXES.c.state.in_(_KEPT)
        )
    )
    if sum(host_id not in beside for host_id in there.scalars()) >= most:
        return False
    facts.accept(conn, sandbox, payload=payload, event_id=event_id)
    return True


# Claims.


def candidates(conn: sa.Connection, pool: str) -> list[tuple[str, str]]:
    """Guests of this pool that are ready, with their hosts, the oldest first."""
    return [(row["id"], row["host_id"]) for row in _CANDIDATES.all(conn, {"pool": pool})]


def claim(
    conn: sa.Connection,
    wanted: Sandbox,
    among: Sequence[str],
    *,
    payload: Callable[[str], tuple[Sealed, str]],
    admit: Callable[[sa.Connection, Sandbox], None],
    now: float,
    ids: NewId,
    request_id: str | None = None,
) -> Committed | None:
    """Give the first of these that is still nobody's to the create that `wanted` says; None: there is none.

    `payload`: what the guest of this sandbox gets, and its digest. `admit`: whether the create may, and what it records. *Errors*: those of
    `admit`; IntegrityError when the create's request id is taken.
    """
    for sandbox_id in among:
        if _LOCKED.first(conn, {"of_id": sandbox_id}) is None:
            continue
        found = facts.load(conn, sandbox_id)
        if found is None:
            continue
        sealed, digest = payload(sandbox_id)
        outcome = advance(found, Claimed(wanted, digest), now=now)
        if outcome is None:
            continue
        admit(conn, outcome.sandbox)
        payloads.replace(conn, sandbox_id, sealed)
        done = facts.commit(conn, found, outcome, now=now, ids=ids, request_id=request_id)
        tallies.made(conn, done.sandbox)
        return done
    return None
