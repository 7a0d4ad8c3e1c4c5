"""Enrolment: a one-use token becomes a host's own credential. Only digests are kept of either."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.ids import Dice, HostId, Prefix, new_id
from atoll.control.configuration import Configuration
from atoll.control.directory import Directory
from atoll.domain.host import Admin, Host
from atoll.planning import admission
from atoll.store import hosts
from atoll.store.engine import Store
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.wire import agent as wire

LOG = get_logger()

TOKEN_LIFE_S: Final = 3600.0


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

    async def admit_token(self, token_digest: str, *, host_name: str, life_s: float = TOKEN_LIFE_S) -> None:
        """Let the token of this digest enrol a host of this name, once, within `life_s`. *Idempotency*: a known digest changes nothing."""
        now = self._clock.now()
        record = hosts.Enrollment(
            id=new_id(Prefix.ENROLLMENT, self._dice),
            token_digest=token_digest,
            host_name=host_name,
            created_at=now,
            expires_at=now + life_s,
        )
        await self._store.write(lambda conn: hosts.add_enrollment(conn, record))

    async def enroll(self, message: wire.Enroll) -> wire.Enrolled:
        """Consume the token and make the host, in one commit.

        *Idempotency*: none: the credential is shown once; a lost answer needs a new token for the same name.
        *Errors*: Refused ENROLLMENT_TOKEN_INVALID, ENROLLMENT_CONFLICT, HOST_QUOTA.
        """
        credential = "hk_" + self._dice(32).hex()
        digest = hashlib.sha256(credential.encode()).hexdigest()
        token_digest = hashlib.sha256(message.token.encode()).hexdigest()
        now = self._clock.now()

        def work(conn: sa.Connection) -> Host:
            token = hosts.enrollment_by_digest(conn, token_digest)
            if token is None or token.used_at is not None or token.expires_at <= now:
                raise Refused(Code.ENROLLMENT_TOKEN_INVALID, "the token is unknown, used, or expired")
            if token.host_name != message.name:
                raise Refused(Code.ENROLLMENT_CONFLICT, f"the token is for host {token.host_name!r}")
            host = self._host(conn, message, digest)
            hosts.use_enrollment(conn, token.id, host_id=host.id, now=now)
            return host

        host = await self._store.write(work)
        self._directory.put(host)
        LOG.info(names.HOST_ENROLLED, host_id=host.id, name=host.name)
        return wire.Enrolled(
            host_id=host.id, credential=credential, credential_version=host.credential_version, install_id=self._install_id
        )

    def _host(self, conn: sa.Connection, message: wire.Enroll, digest: str) -> Host:
        """A new host's row; or the known one with a new credential, where nothing of it is in use."""
        known = hosts.by_name(conn, message.name)
        admin = self._admitted(conn, known)
        if known is None:
            host = Host(
                id=HostId(new_id(Prefix.HOST, self._dice)),
                revision=1,
                name=message.name,
                admin=admin,
                capacity=message.capacity,
                arch=message.facts.arch,
                region=message.region,
                labels=message.labels,
                credential_digest=digest,
                protocol_min=message.protocol_min,
                protocol_max=message.protocol_max,
                agent_version=message.agent_version,
                facts={"kernel": message.facts.kernel, "boot_id": message.facts.boot_id},
            )
            hosts.add(conn, host, now=self._clock.now())
            return host
        if known.admin is not Admin.DISABLED and hosts.placements_held(conn, known.id):
            raise Refused(Code.ENROLLMENT_CONFLICT, f"host {message.name!r} is enrolled and holds sandboxes; disable it first")
        host = replace(
            known,
            admin=admin,
            capacity=message.capacity,
            arch=message.facts.arch,
            credential_digest=digest,
            credential_version=known.credential_version + 1,
            epoch=None,
            poll_seq=0,
            seen_at=None,
        )
        hosts.save(conn, host)
        return replace(host, revision=host.revision + 1)

    def _admitted(self, conn: sa.Connection, known: Host | None) -> Admin:
        """What a host is after its enrolment. One that would be too many to be active drains: an operator may activate it in another's place.

        *Errors*: Refused HOST_QUOTA when it is one too many to be registered.
        """
        limits = self._configuration.current.deployment
        counted = hosts.count(conn)
        if known is None or known.admin is Admin.DISABLED:
            admission.admit_host(counted.registered, limits)
        others_active = counted.active - (1 if known is not None and known.admin is Admin.ACTIVE else 0)
        room = limits.active_hosts is None or others_active < limits.active_hosts
        return Admin.ACTIVE if self._auto_activate and room else Admin.DRAINING
