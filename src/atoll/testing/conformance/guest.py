"""A client of atoll-guest, enough to look at a sandbox from inside: handshake, init, and one command at a time."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.drivers.port import Order
from atoll.wire.guest import GUEST_PORT, SCOPE_CONTROL, Hello, Init, claims

_FRAME: Final = struct.Struct(">BI")
_END_OF_STREAM: Final = 0x02
_LOOK_EVERY_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended. `status` is the exit code, or -1 when a signal ended it."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class GuestGone(Exception):
    """The connection broke: the guest, or the sandbox around it, has ended."""


class GuestClient:
    """Speaks to one placement's guest."""

    def __init__(self, address: str, order: Order, key: Ed25519PrivateKey) -> None:
        self._base = f"http://{address}:{GUEST_PORT}"
        self._key = key
        token = claims(
            sandbox_id=order.sandbox_id,
            placement_id=order.placement_id,
            generation=order.generation,
            nonce=order.nonce,
            scope=SCOPE_CONTROL,
        )
        self._token = jwt.encode(token, key, algorithm="EdDSA")

    async def hello(self, *, patience_s: float) -> Hello:
        """Wait until the guest answers. *Errors*: TimeoutError."""
        deadline = time.monotonic() + patience_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            while True:
                try:
                    async with session.get(f"{self._base}/atoll/hello", headers=self._authorization()) as answer:
                        answer.raise_for_status()
                        return Hello.model_validate(await answer.json())
                except (aiohttp.ClientConnectionError, TimeoutError):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"no guest at {self._base} after {patience_s:.0f} s") from None
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def init(self, init: Init) -> None:
        """Initialise the guest; it serves nothing before."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self._base}/atoll/init", json=init.model_dump(), headers=self._authorization()) as answer,
        ):
            if answer.status != 204:
                raise AssertionError(f"init answered {answer.status}: {await answer.text()}")

    async def refuses(self, other: Order) -> bool:
        """Whether it refuses the token of another order's guest."""
        stranger = GuestClient("", other, self._key)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._base}/atoll/hello", headers=stranger._authorization()) as answer,
        ):
            return answer.status == 401

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    async def run(self, command: list[str], *, user: str = "root", timeout_s: float = 30.0) -> Result:
        """Run a command to its end. *Errors*: GuestGone, TimeoutError; AssertionError when the guest refuses to start it."""
        body = json.dumps({"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{self._base}/process.Process/Start", data=_FRAME.pack(0, len(body)) + body, headers=headers) as answer,
            ):
                return await self._read(answer)
        except aiohttp.ClientError as error:
            raise GuestGone(f"{command[0]}: {error!r}") from error

    async def _read(self, answer: aiohttp.ClientResponse) -> Result:
        out, err, status = bytearray(), bytearray(), None
        while True:
            try:
                flag, length = _FRAME.unpack(await answer.content.readexactly(_FRAME.size))
                message: dict[str, Any] = json.loads(await answer.content.readexactly(length))
            except asyncio.IncompleteReadError as error:
                raise GuestGone("the stream ended before the command did") from error
            if flag & _END_OF_STREAM:
                if "error" in message:
                    raise AssertionError(f"the guest refused: {message['error']}")
                if status is None:
                    raise GuestGone("the stream ended without an end event")
                return Result(status, out.decode(errors="replace"), err.decode(errors="replace"))
            event = message.get("event", {})
            data = event.get("data", {})
            out += base64.b64decode(data.get("stdout", ""))
            err += base64.b64decode(data.get("stderr", ""))
            if "end" in event:
                status = int(event["end"].get("exitCode", 0))
