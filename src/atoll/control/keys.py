"""Keys of teams: looked up by digest at each request, remembered for a moment, shown once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import sqlalchemy as sa

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused
from atoll.base.ids import ClientId, Dice, Prefix, TeamId, new_id
from atoll.base.secret import Secret
from atoll.control.configuration import Configuration
from atoll.control.service import Caller, NewKey
from atoll.domain.operations import Act, Action
from atoll.domain.tenancy import Client, Role, Team, key_digest
from atoll.domain.warmth import OWN_TEAM
from atoll.planning.admission import Buckets, Limits
from atoll.store import operations, schema, tenancy
from atoll.store.engine import Store

_REMEMBER_S: Final = 5.0
"""How long a revoked key may still work on another replica; on this one it ends at once."""
_REMEMBERED_MAX: Final = 10_000


class Keys:
    """Part of the Service."""

    def __init__(self, *, store: Store, clock: Clock, dice: Dice, configuration: Configuration) -> None:
        self._store = store
        self._clock = clock
        self._dice = dice
        self._configuration = configuration
        self._remembered: dict[str, tuple[float, Caller]] = {}
        self._buckets = Buckets()
        self.replicas: Callable[[], int] = lambda: 1
        """How many control processes count requests beside each other."""

    async def authenticate(self, key: Secret) -> Caller:
        """As Service.authenticate. *Errors*: also Unavailable RATE_LIMITED."""
        digest = key_digest(key.reveal())
        now = self._clock.boot()
        remembered = self._remembered.get(digest)
        if remembered is not None and now - remembered[0] < _REMEMBER_S:
            caller = remembered[1]
        else:
            found = await self._store.read(lambda conn: tenancy.by_key_digest(conn, digest))
            if found is None:
                self._remembered.pop(digest, None)
                raise Refused(Code.UNAUTHENTICATED, "the key is unknown or revoked")
            caller = Caller(*found)
            if len(self._remembered) >= _REMEMBERED_MAX:
                self._remembered.clear()
            self._remembered[digest] = (now, caller)
        self._take(caller, now)
        return caller

    async def all(self, caller: Caller) -> Sequence[Client]:
        """The team's keys, revoked ones too."""
        return await self._store.read(lambda conn: tenancy.clients_of(conn, caller.team.id))

    async def create(self, caller: Caller, *, name: str, role: Role, team: str | None) -> NewKey:
        """As Service.create_key."""
        if not caller.operator and (role is Role.OPERATOR or (team is not None and team != caller.team.name)):
            raise Refused(Code.FORBIDDEN, "only an operator may make operator keys or keys of another team")
        key = Secret("e2b_" + self._dice(20).hex())
        now = self._clock.now()

        def work(conn: sa.Connection) -> Client:
            owner = caller.team if team is None else self._team(conn, team, now=now)
            client = self._client(owner, key_digest(key.reveal()), key.reveal()[-4:], name=name, role=role, now=now)
            tenancy.add_client(conn, client)
            about = {"name": name, "role": role.value, "team": owner.name}
            operations.audit(conn, Act(caller.actor(), Action.KEY_CREATE, client.id, data=about), at=now)
            return client

        return NewKey(await self._store.write(work), key)

    async def revoke(self, caller: Caller, client_id: str) -> Client:
        """As Service.revoke_key."""
        now = self._clock.now()
        # Who may make a key for any team may end it, too.
        team_id = None if caller.operator else caller.team.id

        def work(conn: sa.Connection) -> Client:
            found = tenancy.revoke(conn, team_id, client_id, now=now)
            if found is None:
                raise Refused(Code.KEY_NOT_FOUND, f"key {client_id[:64]!r} was not found")
            operations.audit(conn, Act(caller.actor(), Action.KEY_REVOKE, found.id, data={"name": found.name}), at=now)
            return found

        return await self._store.write(work, tell=lambda gone: self._remembered.pop(gone.key_digest, None))

    def forget(self, client_ids: Collection[str] | None = None) -> None:
        """Ask the store again for these clients, or for all: another replica may have revoked them."""
        for digest, (_, caller) in list(self._remembered.items()):
            if client_ids is None or caller.client.id in client_ids:
                del self._remembered[digest]

    async def ensure_operator(self, *, digest: str, hint: str, team: str) -> None:
        """The first key, whose digest the instance brings. *Idempotency*: known: nothing happens."""
        now = self._clock.now()

        def work(conn: sa.Connection) -> None:
            schema.alone(conn)
            if tenancy.by_key_digest(conn, digest) is None:
                owner = self._team(conn, team, now=now)
                tenancy.add_client(conn, self._client(owner, digest, hint, name="operator", role=Role.OPERATOR, now=now))

        await self._store.write(work)

    def _team(self, conn: sa.Connection, name: str, *, now: float) -> Team:
        known = tenancy.team_by_name(conn, name)
        if known is not None and known.id == OWN_TEAM:
            raise Refused(Code.FORBIDDEN, "the deployment's own team has no keys")
        if known is not None:
            return known
        made = Team(TeamId(new_id(Prefix.TEAM, self._dice)), name)
        tenancy.add_team(conn, made, now=now)
        return made

    def _client(self, team: Team, digest: str, hint: str, *, name: str, role: Role, now: float) -> Client:
        return Client(
            id=ClientId(new_id(Prefix.CLIENT, self._dice)),
            team_id=team.id,
            name=name,
            role=role,
            key_digest=digest,
            key_hint=hint,
            created_at=now,
        )

    def _take(self, caller: Caller, boot: float) -> None:
        limits = Limits.of(self._configuration.current, team=caller.team.name)
        self._buckets.take(limits, client=caller.client.id, team=caller.team.id, boot=boot, replicas=self.replicas())
