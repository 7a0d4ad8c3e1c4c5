"""Transport: how the agent's messages get to control. A port, and its implementation over HTTP.

Control may have several replicas; one is dialled, and another after it could not be reached or did not answer. Other machines are
spoken to over TLS alone (`trust.py`); a certificate that does not hold is CONTROL_UNTRUSTED, which may pass: it can be renewed.

*Errors* of every call: Refused with control's code (401, 409, 400, 413), Unavailable (429, 503, no connection; nothing happened),
OutcomeUnknown (sent, and no answer, or one that makes no sense).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from atoll.agent.trust import check_url, context
from atoll.base.errors import AtollError, Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.wire import manifests
from atoll.wire.agent import (
    MESSAGE_BYTES_MAX,
    Accounts,
    AccountsAnswer,
    Collected,
    Enroll,
    Enrolled,
    ErrorBody,
    Known,
    Message,
    Observe,
    ObserveAnswer,
    Payloads,
    PayloadsWanted,
    Poll,
    PollAnswer,
)
from atoll.wire.manifests import KeyChain, KeySet
from atoll.wire.wellknown import PATH, WellKnown

M = TypeVar("M", bound=BaseModel)

CALL_S: Final = 15.0
LAYER_S: Final = 600.0
POLL_SLACK_S: Final = 15.0
"""How much longer than it asked for the agent waits for a parked poll."""


class Transport(Protocol):
    """Control, as the agent sees it."""

    async def poll(self, message: Poll) -> PollAnswer: ...

    async def observe(self, message: Observe) -> ObserveAnswer: ...

    async def payloads(self, message: PayloadsWanted) -> Payloads: ...

    async def accounts(self, message: Accounts) -> AccountsAnswer: ...

    async def collected(self, message: Collected) -> None: ...

    async def layer(self, wish_id: str, path: Path, *, entries: int) -> None: ...

    async def close(self) -> None: ...


class HttpTransport:
    """`Transport` by aiohttp. Use it, and close it, within one event loop."""

    def __init__(self, urls: str | Sequence[str], credential: Secret | None = None, *, authority: Path | None = None) -> None:
        """`authority`: who signs control's certificate, where this machine does not know it. *Errors*: those of `trust`."""
        self._urls = [check_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self._urls:
            raise Refused(Code.INVALID_REQUEST, "no address of control is given")
        self._at = 0
        self._credential = credential
        self._trust = context(authority) if any(url.startswith("https:") for url in self._urls) else None
        self._session: aiohttp.ClientSession | None = None

    async def well_known(self) -> WellKnown:
        """What joining machines should know."""
        body = await self._ask("GET", PATH, None, what="the well-known document", within_s=CALL_S)
        return _read_as(WellKnown, body, "the well-known document")

    async def identity(self) -> Known:
        """Who this credential is. *Errors*: Refused CREDENTIAL_REVOKED when it is nobody's."""
        return await self._call("identity", Message(), Known, within_s=CALL_S)

    async def enroll(self, message: Enroll) -> Enrolled:
        """Use a one-use token up for a host."""
        return await self._call("enroll", message, Enrolled, within_s=CALL_S)

    async def poll(self, message: Poll) -> PollAnswer:
        """See Transport; may take as long as `park_s`."""
        return await self._call("poll", message, PollAnswer, within_s=message.park_s + POLL_SLACK_S)

    async def observe(self, message: Observe) -> ObserveAnswer:
        """See Transport."""
        return await self._call("observe", message, ObserveAnswer, within_s=CALL_S)

    async def payloads(self, message: PayloadsWanted) -> Payloads:
        """See Transport."""
        return await self._call("payloads", message, Payloads, within_s=CALL_S)

    async def accounts(self, message: Accounts) -> AccountsAnswer:
        """See Transport."""
        return await self._call("accounts", message, AccountsAnswer, within_s=CALL_S)

    async def collected(self, message: Collected) -> None:
        """See Transport."""
        await self._send("collected", message, within_s=CALL_S)

    async def layer(self, wish_id: str, path: Path, *, entries: int) -> None:
        """Send a layer that control has asked for."""
        with await asyncio.to_thread(path.open, "rb") as file:
            headers = {"Atoll-Entries": str(entries), "Content-Type": "application/octet-stream"}
            await self._ask("PUT", f"/agent/v1/layers/{wish_id}", file, what="layer", within_s=LAYER_S, headers=headers)

    async def manifest(self, digest: str) -> bytes:
        """The envelope of a signed manifest. *Errors*: Refused IMAGE_UNAVAILABLE when control has none."""
        path = f"/agent/v1/manifests/{digest}"
        return await self._ask("GET", path, None, what="a signed manifest", within_s=CALL_S, bytes_max=manifests.BYTES_MAX)

    async def machine(self, architecture: str) -> bytes:
        """The signed document that says what virtual machines boot by. *Errors*: Refused IMAGE_UNAVAILABLE when control has none."""
        path = f"/agent/v1/machines/{architecture}"
        return await self._ask("GET", path, None, what="a signed document", within_s=CALL_S, bytes_max=manifests.BYTES_MAX)

    async def key_chain(self) -> KeyChain:
        """Every set of keys for signed manifests."""
        body = await self._ask("GET", "/agent/v1/image-keys", None, what="keys", within_s=CALL_S, bytes_max=manifests.BYTES_MAX)
        return _read_as(KeyChain, body, "keys")

    async def first_keys(self) -> KeySet:
        """Which keys count for signed manifests, as everybody is told. *Errors*: Refused PROTOCOL_UNSUPPORTED: an older control."""
        told = (await self.well_known()).image_keys
        if told is None:
            raise Refused(Code.PROTOCOL_UNSUPPORTED, "control signs no images: it is older than this agent")
        return told

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, name: str, message: BaseModel, kind: type[M], *, within_s: float) -> M:
        return _read_as(kind, await self._send(name, message, within_s=within_s), name)

    async def _send(self, name: str, message: BaseModel, *, within_s: float) -> bytes:
        data = message.model_dump_json(exclude_none=True).encode()
        return await self._ask("POST", f"/agent/v1/{name}", data, what=name, within_s=within_s)

    async def _ask(
        self,
        method: str,
        path: str,
        data: bytes | IO[bytes] | None,
        *,
        what: str,
        within_s: float,
        headers: Mapping[str, str] | None = None,
        bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> bytes:
        session = self._open()
        at, url = self._at, self._urls[self._at % len(self._urls)]
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self._credential is not None:
            sent["Authorization"] = f"Bearer {self._credential.reveal()}"
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=5.0)
        try:
            async with session.request(method, url + path, data=data, headers=sent, timeout=timeout, allow_redirects=False) as response:
                body = await _read(response, bytes_max)
                if response.status >= 300:
                    raise refusal(response.status, body, response.headers.get("Retry-After"))
                return body
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            self._turn(at)
            raise Unavailable(Code.CONTROL_UNTRUSTED, f"what answers at {url} is not to be trusted: {_reason(error)}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._turn(at)
            raise Unavailable(Code.CONTROL_UNAVAILABLE, f"control is not reachable at {url}: {type(error).__name__}") from error
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._turn(at)
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"no answer to {what}: {type(error).__name__}") from error

    def _turn(self, at: int) -> None:
        """The next call dials the next replica; calls that fail together turn once."""
        if self._at == at:
            self._at += 1

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=8, keepalive_timeout=60.0, ttl_dns_cache=30, ssl=self._trust or True)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def _read_as(kind: type[M], body: bytes, what: str) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # The text of the error would quote what was received, which may hold secrets.
        fields = ", ".join(".".join(str(part) for part in e["loc"]) for e in error.errors(include_input=False)[:5])
        raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, f"control's answer to {what} makes no sense: {fields}") from None


def _reason(error: aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError) -> str:
    cause = error.certificate_error if isinstance(error, aiohttp.ClientConnectorCertificateError) else error.os_error
    return str(getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or cause)


async def _read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise OutcomeUnknown(Code.OUTCOME_UNKNOWN, "control's answer is too long")
    return bytes(body)


def refusal(status: int, body: bytes, retry_after: str | None = None) -> AtollError:
    """The error that an answer of this status means."""
    try:
        said = ErrorBody.model_validate_json(body)
        code, message = Code(said.code), said.message
    except ValueError:
        # Not ours: a proxy in between, or a newer control.
        known = {401: Code.UNAUTHENTICATED, 413: Code.BODY_TOO_LARGE, 429: Code.RATE_LIMITED}
        code = known.get(status, Code.CONTROL_UNAVAILABLE if status >= 500 else Code.INVALID_REQUEST)
        message = f"control answered with status {status}"
    if status == 429 or status >= 500:
        try:
            pause_s = float(retry_after) if retry_after else 1.0
        except ValueError:
            pause_s = 1.0
        return Unavailable(code, message, retry_after_s=min(max(pause_s, 0.0), 60.0))
    return Refused(code, message)
