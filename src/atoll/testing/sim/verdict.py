"""Verdict: whether what happened to sandboxes was justified, and whether a healed world comes to rest.

Theory of operation. A sandbox may end for reasons that fate has given, and at times that its clients were promised; `committed` asks at
each end. A world that has healed must come to what is desired, do what it could do before, and keep nothing of what was released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from atoll.agent.record import Record
from atoll.base.errors import Code
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.domain import snapshot as sn
from atoll.domain.placement import Holding, Observed
from atoll.domain.sandbox import TERMINAL
from atoll.domain.warmth import OWN_TEAM
from atoll.drivers.port import Power
from atoll.testing.sim import checks, warmth
from atoll.testing.sim.checks import Violated
from atoll.testing.sim.clients import CANARY, Promise
from atoll.testing.sim.machine import SimMachine, claims
from atoll.testing.sim.places import Host, Seat
from atoll.testing.sim.scenario import MOMENTS, Kind
from atoll.testing.sim.store import Change, Row
from atoll.testing.sim.world import World
from atoll.wire.guest import Init

EARLY_S: Final = 10.0
"""An end may come this much too soon: it is counted from when the agent sent its request, and a request may be on its way so long."""
LATE_S: Final = 60.0
"""An end may come this much too late, while its agent runs: verbs hang, and a decision waits for the journal."""
POLLED_S: Final = 60.0
"""An agent polls at least this often: one park and some backoff."""
GONE_S: Final = 300.0
"""What is released in a healed world is gone by then: a removal's longest pause, and one deadline."""
LISTED_S: Final = 900.0
"""The same where hosts fetch snapshots of each other: they tell what they have now and then, and are told then what nobody needs."""
FOUND_S: Final = 180.0
"""What ran when the store was taken back is on record again by then."""
TOLD_S: Final = 100.0
"""Every replica of a world at rest remembers what is on record by then: the silence of one that has died is noticed, and all is read anew."""
REST_S: Final = 1800.0
"""A healed world has come to rest by then: an image's and a guest's deadline, waiting for room, and two releases."""


# While it goes on.


def committed(world: World, changes: Sequence[Change]) -> None:
    """One commit's changes, after the ledger has taken them. *Errors*: Violated."""
    _machines_agree(world)
    for change in changes:
        if change.table == "placements" and change.after is not None:
            _placed(world, change, change.before, change.after)
        if change.table == "sandboxes" and change.after is not None:
            _told(world, change.before, change.after)


def _placed(world: World, change: Change, before: Row | None, after: Row) -> None:
    host = world.host_of(after["host_id"])
    if host is not None:
        checks.believed(change, host.things, fenced=after["host_id"] in world.history.fenced)
    if before is None:
        _begun(world, after)
    if after["ready"]:
        world.history.was_ready.add(after["id"])
        _believed(world, after)
        if before is None or not before["ready"]:
            warmth.ready(world, after)


def _told(world: World, before: Row | None, after: Row) -> None:
    promise = world.clients.book.of(after["id"], after["request_id"])
    if warmth.claimed(before, after):
        warmth.handed_over(world, after)
    if promise is not None and (before is None or warmth.claimed(before, after)) and promise.sandbox_id != after["id"]:
        # Its client may never hear of it; a second one under the same name is another try.
        promise.sandbox_id, promise.ready = after["id"], False
    if before is not None and after["generation"] > before["generation"]:
        _replaced(world, before, after, promise)
    if before is not None and before["reason"] != after["reason"] and after["state"] in ("releasing", *TERMINAL):
        _justified(world, after, promise)


def taken_back(world: World, *, made_at: float) -> None:
    """The store was taken back: note what runs, and what cannot be held to any more. *Units*: true seconds."""
    history, now = world.history, world.loop.time()
    history.taken_back = True
    for promise in world.clients.book.by_request.values():
        # Where its agent knows no end, its whole time begins anew; hosts may come back late.
        promise.latest = max(promise.latest, now + 1500.0 + promise.timeout_s)
        if promise.moved_at >= made_at:
            promise.earliest = 0.0
    for host in world.hosts:
        for placement_id in host.things.initialised:
            sandbox_id = host.things.placements[placement_id].order.sandbox_id
            promised = world.clients.book.of(sandbox_id, None)
            if promised is not None and promised.ready and not promised.released and placement_id in history.was_ready:
                history.there[sandbox_id] = (host, placement_id)


def _settled(world: World, host: Host) -> bool:
    """Whether control has had this host's account since it was taken back."""
    if not world.history.taken_back:
        return True
    row = world.ledger.hosts.get(host.identity.host_id)
    return row is not None and row["seen_at"] is not None and "store.restored" not in row["problems"]


def _may_be_gone(world: World, sandbox_id: str) -> bool:
    """Whether a sandbox that ran when the store was taken back may have ended since, or before anybody was told."""
    host, placement_id = world.history.there[sandbox_id]
    promise = world.clients.book.of(sandbox_id, None)
    if promise is None or promise.released or promise.earliest <= world.loop.time() + EARLY_S:
        return True
    if host.name in world.history.lost_disk:
        return True
    return placement_id in world.history.ended or host.was_unheard() or host.identity.host_id in world.history.fenced or host.fenced


def _answerable(world: World) -> dict[str, SimMachine]:
    """Machines by name, but for those that an operator has fenced while their agent cannot act.

    A lease is no proof of absence: where nobody is left to end what has no lease any more, the operator's word is all that there is.
    """
    now = world.loop.time()
    return {host.name: host.things for host in world.hosts if (not host.fenced or host.able_since(now, LATE_S)) and _settled(world, host)}


def _machines_agree(world: World) -> None:
    checks.machines_agree(world.ledger, _answerable(world), fenced=[host.name for host in world.hosts if host.fenced])


def looked(world: World, host: Host) -> None:
    """A verb of a driver has done its work on this host."""
    with world.watched():
        _machines_agree(world)
        if host.name in _answerable(world):
            checks.started(world.ledger, host.things)
            if not world.history.taken_back and host.identity.host_id not in world.history.fenced:
                checks.rests(world.ledger, host.things)


def guest_takes(world: World, record: Record, token: Secret, init: Init) -> None:
    """What a guest is given is its own, and it was not ready before. *Errors*: Violated, into the world's hands."""
    world.history.secrets |= {token.reveal(), *([init.access_token] if init.access_token else [])}
    with world.watched():
        said = claims(token)
        assert record.blueprint is not None
        if (said["sub"], said["plc"], said["gen"], said["non"]) != (
            record.sandbox_id,
            record.placement_id,
            record.generation,
            record.blueprint.nonce,
        ):
            raise Violated(f"{record.placement_id} was given a token of {said['plc']}")
        row = world.ledger.sandboxes.get(record.sandbox_id)
        if row is None or not all(_settled(world, host) for host in world.hosts):
            # Its host has not yet said that it has it.
            return
        if init.env and not row["bootstrap_exposed"]:
            raise Violated(f"{record.placement_id} was given what nobody has written down as exposed")
        warmth.takes(world, record.placement_id, init)
        promise = world.clients.book.of(record.sandbox_id, row["request_id"])
        given = (promise.given if promise is not None else None) or row["request_id"]
        forgotten = "SECRET" not in init.env and _is_clone_of_restored(world, promise)
        if init.env.get("SECRET") != f"{CANARY}-{given}" and row["request_id"] is not None and not forgotten:
            raise Violated(f"{record.placement_id} was given the environment of another")
        again = world.scenario.on_exit == "restart" and record.placement_id in world.history.ended
        if again:
            # Begun once more from nothing, or from what it began with: its class says so.
            world.history.known.pop(record.sandbox_id, None)
        own = _remembers(world, record, row)
        begins = record.blueprint.moment is None
        if begins and row["started_at"] is not None and record.placement_id not in world.history.was_ready:
            raise Violated(f"{record.sandbox_id} was ready once, and is begun anew as {record.placement_id}")
        # Of an agent that has lost its database, what the guest remembers says that it was brought back.
        back = record.observed in (Observed.SAVED, Observed.SAVING, Observed.RUNNING, Observed.FROZEN, Observed.ERROR) or own
        if record.placement_id in world.history.was_ready and not again and not back:
            raise Violated(f"{record.placement_id} was ready, and another guest is begun in its place")


def _is_clone_of_restored(world: World, promise: Promise | None) -> bool:
    """Whether a record that it comes from was made anew from its host's account, which has no environment (docs/adr/)."""
    rows = [world.ledger.sandboxes.get(parent) for parent in promise.parents] if promise is not None else []
    return any(row is not None and row["request_id"] is None for row in rows)


def nothing_is_kept_too_long(world: World) -> None:
    """No guest runs long after the last end that it was promised, on a host whose agent can act. *Errors*: Violated."""
    now = world.loop.time()
    for host in world.hosts:
        if not host.able_since(now, LATE_S):
            continue
        for placement_id in host.things.running():
            order = host.things.placements[placement_id].order
            row = world.ledger.sandboxes.get(order.sandbox_id)
            promise = world.clients.book.of(order.sandbox_id, row["request_id"] if row else None)
            if promise is not None and promise.latest and now > promise.latest + EARLY_S + LATE_S:
                raise Violated(f"{order.sandbox_id} should have ended at {promise.latest:.1f} and runs on {host.name}")


# Whether an end was justified.


def _replaced(world: World, before: Row, after: Row, promise: Promise | None) -> None:
    """A next generation begins where the last one can do no harm any more, or somebody has said so."""
    if promise is not None:
        promise.latest = max(promise.latest, world.loop.time() + 1500.0 + promise.timeout_s)
        # One that was ready begins from nothing, and so does its time.
        promise.earliest = min(promise.earliest, world.loop.time() + promise.timeout_s)
    if after["state"] == "resuming":
        if before["placement_id"] is not None:
            raise Violated(f"sandbox {before['id']} is resumed elsewhere while {before['placement_id']} has it")
        return
    placement_id = before["placement_id"]
    exposed = placement_id in world.history.was_ready or before["bootstrap_exposed"]
    if not exposed or world.history.taken_back:
        return
    fenced = before["host_id"] in world.history.fenced
    certified = (before["id"], before["generation"]) in world.clients.book.authorized
    if not (fenced or certified or "REPLACEMENT_BLOCKED" in after["conditions"]):
        what = "was ready" if placement_id in world.history.was_ready else "was given its payload"
        raise Violated(f"sandbox {before['id']} {what} as {placement_id}, and is replaced without a word")


def _believed(world: World, after: Row) -> None:
    """A guest was believed ready: what it remembers is the least that its sandbox may come back with."""
    host = world.host_of(after["host_id"])
    thing = host.things.placements.get(after["id"]) if host is not None else None
    if thing is not None and thing.memory:
        known = world.history.known
        known[after["sandbox_id"]] = max(known.get(after["sandbox_id"], 0), int(thing.memory.split()[1]))


def _remembers(world: World, record: Record, row: Row) -> bool:
    """A guest of a sandbox that has lived before comes back with its newest save. *Errors*: Violated. Whether it remembers its sandbox."""
    thing = next(
        (host.things.placements[record.placement_id] for host in world.hosts if record.placement_id in host.things.placements), None
    )
    if thing is None:
        return False
    whose, _, count = thing.memory.partition(" ")
    own, least = whose == record.sandbox_id, world.history.known.get(record.sandbox_id, 0)
    has = int(count) if own else 0
    if has < least and not world.history.taken_back and row["started_at"] is not None:
        raise Violated(f"{record.sandbox_id} comes back as {record.placement_id} with memory {has}, and had {least}")
    return own


def _begun(world: World, after: Row) -> None:
    """A placement of a sandbox that had to wait for somebody's word begins after that. *Errors*: Violated."""
    row = world.ledger.sandboxes[after["sandbox_id"]]
    if "REPLACEMENT_BLOCKED" in row["conditions"]:
        raise Violated(f"{after['id']} begins while its sandbox waits for a word")


def _justified(world: World, row: Row, promise: Promise | None) -> None:
    reason = row["reason"]
    host = world.host_of(row["host_id"]) if row["host_id"] else None
    check = _REASONS.get(reason)
    if check is None:
        raise Violated(f"sandbox {row['id']} ends for {reason}, which nothing explains")
    why_not = check(world, row, promise, host)
    if why_not is not None:
        raise Violated(f"sandbox {row['id']} ends for {reason}: {why_not}")


Why = str | None


def _asked_for(_world: World, _row: Row, promise: Promise | None, _host: Host | None) -> Why:
    return None if promise is None or promise.released else "nobody has asked for it"


def _at_its_end(world: World, row: Row, promise: Promise | None, host: Host | None) -> Why:
    if promise is None or not promise.ready or promise.sandbox_id != row["id"]:
        return None
    if host is not None and promise.moved_at > world.loop.time() - (host.clock.boot() - host.line.answered_at):
        # Its agent has not been answered since, and enforces the end that it knows.
        return None
    early_s = promise.earliest - world.loop.time()
    return f"{early_s:.1f} s too early" if early_s > EARLY_S else None


def _lease_ran_out(world: World, _row: Row, _promise: Promise | None, host: Host | None) -> Why:
    if host is None:
        return "it had no host"
    return None if host.was_unheard() else f"{host.name} was never unheard of for so long"


def _guest_ended(world: World, row: Row, _promise: Promise | None, _host: Host | None) -> Why:
    return None if row["placement_id"] in world.history.ended else "its guest had not"


def _lost(world: World, row: Row, _promise: Promise | None, host: Host | None) -> Why:
    if world.history.taken_back:
        # It may have come back as another placement since, whose guest has ended.
        explained = row["placement_id"] in world.history.ended or row["id"] not in world.history.there or _may_be_gone(world, row["id"])
        return None if explained else "it ran when the store was taken back"
    if row["host_id"] in world.history.fenced or (host is not None and (host.boots > 1 or host.name in world.history.lost_disk)):
        return None
    return "its host was neither fenced nor started anew"


def _after(*kinds: Kind) -> Callable[[World, Row, Promise | None, Host | None], Why]:
    """Only where one of these can happen, and only before the sandbox was ready."""

    def check(world: World, row: Row, promise: Promise | None, _host: Host | None) -> Why:
        if not any(fault.kind in kinds for fault in world.scenario.faults):
            return f"nothing of {', '.join(kinds)} has happened"
        again = world.scenario.on_exit == "restart" and row["placement_id"] in world.history.ended
        if row["started_at"] is not None and promise is not None and promise.ready and not promise.released and not again:
            return "it was ready"
        return None

    return check


def _quarantined(world: World, _row: Row, _promise: Promise | None, host: Host | None) -> Why:
    return None if host is None or host.name in world.history.lost_disk else "its host has lost nothing"


def _nobodys(_world: World, row: Row, promise: Promise | None, _host: Host | None) -> Why:
    # Also where the store was taken back to when it was nobody's: its host knows better.
    somebodys = promise is not None and promise.sandbox_id == row["id"] and promise.ready and not promise.released
    return "it was somebody's" if somebodys or row["team_id"] != OWN_TEAM else None


_SLOW: Final = (
    Kind.AGENT_CRASH, Kind.AGENT_FREEZE, Kind.CONTROL_CRASH, Kind.CONTROL_FREEZE, Kind.REBOOT, Kind.VANISH, Kind.LOSSY, Kind.SLOW,
    Kind.PARTITION, Kind.STORE_DOWN, Kind.STORE_SLOW, Kind.STORE_RACES, Kind.STORE_FORGETS, Kind.GUEST_MUTE, Kind.DRIVER_HANGS,
    Kind.JOURNAL_REFUSES, Kind.DRIVER_FAILS, Kind.RESTORE,
)  # fmt: skip
_ANY: Final = tuple(Kind)
_REASONS: Final[dict[str, Callable[[World, Row, Promise | None, Host | None], Why]]] = {
    Code.RELEASE_REQUESTED: _asked_for,
    Code.END_REACHED: _at_its_end,
    Code.LEASE_EXPIRED: _lease_ran_out,
    Code.GUEST_EXITED: _guest_ended,
    Code.BOOTSTRAP_DELIVERED: _after(Kind.AGENT_CRASH, Kind.REBOOT, Kind.VANISH, Kind.RESTORE),
    Code.PLACEMENT_LOST: _lost,
    Code.HOST_QUARANTINED: _quarantined,
    Code.GUEST_BOOT_TIMEOUT: _after(*_SLOW),
    Code.START_TIMEOUT: _after(Kind.RESTORE),
    Code.IMAGE_TIMEOUT: _after(Kind.RESTORE),
    Code.CREATE_TIMEOUT: _after(*_ANY),
    Code.NO_CAPACITY: lambda *_: None,
    Code.START_FAILED: _after(Kind.DRIVER_FAILS),
    Code.INTERNAL: _after(Kind.DRIVER_FAILS),
    Code.OUTCOME_UNKNOWN: _after(Kind.DRIVER_FAILS),
    Code.CLEANUP_FAILED: _after(Kind.DRIVER_FAILS, Kind.STUCK),
    Code.HOST_DISK_FULL: _after(Kind.DISK_FULL),
    # What a fork began from is not kept for later generations; what is kept goes with its machine.
    Code.SNAPSHOT_UNAVAILABLE: _after(*_ANY),
    # Of one that was to begin from what the store holds.
    Code.MOMENT_CORRUPT: _after(Kind.MOMENT_SPOILT),
    Code.MOMENT_UNAVAILABLE: _after(*MOMENTS),
    **dict.fromkeys(warmth.REASONS, _nobodys),
}


# When everything has healed.


async def _eventually(world: World, wrong: Callable[[World], str | None], within_s: float) -> None:
    begun = world.loop.time()
    while (what := wrong(world)) is not None:
        if world.loop.time() - begun > within_s:
            raise Violated(f"{within_s:.0f} s after everything has healed, {what}")
        await asyncio.sleep(5.0)


async def at_rest(world: World) -> None:
    """What is desired is what is. *Errors*: Violated."""
    await _eventually(world, _lost_to_a_restore, FOUND_S)
    await _eventually(world, _not_at_rest, REST_S)
    await _eventually(world, lambda now: next(filter(None, (_misled(now, seat) for seat in now.seats)), None), TOLD_S)
    world.note("everything is at rest")


def _lost_to_a_restore(world: World) -> str | None:
    missed = (name for name in world.history.there if name not in world.ledger.sandboxes and not _may_be_gone(world, name))
    return next((f"{name} ran when the store was taken back, and is on no record" for name in missed), None)


def _restless(world: World, sandbox_id: str, row: Row) -> str | None:
    """What of a sandbox is not as it should be."""
    state, held = row["state"], world.ledger.held_by(sandbox_id)
    if state in TERMINAL:
        return f"{sandbox_id} is {state} and still holds {held}" if held else None
    if state not in ("ready", "paused", "suspended", "stopped"):
        return f"{sandbox_id} is still {state}"
    if state == "suspended" and row["placement_id"] is None:
        there = row["moment"] in world.shelf.manifests and row["moment"] in world.shelf.packs
        return None if there or world.history.taken_back else f"{sandbox_id} rests in the artifact store, which does not have it"
    host = world.host_of(row["host_id"]) if row["host_id"] is not None else None
    thing = host.things.placements.get(row["placement_id"]) if host is not None else None
    if state == "ready" and (host is None or row["placement_id"] not in host.things.initialised):
        return f"{sandbox_id} is ready and no guest of it runs"
    wanted = {"paused": Power.FROZEN, "suspended": Power.SAVED}.get(state)
    if wanted is not None and (thing is None or thing.power is not wanted):
        return f"{sandbox_id} is {state} and not {wanted} on its host"
    return None


def _not_at_rest(world: World) -> str | None:
    ledger = world.ledger
    for sandbox_id, row in ledger.sandboxes.items():
        if (restless := _restless(world, sandbox_id, row)) is not None:
            return restless
    for host in world.hosts:
        if host.clock.boot() - host.line.answered_at > POLLED_S:
            return f"{host.name} does not poll"
        row = ledger.hosts[host.identity.host_id]
        if "gvisor" not in row["isolations"] or row["problems"] not in ("[]", []):
            return f"{host.name} can have nothing: it offers {row['isolations']}, {row['problems']} is wrong"
        wanted = {
            name for name, row in ledger.placements.items() if row["host_id"] == host.identity.host_id and row["holding"] != Holding.NONE
        }
        stray = sorted(set(host.things.placements) - wanted)
        if stray:
            return f"{host.name} has {', '.join(stray)}, which nobody wants"
        if uncounted := ledger.uncounted(host.identity.host_id, host.things.kept):
            return f"{host.name} has {', '.join(uncounted)}, which counts nowhere"
    return warmth.not_kept(world)


def _misled(world: World, seat: Seat) -> str | None:
    """Whether this replica remembers something else than what is on record."""
    if seat.replica is None:
        return f"control {seat.number} is not up"
    control, ledger = seat.replica.control, world.ledger
    for sandbox_id, row in ledger.sandboxes.items():
        route = control._routes.get(sandbox_id)  # noqa: SLF001 - what edges are told
        # Nobody is sent to what is nobody's.
        wanted = row["placement_id"] if row["state"] == "ready" and row["team_id"] != OWN_TEAM else None
        if (route.placement_id if route is not None else None) != wanted:
            return f"control {seat.number} routes {sandbox_id}, which is {row['state']}, to {route}"
    for advert in control.reconciler.directory.adverts():
        used = Vector(**ledger.used(advert.host.id))
        if advert.used != used:
            return f"control {seat.number} takes {advert.host.name} for using {advert.used}, and it uses {used}"
    return None


async def until_nothing_is_left(world: World) -> None:
    """What was released is gone, from records, journals and machines. *Errors*: Violated."""
    await _eventually(world, _left, LISTED_S if world.scenario.stored else GONE_S)
    world.note("nothing is left")


def _left(world: World) -> str | None:
    for sandbox_id, row in world.ledger.sandboxes.items():
        if row["state"] not in TERMINAL:
            return f"{sandbox_id} is still {row['state']}"
    for placement_id, row in world.ledger.placements.items():
        if row["holding"] != Holding.NONE:
            return f"{placement_id} still holds something"
    if (kept := _kept(world)) is not None:
        return kept
    if not world.history.taken_back and (stored := world.shelf.left()):
        return f"the artifact store still has {', '.join(sorted(stored))}"
    for host in world.hosts:
        if host.things.placements:
            return f"{host.name} still has {', '.join(sorted(host.things.placements))}"
        known = host.known()
        if known:
            return f"{host.name}'s agent still remembers {known} placements"
    return None


def _kept(world: World) -> str | None:
    for snapshot_id, row in world.ledger.snapshots.items():
        if sn.State(row["state"]) not in sn.TERMINAL:
            return f"snapshot {snapshot_id} is still {row['state']}"
    for copy in world.ledger.copies.values():
        return f"{copy['snapshot_id']} is counted for {copy['host_id']}, and there is none"
    # What was kept after the backup that the store was taken back to is on no record any more.
    wrong = [host for host in world.hosts if host.things.kept and not world.history.taken_back]
    return next((f"{host.name} still keeps {', '.join(sorted(host.things.kept))}" for host in wrong), None)


async def still_works(world: World) -> None:
    """A sandbox on each host can be had, and given back. *Errors*: Violated."""
    made = []
    for host in world.hosts:
        promise = Promise(f"again-{host.number}", 600)
        world.clients.book.by_request[promise.request_id] = promise
        made.append(promise)
        if not await world.clients.create(promise, require_host=host.name):
            raise Violated(f"nothing can be started on {host.name} after everything has healed")
    for promise in made:
        await world.clients.release(promise)
    await until_nothing_is_left(world)


def in_the_end(world: World) -> None:
    """No secret is at rest anywhere, and sealed payloads are gone. *Errors*: Violated."""
    tables = world.database.everything()
    if tables["payloads"]:
        raise Violated(f"{len(tables['payloads'])} payloads are kept of sandboxes that have ended")
    secrets = [CANARY, CANARY.encode().hex(), *world.history.secrets]
    for name, found in tables.items():
        text = repr(found)
        for secret in secrets:
            if secret in text:
                raise Violated(f"table {name} holds a secret")
    for path in world.directory.rglob("*"):
        if path.is_file() and "secrets" not in path.parts:
            content = path.read_bytes()
            for secret in secrets:
                if secret.encode() in content:
                    raise Violated(f"{path.name} of {path.parent.name} holds a secret")
