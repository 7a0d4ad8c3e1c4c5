"""Enrolment: a one-use token makes a host, with a credential of its own. Only digests are kept of either.

Theory of operation. The host makes its credential, keeps it, and only then sends the token with the credential's digest. Whatever is lost
afterwards, the host can find out: it asks who it is with that credential, or sends the same message again. A name is given out anew only
when nothing of its last bearer can be in use: nothing held, nobody heard of lately, not disabled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice, HostId, Prefix, new_id
from atoll.base.units import ZERO
from atoll.control.configuration import Configuration
from atoll.control.hosts.directory import Directory
from atoll.domain import history
from atoll.domain.host import LOST_AFTER_S, Admin, Health, Host, health
from atoll.domain.inventory import Inventory, Overcommit, Registered, capacity
from atoll.domain.operations import Act, Action, Actor
from atoll.planning import admission
from atoll.planning.claiming import CLAIMS
from atoll.store import hosts, operations
from atoll.store.engine import Store
from atoll.store.operations import Told
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

TOKEN_LIFE_S: Final = 3600.0
_FORM: Final = {"name", "capacity", "reserve", "overcommit", "slots", "region", "labels"}


class Enrollment:
    """Enrols hosts. `auto_activate`: a new host is active at once instead of draining."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        dice: Dice,
        directory: Directory,
        install_id: str,
        auto_activate: bool,
        configuration: Configuration,
    ) -> None:
        self._store = store
        self._clock = clock
        self._dice = dice
        self._directory = directory
        self._install_id = install_id
        self._auto_activate = auto_activate
        self._configuration = configuration

    async def admit_token(self, token_digest: str, *, host_name: str, life_s: float = TOKEN_LIFE_S, act: Act | None = None) -> None:
        """Let the token of this digest enrol a host of this name, once, within `life_s`. *Idempotency*: a known digest changes nothing.

        `act`: whose doing it is.
        """
        now = self._clock.now()
        record = hosts.Enrollment(
            id=new_id(Prefix.ENROLLMENT, self._dice),
            token_digest=token_digest,
            host_name=host_name,
            created_at=now,
            expires_at=now + life_s,
        )

        def work(conn: sa.Connection) -> None:
            if hosts.add_enrollment(conn, record) and act is not None:
                operations.audit(conn, act, at=now)

        await self._store.write(work)

    async def enroll(self, message: wire.Enroll) -> wire.Enrolled:
        """Consume the token and make the host, in one commit.

        *Idempotency*: a host that made its own credential may send the same message again, with the token it has used up, and gets the
        same answer: who knows both is who enrolled. Where control made the credential, a lost answer needs a new token.
        *Errors*: Refused ENROLLMENT_TOKEN_INVALID, ENROLLMENT_CONFLICT, HOST_QUOTA, INVALID_REQUEST.
        """
        made = "" if message.credential_digest else "hk_" + self._dice(32).hex()
        digest = message.credential_digest or _digest(made)
        token_digest, form = _digest(message.token), _form(message)
        now, event_id = self._clock.now(), new_id(Prefix.EVENT, self._dice)

        def work(conn: sa.Connection) -> tuple[Host, bool]:
            token = hosts.enrollment_by_digest(conn, token_digest)
            if token is None or not hmac.compare_digest(token.token_digest, token_digest):
                raise _invalid()
            if token.host_name != message.name:
                raise Refused(Code.ENROLLMENT_CONFLICT, f"the token is for host {token.host_name!r}")
            if token.used_at is not None:
                return _enrolled_before(conn, token, form, digest), False
            if token.expires_at <= now:
                raise _invalid()
            host = self._host(conn, message, digest, now=now)
            hosts.use_enrollment(conn, token.id, host_id=host.id, form_digest=form, now=now)
            _on_record(conn, host, Actor(), event_id=event_id, now=now)
            return host, True

        host, _ = await self._store.write(work, tell=lambda made: self._tell(made[0], new=made[1]))
        return wire.Enrolled(host_id=host.id, credential=made, credential_version=host.credential_version, install_id=self._install_id)

    async def register(self, message: wire.Registration, *, by: Actor) -> Host:
        """Register a host by an operator's word, without a token. *Idempotency*: the same message again is fine. *Errors*: as `enroll`."""
        digest, now, event_id = message.credential_digest, self._clock.now(), new_id(Prefix.EVENT, self._dice)
        if digest is None:
            raise Refused(Code.INVALID_REQUEST, "a host that is registered without a token brings the digest of its own credential")

        def work(conn: sa.Connection) -> tuple[Host, bool]:
            known = hosts.by_name(conn, message.name)
            if known is not None and known.credential_digest is not None and hmac.compare_digest(known.credential_digest, digest):
                if _registered(message) != known.registered or message.capacity != known.capacity:
                    raise Refused(Code.ENROLLMENT_CONFLICT, f"host {message.name!r} is registered with another configuration")
                return known, False
            host = self._host(conn, message, digest, now=now)
            _on_record(conn, host, by, event_id=event_id, now=now)
            return host, True

        host, _ = await self._store.write(work, tell=lambda made: self._tell(made[0], new=made[1]))
        return host

    async def identify(self, host: Host) -> wire.Known:
        """Who a host is, to itself."""
        return wire.Known(host_id=host.id, name=host.name, credential_version=host.credential_version, install_id=self._install_id)

    def _tell(self, host: Host, *, new: bool) -> None:
        self._directory.put(host)
        if new:
            LOG.info(names.HOST_ENROLLED, host_id=host.id, name=host.name, state=host.admin.value)

    def _host(self, conn: sa.Connection, message: wire.Registration, digest: str, *, now: float) -> Host:
        """A new host's row; or the known one with a new credential, where nothing of it is in use."""
        _check_capacity(message)
        known = hosts.by_name(conn, message.name)
        admin = self._admitted(conn, known)
        _check_slots(conn, message)
        if known is None:
            fresh = Host(
                id=HostId(new_id(Prefix.HOST, self._dice)),
                revision=1,
                name=message.name,
                admin=admin,
                capacity=message.capacity,
                arch=message.facts.arch,
                region=message.region,
            )
            host = _filled(fresh, message, digest)
            hosts.add(conn, host, now=now)
            return host
        known = hosts.locked(conn, known.id) or known
        _check_free(conn, known, now=now)
        changed = replace(
            known, admin=admin, credential_version=known.credential_version + 1, epoch=None, poll_seq=0, seen_at=None, problems=()
        )
        host = _filled(changed, message, digest)
        hosts.save(conn, host, read=known)
        return replace(host, revision=host.revision + 1)

    def _admitted(self, conn: sa.Connection, known: Host | None) -> Admin:
        """What a host is after its enrolment. One that would be too many to be active drains: an operator may activate it in another's place.

        *Errors*: Refused HOST_QUOTA when it is one too many to be registered.
        """
        limits = self._configuration.current.deployment
        counted = hosts.count(conn)
        if known is None:
            admission.admit_host(counted.registered, limits)
        others_active = counted.active - (1 if known is not None and known.admin is Admin.ACTIVE else 0)
        room = limits.active_hosts is None or others_active < limits.active_hosts
        return Admin.ACTIVE if self._auto_activate and room else Admin.DRAINING


def facts_of(facts: wire.HostFacts) -> dict[str, str]:
    """As they are kept on the host's row."""
    return {
        "kernel": facts.kernel,
        "boot_id": facts.boot_id,
        "cpu_count": str(facts.cpu_count),
        "memory_mib": str(facts.memory_mib),
        "disk_mib": str(facts.disk_mib),
        **({CLAIMS: "yes"} if facts.claims else {}),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _form(message: wire.Registration) -> str:
    """Of what was registered: a token that is shown again must come with the same. Free space and the kernel may differ since."""
    said = message.model_dump(mode="json", include=_FORM)
    said["arch"] = message.facts.arch
    return _digest(json.dumps(said, sort_keys=True))


def _invalid() -> Refused:
    return Refused(Code.ENROLLMENT_TOKEN_INVALID, "the token is unknown, used, or expired")


def _on_record(conn: sa.Connection, host: Host, by: Actor, *, event_id: str, now: float) -> None:
    entry = Act(by, Action.HOST_ENROLL, host.id, data={"name": host.name, "credential_version": host.credential_version})
    operations.audit(conn, entry, at=now)
    told = Told(history.HOST_ENROLLED, host.admin.value, host_id=host.id, request_id=by.request_id, data={"name": host.name})
    operations.record(conn, told, event_id=event_id, at=now)


def _enrolled_before(conn: sa.Connection, token: hosts.Enrollment, form: str, digest: str) -> Host:
    """The host that this very message has made before. *Errors*: Refused ENROLLMENT_CONFLICT, ENROLLMENT_TOKEN_INVALID."""
    if token.form_digest is not None and token.form_digest != form:
        raise Refused(Code.ENROLLMENT_CONFLICT, "the token was used to enrol a host with another configuration")
    host = hosts.by_id(conn, token.host_id) if token.host_id else None
    if host is None or host.credential_digest is None or not hmac.compare_digest(host.credential_digest, digest):
        raise _invalid()
    return host


def _filled(host: Host, message: wire.Registration, digest: str) -> Host:
    return replace(
        host,
        capacity=message.capacity,
        arch=message.facts.arch,
        region=message.region,
        labels=dict(message.labels),
        credential_digest=digest,
        protocol_min=message.protocol_min,
        protocol_max=message.protocol_max,
        agent_version=message.agent_version,
        facts=facts_of(message.facts),
        registered=_registered(message),
    )


def _registered(message: wire.Registration) -> Registered:
    facts, overcommit = message.facts, message.overcommit
    return Registered(
        Inventory(facts.cpu_count, facts.memory_mib, facts.disk_mib),
        message.reserve or ZERO,
        None if overcommit is None else Overcommit(overcommit.cpu, overcommit.memory, overcommit.disk),
        message.slots,
    )


def _check_capacity(message: wire.Registration) -> None:
    """A host that says how it reckons may not grant more than that gives."""
    registered = _registered(message)
    if registered.overcommit is None:
        return
    most = capacity(registered.inventory, reserve=registered.reserve, overcommit=registered.overcommit, slots=message.capacity.slots)
    if lacking := most.lacks(message.capacity):
        raise Refused(Code.INVALID_REQUEST, f"capacity: more {', '.join(lacking).lower()} than facts, reserve and overcommit give")


def _check_slots(conn: sa.Connection, message: wire.Registration) -> None:
    """No two hosts may have the same addresses: the edge would give one sandbox's traffic to another. *Errors*: Refused ENROLLMENT_CONFLICT."""
    if message.slots is None:
        return
    for other in hosts.with_slots(conn, message.slots):
        if other.name != message.name and (other.admin is not Admin.DISABLED or hosts.placements_held(conn, other.id)):
            raise Refused(
                Code.ENROLLMENT_CONFLICT,
                f"host {other.name!r} has its sandboxes in {message.slots} already",
                hint="Join with a range that nobody has: `atoll agent join --subnet N`.",
            )


def _check_free(conn: sa.Connection, known: Host, *, now: float) -> None:
    """Whether a host's identity may be given out anew. *Errors*: Refused ENROLLMENT_CONFLICT."""
    if known.admin is Admin.DISABLED:
        raise Refused(
            Code.ENROLLMENT_CONFLICT, f"host {known.name!r} is disabled", hint=f"`atoll host reset {known.name}` lets it come back."
        )
    if hosts.placements_held(conn, known.id):
        raise Refused(
            Code.ENROLLMENT_CONFLICT,
            f"host {known.name!r} is enrolled and holds sandboxes",
            hint=f"`atoll host disable {known.name}` fences it; afterwards reset it.",
        )
    if known.credential_digest is not None and health(known, now=now) in (Health.HEALTHY, Health.SUSPECT):
        raise Refused(
            Code.ENROLLMENT_CONFLICT,
            f"host {known.name!r} is enrolled, and its agent was heard of less than {LOST_AFTER_S:.0f} s ago",
            hint=f"Use another name; or stop that agent, or `atoll host disable {known.name}` and reset it.",
        )
