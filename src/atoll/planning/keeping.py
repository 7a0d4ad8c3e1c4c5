"""Keeping: how a snapshot moves. Pure.

Theory of operation. What is wanted of a host follows from the snapshot's state, so it can be said again at any time: TAKING wants it kept,
DELETING wants it gone. The agent's word about either is heard once; a word that comes late, or again, meets a state in which it means
nothing. Capacity comes back only with absence, as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.base.errors import Code
from atoll.base.records import replace
from atoll.domain import history as ev
from atoll.domain import snapshot as sn
from atoll.domain.moment import Moment
from atoll.domain.snapshot import Copy, Event, Purpose, Snapshot, State
from atoll.domain.spec import Origin, SaveMode, Spec
from atoll.planning.stimuli import Note

FORK_LEFT_S: Final = 120.0
"""How long after its moment a fork is kept whose clones nobody counts any more, beside the patience of their creates."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The agent has it, whole. *Units*: bytes."""

    mode: SaveMode
    size_bytes: int
    moment: Moment | None = None
    """What the artifact store has of it, once that is all."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """The agent could not; nothing of it is left."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The agent has looked, and there is nothing of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A snapshot as it is afterwards, and what its sandbox's history says of that."""

    snapshot: Snapshot
    note: Note | None = None


def heard(snapshot: Snapshot, word: Kept | NotKept | Absent, *, now: float) -> Outcome | None:
    """What the agent's word changes; None: nothing.

    *Idempotency*: a word that was heard before gives None.
    """
    match word:
        case Kept() if snapshot.state is State.TAKING:
            fork_s = snapshot.spec.create_patience_s + FORK_LEFT_S
            after = replace(
                snapshot,
                state=sn.step(snapshot.state, Event.TAKEN),
                mode=word.mode,
                size_bytes=max(1, word.size_bytes),
                taken_at=now,
                deadline_at=now + fork_s if snapshot.purpose is Purpose.FORK else None,
            )
            said = {"snapshot_id": snapshot.id, "mode": word.mode.value, "bytes": word.size_bytes}
            return Outcome(replace(after, moment=word.moment), Note(ev.SANDBOX_SNAPSHOT_TAKEN, said))
        case Kept() if snapshot.state is State.READY and snapshot.moment is None and word.moment is not None:
            said = {"snapshot_id": snapshot.id, "moment": word.moment.digest, "bytes": word.moment.size}
            return Outcome(replace(snapshot, moment=word.moment), Note(ev.SANDBOX_SNAPSHOT_UPLOADED, said))
        case NotKept() if snapshot.state is State.TAKING:
            return _failed(snapshot, Event.BROKE, word.code, word.message, now)
        case Absent() if snapshot.state is State.DELETING:
            return Outcome(_ended(snapshot, Event.ABSENCE_CONFIRMED, now))
        case Absent() if snapshot.copy is Copy.LEAVING:
            return Outcome(replace(snapshot, copy=Copy.NONE))
        case _:
            return None


def delete(snapshot: Snapshot, *, now: float) -> Outcome | None:
    """Somebody wants it gone. None where it is going or gone. What no host has is gone at once."""
    if (snapshot.state, Event.DELETE) not in sn.MOVES:
        return None
    going = replace(snapshot, state=sn.step(snapshot.state, Event.DELETE), deadline_at=None)
    return Outcome(_ended(going, Event.ABSENCE_CONFIRMED, now) if snapshot.copy is Copy.NONE else going)


def sought(spec: Spec, snapshot: Snapshot | None, *, generation: int = 1) -> tuple[Spec, ...]:
    """What a host is looked for with for a sandbox that begins from this snapshot, as it is now; where no host is found, with the next of these.

    Once it is in the store, any host that fits may have it, and preferably the one that has a copy. A head start is no condition: hosts
    that could fetch it come first, and then any other, which boots. `snapshot`: its spec's origin; None: it is gone.
    """
    origin = spec.origin
    if origin is None or _is_past(origin, generation):
        return (begins_with(spec, generation=generation),)
    if snapshot is None or snapshot.moment is None or snapshot.state is not State.READY:
        return (spec,)
    here = snapshot.host_id if snapshot.copy is Copy.HERE else None
    fetched = replace(
        spec,
        require_host=None if origin.pinned else spec.require_host,
        prefer_host=spec.prefer_host or here,
        origin=replace(origin, moment=snapshot.moment.digest, kind=snapshot.moment.kind),
    )
    return (fetched, spec) if origin.or_boot else (fetched,)


def begins_with(spec: Spec, *, generation: int) -> Spec:
    """The spec of this generation's guest. A head start is tried once: what has failed with it begins without."""
    return replace(spec, origin=None) if spec.origin is not None and _is_past(spec.origin, generation) else spec


def _is_past(origin: Origin, generation: int) -> bool:
    return origin.or_boot and generation > 1


def leave(snapshot: Snapshot) -> Outcome | None:
    """Its host is to give its copy up. None where it is needed, or there is none."""
    if snapshot.state is not State.READY or snapshot.moment is None or snapshot.copy is not Copy.HERE:
        return None
    return Outcome(replace(snapshot, copy=Copy.LEAVING))


def late(snapshot: Snapshot, *, now: float) -> Outcome | None:
    """Its deadline has passed. None: it has none that has."""
    if snapshot.deadline_at is None or now < snapshot.deadline_at:
        return None
    if snapshot.state is State.READY:
        return delete(snapshot, now=now)
    if snapshot.state is not State.TAKING:
        return None
    message = f"its host has not kept it within {snapshot.spec.save_s:g} s"
    after = replace(snapshot, state=sn.step(snapshot.state, Event.LATE), deadline_at=None, code=str(Code.SAVE_TIMEOUT), message=message)
    return Outcome(after, _told(after))


def lost(snapshot: Snapshot, *, now: float) -> Outcome | None:
    """Its host is fenced, and what it had counts as gone."""
    if snapshot.state in sn.TERMINAL:
        return None
    if snapshot.state is State.DELETING:
        return Outcome(_ended(snapshot, Event.LOST, now))
    if snapshot.state is State.READY and snapshot.moment is not None:
        return Outcome(replace(snapshot, copy=Copy.NONE)) if snapshot.copy is not Copy.NONE else None
    return _failed(snapshot, Event.LOST, str(Code.SNAPSHOT_UNAVAILABLE), "its host is gone, and it with that", now)


def _failed(snapshot: Snapshot, event: Event, code: str, message: str, now: float) -> Outcome:
    after = replace(_ended(snapshot, event, now), code=code, message=message)
    return Outcome(after, _told(after))


def _ended(snapshot: Snapshot, event: Event, now: float) -> Snapshot:
    return replace(snapshot, state=sn.step(snapshot.state, event), ended_at=now, deadline_at=None)


def _told(snapshot: Snapshot) -> Note:
    return Note(ev.SANDBOX_SNAPSHOT_FAILED, {"snapshot_id": snapshot.id, "reason": snapshot.code, "detail": snapshot.message})
