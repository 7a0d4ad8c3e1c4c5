"""Hosts as operators ask for them: looked at, activated, drained, disabled; and the tokens by which new ones come.

Disabling is a fence: the credential is cleared and its version raised in one commit, so that nothing more is heard of this host; what
it held counts as gone once its last lease has run out (`loops/fencing.py`), because its agent ends everything by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice, Prefix, new_id
from atoll.base.secret import Secret
from atoll.base.units import Vector
from atoll.control.configuration import Configuration
from atoll.control.hosts.directory import Directory
from atoll.control.hosts.enrollment import TOKEN_LIFE_S, Enrollment
from atoll.control.loops.fencing import Fencing
from atoll.control.replicas.hub import Hub
from atoll.control.service import Caller, HostView, NewToken, revision_mismatch
from atoll.domain import history
from atoll.domain import host as domain
from atoll.domain.host import Admin, AdminEvent, Host, health
from atoll.domain.inventory import CAPACITY, capacity
from atoll.domain.machine import IllegalMove
from atoll.domain.operations import Act, Action
from atoll.planning import admission
from atoll.store import facts, operations, warmth
from atoll.store import hosts as stored
from atoll.store.engine import Store
from atoll.store.operations import Told
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

_NAME_MAX: Final = 128

ACTIONS: Final = {
    AdminEvent.ACTIVATE: Action.HOST_ACTIVATE,
    AdminEvent.DRAIN: Action.HOST_DRAIN,
    AdminEvent.DISABLE: Action.HOST_DISABLE,
    AdminEvent.RESET: Action.HOST_RESET,
}
TOLD: Final = {
    AdminEvent.ACTIVATE: history.HOST_ACTIVATED,
    AdminEvent.DRAIN: history.HOST_DRAINED,
    AdminEvent.DISABLE: history.HOST_DISABLED,
    AdminEvent.RESET: history.HOST_RESET,
}


@dataclass(slots=True, kw_only=True)
class Hosts:
    """Part of the Service; operators only."""

    store: Store
    clock: Clock
    dice: Dice
    hub: Hub
    directory: Directory
    enrollment: Enrollment
    fencing: Fencing
    configuration: Configuration

    async def all(self, caller: Caller) -> Sequence[HostView]:
        """As Service.hosts."""
        _operator(caller)
        found, warm = await self.store.read(
            lambda conn: ([_view(conn, host) for host in stored.all_hosts(conn)], warmth.warm_by_host(conn))
        )
        now = self.clock.now()
        return [HostView(host, health(host, now=now), used, count, warm.get(host.id, 0)) for host, used, count in found]

    async def get(self, caller: Caller, reference: str) -> HostView:
        """As Service.host."""
        for view in await self.all(caller):
            if reference in (view.host.id, view.host.name):
                return view
        raise Refused(Code.HOST_NOT_FOUND, f"host {reference[:64]!r} was not found")

    async def set_admin(self, caller: Caller, reference: str, event: AdminEvent, *, off: bool, revision: int | None = None) -> HostView:
        """As Service.set_host_admin."""
        wanted = (await self.get(caller, reference)).host.id
        now, event_id = self.clock.now(), new_id(Prefix.EVENT, self.dice)

        def work(conn: sa.Connection) -> Host:
            host = stored.locked(conn, wanted)
            if host is None:
                raise Refused(Code.HOST_NOT_FOUND, f"host {reference[:64]!r} was not found")
            if revision is not None and host.revision != revision:
                raise revision_mismatch(f"host {host.name}", host.revision)
            if event is AdminEvent.RESET and (held := stored.placements_held(conn, host.id)):
                raise Refused(
                    Code.ILLEGAL_STATE,
                    f"{held} sandboxes of host {host.name} do not count as gone yet",
                    hint=f"Wait for its last lease, or say that the machine is off: `atoll host disable {host.name} --off`.",
                )
            changed = _moved(host, event, off=off)
            if changed == host:
                return host
            if event is AdminEvent.RESET:
                admission.admit_host(stored.count(conn).registered, self.configuration.current.deployment)
            if changed.admin is Admin.ACTIVE:
                admission.admit_active_host(stored.count(conn).active, self.configuration.current.deployment)
            stored.save(conn, changed, read=host)
            operations.audit(conn, Act(caller.actor(), ACTIONS[event], host.id, data={"name": host.name, "off": int(off)}), at=now)
            told = Told(TOLD[event], changed.admin.value, host_id=host.id, request_id=caller.request_id, data={"name": host.name})
            operations.record(conn, told, event_id=event_id, at=now)
            return replace(changed, revision=changed.revision + 1)

        host = await self.store.write(work, tell=lambda moved: self._tell(moved, event))
        return await self.get(caller, host.id)

    def _tell(self, host: Host, event: AdminEvent) -> None:
        self.hub.news()
        self.directory.put(host)
        self.hub.wake_host(host.id)
        if host.admin is Admin.DISABLED:
            LOG.warning(names.HOST_FENCED, host_id=host.id, name=host.name, reason=event.value)
            self.fencing.due.set()
        else:
            LOG.info(names.HOST_ADMIN_CHANGED, host_id=host.id, name=host.name, state=host.admin.value)

    def _tell_counted(self, host: Host) -> None:
        self.hub.news()
        self.directory.put(host)

    async def register(self, caller: Caller, registration: wire.Registration) -> HostView:
        """As Service.register_host."""
        _operator(caller)
        host = await self.enrollment.register(registration, by=caller.actor())
        return await self.get(caller, host.id)

    async def recount(self, caller: Caller, reference: str) -> HostView:
        """As Service.recount_host."""
        wanted = (await self.get(caller, reference)).host.id
        now, event_id = self.clock.now(), new_id(Prefix.EVENT, self.dice)

        def work(conn: sa.Connection) -> Host:
            host = stored.locked(conn, wanted)
            if host is None:
                raise Refused(Code.HOST_NOT_FOUND, f"host {reference[:64]!r} was not found")
            changed = _recounted(host, used=facts.used(conn, host.id))
            stored.save(conn, changed, read=host)
            data = {"name": host.name, **asdict(changed.capacity)}
            operations.audit(conn, Act(caller.actor(), Action.HOST_RECOUNT, host.id, data=data), at=now)
            told = Told(history.HOST_RECOUNTED, changed.admin.value, host_id=host.id, request_id=caller.request_id, data=data)
            operations.record(conn, told, event_id=event_id, at=now)
            return replace(changed, revision=changed.revision + 1)

        host = await self.store.write(work, tell=self._tell_counted)
        LOG.warning(names.HOST_RECOUNTED, host_id=host.id, name=host.name, what=asdict(host.capacity))
        return await self.get(caller, host.id)

    async def create_token(self, caller: Caller, *, host_name: str, life_s: float) -> NewToken:
        """As Service.create_enrollment_token."""
        _operator(caller)
        if not 0 < len(host_name) <= _NAME_MAX or not host_name.isprintable():
            raise Refused(Code.INVALID_REQUEST, f"a host's name has 1 to {_NAME_MAX} printable characters")
        if not 0 < life_s <= TOKEN_LIFE_S:
            raise Refused(Code.INVALID_REQUEST, f"a token lives at most {TOKEN_LIFE_S:.0f} s")
        token = Secret("et_" + self.dice(32).hex())
        digest = hashlib.sha256(token.reveal().encode()).hexdigest()
        act = Act(caller.actor(), Action.ENROLLMENT_TOKEN_CREATE, host_name, data={"life_s": life_s})
        await self.enrollment.admit_token(digest, host_name=host_name, life_s=life_s, act=act)
        return NewToken(token, host_name, self.clock.now() + life_s)


def _moved(host: Host, event: AdminEvent, *, off: bool) -> Host:
    try:
        admin = domain.step(host.admin, event)
    except IllegalMove:
        what = "a disabled host is reset, then enrolled again" if host.admin is Admin.DISABLED else "only a disabled host is reset"
        raise Refused(
            Code.ILLEGAL_STATE,
            f"host {host.name} is {host.admin}; {what}",
            hint="`atoll host get` shows it, `atoll host --help` what it can.",
        ) from None
    if event is AdminEvent.RESET:
        return replace(host, admin=admin, epoch=None, seen_at=None, lease_until=None, problems=())
    if admin is not Admin.DISABLED:
        return replace(host, admin=admin)
    changed = replace(host, admin=admin, lease_until=None if off else host.lease_until)
    if host.admin is Admin.DISABLED:
        return changed
    return replace(changed, credential_digest=None, credential_version=host.credential_version + 1)


def _recounted(host: Host, *, used: Vector) -> Host:
    registered, reported = host.registered, host.reported
    if registered is None or registered.overcommit is None or reported is None:
        raise Refused(
            Code.ILLEGAL_STATE,
            f"host {host.name} has not said how its capacity is reckoned, or what its machine has",
            hint="Let its agent register again: disable it, reset it, and join with a new token.",
        )
    granted = capacity(reported, reserve=registered.reserve, overcommit=registered.overcommit, slots=host.capacity.slots)
    if lacking := granted.lacks(used):
        raise Refused(
            Code.ILLEGAL_STATE,
            f"the machine of {host.name} has too little {', '.join(lacking).lower()} for what it holds",
            hint=f"`atoll host drain {host.name}`, and count again when enough has ended.",
        )
    problems = tuple(problem for problem in host.problems if problem != CAPACITY)
    return replace(host, capacity=granted, registered=replace(registered, inventory=reported), problems=problems)


def _view(conn: sa.Connection, host: Host) -> tuple[Host, Vector, int]:
    return host, facts.used(conn, host.id), stored.placements_held(conn, host.id)


def _operator(caller: Caller) -> None:
    if not caller.operator:
        raise Refused(Code.FORBIDDEN, "only operators see and change hosts")
