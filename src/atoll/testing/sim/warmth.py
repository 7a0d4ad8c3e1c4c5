"""Warm guests: what must hold of those that are made ahead, of creates that take one over, and of what is counted.

Theory of operation. Whose a sandbox is follows from its row; whose its guest is, from what it was given by init. A guest is taken over once:
what it was given of somebody's it keeps, and whoever is told that it is ready has it with what that create brought. In a world at rest as
many are ready as policies say, or there is no room; and when no policy says so any more, nothing is left (`verdict.until_nothing_is_left`).
"""

from __future__ import annotations

import json
from typing import Final

import sqlalchemy as sa

from atoll.base.errors import Code
from atoll.domain.sandbox import TERMINAL
from atoll.domain.warmth import OWN_TEAM
from atoll.store.tables import TALLIES, TEMPLATES, WARM_POLICIES
from atoll.testing.sim.checks import Violated
from atoll.testing.sim.clients import CANARY
from atoll.testing.sim.store import Row
from atoll.testing.sim.world import World
from atoll.wire.guest import Init

REASONS: Final = (Code.WARM_OUTDATED, Code.WARM_SURPLUS, Code.WARM_GIVEN_UP, Code.HOST_NOT_ACTIVE)
"""Why one ends that is nobody's."""


def claimed(before: Row | None, after: Row) -> bool:
    """Whether this change of a sandbox's row makes it somebody's."""
    return before is not None and before["team_id"] == OWN_TEAM != after["team_id"]


def handed_over(world: World, after: Row) -> None:
    """A create has taken it over: its guest is ready for nobody until it has what that brought."""
    world.claims += 1
    world.history.was_ready.discard(after["placement_id"])
    world.note(f"{after['id']} is claimed by {after['request_id']}")


def takes(world: World, placement_id: str, init: Init) -> None:
    """What a guest was given of somebody's it keeps, whatever became of the store meanwhile. *Errors*: Violated."""
    secret = init.env.get("SECRET")
    if secret is not None and world.history.given.setdefault(placement_id, secret) != secret:
        raise Violated(f"the guest of {placement_id} was somebody's, and is given to another")


def ready(world: World, after: Row) -> None:
    """What is believed ready for a create has what that create brought. *Errors*: Violated."""
    row, host = world.ledger.sandboxes.get(after["sandbox_id"]), world.host_of(after["host_id"])
    init = host.things.initialised.get(after["id"]) if host is not None else None
    if row is None or init is None or row["request_id"] is None or world.history.taken_back:
        return
    promise = world.clients.book.of(row["id"], row["request_id"])
    if promise is not None and init.env.get("SECRET") != f"{CANARY}-{promise.given or promise.request_id}":
        raise Violated(f"{after['id']} was believed ready for {row['request_id']}, and its guest has not got what that brought")


def tallies_agree(world: World) -> None:
    """Each living sandbox of somebody's is counted once, and none that is nobody's. *Errors*: Violated."""
    rows = world.ledger.sandboxes.values()
    living = sum(row["state"] not in TERMINAL and row["team_id"] != OWN_TEAM for row in rows)
    found = world.database.conn.execute(sa.select(TALLIES.c.scope, sa.func.sum(TALLIES.c.living)).group_by(TALLIES.c.scope))
    counted = {scope: int(count) for scope, count in found}
    if counted.get("deployment", 0) != living or counted.get(OWN_TEAM, 0):
        raise Violated(f"{living} sandboxes are somebody's, and what is counted is {counted}")


def not_kept(world: World) -> str | None:
    """What of a world at rest is not as its policies say."""
    conn, ledger = world.database.conn, world.ledger
    images = {row.id: row.image for row in conn.execute(sa.select(TEMPLATES.c.id, TEMPLATES.c.image))}
    ahead = [row for row in conn.execute(_AHEAD).mappings() if row["state"] not in TERMINAL]
    policies = list(conn.execute(sa.select(WARM_POLICIES)).mappings())
    for row in ahead:
        spec = row["spec"] if isinstance(row["spec"], dict) else json.loads(row["spec"])
        if spec["image"] != images[spec["template_id"]]:
            return f"{row['id']} is kept warm, and of a build that is none any more"
        if row["state"] != "ready":
            return f"{row['id']} is kept warm, and {row['state']}"
        if row["claimable"] is None and not world.history.taken_back:
            return f"{row['id']} is nobody's, and nobody can take it"
    there = sum(row["claimable"] is not None for row in ahead)
    wanted = sum(policy["count"] for policy in policies)
    if there > wanted:
        return f"{there} guests are kept warm, and {wanted} are wanted"
    if there == wanted:
        return None
    short = [policy for policy in policies if policy["short_since"] is not None and Code.NO_CAPACITY in (policy["problem"] or "")]
    if not short:
        return f"{there} guests are kept warm, {wanted} are wanted, and nobody is told why"
    least = min(policy["memory_mib"] for policy in short)
    for host in world.hosts:
        has, used = ledger.hosts[host.identity.host_id], ledger.used(host.identity.host_id)
        if used["memory_mib"] + least <= has["memory_mib"] and used["slots"] < has["slots"]:
            return f"{there} guests are kept warm, {wanted} are wanted, and {host.name} has room"
    return None


_AHEAD: Final = sa.text("SELECT id, state, claimable, spec FROM sandboxes WHERE team_id = :own").bindparams(own=OWN_TEAM)
