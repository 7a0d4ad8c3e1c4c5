"""`GET /registry/token`: what `docker login` and every client of the registry ask first, with a team's key as the password.

A bare application beside the front: its answers have the shape that registry clients read. The user's name is anything. Which
repositories a key may use is decided here (`atoll.wire.registry`); the registry verifies the signature and does as the token says. Clients
without a key get what the operator has made public. Who may change something is kept in the audit.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code, Refused, Unavailable
from atoll.base.ids import TeamId
from atoll.control.api import auth
from atoll.control.api.errors import row_of
from atoll.control.api.exchange import Answer, Headers, json_answer
from atoll.control.artifacts.own_registry import OwnRegistry
from atoll.control.operations import Operations
from atoll.control.service import Caller, Service
from atoll.domain.deployment import Rate
from atoll.domain.operations import Act, Action
from atoll.planning.admission import Bucket
from atoll.wire import registry

PREFIX = registry.TOKEN_PATH
CREDENTIALS_MAX = 1024


UNKNOWN: Final = Rate(per_s=5.0, burst=100.0)
"""Requests of one address without a key that is known: guessing keys is slow."""
NOTED_MAX: Final = 10_000


class RegistryTokens:
    """The application. `owned`: which of these templates are a team's."""

    def __init__(
        self,
        service: Service,
        operations: Operations,
        own: OwnRegistry,
        *,
        clock: Clock,
        owned: Callable[[TeamId, Collection[str]], Awaitable[Collection[str]]],
    ) -> None:
        self._service = service
        self._operations = operations
        self._own = own
        self._clock = clock
        self._owned = owned
        self._unknown: dict[str, Bucket] = {}
        self._noted: dict[tuple[str, str, tuple[str, ...]], float] = {}

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != PREFIX:
                raise Refused(Code.INVALID_REQUEST, "there is nothing here")
            if scope["method"] != "GET":
                # Clients that try OAuth's form first go on with this one.
                await json_answer(405, _errors("UNSUPPORTED", "ask with GET")).send(send)
                return
            answer = await self._token(scope, dict(scope["headers"]), parse_qs(scope["query_string"].decode("latin-1")))
        except AtollError as error:
            answer = _refused(error)
        await answer.send(send)

    async def _token(self, scope: Scope, headers: Mapping[bytes, bytes], query: Mapping[str, list[str]]) -> Answer:
        if query.get("service", [registry.SERVICE]) != [registry.SERVICE]:
            raise Refused(Code.INVALID_REQUEST, f"this is the registry {registry.SERVICE}")
        scopes, shown = query.get("scope", []), headers.get(b"authorization", b"")
        if not shown:
            self._stranger(scope, headers)
            return self._anonymous(scopes)
        try:
            caller = await auth.authenticate(self._service, password(shown))
        except Refused:
            self._stranger(scope, headers)
            raise
        caller = replace(caller, address=auth.address(scope, headers))
        asked = list(registry.asked(scopes))
        named = {template for one in asked if (template := registry.template_of(one.name)) is not None}
        templates = await self._owned(caller.team.id, named) if named else ()
        access = registry.granted(caller.team.name, scopes, public=self._own.public(), templates=templates)
        await self._note(caller, asked, access)
        limit_mib = self._service.limits(caller)[1].registry_mib
        store = registry.Store(caller.team.name, None if limit_mib is None else limit_mib << 20)
        return _given(*self._own.token(caller.client.id, access, store=store))

    def _stranger(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """One more request of somebody whom nobody knows. *Errors*: Unavailable RATE_LIMITED."""
        address, now = auth.address(scope, headers) or "", self._clock.boot()
        if address not in self._unknown and len(self._unknown) >= NOTED_MAX:
            self._unknown.clear()
        self._unknown.setdefault(address, Bucket.full(UNKNOWN, boot=now)).take(boot=now)

    def _anonymous(self, scopes: Sequence[str]) -> Answer:
        """Without a key: what everybody may pull, or the question for a key."""
        access = registry.granted(None, scopes, public=self._own.public())
        if not access:
            password(b"")
        return _given(*self._own.token("anonymous", access))

    async def _note(self, caller: Caller, asked: Sequence[registry.Access], access: Sequence[registry.Access]) -> None:
        """Keep who may change what, once for as long as a token lasts; and who asked for what is not its team's."""
        now = self._clock.boot()
        for one in access:
            key = (caller.client.id, one.name, one.actions)
            if one.actions != ("pull",) and now - self._noted.get(key, -registry.TOKEN_S) >= registry.TOKEN_S:
                if len(self._noted) >= NOTED_MAX:
                    self._noted.clear()
                self._noted[key] = now
                await self._operations.did(Act(caller.actor(), Action.REGISTRY_TOKEN, one.name, data={"actions": ",".join(one.actions)}))
        names = {one.name for one in access}
        for one in asked:
            if one.name not in names:
                act = Act(caller.actor(), Action.REGISTRY_TOKEN, one.name, str(Code.FORBIDDEN), {"actions": ",".join(one.actions)})
                await self._operations.refused(act)


def _given(token: str, made_at: int) -> Answer:
    issued = datetime.fromtimestamp(made_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json_answer(200, {"token": token, "access_token": token, "expires_in": registry.TOKEN_S, "issued_at": issued})


def password(authorization: bytes) -> str:
    """The key in a Basic authorization, whatever the user's name. *Errors*: Refused UNAUTHENTICATED."""
    scheme, _, encoded = authorization.partition(b" ")
    sign = key = ""
    if scheme.lower() == b"basic" and len(encoded) <= CREDENTIALS_MAX:
        with contextlib.suppress(ValueError, binascii.Error):
            _, sign, key = base64.b64decode(encoded.strip(), validate=True).decode("ascii").partition(":")
    if not sign or not key:
        raise Refused(Code.UNAUTHENTICATED, "log in with any user name, and a team's API key as the password")
    return auth.presented_key({b"x-api-key": key.encode("ascii")})


def _refused(error: AtollError) -> Answer:
    status = row_of(error).status
    known = {401: "UNAUTHORIZED", 403: "DENIED", 429: "TOOMANYREQUESTS", 503: "UNAVAILABLE"}
    extra: Headers = ((b"www-authenticate", b'Basic realm="Atoll"'),) if status == 401 else ()
    if isinstance(error, Unavailable):
        extra += ((b"retry-after", str(max(1, round(error.retry_after_s))).encode()),)
    message = error.message if status != 500 else "unexpected failure"
    return json_answer(status, _errors(known.get(status, "UNKNOWN"), message), extra)


def _errors(code: str, message: str) -> dict[str, list[dict[str, str]]]:
    return {"errors": [{"code": code, "message": message}]}
