"""`GET /registry/token`: what `docker login` and every client of the registry ask first, with a team's key as the password.

A bare application beside the front: its answers have the shape that registry clients read. The user's name is anything. Which
repositories a key may use is decided here (`atoll.wire.registry`); the registry verifies the signature and does as the token says.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from atoll.base.errors import AtollError, Code, Refused
from atoll.control.api import auth
from atoll.control.api.errors import row_of
from atoll.control.api.exchange import Answer, json_answer
from atoll.control.own_registry import OwnRegistry
from atoll.control.service import Service
from atoll.wire import registry

PREFIX = registry.TOKEN_PATH
CREDENTIALS_MAX = 1024


class RegistryTokens:
    """The application."""

    def __init__(self, service: Service, own: OwnRegistry) -> None:
        self._service = service
        self._own = own

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            if scope["path"] != PREFIX:
                raise Refused(Code.INVALID_REQUEST, "there is nothing here")
            if scope["method"] != "GET":
                # Clients that try OAuth's form first go on with this one.
                await json_answer(405, _errors("UNSUPPORTED", "ask with GET")).send(send)
                return
            answer = await self._token(dict(scope["headers"]), parse_qs(scope["query_string"].decode("latin-1")))
        except AtollError as error:
            answer = _refused(error)
        await answer.send(send)

    async def _token(self, headers: Mapping[bytes, bytes], query: Mapping[str, list[str]]) -> Answer:
        caller = await auth.authenticate(self._service, password(headers.get(b"authorization", b"")))
        if query.get("service", [registry.SERVICE]) != [registry.SERVICE]:
            raise Refused(Code.INVALID_REQUEST, f"this is the registry {registry.SERVICE}")
        access = registry.granted(caller.team.name, query.get("scope", []))
        token, made_at = self._own.token(caller.client.id, access)
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
    extra = ((b"www-authenticate", b'Basic realm="Atoll"'),) if status == 401 else ()
    message = error.message if status != 500 else "unexpected failure"
    return json_answer(status, _errors(known.get(status, "UNKNOWN"), message), extra)


def _errors(code: str, message: str) -> dict[str, list[dict[str, str]]]:
    return {"errors": [{"code": code, "message": message}]}
